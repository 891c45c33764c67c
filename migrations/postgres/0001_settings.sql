-- Providers, their limits and account rules, as operators set them, with their version and their audit. Column meanings
-- and defaults: docs, "Database". Constraint names are sentences, because operators read them in error messages.

-- Every text column and domain has the collation "C": texts are compared byte by byte, as in SQLite and the program.
-- An upgrade of the operating system may change the order of a language. Then an index in that order does not find its
-- rows any more, and a payment that is published again is a new one. A column that is no key has "C" too: a later
-- statement or index may use it, and both databases sort alike.

-- Functions that write an audit or the version run with the owner's rights, so that no role needs a right to these
-- tables. They find all names in this schema: a caller may have a temporary table of the same name.
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

-- One row, not a sequence: a writer locks it until its commit. So versions become visible in their order, and a poller
-- that has seen version n has seen all changes before it.
CREATE TABLE settings_version (
    only_row boolean PRIMARY KEY DEFAULT true CONSTRAINT settings_version_has_one_row CHECK (only_row),
    version  bigint NOT NULL
);
INSERT INTO settings_version (version) VALUES (1);

-- The id of this database, so that a command can tell its running process from one on another database. A copy and a
-- restored backup have the id of their original; docs/runbook.md says when to change it.
CREATE TABLE deployment (
    only_row integer PRIMARY KEY DEFAULT 1 CONSTRAINT deployment_has_one_row CHECK (only_row = 1),
    id uuid NOT NULL
);
INSERT INTO deployment (id) VALUES (gen_random_uuid());

CREATE TABLE providers (
    name text COLLATE "C" NOT NULL PRIMARY KEY
        CONSTRAINT name_is_1_to_63_of_a_z_0_9_underscore_dash CHECK (name ~ '^[a-z0-9][a-z0-9_-]{0,62}$')
        CONSTRAINT name_is_not_one_of_our_queues CHECK (name NOT IN ('invalid', 'dead', 'outcomes')),
    kind text COLLATE "C" NOT NULL DEFAULT 'http' CONSTRAINT kind_is_http CHECK (kind = 'http'),
    quota text COLLATE "C"
        CONSTRAINT quota_is_1_to_63_of_a_z_0_9_underscore_dash CHECK (quota ~ '^[a-z0-9][a-z0-9_-]{0,62}$'),
    enabled boolean NOT NULL DEFAULT true,
    paused boolean NOT NULL DEFAULT false,
    -- When an operator ended the waits that the provider had named.
    resumed_at timestamptz,

    -- The request.
    url text COLLATE "C" NOT NULL
        CONSTRAINT url_is_http_or_https_without_spaces
            CHECK (url ~ '^https?://[^[:space:][:cntrl:]]+$' AND char_length(url) <= 2048)
        -- An unknown placeholder would be sent literally, and one in the host would let a job choose the host.
        CONSTRAINT placeholders_of_url_are_id_idempotency_key_reference_or_account
            CHECK (regexp_replace(url, '\$\{(job:)?(id|idempotency_key|reference|account)\}', '', 'g') !~ '\$\{')
        CONSTRAINT url_has_no_placeholder_in_its_host CHECK (url !~ '^[^:]*://[/\\]*[^/\\?#]*\$\{'),
    headers jsonb NOT NULL DEFAULT '{}'
        CONSTRAINT headers_is_an_object_of_strings
            CHECK (jsonb_typeof(headers) = 'object' AND NOT jsonb_path_exists(headers, '$.* ? (@.type() != "string")')),
    request jsonb CONSTRAINT request_is_an_object CHECK (jsonb_typeof(request) = 'object'),
    lookup jsonb CONSTRAINT lookup_is_an_object CHECK (jsonb_typeof(lookup) = 'object'),
    statuses jsonb CONSTRAINT statuses_is_an_object CHECK (jsonb_typeof(statuses) = 'object'),
    -- A message without these fields is no job.
    require jsonb NOT NULL DEFAULT '[]'
        CONSTRAINT require_is_a_list_of_account_and_reference
            CHECK (jsonb_typeof(require) = 'array' AND require <@ '["account", "reference"]'),
    -- How the provider counts money. NULL: every currency, as ISO 4217 counts it.
    currencies jsonb CONSTRAINT currencies_is_a_list_of_currency_codes
        CHECK (jsonb_typeof(currencies) = 'array' AND currencies <> '[]' AND NOT jsonb_path_exists(
            currencies, '$[*] ? (!(@.type() == "string" && @ like_regex "^[A-Z]{3}$"))')),
    decimals jsonb CONSTRAINT decimals_is_an_object_of_digits
        CHECK (jsonb_typeof(decimals) = 'object'
               AND NOT jsonb_path_exists(decimals, '$.* ? (!(@.type() == "number" && @ >= 0 && @ <= 6))')),
    amount_step jsonb CONSTRAINT amount_step_is_an_object_of_steps
        CHECK (jsonb_typeof(amount_step) = 'object'
               AND NOT jsonb_path_exists(amount_step, '$.* ? (!(@.type() == "number" && @ >= 1 && @ <= 1000000))')),
    idempotency_retention_s bigint
        CONSTRAINT idempotency_retention_s_is_1_to_315360000_or_null
            CHECK (idempotency_retention_s BETWEEN 1 AND 315360000),
    timeout_ms bigint NOT NULL DEFAULT 10000
        CONSTRAINT timeout_ms_is_1_to_600000 CHECK (timeout_ms BETWEEN 1 AND 600000),
    send_budget_ms bigint NOT NULL DEFAULT 500
        CONSTRAINT send_budget_ms_is_1_to_60000 CHECK (send_budget_ms BETWEEN 1 AND 60000),
    connection_max_age_ms bigint NOT NULL DEFAULT 60000
        CONSTRAINT connection_max_age_ms_is_1000_to_3600000 CHECK (connection_max_age_ms BETWEEN 1000 AND 3600000),
    -- Whether a charge may use a connection that was used before. NULL: decided by retention and look-ups.
    reuse_connections boolean,

    -- The lane.
    mode text COLLATE "C" NOT NULL DEFAULT 'blocking'
        CONSTRAINT mode_is_blocking_or_requeue CHECK (mode IN ('blocking', 'requeue')),
    "order" text COLLATE "C" NOT NULL DEFAULT 'none'
        CONSTRAINT order_is_none_or_account CHECK ("order" IN ('none', 'account')),
    workers bigint NOT NULL DEFAULT 32 CONSTRAINT workers_is_1_to_10000 CHECK (workers BETWEEN 1 AND 10000),
    bucket_capacity bigint NOT NULL DEFAULT 256
        CONSTRAINT bucket_capacity_is_1_to_65535 CHECK (bucket_capacity BETWEEN 1 AND 65535),
    -- NaN sorts above every number, so the upper bound rejects it.
    leak_per_second double precision
        CONSTRAINT leak_per_second_is_above_0 CHECK (leak_per_second > 0 AND leak_per_second <= 1000000),
    max_wait_ms bigint NOT NULL DEFAULT 5000
        CONSTRAINT max_wait_ms_is_0_to_60000 CHECK (max_wait_ms BETWEEN 0 AND 60000),
    max_attempts bigint NOT NULL DEFAULT 8
        CONSTRAINT max_attempts_is_1_to_1000 CHECK (max_attempts BETWEEN 1 AND 1000),
    max_age_s bigint NOT NULL DEFAULT 259200
        CONSTRAINT max_age_s_is_1_to_315360000 CHECK (max_age_s BETWEEN 1 AND 315360000),
    backoff_base_ms bigint NOT NULL DEFAULT 500
        CONSTRAINT backoff_base_ms_is_at_least_1 CHECK (backoff_base_ms >= 1),
    backoff_max_ms bigint NOT NULL DEFAULT 60000
        CONSTRAINT backoff_max_ms_is_at_most_86400000 CHECK (backoff_max_ms BETWEEN 1 AND 86400000),

    -- The limiter.
    slot_release text COLLATE "C" NOT NULL DEFAULT 'response'
        CONSTRAINT slot_release_is_response_or_grant CHECK (slot_release IN ('response', 'grant')),
    transit_jitter_ms bigint NOT NULL DEFAULT 50
        CONSTRAINT transit_jitter_ms_is_10_to_60000 CHECK (transit_jitter_ms BETWEEN 10 AND 60000),
    pacing text COLLATE "C" NOT NULL DEFAULT 'burst'
        CONSTRAINT pacing_is_burst_or_even CHECK (pacing IN ('burst', 'even')),
    reserve_percent bigint NOT NULL DEFAULT 0
        CONSTRAINT reserve_percent_is_0_to_99 CHECK (reserve_percent BETWEEN 0 AND 99),
    store_down text COLLATE "C" NOT NULL DEFAULT 'wait'
        CONSTRAINT store_down_is_wait_or_share CHECK (store_down IN ('wait', 'share')),
    share_of bigint CONSTRAINT share_of_is_1_to_10000 CHECK (share_of BETWEEN 1 AND 10000),

    -- Set by triggers.
    version bigint NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT now(),

    CONSTRAINT store_down_share_needs_share_of CHECK (store_down <> 'share' OR share_of IS NOT NULL),
    CONSTRAINT backoff_base_ms_is_at_most_backoff_max_ms CHECK (backoff_base_ms <= backoff_max_ms),
    -- The program reads every instant: RFC 3339 in milliseconds (`EpochMs` of src/domain/time.rs). `infinity`, or a year
    -- of five digits, would make every query that meets the row fail. Each table has this rule.
    CONSTRAINT instants_are_finite CHECK (
        least(updated_at, resumed_at) >= '0001-01-01 00:00:00+00'
        AND greatest(updated_at, resumed_at) < '9999-12-30 22:00:00+00')
);

CREATE TABLE provider_limits (
    provider text COLLATE "C" NOT NULL REFERENCES providers (name) ON DELETE CASCADE,
    name text COLLATE "C" NOT NULL
        CONSTRAINT limit_name_is_1_to_63_of_a_z_0_9_underscore_dash CHECK (name ~ '^[a-z0-9][a-z0-9_-]{0,62}$'),
    algorithm text COLLATE "C" NOT NULL DEFAULT 'sliding_log'
        CONSTRAINT algorithm_is_known
            CHECK (algorithm IN ('sliding_log', 'fixed_window', 'sliding_window', 'token_bucket', 'gcra', 'concurrency')),
    max_requests bigint NOT NULL
        CONSTRAINT max_requests_is_0_to_1000000 CHECK (max_requests BETWEEN 0 AND 1000000),
    window_ms bigint
        CONSTRAINT window_ms_is_1_ms_to_31_days CHECK (window_ms BETWEEN 1 AND 2678400000),
    offset_ms bigint NOT NULL DEFAULT 0
        CONSTRAINT offset_ms_is_0_to_31_days CHECK (offset_ms BETWEEN 0 AND 2678400000),
    burst bigint CONSTRAINT burst_is_1_to_1000000 CHECK (burst BETWEEN 1 AND 1000000),
    scope text COLLATE "C" NOT NULL DEFAULT 'provider'
        CONSTRAINT scope_is_known CHECK (scope IN ('provider', 'account', 'reference')),
    applies_to text COLLATE "C" NOT NULL DEFAULT 'all'
        CONSTRAINT applies_to_is_known CHECK (applies_to IN ('all', 'charge', 'lookup')),
    shadow boolean NOT NULL DEFAULT false,
    enabled boolean NOT NULL DEFAULT true,
    PRIMARY KEY (provider, name),
    -- A limit of requests in flight.
    CONSTRAINT concurrency_alone_has_no_window_ms CHECK ((algorithm = 'concurrency') = (window_ms IS NULL)),
    CONSTRAINT burst_goes_with_token_bucket_or_gcra
        CHECK (burst IS NULL OR algorithm IN ('token_bucket', 'gcra')),
    -- No usage is stored longer; GCRA allows one request beyond its burst.
    CONSTRAINT burst_is_given_back_within_31_days
        CHECK (max_requests = 0 OR (burst + CASE algorithm WHEN 'gcra' THEN 1 ELSE 0 END) * window_ms
               <= 2678400000 * max_requests),
    CONSTRAINT offset_ms_goes_with_fixed_window_and_is_below_window_ms
        CHECK (offset_ms = 0 OR (algorithm = 'fixed_window' AND offset_ms < window_ms)),
    CONSTRAINT sliding_window_has_window_ms_of_1000_or_more
        CHECK (algorithm <> 'sliding_window' OR window_ms >= 1000),
    CONSTRAINT sliding_log_by_account_or_reference_is_at_most_10000
        CHECK (algorithm <> 'sliding_log' OR scope = 'provider' OR max_requests <= 10000)
);

CREATE TABLE account_overrides (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    provider text COLLATE "C" NOT NULL REFERENCES providers (name) ON DELETE CASCADE,
    account text COLLATE "C" NOT NULL
        CONSTRAINT account_is_1_to_64_of_letters_digits_underscore_dash CHECK (account ~ '^[A-Za-z0-9_-]{1,64}$'),
    limit_name text COLLATE "C",
    rule text COLLATE "C" CONSTRAINT rule_is_known CHECK (rule IN ('exempt', 'blocked', 'refuse', 'limit')),
    -- The account's own numbers for a limit. Without a window, those of a limit of requests in flight.
    max_requests bigint
        CONSTRAINT override_max_requests_is_0_to_1000000 CHECK (max_requests BETWEEN 0 AND 1000000),
    window_ms bigint
        CONSTRAINT override_window_ms_is_1_ms_to_31_days CHECK (window_ms BETWEEN 1 AND 2678400000),
    burst bigint
        CONSTRAINT override_burst_is_1_to_1000000 CHECK (burst BETWEEN 1 AND 1000000),
    -- The account's share among the accounts of its lane.
    weight bigint NOT NULL DEFAULT 1 CONSTRAINT override_weight_is_1_to_1000 CHECK (weight BETWEEN 1 AND 1000),
    -- The end of the rule, and the columns that come back then; NULL: the row is deleted.
    until_at timestamptz,
    then_row jsonb CONSTRAINT then_row_is_an_object CHECK (jsonb_typeof(then_row) = 'object'),
    CONSTRAINT then_row_goes_with_until_at CHECK (then_row IS NULL OR until_at IS NOT NULL),
    CONSTRAINT instants_are_finite CHECK (
        least(until_at) >= '0001-01-01 00:00:00+00' AND greatest(until_at) < '9999-12-30 22:00:00+00'),
    CONSTRAINT rule_limit_alone_has_max_requests
        CHECK ((coalesce(rule, '') = 'limit') = (max_requests IS NOT NULL)),
    CONSTRAINT window_ms_goes_with_rule_limit CHECK (window_ms IS NULL OR coalesce(rule, '') = 'limit'),
    CONSTRAINT override_burst_goes_with_rule_limit CHECK (burst IS NULL OR coalesce(rule, '') = 'limit'),
    CONSTRAINT override_burst_is_given_back_within_31_days
        CHECK (max_requests = 0 OR burst * window_ms <= 2678400000 * max_requests),
    CONSTRAINT rule_refuse_has_no_limit_name CHECK (limit_name IS NULL OR coalesce(rule, '') <> 'refuse'),
    CONSTRAINT weight_above_1_has_no_limit_name CHECK (limit_name IS NULL OR weight = 1),
    CONSTRAINT without_rule_weight_is_above_1 CHECK (rule IS NOT NULL OR weight > 1),
    -- No cascade: deleting a limit must not silently end a block that names it.
    CONSTRAINT limit_name_is_a_limit_of_this_provider
        FOREIGN KEY (provider, limit_name) REFERENCES provider_limits (provider, name)
);
CREATE UNIQUE INDEX account_overrides_one_rule_per_account_and_limit
    ON account_overrides (provider, account, coalesce(limit_name, ''));

-- Each provider as the file says it that was applied last, without what that file leaves out. `provider apply` compares
-- the next file with it, so that a change by hand is neither lost nor mistaken for an old file.
CREATE TABLE provider_files (
    provider text COLLATE "C" NOT NULL PRIMARY KEY REFERENCES providers (name) ON DELETE CASCADE,
    file jsonb NOT NULL CONSTRAINT file_is_an_object CHECK (jsonb_typeof(file) = 'object')
);

CREATE TABLE settings_audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The database's user. A command adds the operating system's user (user@host), and the reason.
    who text COLLATE "C" NOT NULL,
    os_user text COLLATE "C",
    program text COLLATE "C",
    because text COLLATE "C",
    table_name text COLLATE "C" NOT NULL,
    row_key text COLLATE "C" NOT NULL,
    old_row jsonb,
    new_row jsonb,
    CONSTRAINT instants_are_finite CHECK (
        least(at) >= '0001-01-01 00:00:00+00' AND greatest(at) < '9999-12-30 22:00:00+00')
);
-- For recent changes: a rebuild of the limiter's state asks which providers left a quota lately.
CREATE INDEX settings_audit_by_time ON settings_audit (at);

-- Before the statement touches any row, so that all writers lock in the same order and cannot deadlock.
CREATE FUNCTION settings_bump_version() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    UPDATE settings_version SET version = version + 1;
    RETURN NULL;
END $$;

CREATE FUNCTION settings_stamp_provider() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    NEW.version := (SELECT version FROM settings_version);
    NEW.updated_at := clock_timestamp();
    RETURN NEW;
END $$;

CREATE FUNCTION settings_touch_provider() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        UPDATE providers SET version = version WHERE name = OLD.provider;
    END IF;
    IF TG_OP = 'INSERT' OR (TG_OP = 'UPDATE' AND NEW.provider <> OLD.provider) THEN
        UPDATE providers SET version = version WHERE name = NEW.provider;
    END IF;
    RETURN NULL;
END $$;

-- Arguments: the columns that name a row. `session_user` is the user whose statement fires the trigger.
CREATE FUNCTION settings_record_change() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    was jsonb;
    becomes jsonb;
    row_key text := '';
    key_column text;
BEGIN
    IF TG_OP <> 'INSERT' THEN
        was := to_jsonb(OLD) - 'version' - 'updated_at';
    END IF;
    IF TG_OP <> 'DELETE' THEN
        becomes := to_jsonb(NEW) - 'version' - 'updated_at';
    END IF;
    IF was IS NOT DISTINCT FROM becomes THEN
        RETURN NULL;
    END IF;
    FOREACH key_column IN ARRAY TG_ARGV LOOP
        row_key := row_key || '/' || coalesce(coalesce(becomes, was) ->> key_column, '*');
    END LOOP;
    INSERT INTO settings_audit (who, program, table_name, row_key, old_row, new_row)
    VALUES (session_user, nullif(current_setting('application_name'), ''), TG_TABLE_NAME, substr(row_key, 2),
            was, becomes);
    RETURN NULL;
END $$;

CREATE FUNCTION settings_refuse_truncate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'use DELETE: TRUNCATE of % would not be audited', TG_TABLE_NAME;
END $$;

CREATE TRIGGER bump_version BEFORE INSERT OR UPDATE OR DELETE ON providers
    FOR EACH STATEMENT EXECUTE FUNCTION settings_bump_version();
CREATE TRIGGER stamp BEFORE INSERT OR UPDATE ON providers
    FOR EACH ROW EXECUTE FUNCTION settings_stamp_provider();
CREATE TRIGGER record_change AFTER INSERT OR UPDATE OR DELETE ON providers
    FOR EACH ROW EXECUTE FUNCTION settings_record_change('name');
CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON providers
    FOR EACH STATEMENT EXECUTE FUNCTION settings_refuse_truncate();

CREATE TRIGGER bump_version BEFORE INSERT OR UPDATE OR DELETE ON provider_limits
    FOR EACH STATEMENT EXECUTE FUNCTION settings_bump_version();
CREATE TRIGGER touch_provider AFTER INSERT OR UPDATE OR DELETE ON provider_limits
    FOR EACH ROW EXECUTE FUNCTION settings_touch_provider();
CREATE TRIGGER record_change AFTER INSERT OR UPDATE OR DELETE ON provider_limits
    FOR EACH ROW EXECUTE FUNCTION settings_record_change('provider', 'name');
CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON provider_limits
    FOR EACH STATEMENT EXECUTE FUNCTION settings_refuse_truncate();

CREATE TRIGGER bump_version BEFORE INSERT OR UPDATE OR DELETE ON account_overrides
    FOR EACH STATEMENT EXECUTE FUNCTION settings_bump_version();
CREATE TRIGGER touch_provider AFTER INSERT OR UPDATE OR DELETE ON account_overrides
    FOR EACH ROW EXECUTE FUNCTION settings_touch_provider();
CREATE TRIGGER record_change AFTER INSERT OR UPDATE OR DELETE ON account_overrides
    FOR EACH ROW EXECUTE FUNCTION settings_record_change('provider', 'account', 'limit_name');
CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON account_overrides
    FOR EACH STATEMENT EXECUTE FUNCTION settings_refuse_truncate();

-- A rule that the provider's row cannot use. src/ledger/provider_row/accounts.rs checks the same, and names the fix.
CREATE FUNCTION settings_check_account_rule() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
DECLARE
    broken text;
BEGIN
    WITH touched AS (
        SELECT * FROM provider_limits
        WHERE provider = NEW.provider AND scope = 'account' AND (NEW.limit_name IS NULL OR name = NEW.limit_name)
    ), of_limits AS (
        SELECT count(*) AS limits,
            count(*) FILTER (WHERE enabled) AS enforced,
            count(*) FILTER (WHERE algorithm IN ('token_bucket', 'gcra')) AS with_burst,
            count(*) FILTER (WHERE (algorithm = 'concurrency') <> (NEW.window_ms IS NULL)) AS other_windows,
            count(*) FILTER (WHERE offset_ms >= NEW.window_ms AND offset_ms > 0
                OR algorithm = 'sliding_window' AND NEW.window_ms < 1000) AS longer_windows,
            count(*) FILTER (WHERE algorithm = 'sliding_log') AS logs
        FROM touched
    )
    SELECT CASE
        WHEN NEW.limit_name IS NOT NULL AND EXISTS (SELECT FROM provider_limits
            WHERE provider = NEW.provider AND name = NEW.limit_name AND scope <> 'account')
            THEN 'limit_name_of_the_rule_is_a_limit_of_scope_account'
        WHEN NEW.rule = 'exempt' AND limits = 0 THEN 'rule_exempt_needs_a_limit_of_scope_account'
        WHEN NEW.rule = 'exempt' THEN NULL
        WHEN NEW.max_requests > 0 AND NEW.max_requests * (100 - (
            SELECT reserve_percent FROM providers WHERE name = NEW.provider)) < 100
            THEN 'max_requests_of_the_rule_exceeds_the_reserve'
        WHEN other_windows > 0 OR (limits = 0 AND NEW.window_ms IS NULL)
            THEN 'window_ms_of_the_rule_fits_its_limits'
        WHEN longer_windows > 0 THEN 'window_ms_of_the_rule_is_long_enough_for_its_limits'
        WHEN NEW.burst IS NOT NULL AND with_burst = 0 THEN 'burst_of_the_rule_needs_a_token_bucket_or_gcra'
        WHEN NEW.max_requests > 10000
            AND (logs > 0 OR (NEW.limit_name IS NULL AND enforced = 0 AND NEW.window_ms IS NOT NULL))
            THEN 'max_requests_of_the_rule_is_at_most_10000_in_a_sliding_log'
        END INTO broken FROM of_limits;
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = broken,
            MESSAGE = format('the rule of account %s at provider %s violates %s', NEW.account, NEW.provider, broken);
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_rule BEFORE INSERT OR UPDATE ON account_overrides
    FOR EACH ROW WHEN (NEW.rule IN ('exempt', 'limit')) EXECUTE FUNCTION settings_check_account_rule();

CREATE FUNCTION settings_audit_person() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    NEW.os_user := nullif(current_setting('sluicegate.os_user', true), '');
    NEW.because := nullif(current_setting('sluicegate.because', true), '');
    RETURN NEW;
END $$;
CREATE TRIGGER person BEFORE INSERT ON settings_audit
    FOR EACH ROW EXECUTE FUNCTION settings_audit_person();

-- Rows of an audit can only be added.
CREATE FUNCTION audit_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'audits_never_change',
        MESSAGE = format('rows of %s are never changed or deleted', TG_TABLE_NAME);
END $$;
CREATE TRIGGER never_changes BEFORE UPDATE OR DELETE OR TRUNCATE ON settings_audit
    FOR EACH STATEMENT EXECUTE FUNCTION audit_refuse_change();

-- A hint for workers, so that they need not wait for their next poll. It is the same for every change: PostgreSQL sends
-- equal ones of a transaction once, at its commit. A worker that does not listen polls, so nothing depends on it.
CREATE FUNCTION settings_hint() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('sluicegate_settings', '');
    RETURN NULL;
END $$;
CREATE TRIGGER hint AFTER UPDATE ON settings_version
    FOR EACH STATEMENT EXECUTE FUNCTION settings_hint();

-- The version increases by one with each change. Only after a restore it must exceed the versions that workers and the
-- limiter store know, which hold 48 bits.
CREATE FUNCTION settings_refuse_version() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'settings_version_rises_by_one',
        MESSAGE = 'the version of the settings rises by one; only settings_raise_version() raises it further, to 2^48 at most';
END $$;
CREATE TRIGGER version_rises_by_one BEFORE UPDATE ON settings_version
    FOR EACH ROW WHEN (NEW.version < OLD.version
                       OR (NEW.version > OLD.version + 1 AND NEW.version > 281474976710656))
    EXECUTE FUNCTION settings_refuse_version();
CREATE TRIGGER never_deleted BEFORE DELETE OR TRUNCATE ON settings_version
    FOR EACH STATEMENT EXECUTE FUNCTION settings_refuse_version();

-- A worker that finds a restored database raises the version, and changes no setting. Changes of settings move the
-- version from within their own triggers, which audit them.
CREATE FUNCTION settings_version_audit() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO settings_audit (who, program, table_name, row_key, old_row, new_row)
    VALUES (session_user, nullif(current_setting('application_name'), ''), 'settings_version', 'version',
            jsonb_build_object('version', OLD.version), jsonb_build_object('version', NEW.version));
    RETURN NULL;
END $$;
CREATE TRIGGER audit AFTER UPDATE ON settings_version
    FOR EACH ROW WHEN (NEW.version > OLD.version AND pg_trigger_depth() = 0) EXECUTE FUNCTION settings_version_audit();

-- Returns the version if it is still this one, and locks it until the transaction ends.
CREATE FUNCTION settings_hold_version(expected bigint) RETURNS SETOF bigint
    LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT AS $$
    SELECT version FROM settings_version WHERE version = expected FOR UPDATE;
$$;

-- For a database that was restored from a backup. A trigger writes the audit.
CREATE FUNCTION settings_raise_version(expected bigint, raised bigint) RETURNS SETOF bigint
    LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT AS $$
    UPDATE settings_version SET version = raised WHERE version = expected AND raised > expected RETURNING version;
$$;

-- For who may call a function, see docs, "Least rights".
REVOKE ALL ON FUNCTION
    settings_bump_version(), settings_stamp_provider(), settings_touch_provider(), settings_record_change(),
    settings_check_account_rule(), settings_refuse_truncate(), settings_audit_person(), audit_refuse_change(), settings_hint(),
    settings_refuse_version(), settings_version_audit(), settings_hold_version(bigint),
    settings_raise_version(bigint, bigint)
FROM PUBLIC;
