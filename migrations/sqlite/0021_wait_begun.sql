-- Jobs that a limit has put down are woken when it changes: those whose wait began before. Instants that every claim moves
-- do not tell, because a copy of the message may come long before its time.
ALTER TABLE jobs ADD COLUMN wait_begun_at INTEGER;
