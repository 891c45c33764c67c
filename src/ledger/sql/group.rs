//! Group commit: writes of the same kind that come while one is being committed are committed together, as one.
//!
//! Refuses to let anybody wait for company longer than they may: who may not wait goes at once, with all who are there,
//! and those who come meanwhile go next; only between two crowds there is a pause of a few milliseconds, because a
//! statement costs as much as ten rows. Nobody is answered before the commit that holds their write, and nobody pays for
//! another: a group that a write of it has undone is taken apart, and behind a commit that hangs the next is begun.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::columns::job_of;
use super::dialect::Chain;
use super::engine::{Args, Engine, Group, PATIENCE};
use super::row::Row;
use crate::ledger::LedgerError;

/// Most jobs in one commit: it takes a few milliseconds then.
const UNITS_MAX: usize = 128;
/// So many at once are a crowd.
const CROWD: usize = 4;
/// How long a crowd gathers after one has gone.
const GATHER: Duration = Duration::from_millis(2);
/// A commit that takes longer is not waited for: somebody holds a row of it, or the network hangs.
const STUCK_AFTER: Duration = Duration::from_millis(100);

/// A chain, for any number of jobs at the same time.
#[derive(Clone)]
pub struct Grouped(Arc<Line>);

struct Line {
    chain: Chain,
    state: Mutex<State>,
    /// Somebody came who may not wait as long as the others, or who makes the group a full one.
    hurry: Notify,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Unit>,
    /// A task takes from the line, until it finds nobody waiting.
    served: bool,
}

struct Unit {
    args: Args,
    /// It waits for company until then.
    go_at: Instant,
    reply: oneshot::Sender<Result<Option<Row>, LedgerError>>,
}

impl Grouped {
    #[must_use]
    pub fn new(chain: Chain) -> Self {
        Self(Arc::new(Line { chain, state: Mutex::default(), hurry: Notify::new() }))
    }

    /// Writes one job, committed when this returns: the row that the write answered, `None` if it found nothing. `may_wait`:
    /// for company, before it is begun.
    ///
    /// # Errors
    /// As of a statement. After [`LedgerError::Away`] it may have been committed all the same, or may yet be.
    pub async fn write(
        &self,
        engine: &Arc<dyn Engine>,
        args: Args,
        may_wait: Duration,
    ) -> Result<Option<Row>, LedgerError> {
        let (reply, answer) = oneshot::channel();
        let served = {
            let mut state = self.0.state();
            let gathers_until = state.gathers_until();
            state.waiting.push_back(Unit { args, go_at: Instant::now() + may_wait, reply });
            if state.gathers_until() < gathers_until {
                self.0.hurry.notify_one();
            }
            std::mem::replace(&mut state.served, true)
        };
        if !served {
            tokio::spawn(serve(Serving(Arc::clone(&self.0)), Arc::clone(engine)));
        }
        match timeout(PATIENCE, answer).await {
            Ok(Ok(row)) => row,
            Ok(Err(_)) => Err(LedgerError::Away("the group's task ended early".to_owned())),
            Err(_) => Err(LedgerError::Away(format!("not written within {} s", PATIENCE.as_secs()))),
        }
    }
}

impl Line {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// When the first of those who wait will wait no longer; `None` for nobody, and for more than one group holds.
    fn gathers_until(&self) -> Option<Instant> {
        if self.waiting.len() >= UNITS_MAX {
            return None;
        }
        self.waiting.iter().map(|unit| unit.go_at).min()
    }
}

/// The right to take from the line. Who comes after its end begins anew.
struct Serving(Arc<Line>);

impl Serving {
    /// Returns when the next group is to go.
    async fn gather(&self) {
        loop {
            let until = self.0.state().gathers_until();
            let Some(until) = until.filter(|until| *until > Instant::now()) else { return };
            tokio::select! {
                () = sleep_until(until) => return,
                () = self.0.hurry.notified() => {}
            }
        }
    }

    /// Those who go next, each job once, by id: two workers' groups never wait for each other's rows crosswise.
    fn next(&self) -> Vec<Unit> {
        let mut state = self.0.state();
        let (mut units, mut left, mut jobs) = (Vec::new(), VecDeque::new(), HashSet::new());
        while units.len() < UNITS_MAX
            && let Some(unit) = state.waiting.pop_front()
        {
            // Two writes on one job are two steps of its story.
            if jobs.insert(job_of(&unit.args).map(str::to_owned)) {
                units.push(unit);
            } else {
                left.push_back(unit);
            }
        }
        left.append(&mut state.waiting);
        state.waiting = left;
        // Under the same lock: who comes next finds nobody serving.
        state.served = !units.is_empty();
        drop(state);
        units.sort_by(|a, b| job_of(&a.args).cmp(&job_of(&b.args)));
        units
    }
}

impl Drop for Serving {
    /// Only a panic leaves somebody waiting; they are told so.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut state = self.0.state();
            state.served = false;
            state.waiting.clear();
        }
    }
}

async fn serve(serving: Serving, engine: Arc<dyn Engine>) {
    loop {
        serving.gather().await;
        let units = serving.next();
        if units.is_empty() {
            return;
        }
        let is_crowd = units.len() >= CROWD;
        let committing = tokio::spawn(commit(Arc::clone(&serving.0), Arc::clone(&engine), units));
        if timeout(STUCK_AFTER, committing).await.is_err() {
            tracing::debug!("a commit takes long; the next is begun beside it");
        }
        if is_crowd {
            sleep(GATHER).await;
        }
    }
}

async fn commit(line: Arc<Line>, engine: Arc<dyn Engine>, units: Vec<Unit>) {
    if units.len() == 1 {
        return each_alone(&*engine, &line.chain, units).await;
    }
    match engine.group(&line.chain, units.iter().map(|unit| unit.args.clone()).collect()).await {
        Ok(Group::Committed(rows)) => {
            for (unit, row) in units.into_iter().zip(rows) {
                unit.answer(Ok(row));
            }
        }
        Ok(Group::Undone(error)) => {
            tracing::debug!(%error, jobs = units.len(), "a group was undone; each is written for itself");
            each_alone(&*engine, &line.chain, units).await;
        }
        Err(error) => {
            for unit in units {
                unit.answer(Err(error.clone()));
            }
        }
    }
}

async fn each_alone(engine: &dyn Engine, chain: &Chain, units: Vec<Unit>) {
    let write = async |unit: Unit| {
        let row = engine.alone(chain, &unit.args).await;
        unit.answer(row);
    };
    join_all(units.into_iter().map(write)).await;
}

impl Unit {
    /// Who has gone meanwhile need not know: the ledger does.
    fn answer(self, row: Result<Option<Row>, LedgerError>) {
        drop(self.reply.send(row));
    }
}

#[cfg(test)]
#[path = "group_tests.rs"]
mod tests;
