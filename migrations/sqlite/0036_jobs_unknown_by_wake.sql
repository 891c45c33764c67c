-- For look-ups of a lane whose charges alone are limited. A payment whose outcome is known costs it nothing.
CREATE INDEX jobs_unknown_by_wake ON jobs (provider, wake_at) WHERE state = 'unknown';
