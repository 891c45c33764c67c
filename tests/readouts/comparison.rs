//! The comparison of each readout with what came true: a table of rules, judged readouts, violations and deviations.
//!
//! The judge says whether a readout may be as it is. This says how far it is off, for every view of the same figure:
//! page and API, `status`, `/metrics`, and the dashboard's panel in Prometheus.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use super::ask::{Overview, Provider, Shown};
use super::judge::{Around, Bounds, EARNED, TAKEN_MAX, TOO_SLOW, UNAVAILABLE, finished, open};
use super::{History, Sample, Truth};

/// Largest deviation of the waiting payments, as a part of them.
const WAITING_MAX: f64 = 0.01;
/// Largest deviation of a finish time, as a part of the remaining time, and of a cut-off's missed payments.
const FORECAST_MAX: f64 = 0.1;
/// A finish time may be off by so much in any case: the age of a readout, and the interval of the truth.
const FINISH_SLACK: Duration = Duration::from_secs(5);
/// Time before a forecast whose pace it could know.
const PACE_BEFORE: Duration = Duration::from_secs(60);
/// Time after a recovery until no readout calls the backend unavailable any more.
const RECOVERY_MAX: Duration = Duration::from_secs(3);
/// Time after a recovery in which readouts are judged for that.
const RECOVERY_WATCHED: Duration = Duration::from_secs(30);
/// Most requests that a lane of the test has in flight.
const IN_FLIGHT_MAX: u64 = 64;
/// The largest part of the judged forecasts that may be unforeseen. With more of them the machine was too slow for the
/// limits, and the day says nothing about the forecasts.
const UNFORESEEN_MAX: f64 = 0.1;
/// Printed violations per rule.
const PRINTED: usize = 6;

/// What the test knows of the day besides the truth.
#[derive(Clone, Debug, Default)]
pub struct Day {
    /// From when on nothing is published to a provider any more, and nothing disturbs it.
    pub steady_from: BTreeMap<String, Duration>,
    /// A provider's cut-off.
    pub cutoff: Option<(String, Duration)>,
    /// Alerts whose cause was part of the day.
    pub earned: Vec<&'static str>,
}

/// A rule, and how the readouts keep it.
#[derive(Clone, Debug)]
pub struct Row {
    pub rule: String,
    pub judged: usize,
    pub violations: Vec<String>,
    /// Deviations that no forecast could know: the lane sent slower or faster afterwards than in the minute before.
    pub unforeseen: Vec<String>,
    /// Largest deviation, in the unit; without the unforeseen ones.
    pub worst: f64,
    pub unit: &'static str,
    /// It compares a forecast, which a machine that is too slow for the limits does not keep.
    pub is_forecast: bool,
}

impl Row {
    fn new(rule: impl Into<String>, unit: &'static str) -> Self {
        let (violations, unforeseen) = (Vec::new(), Vec::new());
        Self { rule: rule.into(), judged: 0, violations, unforeseen, worst: 0.0, unit, is_forecast: false }
    }

    fn of_forecast(rule: impl Into<String>) -> Self {
        Self { is_forecast: true, ..Self::new(rule, "%") }
    }

    /// Whether the readouts break the rule, or too few of them could be judged by it.
    pub fn is_broken(&self) -> bool {
        let unforeseen_max = UNFORESEEN_MAX * float(self.judged as u64);
        !self.violations.is_empty() || float(self.unforeseen.len() as u64) > unforeseen_max
    }

    fn count(&mut self, deviation: f64, is_violation: bool, what: impl FnOnce() -> String) {
        self.judged += 1;
        self.worst = self.worst.max(deviation);
        if is_violation {
            self.violations.push(what());
        }
    }
}

/// A place where the same figure is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum View {
    Api,
    Status,
    Metric,
    Panel,
}

impl View {
    const ALL: [Self; 4] = [Self::Api, Self::Status, Self::Metric, Self::Panel];

    fn name(self) -> &'static str {
        match self {
            Self::Api => "page and API",
            Self::Status => "status --json",
            Self::Metric => "/metrics",
            Self::Panel => "dashboard",
        }
    }

    fn provider<'a>(self, shown: &'a Shown, name: &str) -> Option<&'a Provider> {
        let overview = match self {
            Self::Api => shown.overview.as_ref(),
            Self::Status => shown.status.as_ref(),
            Self::Metric | Self::Panel => None,
        };
        overview?.providers.get(name)
    }

    /// Payments that wait, and whether those in flight are among them.
    fn waiting(self, shown: &Shown, name: &str) -> Option<(f64, bool)> {
        match self {
            Self::Api | Self::Status => {
                let provider = self.provider(shown, name)?;
                Some((float(provider.waiting + provider.in_flight), true))
            }
            Self::Metric => Some((*shown.waiting_metric.as_ref()?.get(name)?, false)),
            Self::Panel => Some((*shown.panels.get("Waiting")?.get(name)?, false)),
        }
    }

    /// When the sample read it, since the start of the watch.
    fn asked(self, history: &History, sample: &Sample) -> Duration {
        let at = match self {
            Self::Api => None,
            Self::Status => sample.shown.asked.status,
            Self::Metric => sample.shown.asked.metrics,
            Self::Panel => sample.shown.asked.panels,
        };
        let since_start = |at: Instant| history.started.map(|started| at.saturating_duration_since(started));
        at.and_then(since_start).unwrap_or(sample.asked)
    }

    fn clears_in(self, shown: &Shown, name: &str) -> Option<Duration> {
        match self {
            Self::Api | Self::Status => self.provider(shown, name)?.clears_in_ms.map(Duration::from_millis),
            Self::Metric => Some(Duration::from_secs_f64(*shown.clear_metric.get(name)?)),
            Self::Panel => Some(Duration::from_secs_f64(*shown.panels.get("Clears in")?.get(name)?)),
        }
    }

    fn missed(self, shown: &Shown, name: &str) -> Option<f64> {
        match self {
            Self::Api | Self::Status => self.provider(shown, name)?.cutoff.as_ref()?.missed.map(float),
            Self::Metric => shown.cutoff_metric.get(name).copied(),
            Self::Panel => None,
        }
    }
}

/// All rows of the table.
pub fn compare(history: &History, day: &Day) -> Vec<Row> {
    let mut rows: Vec<Row> = View::ALL.iter().map(|view| waiting(history, *view)).collect();
    rows.extend(day.steady_from.iter().flat_map(|(name, from)| {
        View::ALL.map(|view| finish_time(history, Steady { provider: name, from: *from }, view))
    }));
    rows.extend(day.cutoff.iter().flat_map(|(name, at)| {
        let from = day.steady_from.get(name).copied().unwrap_or_default();
        [View::Api, View::Status, View::Metric].map(|view| cutoff(history, Steady { provider: name, from }, *at, view))
    }));
    rows.extend([View::Api, View::Status].map(|view| recovery(history, view)));
    rows.push(recovery_alert(history));
    rows.push(alerts(history, day));
    rows
}

/// The rows as text, with the first violations of each.
pub fn table(rows: &[Row]) -> String {
    let mut text = format!("{:<52} {:>7} {:>10} {:>10} {:>9}\n", "rule", "judged", "violations", "unforeseen", "worst");
    for row in rows {
        let Row { rule, judged, violations, unforeseen, worst, unit, is_forecast } = row;
        let kind = if *is_forecast { " forecast" } else { "" };
        let (violations, unforeseen) = (violations.len(), unforeseen.len());
        let _ = writeln!(text, "{rule:<52} {judged:>7} {violations:>10} {unforeseen:>10} {worst:>7.1} {unit}{kind}");
    }
    let kinds = rows.iter().flat_map(|row| [("", row, &row.violations), (", unforeseen", row, &row.unforeseen)]);
    for (kind, row, found) in kinds.filter(|(_, _, found)| !found.is_empty()) {
        let _ = writeln!(text, "{}{kind}:", row.rule);
        for what in found.iter().take(PRINTED) {
            let _ = writeln!(text, "  {what}");
        }
    }
    text
}

/// Waiting payments within a hundredth.
fn waiting(history: &History, view: View) -> Row {
    let mut row = Row::new(format!("waiting, {}", view.name()), "%");
    for sample in &history.samples {
        let around = Around::new(history, sample);
        for (name, provider) in around.providers() {
            let Some((figure, has_in_flight)) = view.waiting(&sample.shown, name) else { continue };
            let Some(open) = around.open(name).filter(|_| around.is_calm() && around.no_lost_leases) else { continue };
            let taken = if around.is_still(name) { 0 } else { TAKEN_MAX };
            let in_flight = if has_in_flight { 0 } else { IN_FLIGHT_MAX };
            let off = distance(figure, Bounds { least: open.least.saturating_sub(taken + in_flight), ..open });
            let part = off / float(open.most.max(1));
            let what = || format!("{}: {name} shows {figure}, open are {open:?}, {provider:?}", at(sample));
            row.count(part * 100.0, part > WAITING_MAX, what);
        }
    }
    row
}

/// A provider to which nothing is published any more, and which nothing disturbs.
#[derive(Clone, Copy)]
struct Steady<'a> {
    provider: &'a str,
    from: Duration,
}

impl Steady<'_> {
    /// Samples from then on, while all backends and workers were well.
    fn samples<'h>(&self, history: &'h History) -> impl Iterator<Item = &'h Sample> {
        let from = self.from;
        history.samples.iter().filter(move |sample| sample.asked >= from && Around::new(history, sample).is_calm())
    }

    /// Payments per second that finished in the minute before `at` and from then until `done`, if they differ by more than
    /// a forecast may. `None`: they do not, or there was no minute.
    fn pace_changed(&self, history: &History, at: Duration, done: Duration) -> Option<[f64; 2]> {
        let from = at.checked_sub(PACE_BEFORE).filter(|from| *from >= self.from)?;
        let paces = [self.pace(history, from, at)?, self.pace(history, at, done)?];
        let [before, after] = paces;
        ((after - before).abs() > FORECAST_MAX * before).then_some(paces)
    }

    /// Payments per second that finished between two instants.
    fn pace(&self, history: &History, from: Duration, to: Duration) -> Option<f64> {
        let within = history.truths.iter().filter(|truth| truth.from >= from && truth.from <= to);
        let mut known = within.filter_map(|truth| Some((truth.from, finished(truth, self.provider)?)));
        let (first_at, first) = known.next()?;
        let (last_at, last) = known.next_back()?;
        let seconds = (last_at - first_at).as_secs_f64();
        (seconds > 0.0).then(|| float(last.saturating_sub(first)) / seconds)
    }

    /// The truth when all payments of the provider had finished.
    fn done<'h>(&self, history: &'h History) -> Option<&'h Truth> {
        let is_done = |truth: &&Truth| open(truth, self.provider).is_some_and(|open| open.least == 0);
        history.truths.iter().filter(|truth| truth.from >= self.from).find(is_done)
    }
}

/// Finish times within a tenth of the remaining time.
fn finish_time(history: &History, steady: Steady<'_>, view: View) -> Row {
    let mut row = Row::of_forecast(format!("finish time of {}, {}", steady.provider, view.name()));
    let Some(done) = steady.done(history) else { return row };
    for sample in steady.samples(history) {
        let asked = view.asked(history, sample);
        let Some(left) = done.from.checked_sub(asked).filter(|left| !left.is_zero()) else { continue };
        let Some(clears_in) = view.clears_in(&sample.shown, steady.provider) else { continue };
        let shown = asked + clears_in;
        let off = shown.abs_diff(done.from);
        let part = off.as_secs_f64() / left.as_secs_f64();
        let is_violation = off > FINISH_SLACK.max(left.mul_f64(FORECAST_MAX));
        let deviation = if off > FINISH_SLACK { part * 100.0 } else { 0.0 };
        let (clears, left) = (clears_in.as_secs_f64(), left.as_secs_f64());
        let doing = View::Api.provider(&sample.shown, steady.provider).map(|shown| (&shown.state, &shown.cause));
        let what = format!("{}: clears in {clears:.1} s, came after {left:.1} s, {doing:?}", at(sample));
        match steady.pace_changed(history, asked, done.from).filter(|_| is_violation) {
            Some([before, after]) => {
                row.judged += 1;
                row.unforeseen.push(format!("{what}, {before:.1}/s until then and {after:.1}/s from then on"));
            }
            None => row.count(deviation, is_violation, || what),
        }
    }
    row
}

/// Payments that miss the cut-off, within a tenth of those that missed it.
fn cutoff(history: &History, steady: Steady<'_>, cutoff: Duration, view: View) -> Row {
    let mut row = Row::of_forecast(format!("missed cut-off of {}, {}", steady.provider, view.name()));
    let then = history.truths.iter().find(|truth| truth.from >= cutoff);
    let Some(missed) = then.and_then(|truth| open(truth, steady.provider)) else { return row };
    for sample in steady.samples(history).filter(|sample| sample.answered < cutoff) {
        let Some(figure) = view.missed(&sample.shown, steady.provider) else { continue };
        let off = distance(figure, missed);
        let part = off / float(missed.most.max(1));
        let what = || format!("{}: {figure} miss it, {missed:?} did", at(sample));
        row.count(part * 100.0, part > FORECAST_MAX && off > float(TAKEN_MAX), what);
    }
    row
}

/// Samples soon after a backend answered again, while all went on answering, and the time since.
fn recovered(history: &History) -> impl Iterator<Item = (&Sample, Duration)> {
    let is_whole = |truth: &Truth| truth.ledger.is_some() && truth.ready.is_some() && truth.limiter_kept.is_some();
    history.samples.iter().filter_map(move |sample| {
        let until = history.truths.iter().position(|truth| truth.from >= sample.answered)?;
        let down = history.truths[..=until].iter().rposition(|truth| !is_whole(truth))?;
        let back = history.truths[..=until].get(down + 1)?;
        let since = sample.asked.checked_sub(back.to)?;
        let workers_stay = history.truths[down..=until].iter().all(|truth| truth.workers == back.workers);
        (since <= RECOVERY_WATCHED && workers_stay).then_some((sample, since))
    })
}

/// No backend is called unavailable three seconds after it has answered again.
fn recovery(history: &History, view: View) -> Row {
    let mut row = Row::new(format!("unavailable no longer than 3 s after, {}", view.name()), "s");
    for (sample, since) in recovered(history) {
        let overview = if view == View::Api { &sample.shown.overview } else { &sample.shown.status };
        let Some(overview) = overview else { continue };
        let Some(what) = unavailable(overview) else {
            row.count(0.0, false, String::new);
            continue;
        };
        let seconds = since.as_secs_f64();
        row.count(seconds, since > RECOVERY_MAX, || format!("{}, {seconds:.1} s after: {what}", at(sample)));
    }
    row
}

/// The same, by the alert's expression.
fn recovery_alert(history: &History) -> Row {
    const ALERT: &str = "SluicegateBackendUnavailable";
    let mut row = Row::new("unavailable no longer than 3 s after, alert", "s");
    for (sample, since) in recovered(history) {
        let Some(alerts) = &sample.shown.alerts else { continue };
        let is_true = alerts.iter().any(|name| name == ALERT);
        let seconds = if is_true { since.as_secs_f64() } else { 0.0 };
        row.count(seconds, is_true && since > RECOVERY_MAX, || format!("{}, {seconds:.1} s after", at(sample)));
    }
    row
}

/// No alert without a cause.
fn alerts(history: &History, day: &Day) -> Row {
    let mut row = Row::new("alerts have a cause", "");
    for sample in &history.samples {
        let Some(alerts) = sample.shown.alerts.as_ref().filter(|_| Around::new(history, sample).is_calm()) else {
            continue;
        };
        let has_cause = |name: &str| EARNED.contains(&name) || day.earned.contains(&name);
        let without: Vec<&String> = alerts.iter().filter(|name| !has_cause(name)).collect();
        row.count(0.0, !without.is_empty(), || format!("{}: {without:?}", at(sample)));
    }
    row
}

/// What an overview calls unavailable.
fn unavailable(overview: &Overview) -> Option<String> {
    let is_unavailable =
        |shown: &Provider| UNAVAILABLE.contains(&shown.state.as_str()) && !shown.cause.starts_with(TOO_SLOW);
    let state = overview.providers.iter().find(|(_, shown)| is_unavailable(shown));
    let state = state.map(|(name, shown)| format!("{name} is {}: {}", shown.state, shown.cause));
    state.or_else(|| (!overview.outages.is_empty()).then(|| format!("outages {:?}", overview.outages)))
}

/// How far a figure is outside of its bounds.
fn distance(figure: f64, bounds: Bounds) -> f64 {
    (float(bounds.least) - figure).max(figure - float(bounds.most)).max(0.0)
}

fn at(sample: &Sample) -> String {
    format!("{:.1} s, worker {}", sample.asked.as_secs_f64(), sample.worker)
}

#[allow(clippy::cast_precision_loss, reason = "counts of payments")]
fn float(count: u64) -> f64 {
    count as f64
}
