-- Providers, their limits and account rules, as operators set them. Column meanings and defaults: docs, "Database".
-- Constraint names are sentences, because operators read them in error messages.

-- One row, not a sequence: a writer locks it until its commit. So versions become visible in their order, and a poller
-- that has seen version n has seen all changes before it.
CREATE TABLE settings_version (
    only_row boolean PRIMARY KEY DEFAULT true CONSTRAINT settings_version_has_one_row CHECK (only_row),
    version  bigint NOT NULL
);
INSERT INTO settings_version (version) VALUES (1);

CREATE TABLE providers (
    name text NOT NULL PRIMARY KEY
        CONSTRAINT name_is_1_to_63_of_a_z_0_9_underscore_dash CHECK (name ~ '^[a-z0-9][a-z0-9_-]{0,62}$')
        CONSTRAINT name_is_not_one_of_our_queues CHECK (name NOT IN ('invalid', 'dead', 'outcomes')),
    kind text NOT NULL DEFAULT 'http' CONSTRAINT kind_is_http CHECK (kind = 'http'),
    quota text
        CONSTRAINT quota_is_1_to_63_of_a_z_0_9_underscore_dash CHECK (quota ~ '^[a-z0-9][a-z0-9_-]{0,62}$'),
    enabled boolean NOT NULL DEFAULT true,
    paused boolean NOT NULL DEFAULT false,
    url text NOT NULL
        CONSTRAINT url_is_http_or_https_without_spaces
            CHECK (url ~ '^https?://[^[:space:][:cntrl:]]+$' AND char_length(url) <= 2048),
    mode text NOT NULL DEFAULT 'blocking'
        CONSTRAINT mode_is_blocking_or_requeue CHECK (mode IN ('blocking', 'requeue')),
    slot_release text NOT NULL DEFAULT 'response'
        CONSTRAINT slot_release_is_response_or_grant CHECK (slot_release IN ('response', 'grant')),
    transit_jitter_ms bigint NOT NULL DEFAULT 50
        CONSTRAINT transit_jitter_ms_is_10_to_60000 CHECK (transit_jitter_ms BETWEEN 10 AND 60000),
    pacing text NOT NULL DEFAULT 'burst' CONSTRAINT pacing_is_burst_or_even CHECK (pacing IN ('burst', 'even')),
    reserve_percent bigint NOT NULL DEFAULT 0
        CONSTRAINT reserve_percent_is_0_to_99 CHECK (reserve_percent BETWEEN 0 AND 99),
    store_down text NOT NULL DEFAULT 'wait'
        CONSTRAINT store_down_is_wait_or_share CHECK (store_down IN ('wait', 'share')),
    share_of bigint CONSTRAINT share_of_is_1_to_10000 CHECK (share_of BETWEEN 1 AND 10000),
    timeout_ms bigint NOT NULL DEFAULT 10000
        CONSTRAINT timeout_ms_is_1_to_600000 CHECK (timeout_ms BETWEEN 1 AND 600000),
    send_budget_ms bigint NOT NULL DEFAULT 500
        CONSTRAINT send_budget_ms_is_1_to_60000 CHECK (send_budget_ms BETWEEN 1 AND 60000),
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
    idempotency_retention_s bigint
        CONSTRAINT idempotency_retention_s_is_1_to_315360000_or_null
            CHECK (idempotency_retention_s BETWEEN 1 AND 315360000),
    headers jsonb NOT NULL DEFAULT '{}'
        CONSTRAINT headers_is_an_object_of_strings
            CHECK (jsonb_typeof(headers) = 'object' AND NOT jsonb_path_exists(headers, '$.* ? (@.type() != "string")')),
    request jsonb CONSTRAINT request_is_an_object CHECK (jsonb_typeof(request) = 'object'),
    lookup jsonb CONSTRAINT lookup_is_an_object CHECK (jsonb_typeof(lookup) = 'object'),
    statuses jsonb CONSTRAINT statuses_is_an_object CHECK (jsonb_typeof(statuses) = 'object'),
    version bigint NOT NULL DEFAULT 0,
    updated_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT store_down_share_needs_share_of CHECK (store_down <> 'share' OR share_of IS NOT NULL),
    CONSTRAINT backoff_base_ms_is_at_most_backoff_max_ms CHECK (backoff_base_ms <= backoff_max_ms)
);

CREATE TABLE provider_limits (
    provider text NOT NULL REFERENCES providers (name) ON DELETE CASCADE,
    name text NOT NULL
        CONSTRAINT limit_name_is_1_to_63_of_a_z_0_9_underscore_dash CHECK (name ~ '^[a-z0-9][a-z0-9_-]{0,62}$'),
    algorithm text NOT NULL DEFAULT 'sliding_log'
        CONSTRAINT algorithm_is_known
            CHECK (algorithm IN ('sliding_log', 'fixed_window', 'sliding_window', 'token_bucket', 'gcra')),
    max_requests bigint NOT NULL
        CONSTRAINT max_requests_is_0_to_1000000 CHECK (max_requests BETWEEN 0 AND 1000000),
    window_ms bigint NOT NULL
        CONSTRAINT window_ms_is_1_ms_to_31_days CHECK (window_ms BETWEEN 1 AND 2678400000),
    offset_ms bigint NOT NULL DEFAULT 0
        CONSTRAINT offset_ms_is_0_to_31_days CHECK (offset_ms BETWEEN 0 AND 2678400000),
    burst bigint CONSTRAINT burst_is_1_to_1000000 CHECK (burst BETWEEN 1 AND 1000000),
    scope text NOT NULL DEFAULT 'provider'
        CONSTRAINT scope_is_known CHECK (scope IN ('provider', 'account', 'reference')),
    applies_to text NOT NULL DEFAULT 'all'
        CONSTRAINT applies_to_is_known CHECK (applies_to IN ('all', 'charge', 'lookup')),
    shadow boolean NOT NULL DEFAULT false,
    enabled boolean NOT NULL DEFAULT true,
    PRIMARY KEY (provider, name),
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
    provider text NOT NULL REFERENCES providers (name) ON DELETE CASCADE,
    account text NOT NULL
        CONSTRAINT account_is_1_to_64_of_letters_digits_underscore_dash CHECK (account ~ '^[A-Za-z0-9_-]{1,64}$'),
    limit_name text,
    rule text NOT NULL CONSTRAINT rule_is_known CHECK (rule IN ('exempt', 'blocked', 'limit')),
    max_requests bigint
        CONSTRAINT override_max_requests_is_0_to_1000000 CHECK (max_requests BETWEEN 0 AND 1000000),
    window_ms bigint
        CONSTRAINT override_window_ms_is_1_ms_to_31_days CHECK (window_ms BETWEEN 1 AND 2678400000),
    CONSTRAINT rule_limit_alone_has_max_requests_and_window_ms
        CHECK ((rule = 'limit') = (max_requests IS NOT NULL) AND (rule = 'limit') = (window_ms IS NOT NULL)),
    -- No cascade: deleting a limit must not silently end a block that names it.
    CONSTRAINT limit_name_is_a_limit_of_this_provider
        FOREIGN KEY (provider, limit_name) REFERENCES provider_limits (provider, name)
);
CREATE UNIQUE INDEX account_overrides_one_rule_per_account_and_limit
    ON account_overrides (provider, account, coalesce(limit_name, ''));

CREATE TABLE settings_audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    who text NOT NULL,
    program text,
    table_name text NOT NULL,
    row_key text NOT NULL,
    old_row jsonb,
    new_row jsonb
);

-- Before the statement touches any row, so that all writers lock in the same order and cannot deadlock.
CREATE FUNCTION settings_bump_version() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE settings_version SET version = version + 1;
    RETURN NULL;
END $$;

CREATE FUNCTION settings_stamp_provider() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.version := (SELECT version FROM settings_version);
    NEW.updated_at := clock_timestamp();
    RETURN NEW;
END $$;

CREATE FUNCTION settings_touch_provider() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        UPDATE providers SET version = version WHERE name = OLD.provider;
    END IF;
    IF TG_OP = 'INSERT' OR (TG_OP = 'UPDATE' AND NEW.provider <> OLD.provider) THEN
        UPDATE providers SET version = version WHERE name = NEW.provider;
    END IF;
    RETURN NULL;
END $$;

-- Arguments: the columns that name a row.
CREATE FUNCTION settings_record_change() RETURNS trigger LANGUAGE plpgsql AS $$
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
