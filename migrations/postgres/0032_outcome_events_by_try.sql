-- no-transaction
-- Unpublished events: those that were never rejected in their order, and the others by the instant of their next try.
CREATE INDEX CONCURRENTLY IF NOT EXISTS outcome_events_by_try ON outcome_events (next_try_at, sequence) WHERE published_at IS NULL;
