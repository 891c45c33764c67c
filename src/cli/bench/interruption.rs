//! Signals that end a measurement early, so that what it put up is taken down.
//!
//! Refuses to end the process: whoever measures stops at its next await, and cleans up.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::BenchError;

pub struct Interruption([Signal; 3]);

impl Interruption {
    /// From now on these signals no longer end the process by themselves.
    ///
    /// # Errors
    /// When signals cannot be caught here.
    pub fn catch() -> Result<Self, BenchError> {
        let mut signals = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
        match &mut signals {
            [Ok(_), Ok(_), Ok(_)] => {}
            _ => return Err(BenchError::Server("signals cannot be caught here".to_owned())),
        }
        let [interrupt, terminate, hangup] = signals;
        Ok(Self([interrupt?, terminate?, hangup?]))
    }

    /// Returns with the first signal.
    pub async fn wait(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
