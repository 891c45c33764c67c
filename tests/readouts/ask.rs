//! Readouts of one worker, as plain figures: overview, workers, limits, explanations, metrics, dashboard and alerts.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Deployment;
use super::prometheus::Prometheus;

/// A readout that takes longer counts as missing.
const ANSWER_MAX: Duration = Duration::from_secs(4);
/// A request that takes this long has waited for a backend.
const WAITED_MIN: Duration = Duration::from_secs(1);

/// When each kind of readout was asked for; `None`: as its sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AskedAt {
    pub metrics: Option<Instant>,
    pub status: Option<Instant>,
    pub panels: Option<Instant>,
}

/// All readouts of one worker at one moment; `None`: no response.
#[derive(Clone, Debug, Default)]
pub struct Shown {
    /// When the readouts of one sample were asked for: they are read one after another, for seconds on a busy machine.
    pub asked: AskedAt,
    pub overview: Option<Overview>,
    /// What `status --json` prints.
    pub status: Option<Overview>,
    /// Worker processes that are shown as lost, and as alive.
    pub lost_pids: Vec<u32>,
    pub live_pids: Vec<u32>,
    /// By provider.
    pub limits: BTreeMap<String, Result<Vec<Limit>, String>>,
    pub explained: Vec<Explained>,
    /// Waiting jobs by provider, from `/metrics`; empty if the worker omits the sample.
    pub waiting_metric: Option<BTreeMap<String, f64>>,
    /// Clear time in seconds, and payments that miss the next cut-off, by provider, from `/metrics`.
    pub clear_metric: BTreeMap<String, f64>,
    pub cutoff_metric: BTreeMap<String, f64>,
    /// The dashboard's panels: value by provider.
    pub panels: BTreeMap<String, BTreeMap<String, f64>>,
    /// Alerts whose expression is true now.
    pub alerts: Option<Vec<String>>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overview {
    pub providers: BTreeMap<String, Provider>,
    pub warnings: Vec<String>,
    /// Backends that are shown as unavailable.
    pub outages: Vec<String>,
    /// What is said about backends: warnings, problems of outages, causes of providers.
    pub said: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Provider {
    pub state: String,
    pub cause: String,
    pub waiting: u64,
    /// The figure is marked as a lower bound.
    pub at_least: bool,
    pub in_flight: u64,
    pub finished: u64,
    /// 429s of the last hour.
    pub refused: Option<u64>,
    pub clears_in_ms: Option<u64>,
    pub cutoff: Option<Cutoff>,
}

/// The next cut-off, and the payments that miss it; `None`: there is no forecast.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cutoff {
    pub in_ms: u64,
    pub missed: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    pub name: String,
    pub used: u64,
    pub capacity: u64,
    /// Requests that the provider received within the window and that were certainly counted at the time of the
    /// readout.
    pub received: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explained {
    pub job: String,
    /// The ledger's state before and after the request.
    pub before: Option<String>,
    pub after: Option<String>,
    pub state: Option<String>,
}

/// Final states of a job.
const FINISHED: [&str; 6] = ["succeeded", "declined", "dead", "expired", "review", "cancelled"];

/// Reads only the counts of one worker.
pub fn counts(port: u16) -> Shown {
    let overview = get_json(port, "/api/v1/overview").and_then(|body| overview(&body));
    let asked = AskedAt { metrics: Some(Instant::now()), ..AskedAt::default() };
    let metrics = get(port, "/metrics").filter(|(status, _)| *status == 200);
    let text = metrics.map(|(_, text)| text);
    let samples = |name: &str| text.as_deref().map(|text| samples(text, name));
    Shown {
        asked,
        overview,
        waiting_metric: samples("sluicegate_waiting_jobs"),
        clear_metric: samples("sluicegate_clear_seconds").unwrap_or_default(),
        cutoff_metric: samples("sluicegate_cutoff_missed_payments").unwrap_or_default(),
        ..Shown::default()
    }
}

/// Reads all readouts of one worker.
pub fn everything(deployment: &dyn Deployment, port: u16, jobs: &[String], prometheus: Option<&Prometheus>) -> Shown {
    let counts = counts(port);
    let workers = get_json(port, "/api/v1/workers");
    let pids = |lost: bool| -> Vec<u32> {
        let lines = workers.iter().flat_map(|body| body["workers"].as_array().into_iter().flatten());
        let lines = lines.filter(|line| (line["state"] == "lost") == lost);
        lines.filter_map(|line| line["pid"].as_u64()?.try_into().ok()).collect()
    };
    let names: Vec<String> = counts.overview.iter().flat_map(|shown| shown.providers.keys().cloned()).collect();
    let limits = names.iter().map(|name| (name.clone(), limits(deployment, port, name))).collect();
    // Each request waits for a backend that has just become unavailable. Ten of them would outlast the outage, so that
    // it would go unnoticed.
    let mut explained: Vec<Explained> = Vec::new();
    for job in jobs {
        let started = Instant::now();
        explained.push(self::explained(deployment, port, job));
        if started.elapsed() >= WAITED_MIN {
            break;
        }
    }
    let asked_status = Some(Instant::now());
    let status = deployment.status(port).and_then(|body| overview(&body));
    let asked_panels = Some(Instant::now());
    Shown {
        asked: AskedAt { status: asked_status, panels: asked_panels, ..counts.asked },
        status,
        lost_pids: pids(true),
        live_pids: pids(false),
        limits,
        explained,
        panels: prometheus.map(Prometheus::panels).unwrap_or_default(),
        alerts: prometheus.and_then(Prometheus::alerts),
        ..counts
    }
}

fn overview(body: &Value) -> Option<Overview> {
    let number = |provider: &Value, field: &str| provider[field].as_u64().unwrap_or_default();
    let provider = |provider: &Value| {
        let clears = &provider["clears"];
        let shown = Provider {
            state: provider["state"].as_str()?.to_owned(),
            cause: provider["cause"].as_str().unwrap_or_default().to_owned(),
            waiting: number(provider, "waiting"),
            at_least: provider["waiting_is_at_least"].as_bool().unwrap_or_default(),
            in_flight: number(provider, "in_flight"),
            finished: FINISHED.iter().map(|state| number(provider, state)).sum(),
            refused: provider["refused_by_provider"].as_u64(),
            clears_in_ms: clears["ms"].as_u64().filter(|_| clears["kind"] == "clears_in"),
            cutoff: provider["cutoff"]["in_ms"].as_u64().map(|in_ms| cutoff(in_ms, &provider["cutoff"]["forecast"])),
        };
        Some((provider["name"].as_str()?.to_owned(), shown))
    };
    let providers: BTreeMap<String, Provider> = body["providers"].as_array()?.iter().filter_map(provider).collect();
    let warnings = body["warnings"].as_array()?.iter().filter_map(|text| Some(text.as_str()?.to_owned()));
    let warnings: Vec<String> = warnings.collect();
    let outages = |field: &str| {
        let outages = body["outages"].as_array().into_iter().flatten();
        outages.filter_map(|outage| Some(outage[field].as_str()?.to_owned())).collect::<Vec<_>>()
    };
    let causes = providers.values().map(|shown| shown.cause.clone());
    let said = causes.chain(outages("problem")).chain(warnings.iter().cloned()).collect();
    Some(Overview { providers, warnings, outages: outages("backend"), said })
}

fn cutoff(in_ms: u64, forecast: &Value) -> Cutoff {
    let missed = match forecast["kind"].as_str() {
        Some("on_time") => Some(0),
        _ => forecast["payments"].as_u64(),
    };
    Cutoff { in_ms, missed }
}

/// The limits of a provider, with the requests that it received in each window.
fn limits(deployment: &dyn Deployment, port: u16, provider: &str) -> Result<Vec<Limit>, String> {
    let before = Instant::now();
    let (status, text) = get(port, &format!("/api/v1/limits/{provider}")).ok_or("no answer")?;
    let after = Instant::now();
    if status != 200 {
        return Err(text);
    }
    let body: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let limit = |line: &Value| {
        let (used, remaining) = (line["used"].as_u64()?, line["remaining"].as_u64()?);
        let allows = line["allows"].as_str()?;
        // Which requests were in flight at the moment of the readout is not recorded.
        let received = match allows.ends_with(" at once") {
            true => 0,
            false => deployment.received(provider, after.checked_sub(window(allows)?)?, before),
        };
        Some(Limit { name: line["limit"].as_str()?.to_owned(), used, capacity: used + remaining, received })
    };
    body.as_array().ok_or("no list of limits")?.iter().map(|line| limit(line).ok_or(line.to_string())).collect()
}

/// The window of `N/DURATION`.
fn window(rate: &str) -> Option<Duration> {
    let duration = rate.split_once('/')?.1;
    let digits = duration.trim_end_matches(char::is_alphabetic);
    let unit_ms = match &duration[digits.len()..] {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return None,
    };
    Some(Duration::from_millis(digits.parse::<u64>().ok()? * unit_ms))
}

fn explained(deployment: &dyn Deployment, port: u16, job: &str) -> Explained {
    let before = deployment.state_of(job);
    let answer = get_json(port, &format!("/api/v1/jobs/{job}/explain"));
    let state = answer.and_then(|body| Some(body["state"].as_str()?.to_owned()));
    Explained { job: job.to_owned(), before, after: deployment.state_of(job), state }
}

/// Samples of a metric by provider.
fn samples(metrics: &str, name: &str) -> BTreeMap<String, f64> {
    let lines = metrics.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix("{provider=\""));
    lines
        .filter_map(|rest| {
            let (provider, value) = rest.split_once("\"} ")?;
            Some((provider.to_owned(), value.parse().ok()?))
        })
        .collect()
}

fn get_json(port: u16, path: &str) -> Option<Value> {
    let (status, text) = get(port, path)?;
    (status == 200).then(|| serde_json::from_str(&text).ok())?
}

/// Status and body of one GET; `None`: no complete response in time.
pub fn get(port: u16, path: &str) -> Option<(u16, String)> {
    let address = ([127, 0, 0, 1], port).into();
    let mut stream = TcpStream::connect_timeout(&address, ANSWER_MAX).ok()?;
    stream.set_read_timeout(Some(ANSWER_MAX)).ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    assert!(!head.to_ascii_lowercase().contains("transfer-encoding: chunked"), "{path}: {head}");
    Some((status, body.to_owned()))
}
