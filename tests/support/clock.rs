//! Wall clocks that tests move: libfaketime is loaded into a program, and its monotonic clock stays real.

use std::path::{Path, PathBuf};

use super::process::private_dir;
use super::redis::{Redis, RedisOptions};

/// A redis-server whose wall clock follows a file, and the file.
pub fn redis_with_false_clock() -> (Redis, PathBuf) {
    let dir = private_dir("false-clock");
    let clock = dir.join("clock");
    std::fs::write(&clock, "+0").unwrap();
    let mut environment = preloaded();
    environment.push(("FAKETIME_TIMESTAMP_FILE", clock.display().to_string()));
    environment.push(("FAKETIME_NO_CACHE", "1".to_owned()));
    (Redis::start_in(&dir, RedisOptions { environment, ..RedisOptions::default() }), clock)
}

/// Environment for a program whose wall clock is wrong by this much from its start.
pub fn skewed_by(seconds: i64) -> Vec<(&'static str, String)> {
    let mut environment = preloaded();
    environment.push(("FAKETIME", format!("{seconds:+}s")));
    environment
}

fn preloaded() -> Vec<(&'static str, String)> {
    vec![
        // jemalloc reads the clock before libfaketime is ready, so memory comes from the C library here.
        ("LD_PRELOAD", format!("{}:libc.so.6", libfaketime().display())),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
    ]
}

/// The folder depends on the architecture.
fn libfaketime() -> PathBuf {
    let library = |entry: std::fs::DirEntry| entry.path().join("faketime/libfaketime.so.1");
    let mut places = std::fs::read_dir("/usr/lib").unwrap().map(|entry| library(entry.unwrap()));
    places.find(|path| path.exists()).expect("libfaketime is installed (tests/run does it)")
}

/// Sets a false clock to this many milliseconds ahead of the real one.
pub fn move_clock(clock: &Path, millis: i64) {
    // Renamed into place, so that the server never reads half of it.
    let next = clock.with_extension("next");
    std::fs::write(&next, format!("{:+.3}", millis as f64 / 1_000.0)).unwrap();
    std::fs::rename(&next, clock).unwrap();
}

/// How far a server's wall clock is ahead of this process's clock.
pub fn ahead_ms(redis: &Redis) -> i64 {
    let (seconds, micros): (i64, i64) = redis.command("TIME");
    let ours = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    seconds * 1_000 + micros / 1_000 - i64::try_from(ours.as_millis()).unwrap()
}
