//! The finished deliveries of a channel, and the frames that acknowledge them.
//!
//! A frame for many deliveries reaches no further than the first delivery that is still active. The broker numbers a
//! channel's deliveries from 1 without gaps. If a number is missing, nothing above it is ever acknowledged in
//! multiples. <https://www.rabbitmq.com/docs/confirms#consumer-acks-multiple-parameter>

use std::collections::BTreeMap;

/// One `basic.ack`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AckFrame {
    pub tag: u64,
    /// With all that are out below it.
    pub multiple: bool,
}

/// Runs of finished tags, first and last of each. There are at most as many as active deliveries, and one.
#[derive(Debug, Default)]
pub(super) struct AckTracker {
    finished: BTreeMap<u64, u64>,
}

impl AckTracker {
    /// The frames that acknowledge these and nothing else. Each is named once, and what was requeued, or acknowledged
    /// before, is written already: then no frame covers, or names, what the broker has no longer.
    pub fn acknowledge(&mut self, tags: &[u64]) -> Vec<AckFrame> {
        for tag in tags {
            self.finish(*tag);
        }
        let reach = self.finished.get(&1).copied().unwrap_or(0);
        let (below, above): (Vec<u64>, Vec<u64>) = tags.iter().partition(|tag| **tag <= reach);
        // The highest tag of a frame has to be one that is out, so it is the highest of these and not the reach.
        let many = below.iter().max().map(|tag| AckFrame { tag: *tag, multiple: below.len() > 1 });
        many.into_iter().chain(above.into_iter().map(|tag| AckFrame { tag, multiple: false })).collect()
    }

    /// Its own frame is written, so that no later one covers it.
    pub fn record_requeued(&mut self, tag: u64) {
        self.finish(tag);
    }

    fn finish(&mut self, tag: u64) {
        let last = self.finished.remove(&(tag + 1)).unwrap_or(tag);
        match self.finished.range_mut(..tag).next_back() {
            Some((_, end)) if *end + 1 == tag => *end = last,
            _ => {
                self.finished.insert(tag, last);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const fn one(tag: u64) -> AckFrame {
        AckFrame { tag, multiple: false }
    }

    const fn up_to(tag: u64) -> AckFrame {
        AckFrame { tag, multiple: true }
    }

    #[test]
    fn multiple_ack_ends_below_the_first_unacked() {
        let mut tags = AckTracker::default();
        let requeued = |tags: &mut AckTracker, tag| {
            tags.record_requeued(tag);
            Vec::new()
        };
        for (step, (frames, expected)) in [
            (tags.acknowledge(&[1]), vec![one(1)]),
            (tags.acknowledge(&[3, 2]), vec![up_to(3)]),
            // 4 is active.
            (tags.acknowledge(&[6, 5]), vec![one(6), one(5)]),
            (tags.acknowledge(&[8]), vec![one(8)]),
            // What was acknowledged alone is gone: the frame names 4, and not 6.
            (tags.acknowledge(&[4]), vec![one(4)]),
            (requeued(&mut tags, 7), vec![]),
            (tags.acknowledge(&[10, 9]), vec![up_to(10)]),
            (requeued(&mut tags, 12), vec![]),
            (tags.acknowledge(&[14, 13, 11]), vec![up_to(14)]),
            (tags.acknowledge(&[]), vec![]),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(frames, expected, "step {step}");
        }
        assert_eq!(tags.finished, BTreeMap::from([(1, 14)]));
    }

    #[test]
    fn one_unacked_delivery_costs_no_memory() {
        let mut tags = AckTracker::default();
        for tag in 2..10_000 {
            assert_eq!(tags.acknowledge(&[tag]), [one(tag)]);
        }
        assert_eq!(tags.finished.len(), 1);
    }

    /// What happens to a channel's deliveries, one batch after the other.
    #[derive(Clone, Debug)]
    struct Batch {
        delivered: usize,
        /// Which of the active ones, by their place.
        acknowledged: Vec<prop::sample::Index>,
        requeued: Vec<prop::sample::Index>,
    }

    fn batch() -> impl Strategy<Value = Batch> {
        let picked = || prop::collection::vec(any::<prop::sample::Index>(), 0..8);
        (0..12_usize, picked(), prop::collection::vec(any::<prop::sample::Index>(), 0..2))
            .prop_map(|(delivered, acknowledged, requeued)| Batch { delivered, acknowledged, requeued })
    }

    fn pick(unacked: &mut Vec<u64>, places: &[prop::sample::Index]) -> Vec<u64> {
        let take = |place: &prop::sample::Index| {
            (!unacked.is_empty()).then(|| unacked.swap_remove(place.index(unacked.len())))
        };
        places.iter().filter_map(take).collect()
    }

    /// As RabbitMQ does it: a tag that is not out is an error that closes the channel.
    fn broker(out: &mut BTreeSet<u64>, frame: AckFrame) -> BTreeSet<u64> {
        assert!(out.contains(&frame.tag), "{frame:?}: unknown delivery tag");
        if !frame.multiple {
            out.remove(&frame.tag);
            return BTreeSet::from([frame.tag]);
        }
        let rest = out.split_off(&(frame.tag + 1));
        std::mem::replace(out, rest)
    }

    proptest! {
        #[test]
        fn only_finished_tags_are_acknowledged(batches in prop::collection::vec(batch(), 1..40)) {
            let (mut tags, mut out, mut unacked, mut next) = (AckTracker::default(), BTreeSet::new(), Vec::new(), 1);
            for batch in batches {
                for tag in next..next + batch.delivered as u64 {
                    out.insert(tag);
                    unacked.push(tag);
                }
                next += batch.delivered as u64;
                for tag in pick(&mut unacked, &batch.requeued) {
                    prop_assert!(out.remove(&tag));
                    tags.record_requeued(tag);
                }
                let asked = pick(&mut unacked, &batch.acknowledged);
                let frames = tags.acknowledge(&asked);
                prop_assert!(frames.iter().filter(|frame| frame.multiple).count() <= 1);
                let done: BTreeSet<u64> = frames.into_iter().flat_map(|frame| broker(&mut out, frame)).collect();
                prop_assert_eq!(done, asked.into_iter().collect::<BTreeSet<_>>());
                prop_assert_eq!(&out, &unacked.iter().copied().collect::<BTreeSet<_>>());
                prop_assert!(tags.finished.len() <= unacked.len() + 1);
            }
        }
    }
}
