//! The one order of events, as its sequencer knows it: what is placed, and which smaller sequences may still appear.
//!
//! PostgreSQL draws an event's sequence before the commit. A reader of "all sequences above the last" would lose an
//! event whose transaction commits after a later one. So each sequence that is missed is remembered as a gap, and its
//! event gets its place when it appears. No reader waits for a gap.
//!
//! A gap is forgotten when nothing can fill it any more. An event is never its transaction's first write, so the
//! transaction is older than the sequence. The batch that first names the gap is written later than both. Once all
//! transactions older than that batch's have ended, the event is there, or was rolled back.

use std::ops::RangeInclusive;

/// Where the order ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OrderEnd {
    /// The place of the last event; 0 without any.
    pub position: i64,
    /// The largest sequence that is placed.
    pub highest: i64,
    /// Smaller sequences that may still appear.
    pub gaps: Vec<RangeInclusive<i64>>,
}

/// One batch of the order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventBatch {
    /// The position after which it begins.
    pub previous: i64,
    /// The sequences of its events, in their order.
    pub events: Vec<i64>,
    pub end: OrderEnd,
}

/// What one look at the events found, in one snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventLook {
    /// Sequences above the highest and in gaps, smallest first.
    pub found: Vec<i64>,
    /// There are no others.
    pub is_complete: bool,
    /// The oldest transaction that had not ended.
    pub oldest_writer: i64,
}

/// Missing sequences that were missed in the same batch.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Gap {
    missing: RangeInclusive<i64>,
    /// Only transactions older than this one can still bring them; `None` until the batch that names them is written.
    writers_before: Option<i64>,
}

/// The order, for the process that continues it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventOrder {
    position: i64,
    highest: i64,
    gaps: Vec<Gap>,
}

impl EventOrder {
    /// Continues an order that any process has written. `next_writer` is a transaction that began after its end was read.
    pub fn continued(end: OrderEnd, next_writer: i64) -> Self {
        let gap = |missing| Gap { missing, writers_before: Some(next_writer) };
        let OrderEnd { position, highest, gaps } = end;
        Self { position, highest, gaps: gaps.into_iter().map(gap).collect() }
    }

    /// The place of the last event.
    pub fn position(&self) -> i64 {
        self.position
    }

    pub fn highest(&self) -> i64 {
        self.highest
    }

    /// Sequences that may still appear below the highest.
    pub fn gaps(&self) -> Vec<RangeInclusive<i64>> {
        self.gaps.iter().map(|gap| gap.missing.clone()).collect()
    }

    /// Places what was found; `None` when that is nothing. The caller writes the batch, and then calls
    /// [`EventOrder::record_written`]. If another sequencer has written one, this order is void.
    pub fn place(&mut self, look: &EventLook) -> Option<EventBatch> {
        let highest = look.found.last().map_or(self.highest, |last| self.highest.max(*last));
        let mut gaps = Vec::new();
        for Gap { missing, writers_before } in self.gaps.drain(..) {
            let is_final = look.is_complete && writers_before.is_some_and(|writer| look.oldest_writer >= writer);
            if !is_final {
                gaps.extend(not_among(missing, &look.found).map(|missing| Gap { missing, writers_before }));
            }
        }
        let skipped = not_among(self.highest + 1..=highest, &look.found);
        gaps.extend(skipped.map(|missing| Gap { missing, writers_before: None }));
        let previous = self.position;
        let count = i64::try_from(look.found.len()).unwrap_or(i64::MAX);
        *self = Self { position: previous.saturating_add(count), highest, gaps };
        let end = || OrderEnd { position: self.position, highest, gaps: self.gaps() };
        (count > 0).then(|| EventBatch { previous, events: look.found.clone(), end: end() })
    }

    /// Says which transaction wrote the last batch.
    pub fn record_written(&mut self, writer: i64) {
        for gap in &mut self.gaps {
            gap.writers_before.get_or_insert(writer);
        }
    }
}

/// The parts of a range between the numbers that were found, which ascend.
fn not_among(range: RangeInclusive<i64>, found: &[i64]) -> impl Iterator<Item = RangeInclusive<i64>> {
    let mut next = *range.start();
    let after = range.end().saturating_add(1);
    let inside = found.iter().copied().filter(move |number| range.contains(number)).chain([after]);
    let parts = inside.map(move |number| {
        let part = next..=number - 1;
        next = number + 1;
        part
    });
    parts.filter(|part| !part.is_empty())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn look(found: &[i64], oldest_writer: i64) -> EventLook {
        EventLook { found: found.to_vec(), is_complete: true, oldest_writer }
    }

    #[test]
    fn late_sequence_gets_the_next_place() {
        let mut order = EventOrder::continued(OrderEnd::default(), 1);
        let first = order.place(&look(&[2, 5], 10)).unwrap();
        assert_eq!((first.previous, first.end), (0, OrderEnd { position: 2, highest: 5, gaps: vec![1..=1, 3..=4] }));
        order.record_written(20);
        let second = order.place(&look(&[3], 10)).unwrap();
        assert_eq!((second.previous, second.events), (2, vec![3]));
        assert_eq!(second.end, OrderEnd { position: 3, highest: 5, gaps: vec![1..=1, 4..=4] });
    }

    /// The transaction that may fill the gap is older than the batch that first names it, and not always older than the
    /// look that missed it.
    #[test]
    fn gap_is_forgotten_when_all_older_writers_have_ended() {
        let mut order = EventOrder::continued(OrderEnd::default(), 1);
        order.place(&look(&[2], 10)).unwrap();
        assert_eq!(order.place(&look(&[], i64::MAX)), None);
        assert_eq!(order.gaps(), [1..=1], "the batch is not written yet");
        order.record_written(20);
        order.place(&look(&[], 19));
        assert_eq!(order.gaps(), [1..=1]);
        order.place(&EventLook { is_complete: false, ..look(&[], 20) });
        assert_eq!(order.gaps(), [1..=1], "it may be among those that the look left out");
        order.place(&look(&[], 20));
        assert_eq!(order.gaps(), []);
    }

    #[test]
    fn successor_continues_with_the_gaps() {
        let mut order = EventOrder::continued(OrderEnd::default(), 1);
        let last = order.place(&look(&[4], 10)).unwrap();
        let mut next = EventOrder::continued(last.end, 30);
        next.place(&look(&[], 29));
        assert_eq!((next.position(), next.highest(), next.gaps()), (1, 4, vec![1..=3]));
        next.place(&look(&[2], 30));
        assert_eq!((next.position(), next.gaps()), (2, vec![]));
    }

    /// A transaction of the model: its sequences, and when it begins to write, commits or rolls back.
    #[derive(Clone, Debug)]
    struct Writer {
        sequences: Vec<i64>,
        ends_at: usize,
        commits: bool,
    }

    proptest! {
        /// Transactions that end in any order, with looks and successors between: each committed event has one place,
        /// and no gap is left in the end.
        #[test]
        fn each_committed_event_gets_one_place(
            ends in prop::collection::vec((1_usize..12, any::<bool>(), 1_i64..4), 1..12),
            successors in prop::collection::vec(any::<bool>(), 30),
        ) {
            let mut next_sequence = 1;
            let mut writers = Vec::new();
            let mut placed: Vec<i64> = Vec::new();
            let mut order = EventOrder::continued(OrderEnd::default(), 1);
            let mut last = OrderEnd::default();
            // Transactions are numbered by the time at which they begin: the writers at even, the batches at odd times.
            for (time, has_successor) in successors.into_iter().enumerate() {
                if let Some((lasts, commits, events)) = ends.get(time) {
                    let sequences = (next_sequence..next_sequence + events).collect();
                    next_sequence += events;
                    writers.push(Writer { sequences, ends_at: time + lasts, commits: *commits });
                }
                let oldest = writers.iter().position(|writer| writer.ends_at > time).unwrap_or(time + 1);
                let visible = writers.iter().filter(|writer| writer.ends_at <= time && writer.commits);
                let visible: BTreeSet<i64> = visible.flat_map(|writer| writer.sequences.clone()).collect();
                let gaps = order.gaps();
                let wanted = |number: &i64| *number > order.highest() || gaps.iter().any(|gap| gap.contains(number));
                let found: Vec<i64> = visible.into_iter().filter(wanted).collect();
                let oldest_writer = 2 * i64::try_from(oldest).unwrap();
                let this_writer = 2 * i64::try_from(time).unwrap() + 1;
                if let Some(batch) = order.place(&look(&found, oldest_writer)) {
                    placed.extend(&batch.events);
                    prop_assert_eq!(usize::try_from(batch.end.position).unwrap(), placed.len());
                    order.record_written(this_writer);
                    last = batch.end;
                }
                if has_successor {
                    order = EventOrder::continued(last.clone(), this_writer);
                }
            }
            let committed = writers.iter().filter(|writer| writer.commits).flat_map(|writer| writer.sequences.clone());
            placed.sort_unstable();
            prop_assert_eq!(placed, committed.collect::<Vec<_>>());
            order.place(&look(&[], i64::MAX));
            prop_assert_eq!(order.gaps(), []);
        }
    }
}
