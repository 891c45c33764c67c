-- For what a job was put down last, before it was sent: written by the statement that puts it down, kept by all later ones,
-- so that its story can say why it was late once it has been sent.
ALTER TABLE jobs ADD COLUMN wait_reason TEXT;
ALTER TABLE jobs ADD COLUMN wait_since INTEGER;
ALTER TABLE jobs ADD COLUMN wait_until INTEGER;
-- The number of the request that it waited to send: waits for one reason before one request are one wait.
ALTER TABLE jobs ADD COLUMN wait_request INTEGER;
