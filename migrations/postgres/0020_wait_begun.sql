-- Jobs that a limit has delayed are woken when it changes: those whose wait began before. Instants that every claim
-- changes do not show that, because a copy of the message may come long before it is due.
ALTER TABLE jobs ADD COLUMN wait_begun_at timestamptz;
