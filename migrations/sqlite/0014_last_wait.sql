-- The reason of the last delay before a request: the statement that delays the job writes it, and later ones keep it.
-- So the job's details can say why it was late.
ALTER TABLE jobs ADD COLUMN wait_reason TEXT;
ALTER TABLE jobs ADD COLUMN wait_since INTEGER;
ALTER TABLE jobs ADD COLUMN wait_until INTEGER;
-- The number of the request that it waited to send: delays for one reason before one request are one wait.
ALTER TABLE jobs ADD COLUMN wait_request INTEGER;
