//! The connection pool's scheduling: which waiter gets which connection. It holds no connections of its own.
//!
//! One pool serves three purposes, each with its own share. If the server allows fewer connections than configured, any
//! connection serves any purpose, polls first. So no caller waits for a new connection while another one is free. See
//! `docs/decisions/0027-own-postgresql-connection-pool.md`.

use std::collections::VecDeque;

/// A connection's purpose; each has its own settings on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionPurpose {
    General,
    /// Writes of a group commit.
    Batches,
    /// Values that are polled each second: without them, no permit is granted.
    Polls,
}

/// Most connects at the same time while the server accepts them.
const CONNECTS_MAX: u32 = 4;

/// How many connections each purpose may use, and how many the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PurposeShares {
    pub general: u32,
    pub batches: u32,
    pub polls: u32,
    pub total: u32,
}

impl PurposeShares {
    /// Half for batches, one for polls, the rest for everything else.
    pub fn split(max_connections: u32) -> Self {
        let total = max_connections.max(1);
        let batches = (total / 2).max(1);
        Self { general: total.saturating_sub(batches + 1).max(1), batches, polls: 1, total }
    }

    /// Each purpose may use all of them.
    pub fn undivided(total: u32) -> Self {
        Self { general: total, batches: total, polls: total, total }
    }

    fn get(&self, purpose: ConnectionPurpose) -> u32 {
        match purpose {
            ConnectionPurpose::General => self.general,
            ConnectionPurpose::Batches => self.batches,
            ConnectionPurpose::Polls => self.polls,
        }
    }
}

/// The pool's idle connections `C` and its waiting callers `W`.
pub struct PoolSlots<C, W> {
    shares: PurposeShares,
    idle: Vec<(ConnectionPurpose, C)>,
    waiting: VecDeque<(ConnectionPurpose, W)>,
    used: [u32; 3],
    /// Running connects, including the pauses after failed ones.
    connecting: u32,
    /// The server rejected a connection lately: the open ones serve all purposes.
    pub is_refused: bool,
}

/// The results of a change.
pub struct SlotAssignments<C, W> {
    /// Each waiter with its purpose, its connection, and the purpose for which the connection was last set up.
    pub assigned: Vec<(W, ConnectionPurpose, C, ConnectionPurpose)>,
    /// Purposes for which a connect begins now.
    pub connects: Vec<ConnectionPurpose>,
}

impl<C, W> PoolSlots<C, W> {
    pub fn new(shares: PurposeShares) -> Self {
        Self { shares, idle: Vec::new(), waiting: VecDeque::new(), used: [0; 3], connecting: 0, is_refused: false }
    }

    /// Connections that are idle or in use.
    pub fn open(&self) -> u32 {
        u32::try_from(self.idle.len()).unwrap_or(u32::MAX).saturating_add(self.used.iter().sum())
    }

    pub fn total(&self) -> u32 {
        self.shares.total
    }

    /// Takes a quarter of the bound for another pool, and at most this. Returns what is left, and what was taken.
    pub fn split_off(&mut self, at_most: u32) -> Option<(u32, u32)> {
        let taken = (self.shares.total / 4).min(at_most);
        let left = self.shares.total.checked_sub(taken).filter(|_| taken > 0)?;
        self.shares = PurposeShares::split(left);
        Some((left, taken))
    }

    pub fn wait(&mut self, purpose: ConnectionPurpose, waiter: W) {
        self.waiting.push_back((purpose, waiter));
    }

    /// Removes the waiters for which this is true.
    pub fn remove_waiters(&mut self, has_left: impl Fn(&W) -> bool) {
        self.waiting.retain(|(_, waiter)| !has_left(waiter));
    }

    pub fn take_waiters(&mut self) -> Vec<W> {
        self.waiting.drain(..).map(|(_, waiter)| waiter).collect()
    }

    /// A connect has succeeded.
    pub fn connected(&mut self, purpose: ConnectionPurpose, connection: C) {
        self.connecting = self.connecting.saturating_sub(1);
        self.idle.push((purpose, connection));
    }

    /// A connect has failed, or the pause after that is over: another one may begin.
    pub fn may_connect_again(&mut self) {
        self.connecting = self.connecting.saturating_sub(1);
    }

    /// Adds an idle connection, with the purpose for which it is set up.
    pub fn put(&mut self, set_up_for: ConnectionPurpose, connection: C) {
        self.idle.push((set_up_for, connection));
    }

    /// While the server rejects connections, no connect begins until [`PoolSlots::may_connect_again`]: other workers
    /// come first.
    pub fn hold_connects(&mut self) {
        self.connecting += 1;
    }

    /// A connection that was lent for `purpose` is no longer in use.
    pub fn closed(&mut self, purpose: ConnectionPurpose) {
        let used = &mut self.used[purpose as usize];
        *used = used.saturating_sub(1);
    }

    /// Removes the idle connections for which this is true.
    pub fn prune(&mut self, is_over: impl Fn(&C) -> bool) -> Vec<C> {
        let (over, kept) = std::mem::take(&mut self.idle).into_iter().partition(|(_, connection)| is_over(connection));
        self.idle = kept;
        let over: Vec<(ConnectionPurpose, C)> = over;
        over.into_iter().map(|(_, connection)| connection).collect()
    }

    /// Lends idle connections, and says for which purposes to connect.
    pub fn assign(&mut self) -> SlotAssignments<C, W> {
        let mut served = SlotAssignments { assigned: Vec::new(), connects: Vec::new() };
        let mut wanted = Vec::new();
        let polls_first = |(purpose, _): &(ConnectionPurpose, W)| *purpose != ConnectionPurpose::Polls;
        self.waiting.make_contiguous().sort_by_key(polls_first);
        let mut left = VecDeque::new();
        while let Some((purpose, waiter)) = self.waiting.pop_front() {
            let planned = count(&wanted, |wanted| wanted == purpose);
            let may_have_more = self.used[purpose as usize] + planned < self.share_now(purpose);
            let asked = count(&wanted, |_| true);
            let may_grow = !self.is_refused && self.open().saturating_add(asked) < self.shares.total;
            match self.idle_for(purpose, may_grow).filter(|_| may_have_more) {
                Some(at) => {
                    let (set_up_for, connection) = self.idle.swap_remove(at);
                    self.used[purpose as usize] += 1;
                    served.assigned.push((waiter, purpose, connection, set_up_for));
                }
                None => {
                    if may_have_more && (may_grow || self.is_refused) {
                        wanted.push(purpose);
                    }
                    left.push_back((purpose, waiter));
                }
            }
        }
        self.waiting = left;
        let at_once = if self.is_refused { 1 } else { CONNECTS_MAX };
        let room = self.shares.total.saturating_sub(self.open()).min(at_once).saturating_sub(self.connecting);
        let connecting = usize::try_from(self.connecting).unwrap_or(usize::MAX);
        served.connects = wanted.into_iter().skip(connecting).take(usize::try_from(room).unwrap_or(0)).collect();
        // While the server rejects connections, one connect at a time serves all waiters.
        self.connecting += u32::try_from(served.connects.len()).unwrap_or(0);
        served
    }

    /// A connection that is set up for the purpose; another one only if the pool cannot grow.
    fn idle_for(&self, purpose: ConnectionPurpose, may_grow: bool) -> Option<usize> {
        let own = self.idle.iter().rposition(|(set_up_for, _)| *set_up_for == purpose);
        own.or_else(|| self.idle.len().checked_sub(1).filter(|_| !may_grow))
    }

    /// While the server rejects more, one connection is left for the other purposes.
    fn share_now(&self, purpose: ConnectionPurpose) -> u32 {
        let share = self.shares.get(purpose);
        if self.is_refused { share.min(self.open().saturating_sub(1).max(1)) } else { share }
    }
}

fn count(wanted: &[ConnectionPurpose], is_counted: impl Fn(ConnectionPurpose) -> bool) -> u32 {
    u32::try_from(wanted.iter().filter(|purpose| is_counted(**purpose)).count()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::ConnectionPurpose::{Batches, General, Polls};
    use super::*;

    type Numbered = PoolSlots<u32, char>;

    /// The waiters that were served, in order, each with its connection.
    fn lent(slots: &mut Numbered) -> Vec<(char, u32)> {
        slots.assign().assigned.into_iter().map(|(waiter, _, connection, _)| (waiter, connection)).collect()
    }

    fn back(slots: &mut Numbered, purpose: ConnectionPurpose, connection: u32) {
        slots.closed(purpose);
        slots.put(purpose, connection);
    }

    /// A pool that opened these connections and was rejected at the next.
    fn refused_after(shares: PurposeShares, opened: &[ConnectionPurpose]) -> Numbered {
        let mut slots = Numbered::new(shares);
        for (number, purpose) in (1..).zip(opened) {
            slots.connected(*purpose, number);
        }
        slots.is_refused = true;
        slots
    }

    #[test]
    fn pool_shares_sum_to_the_configured_total() {
        for (max, general, groups) in [(16, 7, 8), (4, 1, 2), (3, 1, 1), (2, 1, 1), (1, 1, 1), (0, 1, 1)] {
            let shares = PurposeShares::split(max);
            assert_eq!((shares.general, shares.batches, shares.total), (general, groups, max.max(1)), "{max}");
        }
    }

    #[test]
    fn reads_are_taken_from_the_bound() {
        for (max, split) in [(16, Some((13, 3))), (100, Some((97, 3))), (6, Some((5, 1))), (3, None), (1, None)] {
            let mut slots = Numbered::new(PurposeShares::split(max));
            assert_eq!(slots.split_off(3), split, "{max}");
            assert_eq!(slots.total(), split.map_or(max, |(left, _)| left));
        }
    }

    #[test]
    fn each_purpose_gets_its_share() {
        let mut slots = Numbered::new(PurposeShares::split(4));
        for waiter in ['a', 'b', 'c'] {
            slots.wait(General, waiter);
        }
        slots.wait(Polls, 'p');
        assert_eq!(slots.assign().connects, [Polls, General], "polls first, and one for the rest");
        slots.connected(General, 1);
        slots.connected(Polls, 2);
        assert_eq!(lent(&mut slots), [('p', 2), ('a', 1)]);
        assert_eq!(slots.assign().connects, [], "the others wait for the one");
        back(&mut slots, General, 1);
        assert_eq!(lent(&mut slots), [('b', 1)]);
    }

    #[test]
    fn refused_pool_serves_polls_first() {
        let mut slots = refused_after(PurposeShares::split(16), &[Batches, Batches, General, General]);
        for waiter in ['a', 'b', 'c', 'd'] {
            slots.wait(General, waiter);
        }
        assert_eq!(lent(&mut slots), [('a', 4), ('b', 3), ('c', 2)], "one is left for others");
        slots.wait(Batches, 'g');
        slots.wait(Polls, 'p');
        assert_eq!(lent(&mut slots), [('p', 1)]);
        back(&mut slots, General, 2);
        assert_eq!(lent(&mut slots), [('d', 2)], "first come, first served");
        back(&mut slots, Polls, 1);
        assert_eq!(lent(&mut slots), [('g', 1)]);
    }

    #[test]
    fn single_connection_is_shared_in_turn() {
        for mut slots in
            [refused_after(PurposeShares::split(16), &[General]), refused_after(PurposeShares::split(1), &[General])]
        {
            slots.wait(Batches, 'g');
            slots.wait(General, 'a');
            slots.wait(Polls, 'p');
            assert_eq!(lent(&mut slots), [('p', 1)]);
            back(&mut slots, Polls, 1);
            assert_eq!(lent(&mut slots), [('g', 1)]);
            back(&mut slots, Batches, 1);
            assert_eq!(lent(&mut slots), [('a', 1)]);
        }
    }

    #[test]
    fn refused_pool_connects_one_at_a_time() {
        let mut slots = refused_after(PurposeShares::split(16), &[]);
        slots.wait(General, 'a');
        slots.wait(Batches, 'g');
        assert_eq!(slots.assign().connects, [General]);
        assert_eq!(slots.assign().connects, []);
        slots.may_connect_again();
        assert_eq!(slots.assign().connects.len(), 1);
        slots.connected(General, 1);
        assert_eq!(lent(&mut slots), [('a', 1)]);
    }
}
