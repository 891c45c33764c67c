//! The targets of the figures that the benchmark `limiter` measures.
//!
//! They apply only to runs of the full size, not to `--quick`.

use super::report::{Figure, FigureName, FigureTarget, Section, SubjectRow};

const FULL_LOG_CALLS: u32 = 1_000_000;
/// Calls per second vary more than processor time does.
const SPEED_TOLERANCE: f64 = 0.95;
const REFUSED_TOLERANCE: f64 = 1.2;

/// Compares every figure of our limiter with its target.
pub fn judge(rows: &mut [SubjectRow], log_calls: u32) {
    for row in rows.iter_mut().filter(|row| row.ours) {
        let small_us = row.value(FigureName::RefusedSmallUs);
        let (section, permits) = (row.section, row.permits_per_call);
        for figure in &mut row.figures {
            figure.target = match section {
                Section::OnePermit => no_slower(figure),
                Section::ManyPermits => cycles(figure, permits),
                Section::FullLog if log_calls == FULL_LOG_CALLS => full_log(figure, small_us),
                Section::FullLog => None,
                Section::Crowd => crowd(figure),
            };
        }
    }
}

fn target(says: impl Into<String>, met: bool) -> Option<FigureTarget> {
    Some(FigureTarget { says: says.into(), met })
}

fn no_slower(figure: &Figure) -> Option<FigureTarget> {
    let ratio = figure.to_correct_zset?;
    match figure.name {
        FigureName::CommandUs | FigureName::ServerUs => target("no more than the correct ZSET script", ratio <= 1.0),
        FigureName::CallsPerSecondOneTask | FigureName::CallsPerSecondFiftyTasks => {
            target("at least 95 % of the correct ZSET script's", ratio >= SPEED_TOLERANCE)
        }
        _ => None,
    }
}

fn cycles(figure: &Figure, permits: u32) -> Option<FigureTarget> {
    if figure.name != FigureName::PermitsPerCoreSecond {
        return None;
    }
    match permits {
        10 => target("at least 400,000 at 10 per call", figure.value >= 400_000.0),
        100 => target("at least 3,000,000 at 100 per call", figure.value >= 3_000_000.0),
        1_000 => target("at least 15,000,000 at 1,000 per call", figure.value >= 15_000_000.0),
        _ => None,
    }
}

fn full_log(figure: &Figure, small_us: Option<f64>) -> Option<FigureTarget> {
    match figure.name {
        FigureName::MemoryBytes => target("at most 1,000,000", figure.value <= 1e6),
        FigureName::AllDueUs | FigureName::CutUs => target("at most 1,000", figure.value <= 1_000.0),
        FigureName::RefusedUs => {
            let met = figure.value <= small_us? * REFUSED_TOLERANCE;
            target("as fast as on a log of 100 (at most 1.2 times)", met)
        }
        _ => None,
    }
}

fn crowd(figure: &Figure) -> Option<FigureTarget> {
    match figure.name {
        FigureName::RedisCallsPerSecond => target("at most 150", figure.value <= 150.0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Median;
    use super::*;

    fn met(section: Section, permits: u32, log_calls: u32, figures: &[(FigureName, f64)]) -> Vec<Option<bool>> {
        let mut median = Median::default();
        figures.iter().for_each(|(name, value)| median.add(*name, *value));
        let mut rows =
            [SubjectRow { section, subject: "x", ours: true, permits_per_call: permits, figures: median.figures() }];
        judge(&mut rows, log_calls);
        rows[0].figures.iter().map(|figure| figure.target.as_ref().map(|target| target.met)).collect()
    }

    #[test]
    fn targets_are_judged_at_their_edge() {
        let cycles =
            |permits, value| met(Section::ManyPermits, permits, 0, &[(FigureName::PermitsPerCoreSecond, value)]);
        assert_eq!((cycles(10, 4e5), cycles(10, 4e5 - 1.0)), (vec![Some(true)], vec![Some(false)]));
        assert_eq!((cycles(100, 3e6), cycles(1_000, 3e6)), (vec![Some(true)], vec![Some(false)]));
        let log = |calls, us| {
            met(Section::FullLog, 1, calls, &[(FigureName::RefusedUs, us), (FigureName::RefusedSmallUs, 10.0)])
        };
        assert_eq!(log(1_000_000, 12.0), [Some(true), None]);
        assert_eq!(log(1_000_000, 12.1), [Some(false), None]);
        assert_eq!(log(50_000, 12.1), [None, None]);
        assert_eq!(met(Section::Crowd, 1, 0, &[(FigureName::RedisCallsPerSecond, 151.0)]), [Some(false)]);
    }
}
