-- no-transaction
-- References that no limit counts any more, oldest first. The condition is written exactly as in the statement that
-- empties them, so that no search for one reference uses this index, whatever the statistics say.
CREATE INDEX CONCURRENTLY IF NOT EXISTS attempts_with_a_reference ON attempts (began_at) WHERE (reference || '') IS NOT NULL;
