//! Places of the ops server: which connection is admitted, which one is closed for it, which request may begin.
//!
//! A connection without a request in progress is closed first when places are short: of the address that has most of them, the
//! one that has been idle longest. Probes need no place of a request, and some connections are theirs alone. So a client that
//! holds connections or begins requests keeps no probe from its answer.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

use crate::ops::client_address::ClientAddress;

/// How many at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Requests in progress that are no probes.
    pub requests: usize,
    /// Requests in progress of one address that are no probes.
    pub requests_of_address: usize,
    /// Connections beyond those, in total and of one address.
    pub for_probes: usize,
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum RequestKind {
    /// Whether the process lives or is ready; answered from memory.
    Probe,
    Other,
}

/// Why a request may not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum NoPlace {
    AllTaken,
    AllOfAddressTaken,
    /// Its connection was closed for another one in the same moment.
    Closed,
}

/// All places and their holders.
#[derive(Debug)]
pub(super) struct Places {
    bounds: Bounds,
    holders: Mutex<Holders>,
}

#[derive(Debug, Default)]
struct Holders {
    /// Counts admissions and ends of requests: a lower turn is longer ago.
    turn: u64,
    /// By the turn of their admission.
    connections: BTreeMap<u64, Holder>,
}

#[derive(Debug)]
struct Holder {
    address: ClientAddress,
    idle_since: u64,
    request: Option<RequestKind>,
    closed: CancellationToken,
}

impl Places {
    pub(super) fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Self { bounds, holders: Mutex::default() })
    }

    /// A place for a new connection, if need be that of an idle one; `None` if no connection is idle.
    pub(super) fn admit(self: &Arc<Self>, address: ClientAddress) -> Option<Place> {
        let Bounds { requests, requests_of_address, for_probes } = self.bounds;
        let mut holders = self.lock();
        let address_is_full = holders.of(address).count() >= requests_of_address + for_probes;
        if address_is_full || holders.connections.len() >= requests + for_probes {
            let idlest = holders.idlest(address_is_full.then_some(address))?;
            if let Some(idle) = holders.connections.remove(&idlest) {
                idle.closed.cancel();
            }
        }
        let (id, closed) = (holders.next_turn(), CancellationToken::new());
        holders.connections.insert(id, Holder { address, idle_since: id, request: None, closed: closed.clone() });
        Some(Place { id, closed, places: Arc::clone(self) })
    }

    /// Marks a connection as one with a request in progress, until the returned value is dropped.
    pub(super) fn begin(self: &Arc<Self>, id: u64, kind: RequestKind) -> Result<RequestInProgress, NoPlace> {
        let mut holders = self.lock();
        let address = holders.connections.get(&id).ok_or(NoPlace::Closed)?.address;
        let others = |holder: &&Holder| holder.request == Some(RequestKind::Other);
        if kind == RequestKind::Other {
            if holders.of(address).filter(others).count() >= self.bounds.requests_of_address {
                return Err(NoPlace::AllOfAddressTaken);
            }
            if holders.connections.values().filter(others).count() >= self.bounds.requests {
                return Err(NoPlace::AllTaken);
            }
        }
        holders.connections.get_mut(&id).ok_or(NoPlace::Closed)?.request = Some(kind);
        Ok(RequestInProgress { id, places: Arc::clone(self) })
    }

    fn lock(&self) -> MutexGuard<'_, Holders> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Holders {
    fn next_turn(&mut self) -> u64 {
        self.turn += 1;
        self.turn
    }

    fn of(&self, address: ClientAddress) -> impl Iterator<Item = &Holder> {
        self.connections.values().filter(move |holder| holder.address == address)
    }

    /// The connection to close for another one, among those of one address or among all.
    fn idlest(&self, within: Option<ClientAddress>) -> Option<u64> {
        let idle = self
            .connections
            .iter()
            .filter(|(_, holder)| holder.request.is_none() && within.is_none_or(|address| holder.address == address));
        let idlest = idle.max_by_key(|(_, holder)| (self.of(holder.address).count(), Reverse(holder.idle_since)));
        idlest.map(|(id, _)| *id)
    }
}

/// Place of one connection, free again when dropped.
#[derive(Debug)]
pub(super) struct Place {
    pub id: u64,
    /// Fires when the connection must make room.
    pub closed: CancellationToken,
    places: Arc<Places>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().connections.remove(&self.id);
    }
}

/// A request whose answer is being made.
#[derive(Debug)]
pub(in crate::ops) struct RequestInProgress {
    id: u64,
    places: Arc<Places>,
}

impl Drop for RequestInProgress {
    fn drop(&mut self) {
        let mut holders = self.places.lock();
        let turn = holders.next_turn();
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

    /// Four requests, two of one address, and one connection more.
    fn places() -> Arc<Places> {
        Places::new(Bounds { requests: 4, requests_of_address: 2, for_probes: 1 })
    }

    fn closed(all: &[Place]) -> Vec<bool> {
        all.iter().map(|place| place.closed.is_cancelled()).collect()
    }

    #[test]
    fn the_longest_idle_connection_of_the_fullest_address_is_closed() {
        let places = places();
        let held: Vec<Place> = [1, 2, 2, 3, 3].map(|last| places.admit(address(last)).unwrap()).into();
        // A request of the oldest connection of address 2 has just ended, so the other one has been idle longer.
        drop(places.begin(held[1].id, RequestKind::Other).unwrap());
        let _fourth = places.admit(address(4)).unwrap();
        assert_eq!(closed(&held), [false, false, true, false, false]);
        let _fifth = places.admit(address(5)).unwrap();
        assert_eq!(closed(&held), [false, false, true, true, false]);
    }

    #[test]
    fn an_address_has_a_bound_of_its_own() {
        let places = places();
        let held: Vec<Place> = (0..4).map(|_| places.admit(address(1)).unwrap()).collect();
        assert_eq!(closed(&held), [true, false, false, false]);
        let requests: Vec<_> = held[1..].iter().map(|place| places.begin(place.id, RequestKind::Other)).collect();
        assert_eq!(requests[2].as_ref().unwrap_err(), &NoPlace::AllOfAddressTaken);
        assert_eq!(places.begin(held[0].id, RequestKind::Other).unwrap_err(), NoPlace::Closed);
        let other = places.admit(address(2)).unwrap();
        assert!(places.begin(other.id, RequestKind::Other).is_ok(), "it is the bound of one address");
    }

    #[test]
    fn a_request_in_progress_is_never_closed_and_leaves_a_place_for_probes() {
        let places = places();
        let held: Vec<Place> = [1, 1, 2, 2].map(|last| places.admit(address(last)).unwrap()).into();
        let requests: Vec<_> = held.iter().map(|place| places.begin(place.id, RequestKind::Other).unwrap()).collect();
        for last in [1, 2, 3] {
            let probe = places.admit(address(last)).unwrap();
            assert_eq!(
                places.begin(probe.id, RequestKind::Other).unwrap_err(),
                match last {
                    3 => NoPlace::AllTaken,
                    _ => NoPlace::AllOfAddressTaken,
                }
            );
            let answered = places.begin(probe.id, RequestKind::Probe).unwrap();
            assert!(places.admit(address(9)).is_none(), "all of them have a request in progress");
            drop(answered);
        }
        assert_eq!(closed(&held), [false; 4]);
        drop(requests);
        drop(held);
        let again: Vec<Place> = [1, 2, 3, 4, 5].map(|last| places.admit(address(last)).unwrap()).into();
        assert_eq!(closed(&again), [false; 5], "places were not given back");
    }
}
