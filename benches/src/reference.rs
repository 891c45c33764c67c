//! The reference contenders: plain commands, trivial scripts, and a sliding log in a ZSET.
//!
//! Each script is the cheapest form of its kind (`benches/reference/`), so the comparison does not favour our limiter.

use std::time::Duration;

use redis::Value;
use tokio::time::Instant;

use super::BenchError;
use super::contender::{BenchCaller, BenchQuota, CallArguments, Contender, GrantedPermits, Program};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference {
    Ping,
    Set,
    EmptyScript,
    TimeScript,
    ThreeCommands,
    ArticleZset,
    CorrectZset,
}

impl Reference {
    pub const ALL: [Self; 7] = [
        Self::Ping,
        Self::Set,
        Self::EmptyScript,
        Self::TimeScript,
        Self::ThreeCommands,
        Self::ArticleZset,
        Self::CorrectZset,
    ];
}

/// A reference contender with the clock that its callers share.
pub struct ReferenceContender {
    pub reference: Reference,
    pub clock: CallerClock,
}

/// The callers' clock: the server's time at the start of the benchmark, and the time since.
#[derive(Clone, Copy, Debug)]
pub struct CallerClock {
    pub began_us: u64,
    pub began: Instant,
}

impl CallerClock {
    fn now_ms(self) -> u64 {
        let since_us = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.began_us.saturating_add(since_us) / 1_000
    }
}

impl Contender for ReferenceContender {
    fn name(&self) -> &'static str {
        match self.reference {
            Reference::Ping => "PING",
            Reference::Set => "SET",
            Reference::EmptyScript => "empty script",
            Reference::TimeScript => "script with TIME only",
            Reference::ThreeCommands => "script with three trivial commands",
            Reference::ArticleZset => "ZSET script as printed",
            Reference::CorrectZset => "ZSET script made correct",
        }
    }

    fn program(&self) -> Program {
        match self.reference {
            Reference::Ping => Program::Command("ping"),
            Reference::Set => Program::Command("set"),
            Reference::EmptyScript => Program::Script(include_str!("../reference/empty.lua")),
            Reference::TimeScript => Program::Script(include_str!("../reference/time.lua")),
            Reference::ThreeCommands => Program::Script(include_str!("../reference/three_commands.lua")),
            Reference::ArticleZset => Program::Script(include_str!("../reference/zset_article.lua")),
            Reference::CorrectZset => Program::Script(include_str!("../reference/zset_correct.lua")),
        }
    }

    fn keeps_log(&self) -> bool {
        matches!(self.reference, Reference::ArticleZset | Reference::CorrectZset)
    }

    fn caller(&self, quota: &BenchQuota, id: u64) -> Result<Box<dyn BenchCaller>, BenchError> {
        let (reference, clock) = (self.reference, self.clock);
        Ok(Box::new(ReferenceCaller { reference, clock, quota: quota.clone(), id, number: 0 }))
    }
}

struct ReferenceCaller {
    reference: Reference,
    clock: CallerClock,
    quota: BenchQuota,
    id: u64,
    number: u64,
}

impl BenchCaller for ReferenceCaller {
    fn keys(&self) -> Vec<String> {
        vec![format!("{}:{{bench}}:log", self.quota.prefix)]
    }

    fn next_call(&mut self, permits: u32) -> CallArguments {
        self.number += 1;
        let key = self.keys();
        let most = self.quota.max_requests.to_string();
        match self.reference {
            Reference::Ping | Reference::EmptyScript | Reference::TimeScript => CallArguments::default(),
            Reference::Set => call_arguments(key, vec![self.number.to_string()]),
            Reference::ThreeCommands => call_arguments(key, Vec::new()),
            Reference::ArticleZset => {
                call_arguments(key, vec![self.clock.now_ms().to_string(), millis(self.quota.window).to_string(), most])
            }
            Reference::CorrectZset => {
                let window_us = (millis(self.quota.window) * 1_000).to_string();
                let name = format!("{}-{}", self.id, self.number);
                call_arguments(key, vec![most, window_us, permits.to_string(), name])
            }
        }
    }

    fn release(&mut self) -> Option<CallArguments> {
        None
    }

    fn read_reply(&mut self, answer: Value) -> Result<GrantedPermits, BenchError> {
        let answer = answer.extract_error()?;
        let permits = match self.reference {
            Reference::CorrectZset => {
                let (granted, _left, _wait_us): (u32, i64, i64) =
                    redis::from_redis_value(answer).map_err(redis::RedisError::from)?;
                granted
            }
            Reference::ArticleZset => redis::from_redis_value(answer).map_err(redis::RedisError::from)?,
            _ => 1,
        };
        Ok(GrantedPermits::at_once_only(permits))
    }

    fn change_quota(&mut self, quota: &BenchQuota) -> Result<(), BenchError> {
        self.quota = quota.clone();
        Ok(())
    }
}

fn millis(window: Duration) -> u64 {
    u64::try_from(window.as_millis()).unwrap_or(u64::MAX)
}

fn call_arguments(keys: Vec<String>, arguments: Vec<String>) -> CallArguments {
    CallArguments { keys, arguments: arguments.into_iter().map(String::into_bytes).collect() }
}
