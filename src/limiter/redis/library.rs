//! The library of the limiter's functions in Redis: loaded once, and compiled for every later call.
//!
//! Its name has a digest of its text, so that two versions of this program can use one server. Functions need Redis 7.0
//! or later (<https://redis.io/docs/latest/develop/programmability/functions-intro/>).

use std::sync::LazyLock;

use redis::aio::MultiplexedConnection;
use redis::{Cmd, FromRedisValue, RedisError};
use sha2::{Digest, Sha256};

/// The functions' source text, from `lua/`.
pub const SOURCE: &str = concat!(
    include_str!("../../../lua/log.lua"),
    include_str!("../../../lua/cells.lua"),
    include_str!("../../../lua/tallies.lua"),
    include_str!("../../../lua/grants.lua"),
    include_str!("../../../lua/known.lua"),
    include_str!("../../../lua/quota.lua"),
    include_str!("../../../lua/peek.lua"),
);

/// The library of this program.
pub static LIBRARY: LazyLock<Library> = LazyLock::new(|| Library::new(SOURCE));

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    name: String,
    code: String,
}

impl Library {
    /// A library of this text.
    pub fn new(source: &str) -> Self {
        let digest = hex::encode(&Sha256::digest(source)[..8]);
        let name = format!("sluicegate_{digest}");
        let code = format!(
            "#!lua name={name}\n{source}\n\
             redis.register_function('{name}_call', quota)\n\
             redis.register_function{{ function_name = '{name}_peek', callback = peek, flags = {{ 'no-writes' }} }}\n"
        );
        Self { name, code }
    }

    /// The name of the function that [`Self::call`] invokes.
    pub fn call_name(&self) -> String {
        format!("{}_call", self.name)
    }

    /// The command that calls the limiter (`lua/quota.lua`).
    pub fn call(&self, keys: &[String], argument: &[u8]) -> Cmd {
        self.invocation("call", keys, argument)
    }

    /// The command that reads usage without acquiring a permit (`lua/peek.lua`).
    pub fn peek(&self, keys: &[String], argument: &[u8]) -> Cmd {
        self.invocation("peek", keys, argument)
    }

    /// The command that loads the library into a server. A server that has it answers with an error.
    pub fn load(&self) -> Cmd {
        let mut command = redis::cmd("FUNCTION");
        command.arg("LOAD").arg(&self.code);
        command
    }

    /// Loads the library into a server that does not have it.
    pub async fn ensure_loaded(&self, connection: &mut MultiplexedConnection) -> Result<(), RedisError> {
        match self.load().query_async::<()>(connection).await {
            Err(error) if Self::is_present(&error) => Ok(()),
            outcome => outcome,
        }
    }

    /// Whether an error means that the server does not have the library.
    pub fn is_missing(error: &RedisError) -> bool {
        error.detail().is_some_and(|detail| detail.contains("Function not found"))
    }

    /// Whether an error means that the server has the library: its name is a digest of its text.
    pub fn is_present(error: &RedisError) -> bool {
        error.detail().is_some_and(|detail| detail.contains("already exists"))
    }

    /// Runs an invocation; loads the library first if the server does not have it.
    pub(super) async fn run<T: FromRedisValue>(
        &self,
        invocation: &Cmd,
        connection: &mut MultiplexedConnection,
    ) -> Result<T, RedisError> {
        match invocation.query_async(connection).await {
            Err(error) if Self::is_missing(&error) => {
                self.ensure_loaded(connection).await?;
                invocation.query_async(connection).await
            }
            outcome => outcome,
        }
    }

    fn invocation(&self, function: &str, keys: &[String], argument: &[u8]) -> Cmd {
        let mut command = redis::cmd("FCALL");
        command.arg(format!("{}_{function}", self.name)).arg(keys.len()).arg(keys).arg(argument);
        command
    }
}
