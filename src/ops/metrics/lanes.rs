//! The metrics of this process's lanes, per provider: counters of the past, and the current state.
//!
//! Each process has its own counters; a query over all workers sums them.

use std::collections::BTreeMap;
use std::fmt;

use super::write::{Labels, MetricsWriter, float};
use crate::domain::job::JobField;
use crate::domain::provider::ProviderName;
use crate::worker::lane_control::LaneStatus;
use crate::worker::meter::{Distribution, LaneCounts, LaneFigures};
use crate::worker::supervisor::WorkerStatus;

/// The states of a lane; exactly one of them has the value 1.
const STATES: [&str; 7] = ["running", "resting", "stopped", "probing", "paused", "draining", "absent"];

struct LaneMetrics {
    provider: String,
    figures: LaneFigures,
    counts: LaneCounts,
}

impl LaneMetrics {
    fn labels(&self) -> Labels {
        vec![("provider", self.provider.clone())]
    }

    fn labels_with(&self, name: &'static str, value: &str) -> Labels {
        vec![("provider", self.provider.clone()), (name, value.to_owned())]
    }
}

pub fn write(writer: &mut MetricsWriter<'_>, progress: &WorkerStatus) -> Result<(), fmt::Error> {
    let lane = |(name, meter): (ProviderName, std::sync::Arc<crate::worker::meter::LaneMeter>)| LaneMetrics {
        provider: name.to_string(),
        figures: meter.figures(),
        counts: meter.counts(),
    };
    let lanes: Vec<LaneMetrics> = progress.meter.lanes().into_iter().map(lane).collect();
    jobs(writer, &lanes)?;
    permits(writer, &lanes)?;
    requests(writer, &lanes)?;
    messages(writer, &lanes)?;
    jobs_without_field(writer, &lanes)?;
    states(writer, progress)
}

fn jobs(writer: &mut MetricsWriter<'_>, lanes: &[LaneMetrics]) -> Result<(), fmt::Error> {
    writer.counter(
        "jobs",
        "Jobs that this process has finished, by final state.",
        labelled_counts(lanes, "outcome", |counts| &counts.outcomes),
    )?;
    writer.histogram(
        "job_duration_seconds",
        "Time from the recording of a job until it is finished.",
        distributions(lanes, |counts| &counts.jobs),
    )?;
    writer.gauge(
        "active_jobs",
        "Active jobs: messages that this process has taken from the queue and not finished.",
        lanes.iter().map(|lane| (lane.labels(), float(lane.figures.active))),
    )
}

fn permits(writer: &mut MetricsWriter<'_>, lanes: &[LaneMetrics]) -> Result<(), fmt::Error> {
    writer.counter(
        "permits_granted",
        "Permits granted, one for each request.",
        lanes.iter().map(|lane| (lane.labels(), lane.counts.granted)),
    )?;
    let refused = lanes.iter().flat_map(|lane| {
        lane.counts.refused.iter().map(|(refused, count)| {
            let mut labels = lane.labels_with("reason", refused.reason);
            labels.push(("limit", refused.limit.clone().unwrap_or_default()));
            (labels, *count)
        })
    });
    writer.counter(
        "permits_refused",
        "Permits that were requested and not granted in time, by reason; for reason limit, by the name of the limit.",
        refused,
    )?;
    writer.histogram(
        "permit_wait_seconds",
        "Time from the request of a permit to its start.",
        distributions(lanes, |counts| &counts.permit_waits),
    )?;
    writer.counter(
        "permit_returned",
        "Permits released unused, by reason; late: the request was recorded too late for its permit.",
        labelled_counts(lanes, "reason", |counts| &counts.returned),
    )?;
    writer.gauge(
        "gate_waiting_jobs",
        "Active jobs that wait for a permit.",
        lanes.iter().map(|lane| (lane.labels(), float(lane.counts.waiting))),
    )
}

fn requests(writer: &mut MetricsWriter<'_>, lanes: &[LaneMetrics]) -> Result<(), fmt::Error> {
    writer.histogram(
        "start_lateness_seconds",
        "Delay from the start of a permit to the start of its request.",
        distributions(lanes, |counts| &counts.lateness),
    )?;
    writer.histogram(
        "hold_seconds",
        "How long a request holds its permit: until its response is read, or until the wait for it ends.",
        distributions(lanes, |counts| &counts.holds),
    )?;
    writer.counter(
        "provider_requests",
        "Finished requests, by status class; none: no response, unsent: not sent.",
        labelled_counts(lanes, "status_class", |counts| &counts.answers),
    )?;
    writer.histogram(
        "provider_request_duration_seconds",
        "Duration of requests.",
        distributions(lanes, |counts| &counts.requests),
    )?;
    writer.counter(
        "provider_throttled",
        "Requests that had a permit and got a 429 from the provider. Must stay at zero.",
        lanes.iter().map(|lane| (lane.labels(), lane.figures.throttled_total)),
    )?;
    writer.gauge(
        "in_flight_requests",
        "Requests that wait for their response.",
        lanes.iter().map(|lane| (lane.labels(), float(lane.figures.in_flight))),
    )
}

fn messages(writer: &mut MetricsWriter<'_>, lanes: &[LaneMetrics]) -> Result<(), fmt::Error> {
    writer.counter(
        "requeues",
        "Jobs that were delayed, and messages that were requeued, by reason.",
        labelled_counts(lanes, "reason", |counts| &counts.requeues),
    )?;
    writer.counter(
        "redelivered",
        "Messages that the broker marks as delivered before.",
        lanes.iter().map(|lane| (lane.labels(), lane.counts.redelivered)),
    )?;
    writer.counter(
        "rejected_messages",
        "Messages that can never be a job, kept in payments.invalid, by reason.",
        labelled_counts(lanes, "reason", |counts| &counts.rejected),
    )
}

fn jobs_without_field(writer: &mut MetricsWriter<'_>, lanes: &[LaneMetrics]) -> Result<(), fmt::Error> {
    for (field, name, help) in [
        (
            JobField::Account,
            "jobs_without_account",
            "Jobs sent without an account: limits and rules by account did not apply to them.",
        ),
        (
            JobField::Reference,
            "jobs_without_reference",
            "Jobs sent without a reference: limits by reference did not apply to them.",
        ),
    ] {
        let lacking = |lane: &LaneMetrics| {
            let of_field = |(lacks, jobs): &(JobField, u64)| (*lacks == field).then_some(*jobs);
            (lane.labels(), lane.counts.uncounted.iter().find_map(of_field).unwrap_or(0))
        };
        writer.counter(name, help, lanes.iter().map(lacking))?;
    }
    Ok(())
}

fn states(writer: &mut MetricsWriter<'_>, progress: &WorkerStatus) -> Result<(), fmt::Error> {
    let enabled = progress.settings.providers.values().filter(|row| row.enabled);
    let found: BTreeMap<String, (&str, f64)> = enabled
        .map(|row| {
            let lane = progress.lanes.get(&row.name).map(|pauses| (pauses.state(), pauses.is_probing()));
            let probing = lane.as_ref().is_some_and(|(_, probing)| *probing);
            let state = match lane {
                _ if progress.draining => "draining",
                None => "absent",
                Some(_) if row.paused => "paused",
                Some((LaneStatus::Running, _)) => "running",
                Some((LaneStatus::IntakePaused(_), _)) => "resting",
                Some((LaneStatus::Stopped(_), _)) => "stopped",
                Some((LaneStatus::Probing { .. }, _)) => "probing",
            };
            let breaker = match (probing, state) {
                (false, _) => 0.0,
                (true, "stopped") => 2.0,
                (true, _) => 1.0,
            };
            (row.name.to_string(), (state, breaker))
        })
        .collect();
    let labels = |provider: &str, state: &str| vec![("provider", provider.to_owned()), ("state", state.to_owned())];
    let states = found.iter().flat_map(|(provider, (now, _))| {
        STATES.map(|state| (labels(provider, state), f64::from(u8::from(state == *now))))
    });
    writer.gauge(
        "lane_state",
        "Lane state in this process: the one with value 1. Resting and draining take no jobs; stopped sends none.",
        states,
    )?;
    writer.gauge(
        "breaker_state",
        "Circuit breaker of the lane: 0 closed, 1 half-open (one job at a time), 2 open (nothing is sent).",
        found.iter().map(|(provider, (_, breaker))| (vec![("provider", provider.clone())], *breaker)),
    )
}

/// Counts of all lanes by one label.
fn labelled_counts<'a>(
    lanes: &'a [LaneMetrics],
    label: &'static str,
    of: fn(&LaneCounts) -> &Vec<(&'static str, u64)>,
) -> impl Iterator<Item = (Labels, u64)> + 'a {
    let of_lane =
        move |lane: &'a LaneMetrics| of(&lane.counts).iter().map(move |(word, n)| (lane.labels_with(label, word), *n));
    lanes.iter().flat_map(of_lane)
}

fn distributions<'a>(
    lanes: &'a [LaneMetrics],
    of: fn(&LaneCounts) -> &Distribution,
) -> impl Iterator<Item = (Labels, Distribution)> + 'a {
    lanes.iter().map(move |lane| (lane.labels(), of(&lane.counts).clone()))
}
