-- The URL of charges may hold the job's fields in path or query. An unknown placeholder would be sent literally, and
-- one in the host would let a job choose the host. Not valid: an existing row with one already disables its own
-- provider when it is read, and the log says why.
ALTER TABLE providers ADD CONSTRAINT placeholders_of_url_are_id_idempotency_key_reference_or_account
    CHECK (regexp_replace(url, '\$\{(job:)?(id|idempotency_key|reference|account)\}', '', 'g') !~ '\$\{') NOT VALID;
ALTER TABLE providers ADD CONSTRAINT url_has_no_placeholder_in_its_host
    CHECK (url !~ '^[^:]*://[/\\]*[^/\\?#]*\$\{') NOT VALID;
