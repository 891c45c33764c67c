//! Random faults under load, by a plan that a seed determines. The oracles then judge the providers' records.
//!
//! `tests/faults/run` documents the choice of seed and size.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;

use crate::coverage::{Coverage, sample_births};
use crate::inject::{Standstill, Timeline, happen};
use crate::oracle::{ORACLES, Violation, judge};
use crate::plan::{GRANT_LANE, LANES, PROVIDERS, Plan, Size, WORKERS, Wave, plan};
use crate::provider::ProviderOptions;
use crate::readout_oracle;
use crate::readout_oracle::judge::table;
use crate::readouts::Watched;
use crate::records::{Call, Published, Records};
use crate::stand::{DATABASE, Stand, StandOptions};
use crate::watch::Watch;
use crate::writes;

/// Time until all jobs have finished. A lost worker's jobs return after its silence, their responses' time and two delays. A message
/// whose delay ended while the broker started returns after 180 s. Its dead-letter worker found no exchange and retries
/// only then (`dead_letter_worker_publisher_confirm_timeout`).
const PATIENCE: Duration = Duration::from_secs(260);

/// Send budget plus timeout of every row: the longest transit that the limiter assumes.
const HOLD_MS: u64 = 2_500;

/// One job in this many of a wave is published twice.
const COPY_EVERY: usize = 40;
/// Copies beyond that share: one per wave that is not full.
const COPIES_MORE: u64 = 64;

/// Violations of one kind that are printed.
const PRINTED: usize = 20;

fn rows() -> String {
    // A request that never arrived goes to manual review after a minute, so that the run can end.
    let bravo = "[provider.lookup]\nurl = \"{url:bravo}?id=${job:id}\"\ngive_up_after_s = 60\n\
                 amount = \"/amount\"\ncurrency = \"/currency\"\n";
    let retention = |keeps: bool| if keeps { "idempotency_retention_s = 86400\n" } else { "" };
    let row = |name: &str, keeps: bool, requests: usize, window_ms: u64, more: &str| {
        format!(
            "[[provider]]\nname = \"{name}\"\nurl = \"{{url:{name}}}\"\ntimeout_ms = 2000\nbackoff_max_ms = 4000\n{}{more}\
             [provider.request]\namount = \"/amount\"\ncurrency = \"/currency\"\n\
             [[provider.limit]]\nname = \"all\"\nmax_requests = {requests}\nwindow_ms = {window_ms}\n\n",
            retention(keeps)
        )
    };
    // One merchant has more than its limit allows, so its flow is blocked again and again.
    let per_account =
        "[[provider.limit]]\nname = \"per-account\"\nscope = \"account\"\nmax_requests = 40\nwindow_ms = 1000\n";
    row(PROVIDERS[0], true, 200, 1_000, "")
        + per_account
        + "\n"
        + &row(PROVIDERS[1], false, 50, 2_000, bravo)
        + &row(PROVIDERS[2], false, 30, 1_000, "")
        + &row(LANES[GRANT_LANE], true, 40, 1_000, "slot_release = \"grant\"\n")
}

fn stand() -> Stand {
    let mut stand = Stand::start(StandOptions::default());
    writes::prepare(&stand);
    let limit = |requests: usize, ms: u64| vec![(requests, Duration::from_millis(ms))];
    let latency = (Duration::from_millis(20), Duration::from_millis(80));
    for (name, deduplicates, can_be_asked, limits) in [
        (PROVIDERS[0], true, false, limit(200, 1_000)),
        (PROVIDERS[1], false, true, limit(50, 2_000)),
        (PROVIDERS[2], false, false, limit(30, 1_000)),
        (LANES[GRANT_LANE], true, false, limit(40, 1_000)),
    ] {
        let by_grant = name == LANES[GRANT_LANE];
        stand.add_provider(
            name,
            ProviderOptions { deduplicates, can_be_asked, limits, latency, by_grant, accepts_per_s: None },
        );
    }
    stand.apply(&rows());
    for _ in 0..WORKERS {
        stand.add_worker();
    }
    stand
}

/// The job with this number at this provider: id, content and message.
fn job(provider: usize, number: usize) -> (String, Published, String) {
    let name = LANES[provider];
    let id = format!("{name}-{number}");
    let (amount, currency) =
        (100 + i64::try_from(number).unwrap(), if number.is_multiple_of(5) { "USD" } else { "EUR" });
    let account = match number % 7 {
        0 => Some(format!("account-{}", number % 3)),
        1 | 2 => Some("flood".to_owned()),
        _ => None,
    };
    let priority = if number.is_multiple_of(10) { number / 10 % 10 } else { 0 };
    let mut body =
        json!({ "id": id, "amount": amount, "currency": currency, "priority": priority, "payload": { "n": number } });
    if let Some(account) = &account {
        body["account"] = json!(account);
    }
    let (provider, currency) = (name.to_owned(), currency.to_owned());
    (id, Published { provider, amount, currency, account, confirmed: false }, body.to_string())
}

type Messages = Mutex<BTreeMap<String, Published>>;

fn publish(stand: &Stand, wave: &Wave, published: &Messages) {
    let jobs: Vec<_> = (wave.first..wave.first + wave.jobs).map(|number| job(wave.provider, number)).collect();
    let all = |confirmed: bool| {
        let noted = jobs.iter().map(|(id, message, _)| (id.clone(), Published { confirmed, ..message.clone() }));
        published.lock().unwrap().extend(noted);
    };
    all(false);
    let mut bodies: Vec<String> = jobs.iter().map(|(_, _, body)| body.clone()).collect();
    // Some are published twice, as a producer may at any time.
    bodies.extend(bodies.clone().into_iter().step_by(COPY_EVERY));
    stand.runtime.block_on(stand.client.publish(LANES[wave.provider], &bodies));
    all(true);
}

/// Messages that producers have sent so far, for the readout oracle.
fn sent(published: &Messages) -> BTreeMap<String, readout_oracle::Published> {
    let mut sent: BTreeMap<String, readout_oracle::Published> = BTreeMap::new();
    for message in published.lock().unwrap().values() {
        let of = sent.entry(message.provider.clone()).or_default();
        of.sent += 1;
        of.confirmed += u64::from(message.confirmed);
    }
    // Every fortieth job of a wave is published twice.
    sent.values_mut().for_each(|of| of.copies = of.sent / COPY_EVERY as u64 + COPIES_MORE);
    sent
}

/// Applies the plan while jobs are published; returns when both are finished.
fn play(stand: &Stand, plan: &Plan, timeline: &Timeline, published: &Messages) {
    std::thread::scope(|scope| {
        let mut playing: Vec<_> =
            plan.faults.iter().map(|planned| scope.spawn(|| happen(stand, planned, timeline))).collect();
        playing.push(scope.spawn(|| {
            for wave in &plan.waves {
                timeline.sleep_until(wave.at);
                publish(stand, wave, published);
            }
            timeline.note("everything is published");
        }));
        let failed: Vec<String> =
            playing.into_iter().filter_map(|thread| thread.join().err()).map(|panic| panic_message(&*panic)).collect();
        assert!(failed.is_empty(), "a fault could not be applied: {}", failed.join("\n"));
    });
    timeline.note("all faults are over");
}

/// Restarts workers that ended by themselves, as a process supervisor would.
fn supervise(stand: &Stand, timeline: &Timeline, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        for worker in stand.revive_workers() {
            timeline.note(format!("worker {worker} had ended by itself and was started again"));
        }
        std::thread::sleep(Duration::from_millis(300));
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message").to_owned()
}

/// One run; the error describes every violation.
fn run(stand: &Stand, plan: &Plan, timeline: &Timeline) -> Result<(), String> {
    let (watch, standstill, over) = (Watch::new(stand), Standstill::watch(stand), AtomicBool::new(false));
    let published = Messages::default();
    let (births, readouts, ended) = std::thread::scope(|scope| {
        scope.spawn(|| supervise(stand, timeline, &over));
        let births = scope.spawn(|| sample_births(stand, &over));
        let readouts = scope.spawn(|| {
            let sent = || sent(&published);
            let explained: Vec<String> = (0..10).map(|number| job(number % 3, number * 20).0).collect();
            readout_oracle::watch(&Watched::new(stand, &sent), &explained, None, &over)
        });
        let ended = catch_unwind(AssertUnwindSafe(|| {
            play(stand, plan, timeline, &published);
            let jobs = published.lock().unwrap().len();
            watch.await_drained(stand, jobs, PATIENCE + Duration::from_millis(20) * u32::try_from(jobs).unwrap())
        }));
        over.store(true, Ordering::Relaxed);
        (births.join().unwrap(), readouts.join().unwrap(), ended)
    });
    let drained = ended.map_err(|panic| panic_message(&*panic))?;
    let published = published.into_inner().unwrap();
    timeline.note(if drained.is_ok() { "drained" } else { "not drained" });
    let records = watch.records(stand, published);
    let (violations, coverage) = (judge(&records), Coverage::of(stand, &watch, &records, births.len()));
    let longest_ms = standstill.longest_ms();
    let way_ms = records.longest_way_ms();
    timeline.note(format!("longest pause of proxies and providers: {longest_ms} ms"));
    timeline.note(format!("longest transit of a request: {way_ms} ms; assumed are {HOLD_MS} ms"));
    println!("{}", summary(&records, &violations, &coverage));
    drained?;
    if !violations.is_empty() {
        return Err(describe(&violations, &records));
    }
    // The oracle does not know of Redis clock steps and of responses that a road loses, so these rules are excused.
    let excused = [
        "available backends are not called unavailable",
        "usage is what the provider received",
        "429s are counted as by the provider",
    ];
    let untruths = readout_oracle::judge::judge_by(&readouts, |rule| !excused.contains(&rule));
    println!("readouts compared with the truth:");
    for (rule, count) in readout_oracle::judge::judged(&readouts) {
        println!("  {rule:<50} {count:>5}");
    }
    if !untruths.is_empty() {
        return Err(table(&untruths));
    }
    for worker in 0..stand.workers() {
        let log = stand.stop_worker(worker);
        if !log.contains("all requests finished, unsent jobs returned to the backlog") {
            return Err(format!("worker {worker} left requests or jobs unfinished"));
        }
    }
    let missing = coverage.missing(plan);
    if !missing.is_empty() {
        return Err(format!("the run proves nothing, because these never happened: {}", missing.join(", ")));
    }
    Ok(())
}

fn summary(records: &Records, violations: &[Violation], coverage: &Coverage) -> String {
    let mut text = String::new();
    for (name, record) in &records.providers {
        let charged = record.calls.iter().filter(|call| call.effect_us.is_some()).count();
        let mut states: BTreeMap<&str, usize> = BTreeMap::new();
        let rows = records.ledger.values().filter(|row| row.provider == *name);
        rows.for_each(|row| *states.entry(&row.state).or_default() += 1);
        let calls = record.calls.len();
        let _ = writeln!(text, "{name}: {calls} requests, {charged} charges; ledger {states:?}");
        for (allowed, window_us) in &record.limits {
            let largest = record.largest_window(*window_us);
            let _ = write!(text, "  at most {largest} of {allowed} in {} ms", window_us / 1_000);
            let _ = match (record.by_grant, record.broken_windows(*allowed, *window_us)) {
                (true, broken) => writeln!(text, "; by grant, reported alone: {broken} windows of {calls} broken"),
                (false, _) => writeln!(text),
            };
        }
    }
    for (oracle, _) in ORACLES {
        let found = violations.iter().filter(|violation| violation.oracle == oracle).count();
        let _ = writeln!(text, "  {oracle:<32} {found:>3}");
    }
    let _ = write!(text, "what happened:\n{coverage}");
    text
}

/// The violations, with every request of each payment concerned.
fn describe(violations: &[Violation], records: &Records) -> String {
    let mut text = String::new();
    for (oracle, _) in ORACLES {
        for violation in violations.iter().filter(|violation| violation.oracle == oracle).take(PRINTED) {
            let _ = writeln!(text, "{oracle}: {}", violation.what);
            let id = violation.what.split(':').next().unwrap_or_default();
            for (provider, call) in records.charges().filter(|(_, call)| call.payment.as_deref() == Some(id)) {
                let shown = Call { body: Vec::new(), ..call.clone() };
                let _ = writeln!(text, "    {provider} {shown:?}");
            }
            if let Some(row) = records.ledger.get(id) {
                let _ = writeln!(text, "    {row:?}");
            }
        }
    }
    text
}

/// Keeps the records of a failed run: worker logs, provider records and ledger tables.
fn keep_evidence(stand: &Stand, seed: u64) -> PathBuf {
    let kept = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("faults-{seed}"));
    let _ = std::fs::remove_dir_all(&kept);
    std::fs::create_dir_all(&kept).unwrap();
    for (path, log) in stand.logs() {
        std::fs::write(kept.join(path.file_name().unwrap()), log).unwrap();
    }
    for (name, placed) in &stand.providers {
        let line = |call: &Call| format!("{:?}\n", Call { body: Vec::new(), ..call.clone() });
        let lines: String = placed.provider.record().calls.iter().map(line).collect();
        std::fs::write(kept.join(format!("{name}.calls")), lines).unwrap();
    }
    for table in ["jobs", "attempts", "events", "event_batches"] {
        // The database may be unavailable.
        let copy = format!("COPY {table} TO STDOUT CSV HEADER");
        if let Ok(output) = stand.postgres.psql(DATABASE).args(["-c", &copy]).output() {
            std::fs::write(kept.join(format!("{table}.csv")), output.stdout).unwrap();
        }
    }
    kept
}

fn setting<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}: `{text}` is not a number")))
}

fn chosen_size() -> Size {
    let name = std::env::var("FAULT_SIZE").unwrap_or_else(|_| "small".to_owned());
    let mut size = match name.as_str() {
        "small" => Size::SMALL,
        "large" => Size::LARGE,
        "huge" => Size::HUGE,
        other => panic!("FAULT_SIZE: `{other}`: write small, large or huge"),
    };
    if let Some(faults) = setting("FAULT_FAULTS") {
        size = size.with_faults(faults);
    }
    Size { jobs: setting("FAULT_JOBS").unwrap_or(size.jobs), ..size }
}

#[test]
fn random_faults_preserve_every_guarantee() {
    let plan = plan(setting("FAULT_SEED").unwrap_or(1), &chosen_size());
    println!("{plan}");
    let stand = stand();
    let timeline = Timeline::new();
    if let Err(wrong) = run(&stand, &plan, &timeline) {
        let kept = keep_evidence(&stand, plan.seed);
        panic!("{plan}\ntimeline:\n{}\n{wrong}\nevidence: {}", timeline.text(), kept.display());
    }
}
