//! The admission control of the ops server: it decides about connections to admit, connections to close and requests.
//!
//! At the bound an idle connection is closed for a new one: the longest idle one of the address with most connections.
//! Probes do not count as requests, and some connections are reserved for them. So no client can block the probes by
//! holding connections or sending requests.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::ops::connections::ClientAddress;

/// Upper bounds on simultaneous requests and connections.
#[derive(Clone, Copy, Debug)]
pub struct AdmissionBounds {
    /// Requests in progress, without probes.
    pub requests: usize,
    /// Requests in progress of one address, without probes.
    pub requests_per_address: usize,
    /// Further connections, in total and per address.
    pub probe_connections: usize,
}

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// A liveness or readiness probe, answered from memory.
    Probe,
    Other,
}

/// Why a request is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmissionError {
    TooManyRequests,
    TooManyOfAddress,
    /// Its connection has just been closed for another one.
    ConnectionClosed,
}

/// All admitted connections and their bounds.
#[derive(Debug)]
pub struct ConnectionAdmission {
    bounds: AdmissionBounds,
    connections: Mutex<ConnectionTable>,
}

#[derive(Debug, Default)]
struct ConnectionTable {
    /// Counts admissions and ends of requests: a lower number is longer ago.
    sequence: u64,
    /// By the sequence number of their admission.
    connections: BTreeMap<u64, ConnectionEntry>,
}

#[derive(Debug)]
struct ConnectionEntry {
    address: ClientAddress,
    idle_since: u64,
    request: Option<RequestKind>,
    /// Its client has not read all of a response, whose request may have ended.
    is_writing: bool,
    close_signal: CancellationToken,
}

impl ConnectionEntry {
    /// Whether it counts as a request in progress.
    fn counts(&self) -> bool {
        self.request == Some(RequestKind::Other) || self.is_writing
    }

    fn is_idle(&self) -> bool {
        self.request.is_none() && !self.is_writing
    }
}

impl ConnectionAdmission {
    pub fn new(bounds: AdmissionBounds) -> Arc<Self> {
        Arc::new(Self { bounds, connections: Mutex::default() })
    }

    /// Admits a new connection, at the bound in place of an idle one; `None` if no connection is idle.
    pub fn admit(self: &Arc<Self>, address: ClientAddress) -> Option<AdmittedConnection> {
        let AdmissionBounds { requests, requests_per_address: requests_of_address, probe_connections: for_probes } =
            self.bounds;
        let mut holders = self.connections.lock();
        let address_is_full = holders.with_address(address).count() >= requests_of_address + for_probes;
        if address_is_full || holders.connections.len() >= requests + for_probes {
            let idlest = holders.connection_to_close(address_is_full.then_some(address))?;
            if let Some(idle) = holders.connections.remove(&idlest) {
                idle.close_signal.cancel();
            }
        }
        let (id, closed) = (holders.next_sequence(), CancellationToken::new());
        holders.connections.insert(
            id,
            ConnectionEntry { address, idle_since: id, request: None, is_writing: false, close_signal: closed.clone() },
        );
        Some(AdmittedConnection { id, close_signal: closed, admission: Arc::clone(self) })
    }

    /// Marks a connection as busy with a request until the returned value is dropped.
    pub fn begin_request(self: &Arc<Self>, id: u64, kind: RequestKind) -> Result<RequestInProgress, AdmissionError> {
        let mut holders = self.connections.lock();
        let address = holders.connections.get(&id).ok_or(AdmissionError::ConnectionClosed)?.address;
        let others = |holder: &&ConnectionEntry| holder.counts();
        if kind == RequestKind::Other {
            if holders.with_address(address).filter(others).count() >= self.bounds.requests_per_address {
                return Err(AdmissionError::TooManyOfAddress);
            }
            if holders.connections.values().filter(others).count() >= self.bounds.requests {
                return Err(AdmissionError::TooManyRequests);
            }
        }
        holders.connections.get_mut(&id).ok_or(AdmissionError::ConnectionClosed)?.request = Some(kind);
        Ok(RequestInProgress { id, admission: Arc::clone(self) })
    }
}

impl ConnectionTable {
    fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    fn with_address(&self, address: ClientAddress) -> impl Iterator<Item = &ConnectionEntry> {
        self.connections.values().filter(move |holder| holder.address == address)
    }

    /// The connection to close for a new one, of one address or of all.
    fn connection_to_close(&self, within: Option<ClientAddress>) -> Option<u64> {
        let idle = self
            .connections
            .iter()
            .filter(|(_, holder)| holder.is_idle() && within.is_none_or(|address| holder.address == address));
        let idlest =
            idle.max_by_key(|(_, holder)| (self.with_address(holder.address).count(), Reverse(holder.idle_since)));
        idlest.map(|(id, _)| *id)
    }
}

/// An admitted connection; it counts until dropped.
#[derive(Debug)]
pub struct AdmittedConnection {
    pub id: u64,
    /// Fires when the connection must close to make room.
    pub close_signal: CancellationToken,
    admission: Arc<ConnectionAdmission>,
}

impl AdmittedConnection {
    /// Whether its client waits for a response, or for the rest of one.
    pub fn has_request(&self) -> bool {
        let holders = self.admission.connections.lock();
        holders.connections.get(&self.id).is_some_and(|holder| holder.request.is_some())
    }

    /// Notes whether bytes of a response wait for its client.
    pub fn set_writing(&self, is_writing: bool) {
        let mut holders = self.admission.connections.lock();
        let turn = holders.next_sequence();
        if let Some(holder) = holders.connections.get_mut(&self.id) {
            (holder.is_writing, holder.idle_since) = (is_writing, turn);
        }
    }
}

impl Drop for AdmittedConnection {
    fn drop(&mut self) {
        self.admission.connections.lock().connections.remove(&self.id);
    }
}

/// A request in progress; it counts until dropped.
#[derive(Debug)]
pub struct RequestInProgress {
    id: u64,
    admission: Arc<ConnectionAdmission>,
}

impl Drop for RequestInProgress {
    fn drop(&mut self) {
        let mut holders = self.admission.connections.lock();
        let turn = holders.next_sequence();
        if let Some(holder) = holders.connections.get_mut(&self.id) {
            (holder.request, holder.idle_since) = (None, turn);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    fn address(last: u8) -> ClientAddress {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, last)).into()
    }

    /// Bounds of four requests, two of one address, and one more connection.
    fn small_admission() -> Arc<ConnectionAdmission> {
        ConnectionAdmission::new(AdmissionBounds { requests: 4, requests_per_address: 2, probe_connections: 1 })
    }

    fn close_signals(all: &[AdmittedConnection]) -> Vec<bool> {
        all.iter().map(|place| place.close_signal.is_cancelled()).collect()
    }

    #[test]
    fn longest_idle_of_busiest_address_is_closed() {
        let places = small_admission();
        let held: Vec<AdmittedConnection> = [1, 2, 2, 3, 3].map(|last| places.admit(address(last)).unwrap()).into();
        // A request of the oldest connection of address 2 has just ended, so the other one has been idle longer.
        drop(places.begin_request(held[1].id, RequestKind::Other).unwrap());
        let _fourth = places.admit(address(4)).unwrap();
        assert_eq!(close_signals(&held), [false, false, true, false, false]);
        let _fifth = places.admit(address(5)).unwrap();
        assert_eq!(close_signals(&held), [false, false, true, true, false]);
    }

    #[test]
    fn each_address_has_its_own_bound() {
        let places = small_admission();
        let held: Vec<AdmittedConnection> = (0..4).map(|_| places.admit(address(1)).unwrap()).collect();
        assert_eq!(close_signals(&held), [true, false, false, false]);
        let requests: Vec<_> =
            held[1..].iter().map(|place| places.begin_request(place.id, RequestKind::Other)).collect();
        assert_eq!(requests[2].as_ref().unwrap_err(), &AdmissionError::TooManyOfAddress);
        assert_eq!(places.begin_request(held[0].id, RequestKind::Other).unwrap_err(), AdmissionError::ConnectionClosed);
        let other = places.admit(address(2)).unwrap();
        assert!(places.begin_request(other.id, RequestKind::Other).is_ok(), "it is the bound of one address");
    }

    /// It ends by the connection's own deadline, if its client stops reading.
    #[test]
    fn unread_response_is_not_idle() {
        let places = small_admission();
        let held: Vec<AdmittedConnection> = (0..3).map(|_| places.admit(address(1)).unwrap()).collect();
        held[0].set_writing(true);
        held[1].set_writing(true);
        let refused = places.begin_request(held[2].id, RequestKind::Other).unwrap_err();
        assert_eq!(refused, AdmissionError::TooManyOfAddress);
        let next = places.admit(address(1)).unwrap();
        assert_eq!(close_signals(&held), [false, false, true]);
        held[1].set_writing(false);
        assert!(places.begin_request(next.id, RequestKind::Other).is_ok());
        let _another = places.admit(address(1)).unwrap();
        assert_eq!(close_signals(&held), [false, true, true]);
    }

    #[test]
    fn requests_in_progress_stay_open_probes_still_fit() {
        let places = small_admission();
        let held: Vec<AdmittedConnection> = [1, 1, 2, 2].map(|last| places.admit(address(last)).unwrap()).into();
        let requests: Vec<_> =
            held.iter().map(|place| places.begin_request(place.id, RequestKind::Other).unwrap()).collect();
        for last in [1, 2, 3] {
            let probe = places.admit(address(last)).unwrap();
            assert_eq!(
                places.begin_request(probe.id, RequestKind::Other).unwrap_err(),
                match last {
                    3 => AdmissionError::TooManyRequests,
                    _ => AdmissionError::TooManyOfAddress,
                }
            );
            let answered = places.begin_request(probe.id, RequestKind::Probe).unwrap();
            assert!(places.admit(address(9)).is_none(), "all of them have a request in progress");
            drop(answered);
        }
        assert_eq!(close_signals(&held), [false; 4]);
        drop(requests);
        drop(held);
        let again: Vec<AdmittedConnection> = [1, 2, 3, 4, 5].map(|last| places.admit(address(last)).unwrap()).into();
        assert_eq!(close_signals(&again), [false; 5], "closed connections still count");
    }
}
