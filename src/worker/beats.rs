//! The beats of the worker processes: this one shows that it lives, and takes the row of those that do not.
//!
//! A process that has seen another's beat stand still, by its own time, deletes that row of `workers`. The jobs that were
//! held under that id return to the backlog. No clock is compared with another's. A process whose own beat is not
//! confirmed in time claims nothing until it is. See `docs/decisions/0058-beats-of-workers.md`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::WorkerContext;
use crate::ledger::LedgerError;
use crate::ledger::fleet::Beat;

/// Time between two beats.
const BEAT_INTERVAL: Duration = Duration::from_secs(2);
/// Time between two beats of a process whose last one failed.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Time after a confirmed beat in which this process claims jobs, and counts the silence of others. Shorter than
/// [`SILENCE_MAX`]: a process that comes back claims nothing under a row that is gone.
const CONFIRMED_FOR: Duration = Duration::from_secs(6);
/// Time for which a beat stands still until its process is lost.
const SILENCE_MAX: Duration = Duration::from_secs(8);

/// When the last beat of this process left that the ledger has confirmed, in milliseconds of time since boot; 0: none.
/// That time goes on while the machine is suspended.
#[derive(Debug, Default)]
pub struct Beats(AtomicU64);

impl Beats {
    /// Whether the ledger has confirmed lately that this process lives.
    pub fn are_confirmed(&self) -> bool {
        is_recent(self.0.load(Ordering::Acquire), since_boot_ms())
    }
}

fn is_recent(confirmed_ms: u64, now_ms: u64) -> bool {
    confirmed_ms > 0 && Duration::from_millis(now_ms.saturating_sub(confirmed_ms)) < CONFIRMED_FOR
}

fn since_boot_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    let ms = now.tv_sec.saturating_mul(1_000).saturating_add(now.tv_nsec / 1_000_000);
    // Never the 0 of a process without a beat.
    u64::try_from(ms).unwrap_or_default().max(1)
}

/// The beats of other processes, and since when each stands still.
#[derive(Debug, Default)]
struct Silences(HashMap<String, (i64, Instant)>);

impl Silences {
    /// Records the present beats. Returns those that have stood still for too long.
    fn record(&mut self, beats: Vec<Beat>, now: Instant) -> Vec<Beat> {
        let mut last = std::mem::take(&mut self.0);
        let mut lost = Vec::new();
        for beat in beats {
            let since = match last.remove(&beat.worker) {
                Some((number, since)) if number == beat.number => since,
                _ => now,
            };
            self.0.insert(beat.worker.clone(), (beat.number, since));
            if now.saturating_duration_since(since) >= SILENCE_MAX {
                lost.push(beat);
            }
        }
        lost
    }
}

/// Writes the first beat. Until its row is there, whatever this process held would be taken away.
pub(super) async fn begin(worker: &WorkerContext) -> Result<(), LedgerError> {
    let departed_ms = since_boot_ms();
    worker.backends.ledger.write_beat(&worker.options.owner, 0).await?;
    worker.beats.0.store(departed_ms, Ordering::Release);
    Ok(())
}

/// Beats until the token fires, then deletes the row.
pub(super) async fn run(worker: WorkerContext, stop: CancellationToken) {
    let mut silences = Silences::default();
    let mut next_at = Instant::now() + BEAT_INTERVAL;
    let mut failing = false;
    for number in 1.. {
        tokio::select! {
            () = sleep_until(next_at) => {}
            () = stop.cancelled() => break,
        }
        // A slow beat is followed by the next at once, and is never left behind: while a commit waits for its standby, it
        // holds a connection.
        next_at = Instant::now() + BEAT_INTERVAL;
        let done = step(&worker, number, &mut silences).await;
        if let Err(error) = &done {
            // The database was away, for the others, too.
            silences = Silences::default();
            next_at = Instant::now() + RETRY_INTERVAL;
            if !failing {
                tracing::warn!(%error, "this worker cannot show that it lives; it claims no job until it can, retrying");
            }
        }
        failing = done.is_err();
    }
    if let Err(error) = worker.backends.ledger.remove_worker(&worker.options.owner).await {
        tracing::debug!(%error, "the row of this worker stays until another one sees that it is silent");
    }
}

/// One beat, and a look at those of the others.
async fn step(worker: &WorkerContext, number: i64, silences: &mut Silences) -> Result<(), LedgerError> {
    let ledger = &worker.backends.ledger;
    let own = worker.options.owner.as_str();
    let departed_ms = since_boot_ms();
    let mut others = ledger.write_beat(own, number).await?;
    let was_confirmed = is_recent(worker.beats.0.swap(departed_ms, Ordering::AcqRel), since_boot_ms());
    if !was_confirmed {
        // Neither have the others' beats been seen meanwhile.
        *silences = Silences::default();
    }
    others.retain(|beat| beat.worker != own);
    for beat in silences.record(others, Instant::now()) {
        if ledger.remove_silent_worker(&beat).await? {
            tracing::warn!(worker = beat.worker, "a worker is lost: its jobs return to the backlog");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn beat(worker: &str, number: i64) -> Beat {
        Beat { worker: worker.to_owned(), number }
    }

    #[test]
    fn beat_that_stands_still_too_long_is_lost() {
        let mut silences = Silences::default();
        let began = Instant::now();
        let mut seen =
            |seconds: u64, beats: &[Beat]| silences.record(beats.to_vec(), began + Duration::from_secs(seconds));
        assert_eq!(seen(0, &[beat("a", 7), beat("b", 1)]), []);
        assert_eq!(seen(7, &[beat("a", 7), beat("b", 2)]), []);
        assert_eq!(seen(8, &[beat("a", 7), beat("b", 2)]), [beat("a", 7)]);
        assert_eq!(seen(14, &[beat("b", 2)]), []);
        assert_eq!(seen(15, &[beat("a", 7), beat("b", 2)]), [beat("b", 2)], "a row that came back is a new one");
    }

    #[test]
    fn confirmation_ends_before_others_take_the_row() {
        assert!(CONFIRMED_FOR < SILENCE_MAX);
        for (confirmed_ms, now_ms, is_confirmed) in
            [(0, 0, false), (0, 1_000, false), (1, 6_000, true), (1, 6_001, false), (9_000, 8_000, true)]
        {
            assert_eq!(is_recent(confirmed_ms, now_ms), is_confirmed, "{confirmed_ms} at {now_ms}");
        }
        assert!(!Beats::default().are_confirmed());
    }
}
