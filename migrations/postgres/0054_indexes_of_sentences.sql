-- Indexes on sentences (0021, 0026), which no statement uses any more.
DROP INDEX jobs_parked_for_limits;
DROP INDEX jobs_parked_for_named_waits;
