//! The interface of a benchmarked limiter: many callers at once ask it for permits, again and again.
//!
//! [`super::ours`] and [`super::reference`] implement it. How it is driven and measured is in other modules.

use std::time::Duration;

use redis::{Cmd, Value};

use super::BenchError;

/// The one limit of a contender, and its place.
#[derive(Clone, Debug)]
pub struct BenchQuota {
    /// Prefix of every key.
    pub prefix: String,
    pub max_requests: u32,
    pub window: Duration,
    /// Version of the settings.
    pub version: i64,
    /// `run_id` of the server.
    pub run_id: String,
}

/// Keys and arguments of one call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallArguments {
    pub keys: Vec<String>,
    pub arguments: Vec<Vec<u8>>,
}

/// The permits that a call was granted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantedPermits {
    pub permits: u32,
    /// The permits that can start now.
    pub at_once: u32,
}

impl GrantedPermits {
    pub fn at_once_only(permits: u32) -> Self {
        Self { permits, at_once: permits }
    }
}

pub trait Contender: Send + Sync {
    fn name(&self) -> &'static str;

    fn program(&self) -> Program;

    /// Whether it has a log that must be full before it is measured.
    fn keeps_log(&self) -> bool;

    /// A caller with its own identity.
    fn caller(&self, quota: &BenchQuota, id: u64) -> Result<Box<dyn BenchCaller>, BenchError>;
}

pub trait BenchCaller: Send {
    /// The keys of every call.
    fn keys(&self) -> Vec<String>;

    /// The next call: acquires permits, and releases those of the previous call.
    fn next_call(&mut self, permits: u32) -> CallArguments;

    /// A call that only releases permits; `None` for a contender without releases.
    fn release(&mut self) -> Option<CallArguments>;

    /// Decodes the reply to the last call.
    ///
    /// # Errors
    /// When the reply is invalid, or one that a correct caller never gets.
    fn read_reply(&mut self, answer: Value) -> Result<GrantedPermits, BenchError>;

    /// Changes the limit from the next call on.
    fn change_quota(&mut self, quota: &BenchQuota) -> Result<(), BenchError>;
}

/// The code that Redis runs for a contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    Command(&'static str),
    Script(&'static str),
    /// The source of our library.
    Library(&'static str),
}

/// A program that is loaded in the server.
#[derive(Clone, Debug)]
pub enum LoadedProgram {
    Command(&'static str),
    Script { sha: String },
    Function { name: String },
}

impl LoadedProgram {
    pub fn command(&self, ask: &CallArguments) -> Cmd {
        let mut command = match self {
            Self::Command(name) => redis::cmd(name),
            Self::Function { .. } => redis::cmd("FCALL"),
            Self::Script { sha } => {
                let mut command = redis::cmd("EVALSHA");
                command.arg(sha).arg(ask.keys.len());
                command
            }
        };
        if let Self::Function { name } = self {
            command.arg(name).arg(ask.keys.len());
        }
        command.arg(&ask.keys).arg(&ask.arguments);
        command
    }

    /// The command's name in the server's statistics.
    pub fn statistics(&self) -> &'static str {
        match self {
            Self::Command(name) => name,
            Self::Script { .. } => "evalsha",
            Self::Function { .. } => "fcall",
        }
    }
}
