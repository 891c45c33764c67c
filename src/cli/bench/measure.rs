//! Calls as fast as they go: one contender at one size, by one task and by fifty on one connection.
//!
//! Refuses a figure from a log that is not in its steady state: where permits are refused, nothing is reported.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::BenchError;
use super::contender::{BenchCaller, BenchQuota, Contender, GrantedPermits, LoadedProgram};
use super::meter::RedisMeter;
use super::report::{Figure, FigureName, Median};
use crate::domain::limit::MAX_REQUESTS;

/// Tasks that share one connection.
pub const TASKS: usize = 50;
/// Short, so that the log is full and every slot due again at any speed that one core can reach.
pub const WINDOW: Duration = Duration::from_millis(10);
/// Calls until a caller that is cold must have been granted something.
const PRIMING_MAX: usize = 20;
/// Least share of the permits that must be granted at once.
const STEADY: f64 = 0.9;

/// One contender, asked for so many permits per call, with its callers.
pub struct CallerGroup {
    pub name: &'static str,
    pub permits: u32,
    program: Arc<LoadedProgram>,
    callers: Vec<Box<dyn BenchCaller>>,
    pub median: Median,
}

/// What a number of calls came to.
#[derive(Clone, Copy, Debug, Default)]
struct CallCounts {
    calls: u64,
    granted: u64,
}

/// How long a task goes on.
#[derive(Clone, Copy)]
enum Until {
    Calls(u64),
    Instant(Instant),
}

impl CallerGroup {
    /// Prepares a lane: its callers are warm, and a log that counts is full.
    ///
    /// # Errors
    /// When the server fails, or nothing is granted.
    pub async fn prepare(
        meter: &RedisMeter,
        contender: &dyn Contender,
        permits: u32,
        turn_calls: u32,
        prefix: &str,
    ) -> Result<Self, BenchError> {
        let quota = BenchQuota {
            prefix: prefix.to_owned(),
            max_requests: permits.saturating_mul(turn_calls).min(MAX_REQUESTS),
            window: WINDOW,
            version: 1,
            run_id: meter.run_id.clone(),
        };
        let program = Arc::new(meter.load(contender.program()).await?);
        let ids = 1..=TASKS as u64;
        let callers = ids.map(|id| contender.caller(&quota, id)).collect::<Result<Vec<_>, _>>()?;
        let name = contender.name();
        let mut lane = Self { name, permits, program, callers, median: Median::default() };
        for caller in &mut lane.callers {
            prime(&mut meter.connection.clone(), &lane.program, caller.as_mut(), permits).await?;
        }
        if contender.keeps_log() {
            // A tenth more than the whole turn, so that the first slots come round again.
            let calls = quota.max_requests / permits * 11 / 10 / TASKS as u32;
            lane.drive(&meter.connection, TASKS, Until::Calls(u64::from(calls.max(1)))).await?;
        }
        Ok(lane)
    }

    /// One round: how fast one task is (for single permits), then fifty, and what those cost the server.
    ///
    /// # Errors
    /// When the server fails, or the log is not in its steady state.
    pub async fn round(&mut self, meter: &RedisMeter, time: Duration) -> Result<(), BenchError> {
        if self.permits == 1 {
            let began = Instant::now();
            let alone = self.drive(&meter.connection, 1, Until::Instant(began + time)).await?;
            self.median.add(FigureName::CallsPerSecondOneTask, per_second(alone.calls, began.elapsed()));
        }
        let command = self.program.statistics();
        let before = meter.usage(command).await?;
        let began = Instant::now();
        let mut many = self.drive(&meter.connection, TASKS, Until::Instant(began + time)).await?;
        let mut after = meter.usage(command).await?;
        // The kernel books a process's time late: a short round on a busy machine may show none yet.
        while after.server_us <= before.server_us {
            let more = self.drive(&meter.connection, TASKS, Until::Instant(Instant::now() + time)).await?;
            many = CallCounts { calls: many.calls + more.calls, granted: many.granted + more.granted };
            after = meter.usage(command).await?;
        }
        let elapsed = began.elapsed();
        let wanted = many.calls as f64 * f64::from(self.permits);
        if (many.granted as f64) < wanted * STEADY {
            let (name, permits, granted) = (self.name, self.permits, many.granted);
            let text = format!("{name}, {permits} per call: only {granted} of {wanted} permits were granted");
            return Err(BenchError::InvalidMeasurement(text));
        }
        let calls = many.calls as f64;
        let server_us = (after.server_us - before.server_us) / calls;
        let script_us = (after.command_us - before.command_us) as f64 / (after.calls - before.calls).max(1) as f64;
        self.median.add(FigureName::CommandUs, script_us);
        self.median.add(FigureName::ServerUs, server_us);
        self.median.add(FigureName::CallsPerSecondFiftyTasks, per_second(many.calls, elapsed));
        self.median.add(FigureName::PermitsPerCoreSecond, many.granted as f64 / calls * 1e6 / server_us);
        Ok(())
    }

    async fn drive(
        &mut self,
        connection: &MultiplexedConnection,
        tasks: usize,
        until: Until,
    ) -> Result<CallCounts, BenchError> {
        let mut running = JoinSet::new();
        for caller in self.callers.drain(..tasks.min(self.callers.len())) {
            running.spawn(call_on(connection.clone(), self.program.clone(), caller, self.permits, until));
        }
        let mut sum = CallCounts::default();
        while let Some(ended) = running.join_next().await {
            let (caller, tally) = ended.map_err(|error| BenchError::InvalidMeasurement(error.to_string()))??;
            self.callers.push(caller);
            sum.calls += tally.calls;
            sum.granted += tally.granted;
        }
        Ok(sum)
    }

    pub fn figures(&self) -> Vec<Figure> {
        self.median.figures()
    }
}

/// One task: the next call when the last one is answered.
async fn call_on(
    mut connection: MultiplexedConnection,
    program: Arc<LoadedProgram>,
    mut caller: Box<dyn BenchCaller>,
    permits: u32,
    until: Until,
) -> Result<(Box<dyn BenchCaller>, CallCounts), BenchError> {
    let mut tally = CallCounts::default();
    while match until {
        Until::Calls(calls) => tally.calls < calls,
        Until::Instant(instant) => Instant::now() < instant,
    } {
        let granted = call(&mut connection, &program, caller.as_mut(), permits).await?;
        tally.calls += 1;
        tally.granted += u64::from(granted.at_once);
    }
    Ok((caller, tally))
}

/// Makes one call and reads its answer.
///
/// # Errors
/// When the server fails, or the answer is none.
pub async fn call(
    connection: &mut MultiplexedConnection,
    program: &LoadedProgram,
    caller: &mut dyn BenchCaller,
    permits: u32,
) -> Result<GrantedPermits, BenchError> {
    let ask = caller.next_call(permits);
    caller.read_reply(connection.send_packed_command(&program.command(&ask)).await?)
}

/// Calls until something is granted: a store without its past, and one that does not know its caller, grant nothing.
///
/// # Errors
/// When nothing is.
pub async fn prime(
    connection: &mut MultiplexedConnection,
    program: &LoadedProgram,
    caller: &mut dyn BenchCaller,
    permits: u32,
) -> Result<GrantedPermits, BenchError> {
    for _ in 0..PRIMING_MAX {
        let granted = call(connection, program, caller, permits).await?;
        if granted.permits > 0 {
            return Ok(granted);
        }
    }
    Err(BenchError::InvalidMeasurement("nothing is granted by an empty log".to_owned()))
}

fn per_second(count: u64, elapsed: Duration) -> f64 {
    count as f64 / elapsed.as_secs_f64()
}
