-- As 0042.
ALTER TABLE outcome_events ADD CONSTRAINT instants_are_finite CHECK (
    least(at, taken_until, published_at, next_try_at) >= '0001-01-01 00:00:00+00'
    AND greatest(at, taken_until, published_at, next_try_at) < '9999-12-30 22:00:00+00') NOT VALID;
