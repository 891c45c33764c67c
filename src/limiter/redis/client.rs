//! One supervised connection to Redis, and the calls over it.
//!
//! The connection is multiplexed: all gates of the process share it. It is never repaired, only replaced, and its
//! replacement asks for the server's run id before anything else.

use std::time::Duration;

use async_trait::async_trait;
use redis::aio::MultiplexedConnection;
use redis::{Client, ErrorKind, RedisError, Script, ServerErrorKind};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::answer::parse_reply;
use super::look::{PEEK, look, looked_at};
use super::script::{QUOTA, invocation};
use crate::domain::decision::{Call, Reply, Subject};
use crate::domain::provider::ProviderName;
use crate::domain::quota_spec::QuotaSpec;
use crate::domain::time::Micros;
use crate::limiter::{LimitUse, Limiter, LimiterError, uses};

/// Longest wait for one answer. Far above a round trip, far below the send budget that it eats into.
const ANSWER_TIME_MAX: Duration = Duration::from_millis(400);
/// Longest wait for a new connection with its handshake.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(2);

pub struct RedisLimiter {
    client: Client,
    prefix: String,
    script: Script,
    peek: Script,
    link: Mutex<Option<Link>>,
}

/// What an operator should know of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreFacts {
    pub eviction_policy: String,
    pub now: Micros,
}

/// A connection and the server that it leads to.
#[derive(Clone)]
struct Link {
    connection: MultiplexedConnection,
    run_id: String,
}

impl RedisLimiter {
    /// Prepares a limiter; connects on first use.
    ///
    /// # Errors
    /// When the URL is not one of Redis.
    pub fn new(url: &str, prefix: &str) -> Result<Self, LimiterError> {
        // The error of a bad URL may quote it, password and all.
        let client =
            Client::open(url).map_err(|_| LimiterError::Refused("limiter.url is not a Redis URL".to_owned()))?;
        Ok(Self {
            client,
            prefix: prefix.to_owned(),
            script: Script::new(QUOTA),
            peek: Script::new(PEEK),
            link: Mutex::new(None),
        })
    }

    /// Reads the store's settings, and runs a script that does nothing.
    ///
    /// # Errors
    /// When it cannot be asked, or refuses scripts.
    pub async fn facts(&self) -> Result<StoreFacts, LimiterError> {
        let info: String =
            self.ask(None, async |link| redis::cmd("INFO").arg("memory").query_async(link).await).await?;
        let policy = info.lines().find_map(|line| line.strip_prefix("maxmemory_policy:"));
        let script = Script::new("return redis.call('TIME')");
        let invocation = script.prepare_invoke();
        let (seconds, micros): (u64, u64) = self.ask(None, async |link| invocation.invoke_async(link).await).await?;
        Ok(StoreFacts {
            eviction_policy: policy.unwrap_or("unknown").trim().to_owned(),
            now: Micros(seconds * 1_000_000 + micros),
        })
    }

    async fn link(&self) -> Result<Link, LimiterError> {
        let mut link = self.link.lock().await;
        if let Some(link) = link.as_ref() {
            return Ok(link.clone());
        }
        let fresh = timeout(CONNECT_TIME_MAX, self.connect())
            .await
            .map_err(|_| LimiterError::Away("no connection in time".to_owned()))??;
        Ok(link.insert(fresh).clone())
    }

    async fn connect(&self) -> Result<Link, LimiterError> {
        // Our own time limits hold; the library's would only blur which one fired.
        let config = redis::AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        let mut connection =
            self.client.get_multiplexed_async_connection_with_config(&config).await.map_err(|e| fault(&e))?;
        let info: String =
            redis::cmd("INFO").arg("server").query_async(&mut connection).await.map_err(|e| fault(&e))?;
        let run_id = info
            .lines()
            .find_map(|line| line.strip_prefix("run_id:"))
            .ok_or_else(|| LimiterError::Refused("INFO server names no run_id".to_owned()))?;
        Ok(Link { connection, run_id: run_id.trim().to_owned() })
    }

    /// Runs one command with a time limit. Any fault but a refusal of the script itself ends the connection.
    async fn ask<T>(
        &self,
        run_id: Option<&str>,
        command: impl AsyncFnOnce(&mut MultiplexedConnection) -> Result<T, RedisError>,
    ) -> Result<T, LimiterError> {
        let mut link = self.link().await?;
        if run_id.is_some_and(|run_id| run_id != link.run_id) {
            return Err(LimiterError::Away("the store's process has changed".to_owned()));
        }
        let answer = timeout(ANSWER_TIME_MAX, command(&mut link.connection)).await;
        let error = match answer {
            Ok(Ok(value)) => return Ok(value),
            Ok(Err(error)) => fault(&error),
            Err(_) => LimiterError::Away("no answer in time".to_owned()),
        };
        if matches!(error, LimiterError::Away(_)) {
            self.link.lock().await.take_if(|current| current.run_id == link.run_id);
        }
        Err(error)
    }
}

#[async_trait]
impl Limiter for RedisLimiter {
    async fn run_id(&self, _quota: &ProviderName) -> Result<String, LimiterError> {
        Ok(self.link().await?.run_id)
    }

    async fn call(&self, spec: &QuotaSpec, call: &Call) -> Result<Reply, LimiterError> {
        let invocation = invocation(&self.script, &self.prefix, spec, call);
        let answer: Vec<u8> =
            self.ask(Some(&call.run_id), async |connection| invocation.invoke_async(connection).await).await?;
        parse_reply(&answer, spec.limits.len(), spec.provider_limits().len(), call.wants.len())
            .map_err(|problem| LimiterError::Refused(format!("unreadable reply: {problem}")))
    }

    async fn peek(&self, spec: &QuotaSpec, subject: Option<&Subject>) -> Result<Vec<LimitUse>, LimiterError> {
        let mut lines = Vec::new();
        for of in [None, subject].into_iter().take(1 + usize::from(subject.is_some())) {
            let invocation = look(&self.peek, &self.prefix, spec, of);
            let found: Vec<(String, u64, u64, u64)> =
                self.ask(None, async |connection| invocation.invoke_async(connection).await).await?;
            lines.extend(looked_at(spec, of, &found));
        }
        Ok(uses(spec, subject, &lines))
    }

    async fn ping(&self) -> Result<(), LimiterError> {
        self.ask(None, async |connection| redis::cmd("PING").query_async::<()>(connection).await).await
    }
}

/// Server states that pass or that another connection may not meet count as away; the rest will not mend by itself.
fn fault(error: &RedisError) -> LimiterError {
    let refused = match error.kind() {
        ErrorKind::Server(kind) => {
            matches!(kind, ServerErrorKind::ResponseError | ServerErrorKind::NoPerm | ServerErrorKind::CrossSlot)
        }
        ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig | ErrorKind::UnexpectedReturnType => true,
        // Somebody else's key has our key's name; the library has no kind of its own for it.
        ErrorKind::Extension => error.code() == Some("WRONGTYPE"),
        _ => false,
    };
    let text = error.to_string();
    if refused { LimiterError::Refused(text) } else { LimiterError::Away(text) }
}
