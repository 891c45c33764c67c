//! The Redis server's own figures: time per command, processor time, memory and the slow log.
//!
//! It computes differences and does not reset the server's statistics, because the server may belong to another user.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Value};

use super::BenchError;
use super::contender::{LoadedProgram, Program};
use sluicegate::limiter::redis::library::Library;

const CONNECT_TIME_MAX: Duration = Duration::from_secs(5);
/// Entries of the slow log to look through for a call that was just made.
const SLOWLOG_DEPTH: usize = 64;

#[derive(Clone)]
pub struct RedisMeter {
    pub connection: MultiplexedConnection,
    pub run_id: String,
    pub version: String,
}

/// The cost of a command since the server's start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    pub calls: u64,
    /// Wall-clock time inside the command.
    pub command_us: u64,
    /// Processor time of the whole server.
    pub server_us: f64,
}

impl RedisMeter {
    pub async fn connect(url: &str) -> Result<Self, BenchError> {
        // The error of an invalid URL may quote it with its password.
        let client = Client::open(url).map_err(|_| BenchError::Server("--redis is not a Redis URL".to_owned()))?;
        // A million due calls block a server for longer than the library's default timeout.
        let config =
            AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(Some(CONNECT_TIME_MAX));
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        let info: String = redis::cmd("INFO").arg("server").query_async(&mut connection).await?;
        let named = |name| field(&info, name).map(str::to_owned);
        let (run_id, version) = (named("run_id")?, named("redis_version")?);
        Ok(Self { connection, run_id, version })
    }

    pub async fn load(&self, program: Program) -> Result<LoadedProgram, BenchError> {
        match program {
            Program::Command(name) => Ok(LoadedProgram::Command(name)),
            Program::Script(text) => self.load_script(text).await,
            Program::Library(text) => self.load_library(text).await,
        }
    }

    pub async fn load_script(&self, text: &str) -> Result<LoadedProgram, BenchError> {
        let mut connection = self.connection.clone();
        let sha = redis::cmd("SCRIPT").arg("LOAD").arg(text).query_async(&mut connection).await?;
        Ok(LoadedProgram::Script { sha })
    }

    pub async fn load_library(&self, text: &str) -> Result<LoadedProgram, BenchError> {
        let library = Library::new(text);
        library.ensure_loaded(&mut self.connection.clone()).await?;
        Ok(LoadedProgram::Function { name: library.call_name() })
    }

    /// The server's clock, in µs since the Unix epoch.
    pub async fn time_us(&self) -> Result<u64, BenchError> {
        let (seconds, micros): (u64, u64) = redis::cmd("TIME").query_async(&mut self.connection.clone()).await?;
        Ok(seconds * 1_000_000 + micros)
    }

    pub async fn usage(&self, command: &str) -> Result<Usage, BenchError> {
        let mut connection = self.connection.clone();
        let commands: String = redis::cmd("INFO").arg("commandstats").query_async(&mut connection).await?;
        let cpu: String = redis::cmd("INFO").arg("cpu").query_async(&mut connection).await?;
        let seconds = |name| -> Result<f64, BenchError> { Ok(field(&cpu, name)?.parse().unwrap_or(0.0)) };
        let server_us = (seconds("used_cpu_user")? + seconds("used_cpu_sys")?) * 1e6;
        let (calls, command_us) = command_stats(&commands, command);
        Ok(Usage { calls, command_us, server_us })
    }

    /// Bytes of these keys; a missing key has none.
    pub async fn memory(&self, keys: &[String]) -> Result<u64, BenchError> {
        let mut pipe = redis::pipe();
        for key in keys {
            pipe.cmd("MEMORY").arg("USAGE").arg(key).arg("SAMPLES").arg(0);
        }
        let bytes: Vec<Option<u64>> = pipe.query_async(&mut self.connection.clone()).await?;
        Ok(bytes.into_iter().flatten().sum())
    }

    /// The time from which commands are in the slow log, in µs.
    pub async fn slow_log_threshold(&self) -> Result<String, BenchError> {
        let mut command = redis::cmd("CONFIG");
        command.arg("GET").arg("slowlog-log-slower-than");
        let (_, threshold_us): (String, String) = command.query_async(&mut self.connection.clone()).await?;
        Ok(threshold_us)
    }

    /// Sets the time from which commands are in the slow log, in µs; 0: all.
    pub async fn log_slower_than(&self, threshold_us: &str) -> Result<(), BenchError> {
        let mut connection = self.connection.clone();
        let mut command = redis::cmd("CONFIG");
        command.arg("SET").arg("slowlog-log-slower-than").arg(threshold_us);
        Ok(command.query_async(&mut connection).await?)
    }

    /// Time of the last call of this script, in µs.
    pub async fn last_call_us(&self, script: &LoadedProgram) -> Result<u64, BenchError> {
        let (command, name) = match script {
            LoadedProgram::Script { sha } => ("EVALSHA", sha),
            LoadedProgram::Function { name } => ("FCALL", name),
            LoadedProgram::Command(_) => {
                return Err(BenchError::InvalidMeasurement("only scripts can be found in the slow log".to_owned()));
            }
        };
        let mut connection = self.connection.clone();
        let entries: Vec<Vec<Value>> =
            redis::cmd("SLOWLOG").arg("GET").arg(SLOWLOG_DEPTH).query_async(&mut connection).await?;
        for entry in entries {
            let [_, _, us, words, ..] = &entry[..] else { continue };
            let words: Vec<Vec<u8>> = redis::from_redis_value_ref(words).map_err(redis::RedisError::from)?;
            if words.first().is_some_and(|word| word.eq_ignore_ascii_case(command.as_bytes()))
                && words.get(1).is_some_and(|word| *word == name.as_bytes())
            {
                return Ok(redis::from_redis_value_ref(us).map_err(redis::RedisError::from)?);
            }
        }
        Err(BenchError::InvalidMeasurement("the call is not in the slow log".to_owned()))
    }

    /// Removes every key with this prefix.
    pub async fn remove(&self, prefix: &str) -> Result<(), BenchError> {
        let mut connection = self.connection.clone();
        let mut cursor = 0_u64;
        loop {
            let mut scan = redis::cmd("SCAN");
            scan.arg(cursor).arg("MATCH").arg(format!("{prefix}*")).arg("COUNT").arg(1_000);
            let (next, keys): (u64, Vec<String>) = scan.query_async(&mut connection).await?;
            if !keys.is_empty() {
                redis::cmd("UNLINK").arg(keys).query_async::<u64>(&mut connection).await?;
            }
            cursor = next;
            if cursor == 0 {
                return Ok(());
            }
        }
    }
}

/// `name:value` of an INFO section.
fn field<'a>(info: &'a str, name: &str) -> Result<&'a str, BenchError> {
    let value = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.map(str::trim).ok_or_else(|| BenchError::InvalidMeasurement(format!("INFO has no field {name}")))
}

/// Calls and µs of one command; zero before its first call.
fn command_stats(info: &str, command: &str) -> (u64, u64) {
    let line = field(info, &format!("cmdstat_{command}")).unwrap_or_default();
    let number = |name: &str| {
        let value = line.split(',').find_map(|item| item.strip_prefix(name)?.strip_prefix('='));
        value.and_then(|value| value.parse().ok()).unwrap_or(0)
    };
    (number("calls"), number("usec"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_read_as_redis_writes_them() {
        let info = "# Commandstats\r\ncmdstat_eval:calls=1,usec=2\r\n\
                    cmdstat_evalsha:calls=30,usec=171,usec_per_call=5.70,rejected_calls=0,failed_calls=0\r\n";
        assert_eq!(command_stats(info, "evalsha"), (30, 171));
        assert_eq!(command_stats(info, "ping"), (0, 0));
        assert_eq!(field("# CPU\r\nused_cpu_sys:1.5\r\nused_cpu_sys_children:0\r\n", "used_cpu_sys").unwrap(), "1.5");
        assert!(field("", "used_cpu_sys").is_err());
    }
}
