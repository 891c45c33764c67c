-- As 0042.
ALTER TABLE attempts ADD CONSTRAINT instants_are_finite CHECK (
    least(began_at, ended_at) >= '0001-01-01 00:00:00+00'
    AND greatest(began_at, ended_at) < '9999-12-30 22:00:00+00') NOT VALID;
