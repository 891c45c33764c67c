-- The URL of charges may hold the job's fields in path or query. An unknown placeholder would be sent literally, and
-- one in the host would let a job choose the host. Triggers, because SQLite cannot add a CHECK to an existing column.
CREATE TRIGGER placeholders_of_url_on_insert BEFORE INSERT ON providers
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: placeholders_of_url_are_id_idempotency_key_reference_or_account') WHERE instr(
        replace(replace(replace(replace(replace(NEW.url, '${job:', '${'),
            '${id}', ''), '${idempotency_key}', ''), '${reference}', ''), '${account}', ''), '${') > 0;
    SELECT raise(ABORT, 'CHECK constraint failed: url_has_no_placeholder_in_its_host')
    FROM (SELECT substr(NEW.url, instr(NEW.url, '://') + 3) AS rest)
    WHERE instr(rest, '${') > 0
        AND NOT (instr(rest, '/') > 1 AND instr(rest, '/') < instr(rest, '${'))
        AND NOT (instr(rest, '?') > 1 AND instr(rest, '?') < instr(rest, '${'));
END;
CREATE TRIGGER placeholders_of_url_on_update BEFORE UPDATE OF url ON providers
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: placeholders_of_url_are_id_idempotency_key_reference_or_account') WHERE instr(
        replace(replace(replace(replace(replace(NEW.url, '${job:', '${'),
            '${id}', ''), '${idempotency_key}', ''), '${reference}', ''), '${account}', ''), '${') > 0;
    SELECT raise(ABORT, 'CHECK constraint failed: url_has_no_placeholder_in_its_host')
    FROM (SELECT substr(NEW.url, instr(NEW.url, '://') + 3) AS rest)
    WHERE instr(rest, '${') > 0
        AND NOT (instr(rest, '/') > 1 AND instr(rest, '/') < instr(rest, '${'))
        AND NOT (instr(rest, '?') > 1 AND instr(rest, '?') < instr(rest, '${'));
END;
