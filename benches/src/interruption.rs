//! The signals that end a measurement early.
//!
//! They do not end the process: the measurement stops at its next await and cleans up.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::BenchError;

pub struct Interruption([Signal; 3]);

impl Interruption {
    /// Catches the signals, so that they no longer end the process.
    pub fn catch() -> Result<Self, BenchError> {
        let mut signals = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
        match &mut signals {
            [Ok(_), Ok(_), Ok(_)] => {}
            _ => return Err(BenchError::Server("signals cannot be caught here".to_owned())),
        }
        let [interrupt, terminate, hangup] = signals;
        Ok(Self([interrupt?, terminate?, hangup?]))
    }

    /// Waits for the first signal.
    pub async fn wait(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}
