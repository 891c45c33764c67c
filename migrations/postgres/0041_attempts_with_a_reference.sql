-- no-transaction
-- References that no limit counts any more, oldest first. The condition is written as the statement that forgets them
-- writes it, so that no look for one reference takes this index, whatever the statistics say.
CREATE INDEX CONCURRENTLY IF NOT EXISTS attempts_with_a_reference ON attempts (began_at) WHERE (reference || '') IS NOT NULL;
