//! What happens on the billing day: backends and a worker that are killed, changes by an operator, and failing providers.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::script::RAISED;
use super::{ARRIVAL_PART, Course};
use crate::provider::Trouble;

/// How long a killed backend is down.
const DOWN: Duration = Duration::from_secs(4);
/// A worker is killed only in a day of this length: its jobs come back after their leases, and until then no waiting
/// payments can be judged.
const WORKER_KILLED_MIN: Duration = Duration::from_secs(300);
/// The same time, until a new process replaces it.
const WORKER_DOWN: Duration = Duration::from_secs(10);

/// Whether this line of the log names something that changes the finish time of a provider. A backend that was down has
/// delayed all.
pub fn disturbs(what: &str, provider: &str) -> bool {
    what.contains("killed") || what.contains("started again") || what.contains(provider)
}

/// Everything that happens to backends, workers and settings, each once.
pub fn happen(course: &Course) {
    course.sleep_until(0.08);
    outage(course, "Redis", || course.stand.redis.kill(), || course.stand.redis.restart());
    course.sleep_until(0.14);
    course.stand.sluicegate(&["provider", "pause", "fox"]);
    course.note("fox is paused");
    course.sleep_until(0.20);
    outage(course, "RabbitMQ", || kill_rabbit(course), || course.stand.rabbit.restart());
    course.sleep_until(0.30);
    course.note("the limit of acme is raised");
    let rate = format!("{RAISED}/1s");
    course.stand.sluicegate(&["limits", "set", "acme", "per-second", &rate, "--because", "billing day"]);
    course.stand.sluicegate(&["provider", "resume", "fox"]);
    course.note("fox is resumed");
    course.sleep_until(0.34);
    outage(course, "PostgreSQL", || course.stand.postgres.kill(), || course.stand.postgres.restart());
    if course.length >= WORKER_KILLED_MIN {
        course.sleep_until(0.46);
        course.stand.kill_worker(0);
        course.note("worker 0 is killed");
        std::thread::sleep(WORKER_DOWN);
        course.stand.start_worker(0, &[]);
        course.stand.await_ready(0);
        course.scrape();
        course.note("worker 0 is started again");
    }
}

fn kill_rabbit(course: &Course) {
    *course.broker_killed_at.lock().unwrap() = Some(Instant::now());
    course.stand.rabbit.kill();
}

fn outage(course: &Course, backend: &str, kill: impl FnOnce(), restart: impl FnOnce()) {
    kill();
    course.note(&format!("{backend} is killed"));
    std::thread::sleep(DOWN);
    restart();
    course.note(&format!("{backend} is started again"));
}

/// Seconds after a restart that [`pace_after_restarts`] lists.
const LISTED_S: u64 = 25;

/// Requests of each provider in each second after each restart: what a lane needs until it is at its pace again.
pub fn pace_after_restarts(course: &Course) -> String {
    let log = course.log.lock().unwrap().clone();
    let mut text = String::new();
    for (at, what) in log.iter().filter(|(_, what)| what.contains("started again")) {
        let _ = writeln!(text, "{what} at {:.1} s; requests in each second from then on:", at.as_secs_f64());
        for (name, placed) in &course.stand.providers {
            let second = |number: u64| {
                let from = course.began + *at + Duration::from_secs(number);
                placed.provider.received_between(from, from + Duration::from_secs(1))
            };
            let sent: Vec<u64> = (0..LISTED_S).map(second).collect();
            let _ = writeln!(text, "  {name:<6} {sent:?}");
        }
    }
    text
}

/// The provider and its trouble at this moment of the day.
fn trouble_of(provider: &str, part: f64, now: Duration) -> Trouble {
    let seconds = now.as_secs_f64();
    let within = |from: f64, to: f64, every: f64| (from..to).contains(&(seconds % every));
    match provider {
        _ if !(0.03..ARRIVAL_PART - 0.05).contains(&part) => Trouble::None,
        "delta" if within(0.0, 0.3, 7.0) => Trouble::Throttle { seconds: 1 },
        "echo" if within(0.0, 1.0, 12.0) => Trouble::Error,
        "echo" if within(5.0, 5.5, 12.0) => Trouble::ResetAfter,
        "fox" if (0.38..0.42).contains(&part) => Trouble::Unauthorized,
        _ => Trouble::None,
    }
}

/// Has the providers fail as the script says, until it is over.
pub fn trouble_providers(course: &Course, over: &AtomicBool) {
    let names = ["delta", "echo", "fox"];
    let mut known = names.map(|_| Trouble::None);
    while !over.load(Ordering::Relaxed) {
        let now = course.began.elapsed();
        let part = now.as_secs_f64() / course.length.as_secs_f64();
        for (name, known) in names.into_iter().zip(&mut known) {
            let trouble = trouble_of(name, part, now);
            if trouble != *known {
                *known = trouble;
                course.stand.provider(name).trouble(trouble);
                course.log.lock().unwrap().push((now, format!("{name}: {trouble:?}")));
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
