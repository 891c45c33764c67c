//! The throughput benchmark: one contender at one size, called by one task and by fifty tasks on one connection.
//!
//! A figure needs a log in its steady state: if permits are refused, it reports an error instead.

use std::sync::Arc;
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::BenchError;
use super::contender::{BenchCaller, BenchQuota, Contender, GrantedPermits, LoadedProgram};
use super::meter::RedisMeter;
use super::report::{Figure, FigureName, Median};
use sluicegate::domain::limit::MAX_REQUESTS;

/// Tasks that share one connection.
pub const TASKS: usize = 50;
/// Short, so that the log is full and every slot is free again at any speed of one core.
pub const WINDOW: Duration = Duration::from_millis(10);
/// Largest number of calls until a new caller must be granted a permit.
const PRIMING_MAX: usize = 20;
/// Least share of the permits that must be granted at once.
const STEADY: f64 = 0.9;

/// One contender with its callers and the number of permits per call.
pub struct CallerGroup {
    pub name: &'static str,
    pub permits: u32,
    program: Arc<LoadedProgram>,
    callers: Vec<Box<dyn BenchCaller>>,
    pub median: Median,
}

/// The number of calls, and of the permits that they were granted.
#[derive(Clone, Copy, Debug, Default)]
struct CallCounts {
    calls: u64,
    granted: u64,
}

/// When a task ends.
#[derive(Clone, Copy)]
enum Until {
    Calls(u64),
    Instant(Instant),
}

impl CallerGroup {
    /// Prepares a group: its callers are granted permits, and its log is full.
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
        let mut group = Self { name, permits, program, callers, median: Median::default() };
        for caller in &mut group.callers {
            prime(&mut meter.connection.clone(), &group.program, caller.as_mut(), permits).await?;
        }
        if contender.keeps_log() {
            // A tenth more than all slots, so that the first slots are used again.
            let calls = quota.max_requests / permits * 11 / 10 / TASKS as u32;
            group.drive(&meter.connection, TASKS, Until::Calls(u64::from(calls.max(1)))).await?;
        }
        Ok(group)
    }

    /// One round: the speed of one task (for single permits), then of fifty tasks, and their cost for the server.
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
        // The kernel accounts a process's time late: a short round on a busy machine may show none yet.
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
            let (caller, counts) = ended.map_err(|error| BenchError::InvalidMeasurement(error.to_string()))??;
            self.callers.push(caller);
            sum.calls += counts.calls;
            sum.granted += counts.granted;
        }
        Ok(sum)
    }

    pub fn figures(&self) -> Vec<Figure> {
        self.median.figures()
    }
}

/// One task: the next call follows the reply to the last one.
async fn call_on(
    mut connection: MultiplexedConnection,
    program: Arc<LoadedProgram>,
    mut caller: Box<dyn BenchCaller>,
    permits: u32,
    until: Until,
) -> Result<(Box<dyn BenchCaller>, CallCounts), BenchError> {
    let mut counts = CallCounts::default();
    while match until {
        Until::Calls(calls) => counts.calls < calls,
        Until::Instant(instant) => Instant::now() < instant,
    } {
        let granted = call(&mut connection, &program, caller.as_mut(), permits).await?;
        counts.calls += 1;
        counts.granted += u64::from(granted.at_once);
    }
    Ok((caller, counts))
}

/// Makes one call and decodes its reply.
///
/// # Errors
/// When the server fails, or the reply is invalid.
pub async fn call(
    connection: &mut MultiplexedConnection,
    program: &LoadedProgram,
    caller: &mut dyn BenchCaller,
    permits: u32,
) -> Result<GrantedPermits, BenchError> {
    let ask = caller.next_call(permits);
    caller.read_reply(connection.send_packed_command(&program.command(&ask)).await?)
}

/// Calls until a permit is granted: during a cold start, and for an unknown caller, the limiter grants none.
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
    Err(BenchError::InvalidMeasurement("an empty log grants no permit".to_owned()))
}

fn per_second(count: u64, elapsed: Duration) -> f64 {
    count as f64 / elapsed.as_secs_f64()
}
