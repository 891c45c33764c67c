-- Providers, their limits and account rules, as operators set them, with their version and their audit. Column meanings
-- and defaults: docs, "Database". Constraint names are sentences, because operators read them in error messages.

-- Times are milliseconds since the Unix epoch, booleans 0 and 1. Operators change rows with their own sqlite3. That of
-- Debian 12 is 3.40: it does not know unixepoch('subsec') and returns NULL for it, so `now` is computed from julianday.
-- Its json_valid(NULL) is 0, so each CHECK of JSON allows NULL. And it enforces no foreign keys by default.

CREATE TABLE settings_version (
    only_row INTEGER PRIMARY KEY DEFAULT 1 CONSTRAINT settings_version_has_one_row CHECK (only_row = 1),
    version  INTEGER NOT NULL
) STRICT;
INSERT INTO settings_version (version) VALUES (1);

-- The id of this database, so that a command can tell its running process from one on another database. A copy and a
-- restored backup have the id of their original; docs/runbook.md says when to change it.
CREATE TABLE deployment (
    only_row INTEGER PRIMARY KEY DEFAULT 1 CONSTRAINT deployment_has_one_row CHECK (only_row = 1),
    id TEXT NOT NULL CONSTRAINT deployment_id_is_a_uuid
        CHECK (id GLOB '????????-????-????-????-????????????'
            AND length(replace(id, '-', '')) = 32 AND replace(id, '-', '') NOT GLOB '*[^0-9a-f]*')
) STRICT;
-- A random UUID, version 4: https://www.rfc-editor.org/rfc/rfc9562#section-5.4
INSERT INTO deployment (id) VALUES (lower(
    hex(randomblob(4)) || '-' || hex(randomblob(2)) || '-4' || substr(hex(randomblob(2)), 2) || '-'
    || substr('89ab', 1 + (random() & 3), 1) || substr(hex(randomblob(2)), 2) || '-' || hex(randomblob(6))
));

CREATE TABLE providers (
    name TEXT NOT NULL PRIMARY KEY
        CONSTRAINT name_is_1_to_63_of_a_z_0_9_underscore_dash
            CHECK (name GLOB '[a-z0-9]*' AND name NOT GLOB '*[^a-z0-9_-]*' AND length(name) <= 63)
        CONSTRAINT name_is_not_one_of_our_queues CHECK (name NOT IN ('invalid', 'dead', 'outcomes')),
    kind TEXT NOT NULL DEFAULT 'http' CONSTRAINT kind_is_http CHECK (kind = 'http'),
    quota TEXT
        CONSTRAINT quota_is_1_to_63_of_a_z_0_9_underscore_dash
            CHECK (quota GLOB '[a-z0-9]*' AND quota NOT GLOB '*[^a-z0-9_-]*' AND length(quota) <= 63),
    enabled INTEGER NOT NULL DEFAULT 1 CONSTRAINT enabled_is_0_or_1 CHECK (enabled IN (0, 1)),
    paused INTEGER NOT NULL DEFAULT 0 CONSTRAINT paused_is_0_or_1 CHECK (paused IN (0, 1)),
    -- When an operator ended the waits that the provider had named.
    resumed_at INTEGER,

    -- The request.
    url TEXT NOT NULL
        CONSTRAINT url_is_http_or_https_without_spaces
            CHECK ((url GLOB 'http://?*' OR url GLOB 'https://?*') AND length(url) <= 2048
                   AND url NOT GLOB '*[' || char(1) || '-' || char(32) || char(127) || ']*'),
    headers TEXT NOT NULL DEFAULT '{}'
        CONSTRAINT headers_is_an_object
            CHECK (json_valid(headers) AND json_type(headers) = 'object'),
    request TEXT CONSTRAINT request_is_an_object
        CHECK (request IS NULL OR (json_valid(request) AND json_type(request) = 'object')),
    lookup TEXT CONSTRAINT lookup_is_an_object
        CHECK (lookup IS NULL OR (json_valid(lookup) AND json_type(lookup) = 'object')),
    statuses TEXT CONSTRAINT statuses_is_an_object
        CHECK (statuses IS NULL OR (json_valid(statuses) AND json_type(statuses) = 'object')),
    -- A message without these fields is no job.
    require TEXT NOT NULL DEFAULT '[]'
        CONSTRAINT require_is_a_list_of_account_and_reference
            CHECK (json_valid(require) AND json_type(require) = 'array'
                AND replace(replace(replace(replace(replace(json(require), '"account"', ''), '"reference"', ''), ',', ''),
                    '[', ''), ']', '') = ''),
    -- How the provider counts money. NULL: every currency, as ISO 4217 counts it.
    currencies TEXT CONSTRAINT currencies_is_a_list_of_currency_codes
        CHECK (currencies IS NULL OR (json_valid(currencies) AND json_type(currencies) = 'array')),
    decimals TEXT CONSTRAINT decimals_is_an_object_of_digits
        CHECK (decimals IS NULL OR (json_valid(decimals) AND json_type(decimals) = 'object')),
    amount_step TEXT CONSTRAINT amount_step_is_an_object_of_steps
        CHECK (amount_step IS NULL OR (json_valid(amount_step) AND json_type(amount_step) = 'object')),
    idempotency_retention_s INTEGER
        CONSTRAINT idempotency_retention_s_is_1_to_315360000_or_null
            CHECK (idempotency_retention_s BETWEEN 1 AND 315360000),
    timeout_ms INTEGER NOT NULL DEFAULT 10000
        CONSTRAINT timeout_ms_is_1_to_600000 CHECK (timeout_ms BETWEEN 1 AND 600000),
    send_budget_ms INTEGER NOT NULL DEFAULT 500
        CONSTRAINT send_budget_ms_is_1_to_60000 CHECK (send_budget_ms BETWEEN 1 AND 60000),
    connection_max_age_ms INTEGER NOT NULL DEFAULT 60000
        CONSTRAINT connection_max_age_ms_is_1000_to_3600000 CHECK (connection_max_age_ms BETWEEN 1000 AND 3600000),
    -- Whether a charge may use a connection that was used before. NULL: decided by retention and look-ups.
    reuse_connections INTEGER CONSTRAINT reuse_connections_is_0_or_1 CHECK (reuse_connections IN (0, 1)),

    -- The lane.
    mode TEXT NOT NULL DEFAULT 'blocking'
        CONSTRAINT mode_is_blocking_or_requeue CHECK (mode IN ('blocking', 'requeue')),
    "order" TEXT NOT NULL DEFAULT 'none' CONSTRAINT order_is_none_or_account CHECK ("order" IN ('none', 'account')),
    workers INTEGER NOT NULL DEFAULT 32 CONSTRAINT workers_is_1_to_10000 CHECK (workers BETWEEN 1 AND 10000),
    bucket_capacity INTEGER NOT NULL DEFAULT 256
        CONSTRAINT bucket_capacity_is_1_to_65535 CHECK (bucket_capacity BETWEEN 1 AND 65535),
    leak_per_second REAL
        CONSTRAINT leak_per_second_is_above_0 CHECK (leak_per_second > 0 AND leak_per_second <= 1000000),
    max_wait_ms INTEGER NOT NULL DEFAULT 5000
        CONSTRAINT max_wait_ms_is_0_to_60000 CHECK (max_wait_ms BETWEEN 0 AND 60000),
    max_attempts INTEGER NOT NULL DEFAULT 8
        CONSTRAINT max_attempts_is_1_to_1000 CHECK (max_attempts BETWEEN 1 AND 1000),
    max_age_s INTEGER NOT NULL DEFAULT 259200
        CONSTRAINT max_age_s_is_1_to_315360000 CHECK (max_age_s BETWEEN 1 AND 315360000),
    backoff_base_ms INTEGER NOT NULL DEFAULT 500
        CONSTRAINT backoff_base_ms_is_at_least_1 CHECK (backoff_base_ms >= 1),
    backoff_max_ms INTEGER NOT NULL DEFAULT 60000
        CONSTRAINT backoff_max_ms_is_at_most_86400000 CHECK (backoff_max_ms BETWEEN 1 AND 86400000),

    -- The limiter.
    slot_release TEXT NOT NULL DEFAULT 'response'
        CONSTRAINT slot_release_is_response_or_grant CHECK (slot_release IN ('response', 'grant')),
    transit_jitter_ms INTEGER NOT NULL DEFAULT 50
        CONSTRAINT transit_jitter_ms_is_10_to_60000 CHECK (transit_jitter_ms BETWEEN 10 AND 60000),
    pacing TEXT NOT NULL DEFAULT 'burst' CONSTRAINT pacing_is_burst_or_even CHECK (pacing IN ('burst', 'even')),
    reserve_percent INTEGER NOT NULL DEFAULT 0
        CONSTRAINT reserve_percent_is_0_to_99 CHECK (reserve_percent BETWEEN 0 AND 99),
    store_down TEXT NOT NULL DEFAULT 'wait'
        CONSTRAINT store_down_is_wait_or_share CHECK (store_down IN ('wait', 'share')),
    share_of INTEGER CONSTRAINT share_of_is_1_to_10000 CHECK (share_of BETWEEN 1 AND 10000),

    -- Set by triggers.
    version INTEGER NOT NULL DEFAULT 0,
    updated_at INTEGER NOT NULL DEFAULT 0,

    CONSTRAINT store_down_share_needs_share_of CHECK (store_down <> 'share' OR share_of IS NOT NULL),
    CONSTRAINT backoff_base_ms_is_at_most_backoff_max_ms CHECK (backoff_base_ms <= backoff_max_ms)
) STRICT;

-- The URL of charges may hold the job's fields in path or query. An unknown placeholder would be sent literally, and
-- one in the host would let a job choose the host.
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

-- The program reads every instant: RFC 3339 in milliseconds (`EpochMs` of src/domain/time.rs). One row beyond that would
-- make every query that meets it fail. Each table has these two triggers.
CREATE TRIGGER instants_are_finite_of_providers_on_insert
    BEFORE INSERT ON providers
    WHEN NEW.updated_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.resumed_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_providers
    BEFORE UPDATE OF updated_at, resumed_at ON providers
    WHEN NEW.updated_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.resumed_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

CREATE TABLE provider_limits (
    provider TEXT NOT NULL REFERENCES providers (name) ON DELETE CASCADE,
    name TEXT NOT NULL
        CONSTRAINT limit_name_is_1_to_63_of_a_z_0_9_underscore_dash
            CHECK (name GLOB '[a-z0-9]*' AND name NOT GLOB '*[^a-z0-9_-]*' AND length(name) <= 63),
    algorithm TEXT NOT NULL DEFAULT 'sliding_log'
        CONSTRAINT algorithm_is_known
            CHECK (algorithm IN ('sliding_log', 'fixed_window', 'sliding_window', 'token_bucket', 'gcra', 'concurrency')),
    max_requests INTEGER NOT NULL
        CONSTRAINT max_requests_is_0_to_1000000 CHECK (max_requests BETWEEN 0 AND 1000000),
    window_ms INTEGER
        CONSTRAINT window_ms_is_1_ms_to_31_days CHECK (window_ms BETWEEN 1 AND 2678400000),
    offset_ms INTEGER NOT NULL DEFAULT 0
        CONSTRAINT offset_ms_is_0_to_31_days CHECK (offset_ms BETWEEN 0 AND 2678400000),
    burst INTEGER CONSTRAINT burst_is_1_to_1000000 CHECK (burst BETWEEN 1 AND 1000000),
    scope TEXT NOT NULL DEFAULT 'provider'
        CONSTRAINT scope_is_known CHECK (scope IN ('provider', 'account', 'reference')),
    applies_to TEXT NOT NULL DEFAULT 'all'
        CONSTRAINT applies_to_is_known CHECK (applies_to IN ('all', 'charge', 'lookup')),
    shadow INTEGER NOT NULL DEFAULT 0 CONSTRAINT shadow_is_0_or_1 CHECK (shadow IN (0, 1)),
    enabled INTEGER NOT NULL DEFAULT 1 CONSTRAINT enabled_is_0_or_1 CHECK (enabled IN (0, 1)),
    PRIMARY KEY (provider, name),
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
) STRICT;

CREATE TABLE account_overrides (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    provider TEXT NOT NULL REFERENCES providers (name) ON DELETE CASCADE,
    account TEXT NOT NULL
        CONSTRAINT account_is_1_to_64_of_letters_digits_underscore_dash
            CHECK (length(account) BETWEEN 1 AND 64 AND account NOT GLOB '*[^A-Za-z0-9_-]*'),
    limit_name TEXT,
    rule TEXT CONSTRAINT rule_is_known CHECK (rule IN ('exempt', 'blocked', 'refuse', 'limit')),
    -- The account's own numbers for a limit. Without a window, those of a limit of requests in flight.
    max_requests INTEGER
        CONSTRAINT override_max_requests_is_0_to_1000000 CHECK (max_requests BETWEEN 0 AND 1000000),
    window_ms INTEGER
        CONSTRAINT override_window_ms_is_1_ms_to_31_days CHECK (window_ms BETWEEN 1 AND 2678400000),
    burst INTEGER
        CONSTRAINT override_burst_is_1_to_1000000 CHECK (burst BETWEEN 1 AND 1000000),
    -- The account's share among the accounts of its lane.
    weight INTEGER NOT NULL DEFAULT 1 CONSTRAINT override_weight_is_1_to_1000 CHECK (weight BETWEEN 1 AND 1000),
    -- The end of the rule, and the columns that come back then; NULL: the row is deleted.
    until_at INTEGER,
    then_row TEXT CONSTRAINT then_row_is_an_object
        CHECK (then_row IS NULL OR (json_valid(then_row) AND json_type(then_row) = 'object')),
    CONSTRAINT then_row_goes_with_until_at CHECK (then_row IS NULL OR until_at IS NOT NULL),
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
) STRICT;
CREATE UNIQUE INDEX account_overrides_one_rule_per_account_and_limit
    ON account_overrides (provider, account, coalesce(limit_name, ''));

CREATE TRIGGER instants_are_finite_of_account_overrides_on_insert
    BEFORE INSERT ON account_overrides
    WHEN NEW.until_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_account_overrides
    BEFORE UPDATE OF until_at ON account_overrides
    WHEN NEW.until_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

-- A rule that the provider's row cannot use. src/ledger/provider_row/accounts.rs checks the same, and names the fix.
CREATE TRIGGER account_overrides_check_rule_on_insert BEFORE INSERT ON account_overrides
    WHEN NEW.rule IN ('exempt', 'limit')
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: limit_name_of_the_rule_is_a_limit_of_scope_account')
    WHERE EXISTS (SELECT 1 FROM provider_limits
        WHERE provider = NEW.provider AND name = NEW.limit_name AND scope <> 'account');
    SELECT raise(ABORT, 'CHECK constraint failed: rule_exempt_needs_a_limit_of_scope_account')
    WHERE NEW.rule = 'exempt' AND NOT EXISTS (SELECT 1 FROM provider_limits
        WHERE provider = NEW.provider AND scope = 'account' AND (NEW.limit_name IS NULL OR name = NEW.limit_name));
    SELECT raise(ABORT, 'CHECK constraint failed: max_requests_of_the_rule_exceeds_the_reserve')
    WHERE NEW.max_requests > 0 AND NEW.max_requests
        * (100 - (SELECT reserve_percent FROM providers WHERE name = NEW.provider)) < 100;
    SELECT raise(ABORT, 'CHECK constraint failed: window_ms_of_the_rule_fits_its_limits')
    WHERE NEW.rule = 'limit' AND (SELECT count(*) = 0 AND NEW.window_ms IS NULL
            OR coalesce(sum((algorithm = 'concurrency') <> (NEW.window_ms IS NULL)), 0) > 0
        FROM provider_limits
        WHERE provider = NEW.provider AND scope = 'account' AND (NEW.limit_name IS NULL OR name = NEW.limit_name));
    SELECT raise(ABORT, 'CHECK constraint failed: window_ms_of_the_rule_is_long_enough_for_its_limits')
    WHERE NEW.rule = 'limit' AND EXISTS (SELECT 1 FROM provider_limits
        WHERE provider = NEW.provider AND scope = 'account' AND (NEW.limit_name IS NULL OR name = NEW.limit_name)
            AND ((offset_ms > 0 AND offset_ms >= NEW.window_ms)
                OR (algorithm = 'sliding_window' AND NEW.window_ms < 1000)));
    SELECT raise(ABORT, 'CHECK constraint failed: burst_of_the_rule_needs_a_token_bucket_or_gcra')
    WHERE NEW.rule = 'limit' AND NEW.burst IS NOT NULL AND NOT EXISTS (SELECT 1 FROM provider_limits
        WHERE provider = NEW.provider AND scope = 'account' AND (NEW.limit_name IS NULL OR name = NEW.limit_name)
            AND algorithm IN ('token_bucket', 'gcra'));
    SELECT raise(ABORT, 'CHECK constraint failed: max_requests_of_the_rule_is_at_most_10000_in_a_sliding_log')
    WHERE NEW.rule = 'limit' AND NEW.max_requests > 10000 AND (
        SELECT coalesce(sum(algorithm = 'sliding_log'), 0) > 0
            OR (NEW.limit_name IS NULL AND coalesce(sum(enabled), 0) = 0 AND NEW.window_ms IS NOT NULL)
        FROM provider_limits
        WHERE provider = NEW.provider AND scope = 'account' AND (NEW.limit_name IS NULL OR name = NEW.limit_name));
END;
CREATE TRIGGER account_overrides_check_rule BEFORE UPDATE ON account_overrides
    WHEN NEW.rule IN ('exempt', 'limit')
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: limit_name_of_the_rule_is_a_limit_of_scope_account')
    WHERE EXISTS (SELECT 1 FROM provider_limits
        WHERE provider = NEW.provider AND name = NEW.limit_name AND scope <> 'account');
    SELECT raise(ABORT, 'CHECK constraint failed: rule_exempt_needs_a_limit_of_scope_account')
    WHERE NEW.rule = 'exempt' AND NOT EXISTS (SELECT 1 FROM provider_limits
        WHERE provider = NEW.provider AND scope = 'account' AND (NEW.limit_name IS NULL OR name = NEW.limit_name));
    SELECT raise(ABORT, 'CHECK constraint failed: max_requests_of_the_rule_exceeds_the_reserve')
    WHERE NEW.max_requests > 0 AND NEW.max_requests
        * (100 - (SELECT reserve_percent FROM providers WHERE name = NEW.provider)) < 100;
    SELECT raise(ABORT, 'CHECK constraint failed: window_ms_of_the_rule_fits_its_limits')
    WHERE NEW.rule = 'limit' AND (SELECT count(*) = 0 AND NEW.window_ms IS NULL
            OR coalesce(sum((algorithm = 'concurrency') <> (NEW.window_ms IS NULL)), 0) > 0
        FROM provider_limits
        WHERE provider = NEW.provider AND scope = 'account' AND (NEW.limit_name IS NULL OR name = NEW.limit_name));
    SELECT raise(ABORT, 'CHECK constraint failed: window_ms_of_the_rule_is_long_enough_for_its_limits')
    WHERE NEW.rule = 'limit' AND EXISTS (SELECT 1 FROM provider_limits
        WHERE provider = NEW.provider AND scope = 'account' AND (NEW.limit_name IS NULL OR name = NEW.limit_name)
            AND ((offset_ms > 0 AND offset_ms >= NEW.window_ms)
                OR (algorithm = 'sliding_window' AND NEW.window_ms < 1000)));
    SELECT raise(ABORT, 'CHECK constraint failed: burst_of_the_rule_needs_a_token_bucket_or_gcra')
    WHERE NEW.rule = 'limit' AND NEW.burst IS NOT NULL AND NOT EXISTS (SELECT 1 FROM provider_limits
        WHERE provider = NEW.provider AND scope = 'account' AND (NEW.limit_name IS NULL OR name = NEW.limit_name)
            AND algorithm IN ('token_bucket', 'gcra'));
    SELECT raise(ABORT, 'CHECK constraint failed: max_requests_of_the_rule_is_at_most_10000_in_a_sliding_log')
    WHERE NEW.rule = 'limit' AND NEW.max_requests > 10000 AND (
        SELECT coalesce(sum(algorithm = 'sliding_log'), 0) > 0
            OR (NEW.limit_name IS NULL AND coalesce(sum(enabled), 0) = 0 AND NEW.window_ms IS NOT NULL)
        FROM provider_limits
        WHERE provider = NEW.provider AND scope = 'account' AND (NEW.limit_name IS NULL OR name = NEW.limit_name));
END;

-- Each provider as the file says it that was applied last, without what that file leaves out. `provider apply` compares
-- the next file with it, so that a change by hand is neither lost nor mistaken for an old file.
CREATE TABLE provider_files (
    provider TEXT NOT NULL PRIMARY KEY REFERENCES providers (name) ON DELETE CASCADE,
    file TEXT NOT NULL CONSTRAINT file_is_an_object CHECK (json_valid(file) AND json_type(file) = 'object')
) STRICT;

CREATE TABLE settings_audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER)),
    -- A database file has no users, so `who` is 'database file'. A command adds the operating system's user (user@host),
    -- and the reason.
    who TEXT NOT NULL,
    os_user TEXT,
    program TEXT,
    because TEXT,
    table_name TEXT NOT NULL,
    row_key TEXT NOT NULL,
    old_row TEXT,
    new_row TEXT
) STRICT;
-- For recent changes: a rebuild of the limiter's state asks which providers left a quota lately.
CREATE INDEX settings_audit_by_time ON settings_audit (at);
CREATE TRIGGER instants_are_finite_of_settings_audit_on_insert
    BEFORE INSERT ON settings_audit
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_settings_audit
    BEFORE UPDATE OF at ON settings_audit
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;

-- Who changes the settings, and why. PostgreSQL keeps this as a setting of the transaction. Here, it is set before a
-- change and cleared after it in the same transaction, so that no other change sees it.
CREATE TABLE settings_person (
    only_row INTEGER PRIMARY KEY DEFAULT 1 CONSTRAINT settings_person_has_one_row CHECK (only_row = 1),
    os_user TEXT,
    because TEXT,
    program TEXT
) STRICT;
INSERT INTO settings_person DEFAULT VALUES;
CREATE TRIGGER settings_audit_person AFTER INSERT ON settings_audit
BEGIN
    UPDATE settings_audit SET os_user = (SELECT os_user FROM settings_person),
        because = (SELECT because FROM settings_person), program = (SELECT program FROM settings_person)
    WHERE id = NEW.id;
END;

-- Rows of the audit can only be added. A command completes its row with author and reason, once. A database file has no
-- roles: any user that may write it may also drop these triggers.
CREATE TRIGGER settings_audit_never_changes BEFORE UPDATE ON settings_audit
    WHEN OLD.os_user IS NOT NULL OR NEW.id <> OLD.id OR NEW.at <> OLD.at OR NEW.who <> OLD.who
        OR NEW.table_name <> OLD.table_name OR NEW.row_key <> OLD.row_key OR NEW.old_row IS NOT OLD.old_row
        OR NEW.new_row IS NOT OLD.new_row
BEGIN
    SELECT raise(ABORT, 'rows of settings_audit are never changed or deleted');
END;
CREATE TRIGGER settings_audit_never_deleted BEFORE DELETE ON settings_audit
BEGIN
    SELECT raise(ABORT, 'rows of settings_audit are never changed or deleted');
END;

-- The version increases by one with each change. Only after a restore it must exceed the versions that the process and
-- its limiter know.
CREATE TRIGGER settings_version_rises BEFORE UPDATE ON settings_version
    WHEN NEW.version < OLD.version OR (NEW.version > OLD.version + 1 AND NEW.version > 281474976710656)
BEGIN
    SELECT raise(ABORT, 'the version of the settings rises by one, and after a restore to 2^48 at most');
END;
CREATE TRIGGER settings_version_never_deleted BEFORE DELETE ON settings_version
BEGIN
    SELECT raise(ABORT, 'the version of the settings is never deleted');
END;

CREATE TRIGGER providers_version_is_set_by_triggers BEFORE UPDATE OF version ON providers
WHEN NEW.version <> (SELECT version FROM settings_version)
BEGIN
    SELECT raise(ABORT, 'version is set by triggers');
END;

-- Each change of a setting increases the version, stamps the providers and writes the audit. Nested updates set only
-- `version` and `updated_at`, which the column lists leave out: no trigger fires twice. A trigger sets `at` itself,
-- because the default of the column fails in an older SQLite.

-- For a shell that does not enforce foreign keys: otherwise, limits would come back with the next provider of that name.
CREATE TRIGGER providers_delete_what_is_theirs AFTER DELETE ON providers
BEGIN
    DELETE FROM provider_files WHERE provider = OLD.name;
    DELETE FROM account_overrides WHERE provider = OLD.name;
    DELETE FROM provider_limits WHERE provider = OLD.name;
END;

CREATE TRIGGER providers_insert AFTER INSERT ON providers
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) WHERE name = NEW.name;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'providers', NEW.name,
        old_row, new_row
    FROM (SELECT NULL AS old_row,
        json_object(
            'name', NEW.name, 'kind', NEW.kind, 'quota', NEW.quota, 'enabled', NEW.enabled,
            'paused', NEW.paused, 'url', NEW.url, 'mode', NEW.mode, 'slot_release', NEW.slot_release,
            'transit_jitter_ms', NEW.transit_jitter_ms, 'pacing', NEW.pacing,
            'reserve_percent', NEW.reserve_percent, 'store_down', NEW.store_down, 'share_of', NEW.share_of,
            'timeout_ms', NEW.timeout_ms, 'send_budget_ms', NEW.send_budget_ms,
            'connection_max_age_ms', NEW.connection_max_age_ms,
            'reuse_connections', NEW.reuse_connections, 'workers', NEW.workers,
            'bucket_capacity', NEW.bucket_capacity, 'leak_per_second', NEW.leak_per_second,
            'max_wait_ms', NEW.max_wait_ms, 'max_attempts', NEW.max_attempts, 'max_age_s', NEW.max_age_s,
            'backoff_base_ms', NEW.backoff_base_ms, 'backoff_max_ms', NEW.backoff_max_ms,
            'idempotency_retention_s', NEW.idempotency_retention_s, 'headers', json(NEW.headers),
            'request', json(NEW.request), 'lookup', json(NEW.lookup), 'statuses', json(NEW.statuses),
            'currencies', json(NEW.currencies), 'decimals', json(NEW.decimals),
            'amount_step', json(NEW.amount_step), 'require', json(NEW.require), 'order', NEW."order", 'resumed_at', NEW.resumed_at) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER providers_update AFTER UPDATE OF
        name, kind, quota, enabled, paused, url, mode, slot_release, transit_jitter_ms, pacing,
        reserve_percent, store_down, share_of, timeout_ms, send_budget_ms, connection_max_age_ms, reuse_connections,
        workers, bucket_capacity,
        leak_per_second, max_wait_ms, max_attempts, max_age_s, backoff_base_ms, backoff_max_ms,
        idempotency_retention_s, headers, request, lookup, statuses, currencies, decimals,
        amount_step, require, "order", resumed_at
    ON providers
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
        WHERE name IN (OLD.name, NEW.name);
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'providers', NEW.name,
        old_row, new_row
    FROM (SELECT json_object(
            'name', OLD.name, 'kind', OLD.kind, 'quota', OLD.quota, 'enabled', OLD.enabled,
            'paused', OLD.paused, 'url', OLD.url, 'mode', OLD.mode, 'slot_release', OLD.slot_release,
            'transit_jitter_ms', OLD.transit_jitter_ms, 'pacing', OLD.pacing,
            'reserve_percent', OLD.reserve_percent, 'store_down', OLD.store_down, 'share_of', OLD.share_of,
            'timeout_ms', OLD.timeout_ms, 'send_budget_ms', OLD.send_budget_ms,
            'connection_max_age_ms', OLD.connection_max_age_ms,
            'reuse_connections', OLD.reuse_connections, 'workers', OLD.workers,
            'bucket_capacity', OLD.bucket_capacity, 'leak_per_second', OLD.leak_per_second,
            'max_wait_ms', OLD.max_wait_ms, 'max_attempts', OLD.max_attempts, 'max_age_s', OLD.max_age_s,
            'backoff_base_ms', OLD.backoff_base_ms, 'backoff_max_ms', OLD.backoff_max_ms,
            'idempotency_retention_s', OLD.idempotency_retention_s, 'headers', json(OLD.headers),
            'request', json(OLD.request), 'lookup', json(OLD.lookup), 'statuses', json(OLD.statuses),
            'currencies', json(OLD.currencies), 'decimals', json(OLD.decimals),
            'amount_step', json(OLD.amount_step), 'require', json(OLD.require), 'order', OLD."order", 'resumed_at', OLD.resumed_at) AS old_row,
        json_object(
            'name', NEW.name, 'kind', NEW.kind, 'quota', NEW.quota, 'enabled', NEW.enabled,
            'paused', NEW.paused, 'url', NEW.url, 'mode', NEW.mode, 'slot_release', NEW.slot_release,
            'transit_jitter_ms', NEW.transit_jitter_ms, 'pacing', NEW.pacing,
            'reserve_percent', NEW.reserve_percent, 'store_down', NEW.store_down, 'share_of', NEW.share_of,
            'timeout_ms', NEW.timeout_ms, 'send_budget_ms', NEW.send_budget_ms,
            'connection_max_age_ms', NEW.connection_max_age_ms,
            'reuse_connections', NEW.reuse_connections, 'workers', NEW.workers,
            'bucket_capacity', NEW.bucket_capacity, 'leak_per_second', NEW.leak_per_second,
            'max_wait_ms', NEW.max_wait_ms, 'max_attempts', NEW.max_attempts, 'max_age_s', NEW.max_age_s,
            'backoff_base_ms', NEW.backoff_base_ms, 'backoff_max_ms', NEW.backoff_max_ms,
            'idempotency_retention_s', NEW.idempotency_retention_s, 'headers', json(NEW.headers),
            'request', json(NEW.request), 'lookup', json(NEW.lookup), 'statuses', json(NEW.statuses),
            'currencies', json(NEW.currencies), 'decimals', json(NEW.decimals),
            'amount_step', json(NEW.amount_step), 'require', json(NEW.require), 'order', NEW."order", 'resumed_at', NEW.resumed_at) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER providers_delete AFTER DELETE ON providers
BEGIN
    UPDATE settings_version SET version = version + 1;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'providers', OLD.name,
        old_row, new_row
    FROM (SELECT json_object(
            'name', OLD.name, 'kind', OLD.kind, 'quota', OLD.quota, 'enabled', OLD.enabled,
            'paused', OLD.paused, 'url', OLD.url, 'mode', OLD.mode, 'slot_release', OLD.slot_release,
            'transit_jitter_ms', OLD.transit_jitter_ms, 'pacing', OLD.pacing,
            'reserve_percent', OLD.reserve_percent, 'store_down', OLD.store_down, 'share_of', OLD.share_of,
            'timeout_ms', OLD.timeout_ms, 'send_budget_ms', OLD.send_budget_ms,
            'connection_max_age_ms', OLD.connection_max_age_ms,
            'reuse_connections', OLD.reuse_connections, 'workers', OLD.workers,
            'bucket_capacity', OLD.bucket_capacity, 'leak_per_second', OLD.leak_per_second,
            'max_wait_ms', OLD.max_wait_ms, 'max_attempts', OLD.max_attempts, 'max_age_s', OLD.max_age_s,
            'backoff_base_ms', OLD.backoff_base_ms, 'backoff_max_ms', OLD.backoff_max_ms,
            'idempotency_retention_s', OLD.idempotency_retention_s, 'headers', json(OLD.headers),
            'request', json(OLD.request), 'lookup', json(OLD.lookup), 'statuses', json(OLD.statuses),
            'currencies', json(OLD.currencies), 'decimals', json(OLD.decimals),
            'amount_step', json(OLD.amount_step), 'require', json(OLD.require), 'order', OLD."order", 'resumed_at', OLD.resumed_at) AS old_row,
        NULL AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER provider_limits_insert AFTER INSERT ON provider_limits
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) WHERE name = NEW.provider;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'provider_limits', NEW.provider || '/' || NEW.name,
        old_row, new_row
    FROM (SELECT NULL AS old_row,
        json_object(
            'provider', NEW.provider, 'name', NEW.name, 'algorithm', NEW.algorithm,
            'max_requests', NEW.max_requests, 'window_ms', NEW.window_ms, 'offset_ms', NEW.offset_ms,
            'burst', NEW.burst, 'scope', NEW.scope, 'applies_to', NEW.applies_to, 'shadow', NEW.shadow,
            'enabled', NEW.enabled) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER provider_limits_update AFTER UPDATE OF
        provider, name, algorithm, max_requests, window_ms, offset_ms, burst, scope, applies_to, shadow,
        enabled
    ON provider_limits
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
        WHERE name IN (OLD.provider, NEW.provider);
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'provider_limits', NEW.provider || '/' || NEW.name,
        old_row, new_row
    FROM (SELECT json_object(
            'provider', OLD.provider, 'name', OLD.name, 'algorithm', OLD.algorithm,
            'max_requests', OLD.max_requests, 'window_ms', OLD.window_ms, 'offset_ms', OLD.offset_ms,
            'burst', OLD.burst, 'scope', OLD.scope, 'applies_to', OLD.applies_to, 'shadow', OLD.shadow,
            'enabled', OLD.enabled) AS old_row,
        json_object(
            'provider', NEW.provider, 'name', NEW.name, 'algorithm', NEW.algorithm,
            'max_requests', NEW.max_requests, 'window_ms', NEW.window_ms, 'offset_ms', NEW.offset_ms,
            'burst', NEW.burst, 'scope', NEW.scope, 'applies_to', NEW.applies_to, 'shadow', NEW.shadow,
            'enabled', NEW.enabled) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER provider_limits_delete AFTER DELETE ON provider_limits
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) WHERE name = OLD.provider;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'provider_limits', OLD.provider || '/' || OLD.name,
        old_row, new_row
    FROM (SELECT json_object(
            'provider', OLD.provider, 'name', OLD.name, 'algorithm', OLD.algorithm,
            'max_requests', OLD.max_requests, 'window_ms', OLD.window_ms, 'offset_ms', OLD.offset_ms,
            'burst', OLD.burst, 'scope', OLD.scope, 'applies_to', OLD.applies_to, 'shadow', OLD.shadow,
            'enabled', OLD.enabled) AS old_row,
        NULL AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER account_overrides_insert AFTER INSERT ON account_overrides
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) WHERE name = NEW.provider;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'account_overrides',
        NEW.provider || '/' || NEW.account || '/' || coalesce(NEW.limit_name, '*'),
        old_row, new_row
    FROM (SELECT NULL AS old_row,
        json_object(
            'id', NEW.id, 'provider', NEW.provider, 'account', NEW.account, 'limit_name', NEW.limit_name,
            'rule', NEW.rule, 'max_requests', NEW.max_requests, 'window_ms', NEW.window_ms,
            'burst', NEW.burst, 'weight', NEW.weight, 'until_at', NEW.until_at,
            'then_row', json(NEW.then_row)) AS new_row)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER account_overrides_update AFTER UPDATE OF
        id, provider, account, limit_name, rule, max_requests, window_ms, burst, weight,
        until_at, then_row
    ON account_overrides
BEGIN
    -- Any other change of the row ends the return of the former rule. The nested update does not fire this trigger again,
    -- and the audit has the row as it is after it.
    UPDATE account_overrides SET until_at = NULL, then_row = NULL
    WHERE id = NEW.id AND OLD.until_at IS NOT NULL AND (NEW.until_at, NEW.then_row) IS (OLD.until_at, OLD.then_row)
        AND (NEW.provider, NEW.account, NEW.limit_name, NEW.rule, NEW.max_requests, NEW.window_ms, NEW.burst, NEW.weight)
            IS NOT (OLD.provider, OLD.account, OLD.limit_name, OLD.rule, OLD.max_requests, OLD.window_ms, OLD.burst,
                OLD.weight);
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
        WHERE name IN (OLD.provider, NEW.provider);
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'account_overrides',
        NEW.provider || '/' || NEW.account || '/' || coalesce(NEW.limit_name, '*'),
        old_row, new_row
    FROM (SELECT json_object(
            'id', OLD.id, 'provider', OLD.provider, 'account', OLD.account, 'limit_name', OLD.limit_name,
            'rule', OLD.rule, 'max_requests', OLD.max_requests, 'window_ms', OLD.window_ms,
            'burst', OLD.burst, 'weight', OLD.weight, 'until_at', OLD.until_at,
            'then_row', json(OLD.then_row)) AS old_row,
        json_object(
            'id', id, 'provider', provider, 'account', account, 'limit_name', limit_name,
            'rule', rule, 'max_requests', max_requests, 'window_ms', window_ms,
            'burst', burst, 'weight', weight, 'until_at', until_at,
            'then_row', json(then_row)) AS new_row
        FROM account_overrides WHERE id = NEW.id)
    WHERE old_row IS NOT new_row;
END;

CREATE TRIGGER account_overrides_delete AFTER DELETE ON account_overrides
BEGIN
    UPDATE settings_version SET version = version + 1;
    UPDATE providers SET version = (SELECT version FROM settings_version),
        updated_at = CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) WHERE name = OLD.provider;
    INSERT INTO settings_audit (at, who, table_name, row_key, old_row, new_row)
    SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        'database file', 'account_overrides',
        OLD.provider || '/' || OLD.account || '/' || coalesce(OLD.limit_name, '*'),
        old_row, new_row
    FROM (SELECT json_object(
            'id', OLD.id, 'provider', OLD.provider, 'account', OLD.account, 'limit_name', OLD.limit_name,
            'rule', OLD.rule, 'max_requests', OLD.max_requests, 'window_ms', OLD.window_ms,
            'burst', OLD.burst, 'weight', OLD.weight, 'until_at', OLD.until_at,
            'then_row', json(OLD.then_row)) AS old_row,
        NULL AS new_row)
    WHERE old_row IS NOT new_row;
END;
