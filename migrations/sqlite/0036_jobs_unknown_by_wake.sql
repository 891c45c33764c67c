-- For look-ups of a lane that limits only charges. A payment whose outcome is known costs it nothing.
CREATE INDEX jobs_unknown_by_wake ON jobs (provider, wake_at) WHERE state = 'unknown';
