//! What is measured: something that is asked for permits over and over, by many callers at once.
//!
//! Refuses to know how it is driven or measured; [`super::ours`] and [`super::reference`] implement it.

use std::time::Duration;

use redis::{Cmd, Value};

use super::BenchError;

/// The one limit that a contender keeps, and where.
#[derive(Clone, Debug)]
pub struct BenchQuota {
    /// Of every key.
    pub prefix: String,
    pub max_requests: u32,
    pub window: Duration,
    /// Version of the settings.
    pub version: i64,
    /// Of the server.
    pub run_id: String,
}

/// Keys and arguments of one call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallArguments {
    pub keys: Vec<String>,
    pub arguments: Vec<Vec<u8>>,
}

/// What a call came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GrantedPermits {
    pub permits: u32,
    /// Of these, those that may start now.
    pub at_once: u32,
}

impl GrantedPermits {
    #[must_use]
    pub fn at_once_only(permits: u32) -> Self {
        Self { permits, at_once: permits }
    }
}

pub trait Contender: Send + Sync {
    fn name(&self) -> &'static str;

    fn program(&self) -> Program;

    /// Whether it keeps a log that has to be full before it is measured.
    fn keeps_log(&self) -> bool;

    /// A caller with an identity of its own.
    ///
    /// # Errors
    /// When the quota cannot be meant.
    fn caller(&self, quota: &BenchQuota, id: u64) -> Result<Box<dyn BenchCaller>, BenchError>;
}

pub trait BenchCaller: Send {
    /// The keys of every call.
    fn keys(&self) -> Vec<String>;

    /// The next call: takes permits, and settles what the call before it was granted.
    fn next_call(&mut self, permits: u32) -> CallArguments;

    /// A call that settles and takes nothing; `None` for those that settle nothing.
    fn release(&mut self) -> Option<CallArguments>;

    /// Reads the answer to the last call.
    ///
    /// # Errors
    /// When it is no answer, or one that no correct caller is given.
    fn read_reply(&mut self, answer: Value) -> Result<GrantedPermits, BenchError>;

    /// From the next call on the limit is another.
    ///
    /// # Errors
    /// When the quota cannot be meant.
    fn change_quota(&mut self, quota: &BenchQuota) -> Result<(), BenchError>;
}

/// What Redis runs for a contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    Command(&'static str),
    Script(&'static str),
    /// The text of our own library.
    Library(&'static str),
}

/// A program that the server knows.
#[derive(Clone, Debug)]
pub enum LoadedProgram {
    Command(&'static str),
    Script { sha: String },
    Function { name: String },
}

impl LoadedProgram {
    #[must_use]
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

    /// The name under which the server keeps its statistics.
    #[must_use]
    pub fn statistics(&self) -> &'static str {
        match self {
            Self::Command(name) => name,
            Self::Script { .. } => "evalsha",
            Self::Function { .. } => "fcall",
        }
    }
}
