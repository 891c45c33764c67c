//! The supervisor of one connection: connects, watches, and connects again with growing, jittered pauses.
//!
//! Nothing is repaired: what belonged to a lost connection is lost with it, and a new generation begins with the
//! topology declared. The recovery of lapin 4.12 stays off: its fixes of prefetch and acknowledgements are too new to
//! rely on.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Connection, Event};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::channels::{CALL_LIMIT, ChannelLimit, Channels, OpenChannel, with_call_limit};
use super::connect::{BrokerConnection, RabbitSettings, connect};
use super::declare_all;
use super::topology::{Route, Topology};
use crate::domain::backend_fault::BackendFault;
use crate::domain::backoff::BackoffPolicy;
use crate::domain::provider::ProviderName;
use crate::queue::QueueError;

/// Pauses between attempts: a broker that is there again is found before readouts look old.
const RECONNECT: BackoffPolicy = BackoffPolicy { base: Duration::from_millis(100), max: Duration::from_secs(2) };
/// A generation that lived this long ends the growth of the pauses.
const STEADY: Duration = Duration::from_secs(10);
/// Time between two log lines about a broker that still cannot be reached for the same reason.
const FAILURE_LOG_INTERVAL: Duration = Duration::from_secs(60);
/// How long a ping or a count waits for a broker that is known to be unavailable: less than its readers do, so that they
/// learn why.
const READOUT_LIMIT: Duration = Duration::from_millis(1_500);
/// How often an idle connection finds out whether the broker blocks publishers.
const LOOK_FOR_BLOCK_EVERY: Duration = Duration::from_secs(10);
/// How often the state is looked at, should an event be missed.
const STATE_CHECK_EVERY: Duration = Duration::from_secs(1);

/// One connection, from its opening to its end.
pub struct Generation {
    pub number: u64,
    pub connection: Connection,
    /// Of the broker, if it tells it.
    pub version: Option<String>,
    /// The broker's address.
    peer: Option<SocketAddr>,
    channels: Channels,
    /// Since when the broker has blocked publishers, and why.
    blocked: watch::Sender<Option<(Instant, BackendFault)>>,
    /// When it was last found out whether the broker blocks publishers.
    looked_at: Mutex<Option<Instant>>,
}

#[derive(Clone)]
enum ConnectionState {
    /// The first attempt goes on.
    Connecting,
    Up(Arc<Generation>),
    Down(String),
    Refused(String),
}

/// The providers whose lanes each new generation declares; empty until the first declaration.
#[derive(Clone, Default)]
pub struct DeclaredProviders(Arc<Mutex<BTreeSet<ProviderName>>>);

impl DeclaredProviders {
    pub fn add(&self, providers: &[ProviderName]) {
        self.0.lock().extend(providers.iter().cloned());
    }

    fn list(&self) -> Vec<ProviderName> {
        self.0.lock().iter().cloned().collect()
    }
}

/// One supervised connection. Dropping it ends the supervision and, with the last channel, the connection.
pub struct SupervisedConnection {
    state: watch::Receiver<ConnectionState>,
    _supervision: AbortOnDropHandle<()>,
}

impl SupervisedConnection {
    /// Starts connecting and returns at once.
    pub fn start(settings: RabbitSettings, purpose: &'static str, declared: DeclaredProviders) -> Self {
        let (sender, state) = watch::channel(ConnectionState::Connecting);
        let config = ConnectionConfig { settings, purpose, declared, limit: ChannelLimit::default() };
        let supervision = tokio::spawn(supervise(config, sender));
        Self { state, _supervision: AbortOnDropHandle::new(supervision) }
    }

    /// The present generation; waits up to [`CALL_LIMIT`] for one.
    ///
    /// # Errors
    /// [`QueueError::Unavailable`] with the last failure, or at once [`QueueError::Refused`] when the broker turns us down and
    /// has never taken us.
    pub async fn generation(&self) -> Result<Arc<Generation>, QueueError> {
        self.generation_within(CALL_LIMIT).await
    }

    /// The same for a readout, which waits less long for a broker that is known to be unavailable.
    pub async fn generation_for_readout(&self) -> Result<Arc<Generation>, QueueError> {
        let is_down = matches!(*self.state.borrow(), ConnectionState::Down(_));
        self.generation_within(if is_down { READOUT_LIMIT } else { CALL_LIMIT }).await
    }

    /// Waits up to [`CALL_LIMIT`] for a generation after the one of this number.
    pub async fn await_newer(&self, number: u64) {
        let mut state = self.state.clone();
        let is_newer = |state: &ConnectionState| matches!(state, ConnectionState::Up(new) if new.number > number);
        // Without one, the caller learns why from its next call.
        let _ = tokio::time::timeout(CALL_LIMIT, state.wait_for(is_newer)).await;
    }

    async fn generation_within(&self, limit: Duration) -> Result<Arc<Generation>, QueueError> {
        let mut state = self.state.clone();
        let decided =
            |state: &ConnectionState| !matches!(state, ConnectionState::Down(_) | ConnectionState::Connecting);
        let last = match tokio::time::timeout(limit, state.wait_for(decided)).await {
            Ok(Ok(state)) => state.clone(),
            Ok(Err(_)) => return Err(QueueError::Unavailable("the supervision has ended".to_owned())),
            Err(_) => self.state.borrow().clone(),
        };
        match last {
            ConnectionState::Up(generation) => Ok(generation),
            ConnectionState::Down(text) => Err(QueueError::Unavailable(text)),
            ConnectionState::Connecting => Err(QueueError::Unavailable("not connected yet".to_owned())),
            ConnectionState::Refused(text) => Err(QueueError::Refused(text)),
        }
    }
}

impl Generation {
    /// # Errors
    /// [`QueueError::Refused`] where the broker allows no more of them.
    pub async fn open_channel(&self) -> Result<OpenChannel, QueueError> {
        self.channels.open(&self.connection).await
    }

    /// New channels take another connection, to another address of the broker if there is one. Open channels stay.
    pub fn leave(&self) {
        self.channels.worn_out.cancel();
    }

    /// Waits until the broker takes publishes; at most until [`CALL_LIMIT`] after it stopped.
    pub async fn unblocked(&self) -> Result<(), QueueError> {
        let mut blocked = self.blocked.subscribe();
        let Some((since, fault)) = blocked.borrow().clone() else { return Ok(()) };
        let left = CALL_LIMIT.saturating_sub(since.elapsed());
        match tokio::time::timeout(left, blocked.wait_for(Option::is_none)).await {
            Ok(_) => Ok(()),
            Err(_) => Err(QueueError::NotConfirmed(fault.to_string())),
        }
    }

    /// Why the broker blocks this connection. It tells that only to a connection that publishes, so this publishes a
    /// message by a route that leads to no queue, each [`LOOK_FOR_BLOCK_EVERY`].
    pub async fn publish_fault(self: &Arc<Self>, nowhere: Route) -> Option<BackendFault> {
        let mut blocked = self.blocked.subscribe();
        let is_due = || {
            let mut looked_at = self.looked_at.lock();
            let is_due = looked_at.is_none_or(|at| at.elapsed() >= LOOK_FOR_BLOCK_EVERY);
            is_due.then(|| *looked_at = Some(Instant::now())).is_some()
        };
        if blocked.borrow().is_none() && is_due() {
            let generation = Arc::clone(self);
            // To its end, though its caller may lose interest: see `detached`.
            let published = tokio::spawn(async move { generation.publish_nowhere(&nowhere).await });
            tokio::select! {
                _ = published => {}
                _ = blocked.wait_for(Option::is_some) => {}
                () = tokio::time::sleep(READOUT_LIMIT) => {}
            }
        }
        blocked.borrow().as_ref().map(|(_, fault)| fault.clone())
    }

    async fn publish_nowhere(&self, nowhere: &Route) {
        let Ok(channel) = self.open_channel().await else { return };
        let (exchange, key) = (nowhere.exchange.as_str().into(), nowhere.routing_key.as_str().into());
        // Should an operator's policy lead it to a queue after all, it does not stay there.
        let properties = BasicProperties::default().with_expiration("0".into());
        let publish = channel.basic_publish(exchange, key, BasicPublishOptions::default(), &[], properties);
        // The answer to the next call shows that the broker has read the message. An exchange that does not exist yet is
        // an answer as well.
        if with_call_limit(publish).await.is_ok() {
            drop(with_call_limit(channel.confirm_select(ConfirmSelectOptions::default())).await);
        }
    }

    /// Waits for the end of the connection and says why.
    async fn ended(&self) -> String {
        let mut events = std::pin::pin!(self.connection.events_listener());
        let mut cause = "closed".to_owned();
        // An error event may concern a channel alone, so the connection's own state decides.
        while self.connection.status().connected() {
            let Ok(event) = tokio::time::timeout(STATE_CHECK_EVERY, events.next()).await else { continue };
            match event {
                Some(Event::ConnectionBlocked(reason)) => {
                    let fault = BackendFault::PublishersBlocked(reason);
                    tracing::warn!("{fault}");
                    self.blocked.send_replace(Some((Instant::now(), fault)));
                }
                Some(Event::ConnectionUnblocked) => {
                    tracing::info!("broker takes publishes again");
                    self.blocked.send_replace(None);
                }
                Some(Event::Error(error)) => cause = error.to_string(),
                Some(_) => {}
                None => break,
            }
        }
        cause
    }
}

/// What all generations of one supervised connection have in common.
struct ConnectionConfig {
    settings: RabbitSettings,
    purpose: &'static str,
    declared: DeclaredProviders,
    limit: ChannelLimit,
}

/// Decides which failed attempts are logged: the first, a new reason, and one a minute.
#[derive(Default)]
struct FailureLog(Option<(Instant, String)>);

impl FailureLog {
    fn admits(&mut self, reason: &str, now: Instant) -> bool {
        let is_known = |(at, last): &(Instant, String)| last == reason && now - *at < FAILURE_LOG_INTERVAL;
        if self.0.as_ref().is_some_and(is_known) {
            return false;
        }
        self.0 = Some((now, reason.to_owned()));
        true
    }
}

async fn supervise(config: ConnectionConfig, state: watch::Sender<ConnectionState>) {
    let purpose = config.purpose;
    let mut failed: u32 = 0;
    let mut failure_log = FailureLog::default();
    let mut connected_before = false;
    let mut left: Option<Arc<Generation>> = None;
    for number in 1.. {
        match establish(&config, number, left.as_ref().and_then(|left| left.peer)).await {
            Ok(generation) => {
                connected_before = true;
                left = None;
                let since = Instant::now();
                failure_log = FailureLog::default();
                tracing::info!(purpose, generation = number, "broker connected");
                state.send_replace(ConnectionState::Up(Arc::clone(&generation)));
                let cause = tokio::select! {
                    cause = generation.ended() => cause,
                    // What uses it goes on.
                    () = generation.channels.worn_out.cancelled() => {
                        tracing::debug!(purpose, generation = number, "another broker connection for new channels");
                        tokio::spawn(close_when_unused(Arc::clone(&generation)));
                        left = Some(generation);
                        continue;
                    }
                };
                tracing::warn!(purpose, generation = number, %cause, "broker connection lost");
                state.send_replace(ConnectionState::Down(format!("connection lost: {cause}")));
                failed = if since.elapsed() > STEADY { 1 } else { failed.saturating_add(1) };
            }
            Err(error) => {
                if failure_log.admits(&error.to_string(), Instant::now()) {
                    tracing::warn!(purpose, %error, "broker cannot be reached, retrying");
                }
                // A connection that is left is better than none.
                if left.as_ref().is_some_and(|left| left.connection.status().connected()) {
                    failed = failed.saturating_add(1);
                    tokio::time::sleep(RECONNECT.delay(failed, rand::random())).await;
                    continue;
                }
                state.send_replace(match error {
                    // What was good once will be again, after a rotated password or a limit on connections; callers
                    // take a refusal for final and would give their messages back.
                    QueueError::Refused(text) if !connected_before => ConnectionState::Refused(text),
                    QueueError::Refused(text) | QueueError::Unavailable(text) => ConnectionState::Down(text),
                    error => ConnectionState::Down(error.to_string()),
                });
                failed = failed.saturating_add(1);
            }
        }
        tokio::time::sleep(RECONNECT.delay(failed, rand::random())).await;
    }
}

async fn close_when_unused(generation: Arc<Generation>) {
    generation.channels.unused().await;
    if let Err(failure) = with_call_limit(generation.connection.close(200, "its channels are used up".into())).await {
        tracing::debug!(generation = generation.number, error = failure.describe("close the connection"), "not closed");
    }
}

async fn establish(
    config: &ConnectionConfig,
    number: u64,
    last: Option<SocketAddr>,
) -> Result<Arc<Generation>, QueueError> {
    let (settings, authority) = (&config.settings, &config.settings.uri.authority);
    let BrokerConnection { connection, version, peer } =
        connect(settings, &format!("sluicegate {}", config.purpose), last)
            .await
            .map_err(|failure| failure.into_error(&format!("connect to {}:{}", authority.host, authority.port)))?;
    let channels = Channels::new(settings.clone(), config.limit.clone());
    let blocked = watch::Sender::new(None);
    let generation =
        Arc::new(Generation { number, connection, version, peer, channels, blocked, looked_at: Mutex::default() });
    redeclare(&generation, &Topology::new(&settings.prefix), &config.declared.list()).await?;
    Ok(generation)
}

/// Declares again what was declared before. Where that is refused now, one by one: a queue that exists with other
/// arguments fails its own lane, which reports it when it opens, and the other lanes do not wait until it is fixed.
async fn redeclare(generation: &Generation, topology: &Topology, providers: &[ProviderName]) -> Result<(), QueueError> {
    if providers.is_empty() {
        return Ok(());
    }
    match declare_all(generation, topology, providers).await {
        Err(QueueError::Refused(_)) => {}
        declared => return declared,
    }
    declare_all(generation, topology, &[]).await?;
    for provider in providers {
        match declare_all(generation, topology, std::slice::from_ref(provider)).await {
            Err(QueueError::Refused(error)) => tracing::error!(%provider, error, "queues not declared"),
            declared => declared?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lasting_failure_is_logged_once_a_minute() {
        let (mut log, began) = (FailureLog::default(), Instant::now());
        for (after_s, reason, admitted) in [
            (0, "refused", true),
            (1, "refused", false),
            (59, "refused", false),
            (60, "refused", true),
            (61, "no such host", true),
            (62, "no such host", false),
        ] {
            let now = began + Duration::from_secs(after_s);
            assert_eq!(log.admits(reason, now), admitted, "{after_s} s: {reason}");
        }
    }
}
