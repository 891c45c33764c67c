//! A plain definition of the four algorithms that count starts: it keeps every start and computes each answer from all
//! of them. It shares no code with the limiter.

use sluicegate::domain::limit::Algorithm;
use sluicegate::domain::provider::BOOKING_HORIZON;
use sluicegate::domain::quota_spec::WINDOW_BUCKETS;
use sluicegate::domain::time::micros_up;

use super::*;

#[derive(Clone, Debug)]
pub struct Oracle {
    limit: LimitSpec,
    /// No start before this instant.
    held_until_us: u64,
    /// Starts and costs, oldest first; for a sliding window the instant from which each counts.
    uses: Vec<(u64, u64)>,
}

/// What the definition answers to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Says {
    StartsAt(u64),
    /// The cost exceeds what the limit ever admits.
    Never,
}

impl Oracle {
    pub fn new(limit: LimitSpec) -> Self {
        Self { limit, held_until_us: 0, uses: Vec::new() }
    }

    fn max(&self) -> u64 {
        u64::from(self.limit.cost_max())
    }

    fn window_us(&self) -> u64 {
        micros_up(self.limit.window)
    }

    /// How long a use counts.
    pub fn counts_for_us(&self) -> u64 {
        match self.limit.algorithm {
            Algorithm::SlidingLog | Algorithm::SlidingWindow => self.limit.padded_window_us(),
            Algorithm::FixedWindow => self.window_us(),
            Algorithm::TokenBucket | Algorithm::Gcra => self.interval_us() * self.max().max(1),
            Algorithm::Concurrency => unreachable!("it counts no starts"),
        }
    }

    /// Time that one use of a bucket takes to drain; whole microseconds in these tests.
    fn interval_us(&self) -> u64 {
        let per = u64::from(self.limit.max_requests).max(1);
        assert_eq!(self.window_us() % per, 0);
        self.window_us() / per
    }

    fn calendar_window(&self, at_us: u64) -> u64 {
        (at_us - micros_up(self.limit.offset)) / self.window_us()
    }

    fn begin_us(&self, calendar_window: u64) -> u64 {
        calendar_window * self.window_us() + micros_up(self.limit.offset)
    }

    fn in_calendar_window(&self, window: u64) -> u64 {
        self.uses.iter().filter(|(at_us, _)| self.calendar_window(*at_us) == window).map(|(_, cost)| cost).sum()
    }

    /// Level of a bucket at an instant, in microseconds of draining.
    fn level_us(&self, at_us: u64) -> u64 {
        let (mut level, mut since) = (0_u64, 0_u64);
        for (used_us, cost) in &self.uses {
            level = level.saturating_sub(used_us - since) + cost * self.interval_us();
            since = *used_us;
        }
        if at_us >= since { level.saturating_sub(at_us - since) } else { level + (since - at_us) }
    }

    /// Uses of a sliding window that count at an instant, including booked ones.
    fn counting(&self, at_us: u64) -> u64 {
        let window_us = self.counts_for_us();
        self.uses.iter().filter(|(from_us, _)| from_us + window_us > at_us).map(|(_, cost)| cost).sum()
    }

    /// The earliest start of a request of this cost, from an instant on.
    pub fn earliest(&self, cost: u64, from_us: u64) -> Says {
        if cost > self.max() {
            return Says::Never;
        }
        let from_us = from_us.max(self.held_until_us);
        Says::StartsAt(match self.limit.algorithm {
            Algorithm::FixedWindow => {
                let first = self.calendar_window(from_us);
                let window = (first..).find(|window| self.in_calendar_window(*window) + cost <= self.max()).unwrap();
                from_us.max(self.begin_us(window))
            }
            Algorithm::TokenBucket | Algorithm::Gcra => {
                let room_us = self.interval_us() * self.max();
                from_us + (self.level_us(from_us) + cost * self.interval_us()).saturating_sub(room_us)
            }
            Algorithm::Concurrency => unreachable!("it counts no starts"),
            Algorithm::SlidingLog | Algorithm::SlidingWindow => {
                let window_us = self.counts_for_us();
                let ends = self.uses.iter().map(|(from, _)| from + window_us).filter(|end_us| *end_us > from_us);
                let mut instants: Vec<u64> = std::iter::once(from_us).chain(ends).collect();
                instants.sort_unstable();
                instants.into_iter().find(|at_us| self.counting(*at_us) + cost <= self.max()).unwrap()
            }
        })
    }

    /// Whether a start is booked: it is within the booking horizon, and in this calendar window or the next.
    fn books(&self, start_us: u64, now_us: u64) -> bool {
        let is_far = self.limit.algorithm == Algorithm::FixedWindow
            && self.calendar_window(start_us) > self.calendar_window(now_us) + 1;
        start_us <= now_us + micros_up(BOOKING_HORIZON) && !is_far
    }

    pub fn take(&mut self, cost: u64, start_us: u64) {
        let granule_us = match self.limit.algorithm {
            Algorithm::SlidingWindow => {
                u64::try_from(self.limit.window.as_millis()).unwrap().div_ceil(WINDOW_BUCKETS) * 1_000
            }
            _ => 1,
        };
        // Uses are kept in order. After one that was rounded up to a longer granule, no later use counts from before
        // it.
        let is_rolling = self.limit.algorithm == Algorithm::SlidingWindow;
        let last_us = self.uses.last().filter(|_| is_rolling).map_or(0, |(from_us, _)| *from_us);
        self.uses.push(((start_us.div_ceil(granule_us) * granule_us).max(last_us), cost));
    }

    /// Changes the limit at an instant; `before_us`: how long permits granted before may still run.
    pub fn change(&mut self, limit: LimitSpec, now_us: u64, before_us: u64) {
        let is_bucket = |limit: &LimitSpec| matches!(limit.algorithm, Algorithm::TokenBucket | Algorithm::Gcra);
        let was = std::mem::replace(&mut self.limit, limit);
        let unknown_until_us = now_us + before_us + self.counts_for_us();
        if is_bucket(&was) && is_bucket(&self.limit) {
            let old = Self { limit: was, ..self.clone() };
            if old.interval_us() == self.interval_us() {
                return;
            }
            let uses = old.level_us(now_us).div_ceil(old.interval_us());
            self.uses = vec![(now_us, uses)];
        } else if was.algorithm != self.limit.algorithm
            || was.algorithm == Algorithm::FixedWindow
                && (was.window, was.offset) != (self.limit.window, self.limit.offset)
        {
            self.uses.clear();
            self.held_until_us = unknown_until_us;
        } else if self.limit.window > was.window {
            self.held_until_us = unknown_until_us;
        }
    }

    /// What can be granted at once, if no counted use ends meanwhile.
    fn remaining(&self, now_us: u64) -> u64 {
        match self.limit.algorithm {
            Algorithm::FixedWindow => self.max().saturating_sub(self.in_calendar_window(self.calendar_window(now_us))),
            Algorithm::TokenBucket | Algorithm::Gcra => {
                (self.interval_us() * self.max()).saturating_sub(self.level_us(now_us)) / self.interval_us()
            }
            Algorithm::Concurrency => unreachable!("it counts no starts"),
            Algorithm::SlidingLog | Algorithm::SlidingWindow => self.max().saturating_sub(self.counting(now_us)),
        }
    }

    /// Time until no use counts any more.
    fn reset_us(&self, now_us: u64) -> u64 {
        let last_us = self.uses.iter().map(|(at_us, _)| *at_us).max().unwrap_or(0);
        let free_us = match self.limit.algorithm {
            _ if last_us == 0 => 0,
            Algorithm::FixedWindow => self.begin_us(self.calendar_window(last_us) + 1),
            Algorithm::TokenBucket | Algorithm::Gcra => now_us + self.level_us(now_us),
            Algorithm::Concurrency => unreachable!("it counts no starts"),
            Algorithm::SlidingLog | Algorithm::SlidingWindow => last_us + self.counts_for_us(),
        };
        free_us.saturating_sub(now_us)
    }

    /// Checks a reply against the definition, for single permits of these costs. All that start within the booking
    /// horizon must be granted. Records the grants and returns their number.
    #[track_caller]
    pub fn holds(&mut self, reply: &LimiterReply, costs: &[u32]) -> usize {
        let now_us = reply.now.0;
        let waits: Vec<u64> = reply
            .grants
            .iter()
            .flat_map(|run| std::iter::repeat_n(run.wait_us, usize::try_from(run.permits).unwrap()))
            .collect();
        let (mut granted, mut used) = (0, 0);
        for cost in costs.iter().map(|cost| u64::from(*cost)) {
            // Starts granted by this call free no slot for its later permits: a sliding window does not search for
            // their end.
            let rolls = self.limit.algorithm == Algorithm::SlidingWindow;
            let says = if rolls && used + cost > self.max() { Says::Never } else { self.earliest(cost, now_us) };
            match says {
                Says::StartsAt(start_us) if self.books(start_us, now_us) => {
                    assert_eq!(
                        waits.get(granted),
                        Some(&(start_us - now_us)),
                        "permit {granted} of {reply:?}\n{self:?}"
                    );
                    self.take(cost, start_us);
                    granted += 1;
                    used += cost;
                }
                Says::StartsAt(start_us) => {
                    let refusal = refused(reply);
                    assert_eq!((refusal.wait_us, refusal.exact), (start_us - now_us, true), "{reply:?}\n{self:?}");
                    break;
                }
                Says::Never => {
                    let refusal = refused(reply);
                    assert_eq!((refusal.wait_us, refusal.exact), (self.counts_for_us(), false), "{reply:?}\n{self:?}");
                    break;
                }
            }
        }
        assert_eq!(waits.len(), granted, "{reply:?}\n{self:?}");
        assert_eq!(reply.refused.is_some(), granted < costs.len(), "{reply:?}");
        self.holds_figures(reply);
        granted
    }

    #[track_caller]
    fn holds_figures(&self, reply: &LimiterReply) {
        let now_us = reply.now.0;
        assert_eq!(reply.deciding_limit, 0);
        assert_eq!(reply.reset_us, self.reset_us(now_us), "{reply:?}\n{self:?}");
        let remaining = self.remaining(now_us);
        if self.limit.algorithm == Algorithm::SlidingWindow {
            // The limiter's `remaining` is a safe lower bound, from the last use alone. It must be exact if all uses
            // count or none does.
            let ever: u64 = self.uses.iter().map(|(_, cost)| cost).sum();
            let is_plain = self.reset_us(now_us) == 0 || self.counting(now_us) == ever;
            assert!(reply.remaining <= remaining && (!is_plain || reply.remaining == remaining), "{reply:?}\n{self:?}");
        } else {
            assert_eq!(reply.remaining, remaining, "{reply:?}\n{self:?}");
        }
    }
}
