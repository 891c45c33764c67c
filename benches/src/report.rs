//! The data of a limiter report: figures, rows, and their ratios to the empty script and to the correct ZSET script.
//!
//! [`super::print`] prints it, and [`super::targets`] compares it with the targets.

use std::collections::BTreeMap;

use serde::Serialize;

use super::server::PrivateServerInfo;

/// The name of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FigureName {
    CommandUs,
    ServerUs,
    CallsPerSecondOneTask,
    CallsPerSecondFiftyTasks,
    PermitsPerCoreSecond,
    MemoryBytes,
    BytesPerCall,
    RefusedUs,
    RefusedSmallUs,
    AllDueUs,
    CutUs,
    RedisCallsPerSecond,
    PermitsPerSecond,
}

impl FigureName {
    /// The column title, with its unit.
    pub fn title(self) -> &'static str {
        match self {
            Self::CommandUs => "µs in the command",
            Self::ServerUs => "µs of Redis CPU",
            Self::CallsPerSecondOneTask => "calls/s, 1 task",
            Self::CallsPerSecondFiftyTasks => "calls/s, 50 tasks",
            Self::PermitsPerCoreSecond => "permits/s of one core",
            Self::MemoryBytes => "bytes",
            Self::BytesPerCall => "bytes per call",
            Self::RefusedUs => "µs, refused",
            Self::RefusedSmallUs => "µs, refused on a log of 100",
            Self::AllDueUs => "µs, all due at once",
            Self::CutUs => "µs, limit cut to 10",
            Self::RedisCallsPerSecond => "Redis calls/s",
            Self::PermitsPerSecond => "permits/s",
        }
    }

    /// Whether it is the time of one call, which is comparable with the empty script's.
    fn times_one_call(self) -> bool {
        matches!(self, Self::RefusedUs | Self::RefusedSmallUs | Self::AllDueUs | Self::CutUs)
    }
}

/// One measured value: the median of its rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    pub name: FigureName,
    pub value: f64,
    pub to_empty_script: Option<f64>,
    pub to_correct_zset: Option<f64>,
    pub target: Option<FigureTarget>,
}

/// The target of a figure, and whether it is met.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FigureTarget {
    pub says: String,
    pub met: bool,
}

/// Values of several rounds.
#[derive(Clone, Debug, Default)]
pub struct Median(BTreeMap<FigureName, Vec<f64>>);

impl Median {
    pub fn add(&mut self, name: FigureName, value: f64) {
        self.0.entry(name).or_default().push(value);
    }

    pub fn figures(&self) -> Vec<Figure> {
        let figure = |(name, values): (&FigureName, &Vec<f64>)| {
            let mut values = values.clone();
            values.sort_by(f64::total_cmp);
            let (below, above) = (values.get((values.len().max(1) - 1) / 2)?, values.get(values.len() / 2)?);
            let value = f64::midpoint(*below, *above);
            Some(Figure { name: *name, value, to_empty_script: None, to_correct_zset: None, target: None })
        };
        self.0.iter().filter_map(figure).collect()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Section {
    OnePermit,
    ManyPermits,
    FullLog,
    Crowd,
}

impl Section {
    pub const ALL: [Self; 4] = [Self::OnePermit, Self::ManyPermits, Self::FullLog, Self::Crowd];
}

/// One subject with its figures.
#[derive(Clone, Debug, Serialize)]
pub struct SubjectRow {
    pub section: Section,
    pub subject: &'static str,
    /// Whether it is our limiter, which has targets.
    pub ours: bool,
    pub permits_per_call: u32,
    pub figures: Vec<Figure>,
}

impl SubjectRow {
    pub fn value(&self, name: FigureName) -> Option<f64> {
        self.figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
    }
}

/// The figures of one run, with its conditions.
#[derive(Clone, Debug, Serialize)]
pub struct LimiterReport {
    pub command: String,
    pub date: String,
    pub machine: String,
    /// Load average of the minute before the run.
    pub load: Option<f64>,
    pub sluicegate: String,
    pub redis: String,
    /// `None`: a server named by `--redis`.
    pub server: Option<PrivateServerInfo>,
    pub seconds_per_figure: f64,
    pub rounds: usize,
    /// Calls in the full log.
    pub log_calls: u32,
    pub crowd_seconds: f64,
    pub rows: Vec<SubjectRow>,
}

/// Adds to every figure its ratios to the empty script's and the correct ZSET script's in the same run.
pub fn set_ratios(rows: &mut [SubjectRow], empty: &str, zset: &str) {
    let known = rows.to_vec();
    let value_of = |subject: &str, section: Option<Section>, permits: Option<u32>, name: FigureName| {
        let fits = |row: &&SubjectRow| {
            row.subject == subject
                && section.is_none_or(|section| row.section == section)
                && permits.is_none_or(|permits| row.permits_per_call == permits)
        };
        known.iter().find(fits).and_then(|row| row.value(name))
    };
    for row in rows {
        let (section, permits) = (row.section, row.permits_per_call);
        for figure in &mut row.figures {
            let comparable = if figure.name.times_one_call() { FigureName::CommandUs } else { figure.name };
            figure.to_empty_script = value_of(empty, None, None, comparable).map(|base| figure.value / base);
            figure.to_correct_zset =
                value_of(zset, Some(section), Some(permits), figure.name).map(|base| figure.value / base);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_is_the_middle_or_their_mean() {
        let median_of = |values: &[f64]| {
            let mut median = Median::default();
            values.iter().for_each(|value| median.add(FigureName::ServerUs, *value));
            median.figures().first().map(|figure| figure.value)
        };
        assert_eq!(median_of(&[9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median_of(&[4.0, 1.0]), Some(2.5));
        assert_eq!(median_of(&[]), None);
    }

    #[test]
    fn ratios_compare_figures_of_the_same_size() {
        let row = |section, subject, permits_per_call, figures: &[(FigureName, f64)]| {
            let mut median = Median::default();
            figures.iter().for_each(|(name, value)| median.add(*name, *value));
            SubjectRow { section, subject, ours: false, permits_per_call, figures: median.figures() }
        };
        let mut rows = [
            row(Section::OnePermit, "empty", 1, &[(FigureName::CommandUs, 2.0)]),
            row(Section::OnePermit, "zset", 1, &[(FigureName::CommandUs, 4.0)]),
            row(Section::ManyPermits, "zset", 10, &[(FigureName::CommandUs, 20.0)]),
            row(Section::ManyPermits, "ours", 10, &[(FigureName::CommandUs, 10.0)]),
            row(Section::FullLog, "ours", 1, &[(FigureName::CutUs, 8.0), (FigureName::MemoryBytes, 1.0)]),
        ];
        set_ratios(&mut rows, "empty", "zset");
        let ratios = |row: usize| {
            let figures = rows[row].figures.iter();
            figures.map(|figure| (figure.to_empty_script, figure.to_correct_zset)).collect::<Vec<_>>()
        };
        assert_eq!(ratios(3), [(Some(5.0), Some(0.5))]);
        assert_eq!(ratios(4), [(None, None), (Some(4.0), None)]);
    }
}
