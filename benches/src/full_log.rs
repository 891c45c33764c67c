//! The full-log benchmark: the memory of a full log, the cost of a refusal on it, and of single calls that touch all of
//! it.
//!
//! A real log of a minute takes a minute to fill. So the script's clock is replaced by a key; the rest of the script is
//! unchanged. A log that did not fill, or a call with an unexpected result, is an error.

use std::time::Duration;

use redis::Value;
use redis::aio::MultiplexedConnection;

use super::BenchError;
use super::contender::{BenchCaller, BenchQuota, CallArguments, Contender, GrantedPermits, LoadedProgram, Program};
use super::measure::{call, prime};
use super::meter::RedisMeter;
use super::report::{FigureName, Median};
use sluicegate::domain::time::micros_up;

/// Window of the limit whose log is filled.
pub const WINDOW: Duration = Duration::from_secs(60);
/// Size of the small log that refusals are compared with.
pub const SMALL_LOG: u32 = 100;
/// The lowered limit.
pub const CUT_TO: u32 = 10;
/// Longer than window, padding and the longest lease.
const ALL_DUE_AFTER: Duration = Duration::from_secs(180);
const BATCH: usize = 500;
/// Largest number of permits in one call.
const PERMITS_PER_CALL_MAX: u32 = 1_000;
/// Least share of the log that must be granted; some algorithms refuse the last few to be safe.
const FILLED_SHARE_MIN: f64 = 0.95;

/// The text with which our library reads the clock, and its replacement.
const LIBRARY_READS_TIME: &str = "local clock = clock_us()";
const LIBRARY_READS_KEY: &str = "local clock = tonumber(redis.call('GET', keys[1] .. ':clock'))";

const READS_TIME: &str = "redis.call('TIME')";
const READS_KEY: &str = "(function() local t = tonumber(redis.call('GET', KEYS[1] .. ':clock')) \
                         return { math.floor(t / 1000000), t % 1000000 } end)()";

/// The sizes of a run.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Calls in the log.
    pub calls: u32,
    pub rounds: usize,
    /// Number of refusals per figure, which is their mean.
    pub refusals: u32,
}

/// Measures all figures of one contender.
///
/// # Errors
/// When the server fails, or the log is not full.
pub async fn measure(
    meter: &RedisMeter,
    contender: &dyn Contender,
    extent: Extent,
    prefix: &str,
) -> Result<Median, BenchError> {
    let mut median = Median::default();
    // Keys of its own: the library remembers what it wrote to the keys of another algorithm's log.
    let prefix = format!("{prefix}:{}", contender.name().replace(' ', "-"));
    let mut small = FilledLog::fill(meter, contender, SMALL_LOG, &format!("{prefix}:small")).await?;
    let mut log = FilledLog::fill(meter, contender, extent.calls, &format!("{prefix}:full")).await?;
    let bytes = meter.memory(&log.keys).await? as f64;
    median.add(FigureName::MemoryBytes, bytes);
    median.add(FigureName::BytesPerCall, bytes / log.granted as f64);
    for _ in 0..extent.rounds {
        median.add(FigureName::RefusedUs, log.refused_us(extent.refusals).await?);
        median.add(FigureName::RefusedSmallUs, small.refused_us(extent.refusals).await?);
        median.add(FigureName::AllDueUs, log.all_due_us().await?);
        median.add(FigureName::CutUs, log.cut_us().await?);
    }
    // The next contender's log needs the memory.
    meter.remove(&prefix).await?;
    Ok(median)
}

/// The script with its clock replaced by a key.
fn with_clock_key(program: Program) -> Result<String, BenchError> {
    match program {
        Program::Library(text) => Ok(text.replace(LIBRARY_READS_TIME, LIBRARY_READS_KEY)),
        Program::Script(text) if text.matches(READS_TIME).count() == 1 => Ok(text.replace(READS_TIME, READS_KEY)),
        Program::Script(text) => {
            let count = text.matches(READS_TIME).count();
            Err(BenchError::InvalidMeasurement(format!("a script reads its clock in {count} places: it cannot be set")))
        }
        Program::Command(name) => Err(BenchError::InvalidMeasurement(format!("{name} keeps no log"))),
    }
}

struct FilledLog<'a> {
    meter: &'a RedisMeter,
    connection: MultiplexedConnection,
    program: LoadedProgram,
    caller: Box<dyn BenchCaller>,
    quota: BenchQuota,
    /// Keys of the full log.
    keys: Vec<String>,
    granted: u64,
    /// The script's clock when the log was full.
    full_at_us: u64,
    /// Copies made so far.
    copies: u32,
}

impl<'a> FilledLog<'a> {
    /// Fills the log with calls spread evenly over the window, by the millisecond. Each call releases the previous one.
    async fn fill(
        meter: &'a RedisMeter,
        contender: &dyn Contender,
        calls: u32,
        prefix: &str,
    ) -> Result<Self, BenchError> {
        let program = match contender.program() {
            Program::Library(text) => meter.load_library(&with_clock_key(Program::Library(text))?).await?,
            other => meter.load_script(&with_clock_key(other)?).await?,
        };
        let run_id = meter.run_id.clone();
        let quota = BenchQuota { prefix: prefix.to_owned(), max_requests: calls, window: WINDOW, version: 1, run_id };
        let caller = contender.caller(&quota, 1)?;
        let connection = meter.connection.clone();
        // At the start of a window, for algorithms with fixed windows; not before the server's clock.
        let full_at_us = meter.time_us().await?.next_multiple_of(micros_up(WINDOW));
        let mut log =
            Self { meter, connection, program, caller, quota, keys: Vec::new(), granted: 0, full_at_us, copies: 0 };
        log.fill_up().await?;
        if (log.granted as f64) < f64::from(calls) * FILLED_SHARE_MIN {
            let text = format!("{}: {} of {calls} calls filled the log", contender.name(), log.granted);
            return Err(BenchError::InvalidMeasurement(text));
        }
        Ok(log)
    }

    async fn fill_up(&mut self) -> Result<(), BenchError> {
        let calls = u64::from(self.quota.max_requests);
        let window_us = micros_up(WINDOW);
        let steps = calls.min(window_us / 1_000);
        let began_us = self.full_at_us;
        let permits = |step: u64| {
            u32::try_from(calls * (step + 1) / steps - calls * step / steps).unwrap_or(PERMITS_PER_CALL_MAX)
        };
        self.set_clock(began_us).await?;
        let first = prime(&mut self.connection, &self.program, self.caller.as_mut(), permits(0)).await?;
        self.granted = u64::from(first.permits);
        let mut batch = Vec::with_capacity(BATCH);
        for step in 1..steps {
            self.full_at_us = began_us + window_us * step / steps;
            let ask = self.caller.next_call(permits(step));
            batch.push((self.full_at_us, ask));
            if batch.len() == BATCH || step + 1 == steps {
                self.granted += self.send(std::mem::take(&mut batch)).await?;
            }
        }
        if let Some(release) = self.caller.release() {
            self.send(vec![(self.full_at_us, release)]).await?;
        }
        self.keys = self.existing(self.caller.keys()).await?;
        Ok(())
    }

    /// Sends calls in one pipeline, each at its instant; returns the granted permits.
    async fn send(&mut self, batch: Vec<(u64, CallArguments)>) -> Result<u64, BenchError> {
        let mut pipe = redis::pipe();
        for (at_us, ask) in batch {
            pipe.cmd("SET").arg(clock_key(&ask.keys)).arg(at_us).ignore();
            pipe.add_command(self.program.command(&ask));
        }
        let answers: Vec<Value> = pipe.query_async(&mut self.connection).await?;
        let mut permits = 0;
        for answer in answers {
            permits += u64::from(self.caller.read_reply(answer)?.permits);
        }
        Ok(permits)
    }

    async fn existing(&mut self, keys: Vec<String>) -> Result<Vec<String>, BenchError> {
        let mut pipe = redis::pipe();
        keys.iter().for_each(|key| {
            pipe.cmd("EXISTS").arg(key);
        });
        let found: Vec<bool> = pipe.query_async(&mut self.connection).await?;
        Ok(keys.into_iter().zip(found).filter_map(|(key, found)| found.then_some(key)).collect())
    }

    async fn set_clock(&mut self, at_us: u64) -> Result<(), BenchError> {
        let key = clock_key(&self.caller.keys());
        Ok(redis::cmd("SET").arg(key).arg(at_us).query_async(&mut self.connection).await?)
    }

    /// Copies the full log for a limit and an instant; the caller uses the copy from now on.
    ///
    /// Each copy has new keys, because our library treats a restored state as damaged. The library also verifies a
    /// state that it does not remember, so one call precedes the measured ones.
    async fn copy(&mut self, max_requests: u32, version: i64, at_us: u64) -> Result<(), BenchError> {
        self.meter.remove(&format!("{}:copy", self.quota.prefix)).await?;
        self.copies += 1;
        let prefix = format!("{}:copy{}", self.quota.prefix, self.copies);
        let mut pipe = redis::pipe();
        for key in &self.keys {
            let copy = key.replacen(&self.quota.prefix, &prefix, 1);
            pipe.cmd("COPY").arg(key).arg(copy);
        }
        let copied: Vec<bool> = pipe.query_async(&mut self.connection).await?;
        if copied.contains(&false) {
            return Err(BenchError::InvalidMeasurement("the full log expired before it was measured".to_owned()));
        }
        self.caller.change_quota(&BenchQuota { prefix: prefix.clone(), ..self.quota.clone() })?;
        self.set_clock(self.full_at_us).await?;
        self.call(1).await?;
        self.caller.change_quota(&BenchQuota { prefix, max_requests, version, ..self.quota.clone() })?;
        self.set_clock(at_us).await
    }

    /// Mean time of a refusal on the full log, in µs.
    async fn refused_us(&mut self, refusals: u32) -> Result<f64, BenchError> {
        self.copy(self.quota.max_requests, 1, self.full_at_us).await?;
        // Some algorithms have permits left, and permits within the booking horizon can still be booked.
        for permits in [PERMITS_PER_CALL_MAX, 1] {
            let mut left = self.quota.max_requests / permits + 2 * PERMITS_PER_CALL_MAX;
            while self.call(permits).await?.permits > 0 {
                left = left
                    .checked_sub(1)
                    .ok_or_else(|| BenchError::InvalidMeasurement("a full log refuses no call".to_owned()))?;
            }
        }
        let before = self.meter.usage(self.program.statistics()).await?;
        for _ in 0..refusals {
            if self.call(1).await?.permits > 0 {
                return Err(BenchError::InvalidMeasurement("a full log granted a call".to_owned()));
            }
        }
        let after = self.meter.usage(self.program.statistics()).await?;
        Ok((after.command_us - before.command_us) as f64 / (after.calls - before.calls).max(1) as f64)
    }

    /// Time of the one call that finds every slot free again, in µs.
    async fn all_due_us(&mut self) -> Result<f64, BenchError> {
        self.copy(self.quota.max_requests, 1, self.full_at_us + micros_up(ALL_DUE_AFTER)).await?;
        if self.call(1).await?.permits != 1 {
            return Err(BenchError::InvalidMeasurement("a log that was due refused a call".to_owned()));
        }
        Ok(self.meter.last_call_us(&self.program).await? as f64)
    }

    /// Time of the one call that lowers the limit to [`CUT_TO`], in µs.
    async fn cut_us(&mut self) -> Result<f64, BenchError> {
        self.copy(CUT_TO, 2, self.full_at_us).await?;
        self.call(1).await?;
        Ok(self.meter.last_call_us(&self.program).await? as f64)
    }

    async fn call(&mut self, permits: u32) -> Result<GrantedPermits, BenchError> {
        call(&mut self.connection, &self.program, self.caller.as_mut(), permits).await
    }
}

fn clock_key(keys: &[String]) -> String {
    format!("{}:clock", keys.first().map_or("", String::as_str))
}

#[cfg(test)]
mod tests {
    use super::super::contender::Contender as _;
    use super::super::ours;
    use super::*;

    #[test]
    fn the_clock_of_every_algorithm_can_be_set() {
        for contender in ours::available() {
            let script = with_clock_key(contender.program()).unwrap();
            assert!(script.contains(":clock") && !script.contains(LIBRARY_READS_TIME), "{}", contender.name());
        }
        assert!(with_clock_key(Program::Script("return 1")).is_err());
    }
}
