-- A SQLite database of Sluicegate 0.1.0 with rows in every table, by .dump. See tests/contract/ledger/upgrade.rs.
BEGIN TRANSACTION;
CREATE TABLE _sqlx_migrations (
    version BIGINT PRIMARY KEY,
    description TEXT NOT NULL,
    installed_on TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
    success BOOLEAN NOT NULL,
    checksum BLOB NOT NULL,
    execution_time BIGINT NOT NULL
);
INSERT INTO _sqlx_migrations VALUES(1,'settings','2026-11-27 00:19:01',1,X'1bfe0ba4c5df1471053948d8ac19deb446800fee03949bd34d7226d96514b7906136e28fbc801f053d6b81f22a012d9b',3589200);
INSERT INTO _sqlx_migrations VALUES(2,'ledger','2026-11-27 00:19:01',1,X'deff256578770ae1c6f986c80ccb66d9554ef0611cafbbd590ebe95801c2daa237b086d8f867fcbfe492204d05dfed5f',5028124);
INSERT INTO _sqlx_migrations VALUES(3,'limiter','2026-11-27 00:19:01',1,X'a8eaf85b11e8d00d78f21432f764b6984433d5e56f4df5848ad70d80abd5cba1e46440a62200fe5246b8cb30c3066576',468455);
INSERT INTO _sqlx_migrations VALUES(4,'operators','2026-11-27 00:19:01',1,X'573b654e19fc6a43a96d40bdd9c09223069140957f3ace1739b680e07d6f2bf948b7d0cf6a81c06b7f8d6877dd9cd1f1',1018970);
INSERT INTO _sqlx_migrations VALUES(5,'workers','2026-11-27 00:19:01',1,X'2db3d35ba26c96b40e7f3e9972543ba3a5af5569c211c09257548154d1b9922b8891e778d2233242f704cc3a40228d6b',1169734);
INSERT INTO _sqlx_migrations VALUES(6,'queue','2026-11-27 00:19:01',1,X'56534fee568ce5e43f926b42eed297ebd018111c953af8e64d44b1b5a6868f6e7d5dcc48b8978671311d92163676a72d',401015);
CREATE TABLE settings_version (
    only_row INTEGER PRIMARY KEY DEFAULT 1 CONSTRAINT settings_version_has_one_row CHECK (only_row = 1),
    version  INTEGER NOT NULL
) STRICT;
INSERT INTO settings_version VALUES(1,10);
CREATE TABLE deployment (
    only_row INTEGER PRIMARY KEY DEFAULT 1 CONSTRAINT deployment_has_one_row CHECK (only_row = 1),
    id TEXT NOT NULL CONSTRAINT deployment_id_is_a_uuid
        CHECK (id GLOB '????????-????-????-????-????????????'
            AND length(replace(id, '-', '')) = 32 AND replace(id, '-', '') NOT GLOB '*[^0-9a-f]*')
) STRICT;
INSERT INTO deployment VALUES(1,'50ddbd38-b041-44d6-ae7b-6719e3732c45');
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
INSERT INTO providers VALUES('acme','http','acme',1,0,1793527200000,'https://acme.example/charges/${job:reference}','{"Authorization": "Bearer ${file:/run/secrets/acme}"}','{"method": "POST"}','{"url": "https://acme.example/charges/${id}"}','{"402": "declined"}','["account"]',86400,10000,500,60000,0,'blocking','account',32,256,12.5,5000,8,259200,500,60000,'response',50,'burst',0,'share',4,9,1795738741654);
INSERT INTO providers VALUES('bolt','http',NULL,1,1,NULL,'https://bolt.example/pay','{}',NULL,NULL,NULL,'[]',NULL,10000,500,60000,NULL,'blocking','none',32,256,NULL,5000,8,259200,500,60000,'response',50,'burst',0,'wait',NULL,10,1795738741658);
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
INSERT INTO provider_limits VALUES('acme','per-second','token_bucket',100,1000,0,20,'provider','all',0,1);
INSERT INTO provider_limits VALUES('acme','at-once','concurrency',5,NULL,0,NULL,'account','all',0,1);
INSERT INTO provider_limits VALUES('bolt','per-minute','sliding_log',600,60000,0,NULL,'provider','all',0,1);
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
INSERT INTO account_overrides VALUES(1,'acme','acct_1','per-second','limit',5,1000,2,1);
INSERT INTO account_overrides VALUES(2,'acme','acct_2',NULL,'refuse',NULL,NULL,NULL,1);
INSERT INTO account_overrides VALUES(3,'acme','acct_3',NULL,NULL,NULL,NULL,NULL,3);
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
INSERT INTO settings_audit VALUES(1,1795738741639,'database file',NULL,NULL,NULL,'providers','acme',NULL,'{"name":"acme","kind":"http","quota":"acme","enabled":1,"paused":0,"url":"https://acme.example/charges/${job:reference}","mode":"blocking","slot_release":"response","transit_jitter_ms":50,"pacing":"burst","reserve_percent":0,"store_down":"share","share_of":4,"timeout_ms":10000,"send_budget_ms":500,"connection_max_age_ms":60000,"reuse_connections":0,"workers":32,"bucket_capacity":256,"leak_per_second":12.5,"max_wait_ms":5000,"max_attempts":8,"max_age_s":259200,"backoff_base_ms":500,"backoff_max_ms":60000,"idempotency_retention_s":86400,"headers":{"Authorization":"Bearer ${file:/run/secrets/acme}"},"request":{"method":"POST"},"lookup":{"url":"https://acme.example/charges/${id}"},"statuses":{"402":"declined"},"require":["account"],"order":"account","resumed_at":1793527200000}');
INSERT INTO settings_audit VALUES(2,1795738741639,'database file',NULL,NULL,NULL,'providers','bolt',NULL,'{"name":"bolt","kind":"http","quota":null,"enabled":1,"paused":0,"url":"https://bolt.example/pay","mode":"blocking","slot_release":"response","transit_jitter_ms":50,"pacing":"burst","reserve_percent":0,"store_down":"wait","share_of":null,"timeout_ms":10000,"send_budget_ms":500,"connection_max_age_ms":60000,"reuse_connections":null,"workers":32,"bucket_capacity":256,"leak_per_second":null,"max_wait_ms":5000,"max_attempts":8,"max_age_s":259200,"backoff_base_ms":500,"backoff_max_ms":60000,"idempotency_retention_s":null,"headers":{},"request":null,"lookup":null,"statuses":null,"require":[],"order":"none","resumed_at":null}');
INSERT INTO settings_audit VALUES(3,1795738741650,'database file',NULL,NULL,NULL,'provider_limits','acme/per-second',NULL,'{"provider":"acme","name":"per-second","algorithm":"token_bucket","max_requests":100,"window_ms":1000,"offset_ms":0,"burst":20,"scope":"provider","applies_to":"all","shadow":0,"enabled":1}');
INSERT INTO settings_audit VALUES(4,1795738741650,'database file',NULL,NULL,NULL,'provider_limits','acme/at-once',NULL,'{"provider":"acme","name":"at-once","algorithm":"concurrency","max_requests":5,"window_ms":null,"offset_ms":0,"burst":null,"scope":"account","applies_to":"all","shadow":0,"enabled":1}');
INSERT INTO settings_audit VALUES(5,1795738741650,'database file',NULL,NULL,NULL,'provider_limits','bolt/per-minute',NULL,'{"provider":"bolt","name":"per-minute","algorithm":"sliding_log","max_requests":600,"window_ms":60000,"offset_ms":0,"burst":null,"scope":"provider","applies_to":"all","shadow":0,"enabled":1}');
INSERT INTO settings_audit VALUES(6,1795738741654,'database file',NULL,NULL,NULL,'account_overrides','acme/acct_1/per-second',NULL,'{"id":1,"provider":"acme","account":"acct_1","limit_name":"per-second","rule":"limit","max_requests":5,"window_ms":1000,"burst":2,"weight":1}');
INSERT INTO settings_audit VALUES(7,1795738741654,'database file',NULL,NULL,NULL,'account_overrides','acme/acct_2/*',NULL,'{"id":2,"provider":"acme","account":"acct_2","limit_name":null,"rule":"refuse","max_requests":null,"window_ms":null,"burst":null,"weight":1}');
INSERT INTO settings_audit VALUES(8,1795738741654,'database file',NULL,NULL,NULL,'account_overrides','acme/acct_3/*',NULL,'{"id":3,"provider":"acme","account":"acct_3","limit_name":null,"rule":null,"max_requests":null,"window_ms":null,"burst":null,"weight":3}');
INSERT INTO settings_audit VALUES(9,1795738741658,'database file',NULL,NULL,NULL,'providers','bolt','{"name":"bolt","kind":"http","quota":null,"enabled":1,"paused":0,"url":"https://bolt.example/pay","mode":"blocking","slot_release":"response","transit_jitter_ms":50,"pacing":"burst","reserve_percent":0,"store_down":"wait","share_of":null,"timeout_ms":10000,"send_budget_ms":500,"connection_max_age_ms":60000,"reuse_connections":null,"workers":32,"bucket_capacity":256,"leak_per_second":null,"max_wait_ms":5000,"max_attempts":8,"max_age_s":259200,"backoff_base_ms":500,"backoff_max_ms":60000,"idempotency_retention_s":null,"headers":{},"request":null,"lookup":null,"statuses":null,"require":[],"order":"none","resumed_at":null}','{"name":"bolt","kind":"http","quota":null,"enabled":1,"paused":1,"url":"https://bolt.example/pay","mode":"blocking","slot_release":"response","transit_jitter_ms":50,"pacing":"burst","reserve_percent":0,"store_down":"wait","share_of":null,"timeout_ms":10000,"send_budget_ms":500,"connection_max_age_ms":60000,"reuse_connections":null,"workers":32,"bucket_capacity":256,"leak_per_second":null,"max_wait_ms":5000,"max_attempts":8,"max_age_s":259200,"backoff_base_ms":500,"backoff_max_ms":60000,"idempotency_retention_s":null,"headers":{},"request":null,"lookup":null,"statuses":null,"require":[],"order":"none","resumed_at":null}');
CREATE TABLE settings_person (
    only_row INTEGER PRIMARY KEY DEFAULT 1 CONSTRAINT settings_person_has_one_row CHECK (only_row = 1),
    os_user TEXT,
    because TEXT,
    program TEXT
) STRICT;
INSERT INTO settings_person VALUES(1,NULL,NULL,NULL);
CREATE TABLE jobs (
    -- What the payment is.
    id TEXT NOT NULL PRIMARY KEY
        CONSTRAINT id_is_1_to_64_of_letters_digits_underscore_dash
            CHECK (length(id) BETWEEN 1 AND 64 AND id NOT GLOB '*[^A-Za-z0-9_-]*'),
    -- No foreign key: a payment outlives its provider's row.
    provider TEXT NOT NULL
        CONSTRAINT job_provider_is_a_provider_name
            CHECK (provider GLOB '[a-z0-9]*' AND provider NOT GLOB '*[^a-z0-9_-]*' AND length(provider) <= 63),
    -- The effective key: the id itself unless one was given.
    idempotency_key TEXT NOT NULL
        CONSTRAINT idempotency_key_is_1_to_64_of_letters_digits_underscore_dash
            CHECK (length(idempotency_key) BETWEEN 1 AND 64 AND idempotency_key NOT GLOB '*[^A-Za-z0-9_-]*'),
    key_given INTEGER NOT NULL CONSTRAINT key_given_is_0_or_1 CHECK (key_given IN (0, 1)),
    content_hash BLOB NOT NULL CONSTRAINT content_hash_is_32_bytes CHECK (length(content_hash) = 32),
    amount INTEGER NOT NULL CONSTRAINT amount_is_above_0 CHECK (amount > 0),
    currency TEXT NOT NULL CONSTRAINT currency_is_3_capital_letters CHECK (currency GLOB '[A-Z][A-Z][A-Z]'),
    account TEXT CONSTRAINT job_account_is_1_to_64_of_letters_digits_underscore_dash
        CHECK (length(account) BETWEEN 1 AND 64 AND account NOT GLOB '*[^A-Za-z0-9_-]*'),
    reference TEXT CONSTRAINT reference_is_at_most_255_characters CHECK (length(reference) <= 255),
    cost INTEGER NOT NULL CONSTRAINT cost_is_1_to_1000 CHECK (cost BETWEEN 1 AND 1000),
    priority INTEGER NOT NULL CONSTRAINT priority_is_0_to_9 CHECK (priority BETWEEN 0 AND 9),
    not_before INTEGER,
    expires_at INTEGER,
    -- A JSON object exactly as the producer wrote it; emptied (NULL) when the job is scrubbed. Not a JSON
    -- type, which would lose the formatting; the reader of messages has checked it.
    payload TEXT,

    -- How far it is.
    state TEXT NOT NULL
        CONSTRAINT state_is_known CHECK (state IN ('waiting', 'sending', 'unknown', 'succeeded', 'declined', 'dead',
                                                   'expired', 'review', 'cancelled')),
    -- Why it ended, or an operator's words.
    reason TEXT,
    wake_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0 CONSTRAINT attempts_is_0_or_more CHECK (attempts >= 0),
    last_attempt INTEGER NOT NULL DEFAULT 0 CONSTRAINT last_attempt_is_0_or_more CHECK (last_attempt >= 0),
    lookups INTEGER NOT NULL DEFAULT 0 CONSTRAINT lookups_is_0_or_more CHECK (lookups >= 0),
    -- Whether a look-up without a result has allowed one more request, and whether that may have been sent.
    resend TEXT CONSTRAINT resend_is_granted_or_used CHECK (resend IN ('granted', 'used')),
    -- Some attempt's outcome was unknown. Only an operator's decision clears this.
    maybe_charged INTEGER NOT NULL DEFAULT 0 CONSTRAINT maybe_charged_is_0_or_1 CHECK (maybe_charged IN (0, 1)),
    provider_reference TEXT,

    -- The lease.
    fence INTEGER NOT NULL CONSTRAINT fence_is_0_or_more CHECK (fence >= 0),
    lease_owner TEXT,
    lease_until INTEGER,
    -- Consecutive workers that were lost while the job was active, before they began a request for it.
    lost_holders INTEGER NOT NULL DEFAULT 0 CONSTRAINT lost_holders_is_0_or_more CHECK (lost_holders >= 0),

    -- The time of the first byte of the first request that may have been sent, and the number of that attempt.
    first_sent_at INTEGER,
    first_sent_number INTEGER,
    -- The frozen request of the first attempt; later attempts send the same.
    frozen_method TEXT,
    frozen_url TEXT,
    frozen_key TEXT,
    frozen_content_type TEXT,
    frozen_body BLOB,
    frozen_account TEXT,
    frozen_fingerprint TEXT,

    -- Why the job waits, or waited last: the statement that delays it writes this, and later ones keep it. The codes are
    -- those of `WaitReason` in src/domain/wait_reason.rs. Only human readers read the detail.
    wait_reason TEXT CONSTRAINT wait_reason_is_known CHECK (wait_reason IN (
        'not_before', 'egress', 'limit', 'cost_exceeds_limit', 'account_blocked', 'provider_paused', 'throttled',
        'limiter_cold', 'needs_history', 'limiter_unavailable', 'stale_settings', 'circuit_open', 'circuit_probing',
        'operator_paused', 'quota_closed', 'misconfigured', 'rejected_streak', 'unbuildable', 'local_fault',
        'object_busy', 'in_progress', 'outcome_unknown', 'lookup', 'resend', 'retry', 'permit_missed',
        'ledger_unavailable', 'ledger_refused', 'worker_lost'
    )),
    wait_limit TEXT,
    wait_detail TEXT,
    wait_since INTEGER,
    wait_until INTEGER,
    -- The number of the request that it waits to send: delays for one reason before one request are one wait.
    wait_request INTEGER,
    -- A change of a limit wakes the jobs whose wait for it began before. Instants that every claim changes do not show
    -- that, because a copy of the message may come long before it is due.
    wait_begun_at INTEGER,

    -- The order of recording: first in, first out within a flow. Set by a trigger.
    seq INTEGER NOT NULL DEFAULT 0,
    -- The job waits here alone: due, without a lease, and no queue has a message for it. Only a dispatcher brings it
    -- back.
    backlog INTEGER NOT NULL DEFAULT 0 CONSTRAINT backlog_is_0_or_1 CHECK (backlog IN (0, 1)),
    -- A claimed job of a lane that keeps an account's order: no later job of its account is claimed while this one is
    -- undecided and not in the backlog.
    in_order INTEGER NOT NULL DEFAULT 0 CONSTRAINT in_order_is_0_or_1 CHECK (in_order IN (0, 1)),

    -- No queue has a message for the job: the sweeper publishes one when it is due.
    unqueued INTEGER NOT NULL DEFAULT 0 CONSTRAINT unqueued_is_0_or_1 CHECK (unqueued IN (0, 1)),
    -- Number of the newest copy of its message; 0 is the producer's own.
    copy INTEGER NOT NULL DEFAULT 0 CONSTRAINT copy_is_0_or_more CHECK (copy >= 0),
    -- Number of the copy that a delay queue holds until an instant.
    delayed_copy INTEGER,
    delayed_until INTEGER,
    -- Copies of the message that the sweeper has published. The next one is not published before this instant; NULL
    -- until the first.
    sweeps INTEGER NOT NULL DEFAULT 0 CONSTRAINT sweeps_is_0_or_more CHECK (sweeps >= 0),
    sweep_after INTEGER,

    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    -- When an operator last sent the job again: its age counts from then.
    revived_at INTEGER,
    -- When payload and request body were emptied.
    scrubbed_at INTEGER,

    CONSTRAINT jobs_one_payment_per_provider_and_key UNIQUE (provider, idempotency_key),
    CONSTRAINT lease_is_whole_or_absent CHECK ((lease_owner IS NULL) = (lease_until IS NULL)),
    CONSTRAINT final_states_have_no_lease CHECK (state IN ('waiting', 'sending', 'unknown') OR lease_until IS NULL),
    CONSTRAINT maybe_charged_is_never_waiting_dead_expired_or_cancelled
        CHECK (NOT (maybe_charged AND state IN ('waiting', 'dead', 'expired', 'cancelled'))),
    CONSTRAINT unknown_is_maybe_charged CHECK (state <> 'unknown' OR maybe_charged),
    CONSTRAINT sending_and_unknown_have_a_frozen_request
        CHECK (state NOT IN ('sending', 'unknown') OR (frozen_method IS NOT NULL AND first_sent_at IS NOT NULL)),
    CONSTRAINT first_sent_is_whole_or_absent CHECK ((first_sent_at IS NULL) = (first_sent_number IS NULL)),
    CONSTRAINT frozen_request_is_whole_or_absent
        CHECK ((frozen_method IS NULL) + (frozen_url IS NULL) + (frozen_key IS NULL) + (frozen_content_type IS NULL)
               + (frozen_body IS NULL) + (frozen_fingerprint IS NULL) IN (0, 6)
               AND (frozen_account IS NULL OR frozen_method IS NOT NULL)),
    CONSTRAINT wait_limit_is_named_by_its_reason CHECK (
        (wait_limit IS NOT NULL) = coalesce(wait_reason IN ('limit', 'cost_exceeds_limit'), false)),
    CONSTRAINT backlog_has_no_lease_and_no_message CHECK (NOT backlog OR (lease_until IS NULL AND NOT unqueued)),
    CONSTRAINT a_delayed_copy_has_a_number_and_an_end CHECK ((delayed_copy IS NULL) = (delayed_until IS NULL)),
    CONSTRAINT open_jobs_are_not_scrubbed
        CHECK (scrubbed_at IS NULL OR state NOT IN ('waiting', 'sending', 'unknown'))
) STRICT;
INSERT INTO jobs VALUES('pay-1','acme','key-1',1,X'abababababababababababababababababababababababababababababababab',1299,'EUR','acct_1','invoice 7',1,9,1793527200000,1793613600000,'{"token": "tok_1"}','succeeded','accepted',1793527200000,2,2,0,NULL,0,'ch_1',3,NULL,NULL,0,1793527200000,1,'POST','https://acme.example/charges/invoice%207','key-1','application/json',X'7b7d','acct_1','0123456789abcdef','limit','per-second',NULL,1793527200000,1793527201250,1,1793527200000,1,0,0,0,1,NULL,NULL,0,NULL,1793527200000,1793527205000,NULL,NULL);
INSERT INTO jobs VALUES('pay-2','acme','pay-2',0,X'abababababababababababababababababababababababababababababababab',500,'USD','acct_1',NULL,1,0,NULL,NULL,NULL,'waiting',NULL,1793527201250,0,0,0,NULL,0,NULL,1,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'limit','per-second',NULL,1793527201250,1793527205000,1,1793527201250,2,1,0,0,0,NULL,NULL,0,NULL,1793527201250,1793527201250,NULL,NULL);
INSERT INTO jobs VALUES('pay-3','acme','pay-3',0,X'abababababababababababababababababababababababababababababababab',700,'EUR',NULL,'order 3',2,5,NULL,NULL,'{}','unknown',NULL,1793527205000,1,1,1,'granted',1,NULL,4,NULL,NULL,0,1793527201250,1,'POST','https://acme.example/charges/order%203','pay-3','application/json',X'7b7d',NULL,'0123456789abcdef','outcome_unknown',NULL,'no answer in time',1793527201250,1793527205000,2,1793527201250,3,0,0,0,1,1,1793613600000,1,NULL,1793527201250,1793527205000,NULL,NULL);
INSERT INTO jobs VALUES('pay-4','bolt','pay-4',0,X'abababababababababababababababababababababababababababababababab',900,'EUR',NULL,NULL,1,0,NULL,NULL,NULL,'review','the provider contradicts itself',1793527201250,1,1,0,NULL,1,NULL,5,NULL,NULL,0,1793527201250,1,'POST','https://bolt.example/pay','pay-4','application/json',X'7b7d',NULL,'fedcba9876543210',NULL,NULL,NULL,NULL,NULL,NULL,NULL,4,0,0,0,0,NULL,NULL,0,NULL,1793527201250,1793527205000,NULL,NULL);
INSERT INTO jobs VALUES('pay-5','bolt','pay-5',0,X'abababababababababababababababababababababababababababababababab',100,'CHF','acct_9',NULL,1,0,NULL,1793527201250,NULL,'declined','erased',1793527200000,1,1,0,NULL,0,NULL,3,NULL,NULL,0,1793527200000,1,'POST','','pay-5','application/json',X'',NULL,'fedcba9876543210',NULL,NULL,NULL,NULL,NULL,NULL,NULL,5,0,0,0,0,NULL,NULL,0,NULL,1793527200000,1793527201250,NULL,1793527205000);
INSERT INTO jobs VALUES('pay-6','bolt','pay-6',0,X'abababababababababababababababababababababababababababababababab',100,'CHF','acct_9',NULL,1,0,NULL,1793613600000,'{}','cancelled','ordered twice',1793527201250,0,0,0,NULL,0,NULL,1,NULL,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,'egress',NULL,NULL,1793527201250,1793527205000,1,1793527201250,6,0,0,0,0,NULL,NULL,0,NULL,1793527201250,1793527201250,NULL,NULL);
CREATE TABLE attempts (
    job_id TEXT NOT NULL REFERENCES jobs (id),
    number INTEGER NOT NULL CONSTRAINT attempt_number_is_1_or_more CHECK (number >= 1),
    provider TEXT NOT NULL,
    -- A look-up is a request like any other: it has a row, and it counts at the provider.
    kind TEXT NOT NULL DEFAULT 'charge' CONSTRAINT kind_is_charge_or_lookup CHECK (kind IN ('charge', 'lookup')),
    -- A limiter that did not count the uses of an account or a reference asks for just those.
    account TEXT,
    reference TEXT,
    began_at INTEGER NOT NULL,
    ended_at INTEGER,
    outcome TEXT CONSTRAINT outcome_is_a_short_word
        CHECK (length(outcome) BETWEEN 1 AND 32 AND outcome NOT GLOB '*[^a-z_]*'),
    status INTEGER CONSTRAINT status_is_100_to_999 CHECK (status BETWEEN 100 AND 999),
    detail TEXT,
    counted INTEGER CONSTRAINT counted_is_0_or_1 CHECK (counted IN (0, 1)),
    PRIMARY KEY (job_id, number),
    CONSTRAINT attempt_end_is_whole_or_absent
        CHECK ((ended_at IS NULL) = (outcome IS NULL) AND (ended_at IS NULL) = (counted IS NULL))
) STRICT;
INSERT INTO attempts VALUES('pay-1',1,'acme','charge','acct_1','invoice 7',1793527200000,1793527201250,'throttled',429,'too many requests',1);
INSERT INTO attempts VALUES('pay-1',2,'acme','charge','acct_1','invoice 7',1793527201250,1793527205000,'accepted',200,'',1);
INSERT INTO attempts VALUES('pay-3',1,'acme','charge',NULL,'order 3',1793527201250,1793527205000,'timeout',NULL,'no answer in time',1);
INSERT INTO attempts VALUES('pay-4',1,'bolt','lookup',NULL,NULL,1793527201250,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE outcome_events (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id TEXT NOT NULL REFERENCES jobs (id),
    provider TEXT NOT NULL,
    state TEXT NOT NULL
        CONSTRAINT event_state_is_final
            CHECK (state IN ('succeeded', 'declined', 'dead', 'expired', 'review', 'cancelled')),
    provider_reference TEXT,
    reason TEXT,
    attempts INTEGER NOT NULL,
    at INTEGER NOT NULL,
    -- A worker is publishing it; others take it after this instant.
    taken_until INTEGER,
    published_at INTEGER,
    -- An event that a queue rejected is tried again at growing intervals: it leaves the order of those that were never
    -- rejected. NULL until it is rejected.
    tries INTEGER NOT NULL DEFAULT 0 CONSTRAINT tries_is_0_or_more CHECK (tries >= 0),
    next_try_at INTEGER
) STRICT;
INSERT INTO outcome_events VALUES(1,'pay-1','acme','succeeded','ch_1','accepted',2,1793527205000,NULL,1793527205000,0,NULL);
INSERT INTO outcome_events VALUES(2,'pay-4','bolt','review',NULL,'the provider contradicts itself',1,1793527205000,1793613600000,NULL,2,1793613600000);
INSERT INTO outcome_events VALUES(3,'pay-6','bolt','cancelled',NULL,'ordered twice',0,1795738741674,NULL,NULL,0,NULL);
CREATE TABLE rejected_messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL,
    lane TEXT NOT NULL CONSTRAINT lane_is_a_provider_name
        CHECK (lane GLOB '[a-z0-9]*' AND lane NOT GLOB '*[^a-z0-9_-]*' AND length(lane) <= 63),
    -- The id in the message, if it could be read.
    job_id TEXT CONSTRAINT rejected_job_id_is_at_most_255_characters CHECK (length(job_id) <= 255),
    reason TEXT NOT NULL CONSTRAINT rejected_reason_is_a_short_word
        CHECK (length(reason) BETWEEN 1 AND 32 AND reason NOT GLOB '*[^a-z_]*'),
    detail TEXT NOT NULL,
    body_sha256 BLOB NOT NULL CONSTRAINT body_sha256_is_32_bytes CHECK (length(body_sha256) = 32),
    body_bytes INTEGER NOT NULL CONSTRAINT body_bytes_is_0_or_more CHECK (body_bytes >= 0)
) STRICT;
INSERT INTO rejected_messages VALUES(1,1793527201250,'acme','pay-1','conflict','recorded before with other content',X'abababababababababababababababababababababababababababababababab',120);
CREATE TABLE flows (
    -- No foreign key: a flow outlives its provider's row as its jobs do.
    provider TEXT NOT NULL CONSTRAINT flow_provider_is_a_provider_name
        CHECK (provider GLOB '[a-z0-9]*' AND provider NOT GLOB '*[^a-z0-9_-]*' AND length(provider) <= 63),
    -- 0: the outcome is unknown; otherwise 10 minus the priority.
    class INTEGER NOT NULL CONSTRAINT class_is_0_to_10 CHECK (class BETWEEN 0 AND 10),
    account TEXT NOT NULL CONSTRAINT flow_account_is_0_to_64_of_letters_digits_underscore_dash
        CHECK (length(account) <= 64 AND account NOT GLOB '*[^A-Za-z0-9_-]*'),
    -- Start-time fair queueing: millionths of cost / weight.
    tag INTEGER NOT NULL DEFAULT 0 CONSTRAINT tag_is_0_or_more CHECK (tag >= 0),
    weight INTEGER NOT NULL DEFAULT 1 CONSTRAINT weight_is_1_to_1000 CHECK (weight BETWEEN 1 AND 1000),
    -- Jobs in the backlog.
    waiting INTEGER NOT NULL DEFAULT 0 CONSTRAINT waiting_is_0_or_more CHECK (waiting >= 0),
    -- For the indexes: a change of `waiting` alone writes none of them.
    queued INTEGER NOT NULL GENERATED ALWAYS AS (waiting > 0) STORED,
    blocked_until INTEGER,
    blocked_reason TEXT CONSTRAINT blocked_reason_is_known
        CHECK (blocked_reason IN ('limit', 'account_blocked', 'misconfigured', 'rejected_streak')),
    -- The limit that is meant.
    blocked_limit TEXT CONSTRAINT blocked_limit_is_at_most_255_characters CHECK (length(blocked_limit) <= 255),
    PRIMARY KEY (provider, class, account),
    CONSTRAINT block_is_whole_or_absent
        CHECK ((blocked_until IS NULL) = (blocked_reason IS NULL)
               AND (blocked_limit IS NULL OR blocked_until IS NOT NULL))
) STRICT;
INSERT INTO flows VALUES('acme',10,'acct_1',1000000,3,1,1793613600000,'limit','per-second');
INSERT INTO flows VALUES('acme',0,'',0,1,0,NULL,NULL,NULL);
CREATE TABLE flow_clocks (
    provider TEXT NOT NULL CONSTRAINT clock_provider_is_a_provider_name
        CHECK (provider GLOB '[a-z0-9]*' AND provider NOT GLOB '*[^a-z0-9_-]*' AND length(provider) <= 63),
    class INTEGER NOT NULL CONSTRAINT clock_class_is_0_to_10 CHECK (class BETWEEN 0 AND 10),
    virtual_time INTEGER NOT NULL CONSTRAINT virtual_time_is_0_or_more CHECK (virtual_time >= 0),
    PRIMARY KEY (provider, class)
) STRICT;
INSERT INTO flow_clocks VALUES('acme',10,1000000);
CREATE TABLE flow_turns (
    provider TEXT NOT NULL PRIMARY KEY CONSTRAINT turn_provider_is_a_provider_name
        CHECK (provider GLOB '[a-z0-9]*' AND provider NOT GLOB '*[^a-z0-9_-]*' AND length(provider) <= 63),
    claims INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO flow_turns VALUES('acme',17);
CREATE TABLE limiter_authority (
    quota TEXT NOT NULL PRIMARY KEY
        CONSTRAINT authority_quota_is_a_provider_name
            CHECK (quota GLOB '[a-z0-9]*' AND quota NOT GLOB '*[^a-z0-9_-]*' AND length(quota) <= 63),
    holder TEXT NOT NULL
        CONSTRAINT holder_is_share_or_redis_and_a_run_id
            CHECK (holder = 'share' OR (substr(holder, 1, 6) = 'redis:' AND length(holder) BETWEEN 7 AND 70
                                        AND substr(holder, 7) NOT GLOB '*[^A-Za-z0-9_-]*')),
    -- Increases by one with each change of the holder.
    term INTEGER NOT NULL CONSTRAINT term_is_1_or_more CHECK (term >= 1),
    -- When the holder took over, by the database's clock.
    since INTEGER NOT NULL,

    -- The last clock attestation: the limiter store's clock compared with this database's, for a worker that starts
    -- later and did not see an earlier step. Each change of the holder clears it.
    -- Bounds of the store's clock minus the database's.
    clock_ahead_least_us INTEGER,
    clock_ahead_most_us INTEGER,
    -- By the store's clock: it made no step after this.
    clock_since_us INTEGER,
    clock_said_at INTEGER,

    CONSTRAINT a_word_on_the_clock_is_whole
        CHECK ((clock_ahead_least_us IS NULL) + (clock_ahead_most_us IS NULL) + (clock_since_us IS NULL)
               + (clock_said_at IS NULL) IN (0, 4))
) STRICT;
INSERT INTO limiter_authority VALUES('acme','redis:0a1b2c',3,1793527200000,-500,700,1700000000000000,1793527201250);
CREATE TABLE job_audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL DEFAULT (CAST(round(unixepoch('subsec') * 1000) AS INTEGER)),
    job_id TEXT NOT NULL,
    -- A database file has no users, so `who` is 'database file'; a command adds the operating system's user
    -- (user@host).
    who TEXT NOT NULL,
    os_user TEXT,
    program TEXT,
    because TEXT,
    old_state TEXT NOT NULL,
    -- NULL: the row was deleted.
    new_state TEXT,
    -- The operator confirmed that the payment was not charged.
    cleared_maybe_charged INTEGER NOT NULL
        CONSTRAINT cleared_maybe_charged_is_0_or_1 CHECK (cleared_maybe_charged IN (0, 1)),
    -- The personal data was erased.
    erased INTEGER NOT NULL DEFAULT 0 CONSTRAINT erased_is_0_or_1 CHECK (erased IN (0, 1))
) STRICT;
INSERT INTO job_audit VALUES(1,1795738741674,'pay-6','database file',NULL,NULL,NULL,'waiting','cancelled',0,0);
CREATE TABLE worker_reports (
    id TEXT NOT NULL PRIMARY KEY
        CONSTRAINT worker_id_is_1_to_64_of_letters_digits_underscore_dash
            CHECK (length(id) BETWEEN 1 AND 64 AND id NOT GLOB '*[^A-Za-z0-9_-]*'),
    host TEXT NOT NULL CONSTRAINT host_is_at_most_255_characters CHECK (length(host) <= 255),
    pid INTEGER NOT NULL CONSTRAINT pid_is_0_or_more CHECK (pid >= 0),
    version TEXT NOT NULL CONSTRAINT version_is_at_most_64_characters CHECK (length(version) <= 64),
    started_at INTEGER NOT NULL,
    -- By the database's clock, like every instant here: the clocks of workers may differ.
    reported_at INTEGER NOT NULL,
    -- The format of `report`; a program that knows only older formats ignores the row.
    format INTEGER NOT NULL CONSTRAINT format_is_1_or_more CHECK (format >= 1),
    report TEXT NOT NULL CONSTRAINT report_is_json CHECK (json_valid(report))
) STRICT;
INSERT INTO worker_reports VALUES('w-1','desk',4711,'0.1.0',1793527200000,1793527205000,3,'{"lanes": []}');
CREATE TABLE upkeep_turns (
    duty TEXT NOT NULL PRIMARY KEY
        CONSTRAINT duty_is_a_short_word CHECK (length(duty) BETWEEN 1 AND 32 AND duty NOT GLOB '*[^a-z_]*'),
    taken_until INTEGER NOT NULL
) STRICT;
INSERT INTO upkeep_turns VALUES('reconcile',1793527205000);
CREATE TABLE finished_jobs (
    provider TEXT NOT NULL,
    state TEXT NOT NULL
        CONSTRAINT finished_state_is_for_good CHECK (state IN ('succeeded', 'declined', 'expired', 'cancelled')),
    -- Jobs whose `updated_at` is before `finished_mark.counted_before`.
    jobs INTEGER NOT NULL CONSTRAINT finished_jobs_is_0_or_more CHECK (jobs >= 0),
    PRIMARY KEY (provider, state)
) STRICT;
INSERT INTO finished_jobs VALUES('acme','succeeded',41);
CREATE TABLE finished_mark (
    only_row INTEGER PRIMARY KEY DEFAULT 1 CONSTRAINT finished_mark_has_one_row CHECK (only_row = 1),
    -- The mark before this one: the jobs between both were added last.
    counted_from INTEGER NOT NULL,
    counted_before INTEGER NOT NULL,
    -- When all were last counted, and when they are counted next.
    counted_at INTEGER NOT NULL,
    recount_after INTEGER NOT NULL
) STRICT;
INSERT INTO finished_mark VALUES(1,0,0,1795738741600,1795738741600);
CREATE TABLE queue_messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    queue TEXT NOT NULL CONSTRAINT queue_is_named CHECK (queue <> ''),
    body BLOB NOT NULL,
    properties TEXT NOT NULL DEFAULT '{}'
        CONSTRAINT properties_is_an_object CHECK (json_valid(properties) AND json_type(properties) = 'object'),
    visible_at_ms INTEGER NOT NULL,
    -- 0: free; otherwise the number of the lane that took it.
    taken INTEGER NOT NULL DEFAULT 0 CONSTRAINT taken_is_not_negative CHECK (taken >= 0),
    redelivered INTEGER NOT NULL DEFAULT 0 CONSTRAINT redelivered_is_0_or_1 CHECK (redelivered IN (0, 1)),
    -- For the delivery limit, as RabbitMQ has one: the number of deliveries, and the lane that a dead message came from.
    deliveries INTEGER NOT NULL DEFAULT 0 CONSTRAINT deliveries_is_not_negative CHECK (deliveries >= 0),
    dead_of TEXT
) STRICT;
INSERT INTO queue_messages VALUES(1,'payments.acme',X'7b7d','{"message_id": "pay-2"}',1793527201250,0,1,2,NULL);
INSERT INTO queue_messages VALUES(2,'payments.dead',X'7b7d','{}',1793527201250,0,0,0,'acme');
DELETE FROM sqlite_sequence;
INSERT INTO sqlite_sequence VALUES('settings_audit',9);
INSERT INTO sqlite_sequence VALUES('account_overrides',3);
INSERT INTO sqlite_sequence VALUES('outcome_events',3);
INSERT INTO sqlite_sequence VALUES('job_audit',1);
INSERT INTO sqlite_sequence VALUES('rejected_messages',1);
INSERT INTO sqlite_sequence VALUES('queue_messages',2);
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
CREATE UNIQUE INDEX account_overrides_one_rule_per_account_and_limit
    ON account_overrides (provider, account, coalesce(limit_name, ''));
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
CREATE TRIGGER settings_audit_person AFTER INSERT ON settings_audit
BEGIN
    UPDATE settings_audit SET os_user = (SELECT os_user FROM settings_person),
        because = (SELECT because FROM settings_person), program = (SELECT program FROM settings_person)
    WHERE id = NEW.id;
END;
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
CREATE TRIGGER providers_delete_what_is_theirs AFTER DELETE ON providers
BEGIN
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
            'require', json(NEW.require), 'order', NEW."order", 'resumed_at', NEW.resumed_at) AS new_row)
    WHERE old_row IS NOT new_row;
END;
CREATE TRIGGER providers_update AFTER UPDATE OF
        name, kind, quota, enabled, paused, url, mode, slot_release, transit_jitter_ms, pacing,
        reserve_percent, store_down, share_of, timeout_ms, send_budget_ms, connection_max_age_ms, reuse_connections,
        workers, bucket_capacity,
        leak_per_second, max_wait_ms, max_attempts, max_age_s, backoff_base_ms, backoff_max_ms,
        idempotency_retention_s, headers, request, lookup, statuses, require, "order", resumed_at
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
            'require', json(OLD.require), 'order', OLD."order", 'resumed_at', OLD.resumed_at) AS old_row,
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
            'require', json(NEW.require), 'order', NEW."order", 'resumed_at', NEW.resumed_at) AS new_row)
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
            'require', json(OLD.require), 'order', OLD."order", 'resumed_at', OLD.resumed_at) AS old_row,
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
            'burst', NEW.burst, 'weight', NEW.weight) AS new_row)
    WHERE old_row IS NOT new_row;
END;
CREATE TRIGGER account_overrides_update AFTER UPDATE OF
        id, provider, account, limit_name, rule, max_requests, window_ms, burst, weight
    ON account_overrides
BEGIN
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
            'burst', OLD.burst, 'weight', OLD.weight) AS old_row,
        json_object(
            'id', NEW.id, 'provider', NEW.provider, 'account', NEW.account, 'limit_name', NEW.limit_name,
            'rule', NEW.rule, 'max_requests', NEW.max_requests, 'window_ms', NEW.window_ms,
            'burst', NEW.burst, 'weight', NEW.weight) AS new_row)
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
            'burst', OLD.burst, 'weight', OLD.weight) AS old_row,
        NULL AS new_row)
    WHERE old_row IS NOT new_row;
END;
CREATE INDEX jobs_by_provider_and_state ON jobs (provider, state);
CREATE INDEX jobs_by_account ON jobs (account, id) WHERE account IS NOT NULL;
CREATE UNIQUE INDEX jobs_one_payment_per_charge ON jobs (provider_reference, (provider || '')) WHERE state = 'succeeded';
CREATE INDEX jobs_open_by_sweep ON jobs (provider, (CASE WHEN sweep_after > wake_at THEN sweep_after ELSE wake_at END))
    WHERE state IN ('waiting', 'sending', 'unknown');
CREATE INDEX jobs_unqueued_by_wake ON jobs (provider, wake_at) WHERE unqueued AND state = 'waiting';
CREATE INDEX jobs_waiting_by_expiry ON jobs (expires_at) WHERE state = 'waiting' AND expires_at IS NOT NULL;
CREATE INDEX jobs_unknown_by_wake ON jobs (provider, wake_at) WHERE state = 'unknown';
CREATE INDEX jobs_waiting_for_limits ON jobs (provider, wake_at)
    WHERE state IN ('waiting', 'unknown') AND wait_reason IN ('limit', 'cost_exceeds_limit');
CREATE INDEX jobs_waiting_for_providers ON jobs (provider, wake_at)
    WHERE state IN ('waiting', 'unknown') AND wait_reason IN ('provider_paused', 'throttled');
CREATE INDEX jobs_in_backlog ON jobs
    (provider, (CASE WHEN state = 'unknown' THEN 0 ELSE 10 - priority END), (COALESCE(account, '')), seq) WHERE backlog;
CREATE INDEX jobs_in_order ON jobs (provider, account)
    WHERE in_order AND NOT backlog AND state IN ('waiting', 'sending', 'unknown', 'review');
CREATE INDEX jobs_with_a_message_left ON jobs (provider) WHERE delayed_until <= created_at;
CREATE INDEX jobs_finished_by_update ON jobs (updated_at)
    WHERE scrubbed_at IS NULL AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled');
CREATE INDEX jobs_in_review_by_update ON jobs (updated_at) WHERE state = 'review';
CREATE TRIGGER instants_are_finite_of_jobs_on_insert
    BEFORE INSERT ON jobs
    WHEN NEW.not_before NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.expires_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wake_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.lease_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.first_sent_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.created_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.updated_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.sweep_after NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.scrubbed_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.revived_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_since NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_begun_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.delayed_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_jobs
    BEFORE UPDATE OF not_before, expires_at, wake_at, lease_until, first_sent_at, created_at, updated_at, sweep_after,
    scrubbed_at, revived_at, wait_since, wait_until, wait_begun_at, delayed_until ON jobs
    WHEN NEW.not_before NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.expires_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wake_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.lease_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.first_sent_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.created_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.updated_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.sweep_after NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.scrubbed_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.revived_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_since NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.wait_begun_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.delayed_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER frozen_request_is_at_most_1_mib_to_a_url_of_8_kib_on_insert BEFORE INSERT ON jobs
    WHEN length(NEW.frozen_body) > 1048576 OR length(CAST(NEW.frozen_url AS BLOB)) > 8192
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: frozen_request_is_at_most_1_mib_to_a_url_of_8_kib');
END;
CREATE TRIGGER frozen_request_is_at_most_1_mib_to_a_url_of_8_kib BEFORE UPDATE OF frozen_body, frozen_url ON jobs
    WHEN length(NEW.frozen_body) > 1048576 OR length(CAST(NEW.frozen_url AS BLOB)) > 8192
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: frozen_request_is_at_most_1_mib_to_a_url_of_8_kib');
END;
CREATE TRIGGER payload_is_at_most_64_kib_on_insert BEFORE INSERT ON jobs
    WHEN length(CAST(NEW.payload AS BLOB)) > 65536
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: payload_is_at_most_64_kib');
END;
CREATE TRIGGER payload_is_at_most_64_kib BEFORE UPDATE OF payload ON jobs
    WHEN length(CAST(NEW.payload AS BLOB)) > 65536
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: payload_is_at_most_64_kib');
END;
CREATE TRIGGER content_never_changes
    BEFORE UPDATE OF id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, cost,
                     priority, not_before, expires_at, payload ON jobs
    WHEN NEW.id <> OLD.id OR NEW.provider <> OLD.provider OR NEW.idempotency_key <> OLD.idempotency_key
        OR NEW.key_given <> OLD.key_given OR NEW.content_hash <> OLD.content_hash OR NEW.amount <> OLD.amount
        OR NEW.currency <> OLD.currency OR NEW.cost <> OLD.cost OR NEW.priority <> OLD.priority
        OR NEW.not_before IS NOT OLD.not_before OR NEW.expires_at IS NOT OLD.expires_at
        OR (NEW.account IS NOT OLD.account
            AND (NEW.account IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
        OR (NEW.reference IS NOT OLD.reference
            AND (NEW.reference IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
        OR (NEW.payload IS NOT OLD.payload
            AND (NEW.payload IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
BEGIN
    SELECT raise(ABORT, 'what a payment is never changes: publish a new payment');
END;
CREATE TRIGGER frozen_request_never_changes
    BEFORE UPDATE OF frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account,
                     frozen_fingerprint ON jobs
    WHEN OLD.frozen_method IS NOT NULL
        AND (NEW.frozen_method IS NOT OLD.frozen_method
             OR NEW.frozen_key IS NOT OLD.frozen_key OR NEW.frozen_content_type IS NOT OLD.frozen_content_type
             OR (NEW.frozen_account IS NOT OLD.frozen_account
                 AND NOT (NEW.frozen_account IS NULL AND NEW.frozen_url = '' AND length(NEW.frozen_body) = 0
                          AND NEW.state NOT IN ('waiting', 'sending', 'unknown')))
             OR (NEW.frozen_fingerprint IS NOT OLD.frozen_fingerprint
                 AND (OLD.maybe_charged OR OLD.state <> 'waiting' OR NEW.state <> 'sending'))
             OR (NEW.frozen_url IS NOT OLD.frozen_url
                 AND NOT (NEW.frozen_url = '' AND length(NEW.frozen_body) = 0
                          AND NEW.state NOT IN ('waiting', 'sending', 'unknown')))
             OR (NEW.frozen_body IS NOT OLD.frozen_body
                 AND NOT (length(NEW.frozen_body) = 0 AND NEW.state NOT IN ('waiting', 'sending', 'unknown'))))
BEGIN
    SELECT raise(ABORT, 'the frozen request of a job never changes');
END;
CREATE TRIGGER jobs_get_a_sequence_number AFTER INSERT ON jobs
BEGIN
    UPDATE jobs SET seq = NEW.rowid WHERE rowid = NEW.rowid;
END;
CREATE TRIGGER seq_never_changes BEFORE UPDATE OF seq ON jobs WHEN OLD.seq <> 0 AND NEW.seq <> OLD.seq
BEGIN
    SELECT raise(ABORT, 'seq never changes: a constraint of jobs');
END;
CREATE TRIGGER new_wait_resets_the_sweep_interval
    AFTER UPDATE OF wake_at, fence ON jobs
    WHEN OLD.sweep_after IS NOT NULL AND (NEW.wake_at <> OLD.wake_at OR NEW.fence <> OLD.fence)
BEGIN
    UPDATE jobs SET sweep_after = NULL WHERE id = NEW.id;
END;
CREATE INDEX attempts_by_provider_and_end ON attempts (provider, ended_at);
CREATE INDEX attempts_by_account ON attempts (provider, account, began_at) WHERE account IS NOT NULL;
CREATE INDEX attempts_by_reference ON attempts (provider, reference, began_at) WHERE reference IS NOT NULL;
CREATE INDEX attempts_with_a_reference ON attempts (began_at) WHERE (reference || '') IS NOT NULL;
CREATE TRIGGER instants_are_finite_of_attempts_on_insert
    BEFORE INSERT ON attempts
    WHEN NEW.began_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.ended_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_attempts
    BEFORE UPDATE OF began_at, ended_at ON attempts
    WHEN NEW.began_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.ended_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER reference_never_changes BEFORE UPDATE OF reference ON attempts
    WHEN NEW.reference IS NOT NULL AND NEW.reference IS NOT OLD.reference
BEGIN
    SELECT raise(ABORT, 'what a payment is never changes: publish a new payment');
END;
CREATE INDEX outcome_events_by_job ON outcome_events (job_id);
CREATE INDEX outcome_events_by_try ON outcome_events (next_try_at, sequence) WHERE published_at IS NULL;
CREATE TRIGGER instants_are_finite_of_outcome_events_on_insert
    BEFORE INSERT ON outcome_events
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.taken_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.published_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.next_try_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_outcome_events
    BEFORE UPDATE OF at, taken_until, published_at, next_try_at ON outcome_events
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.taken_until NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.published_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.next_try_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE INDEX rejected_messages_by_job ON rejected_messages (job_id) WHERE job_id IS NOT NULL;
CREATE TRIGGER instants_are_finite_of_rejected_messages_on_insert
    BEFORE INSERT ON rejected_messages
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_rejected_messages
    BEFORE UPDATE OF at ON rejected_messages
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE INDEX flows_in_order ON flows (provider, class, tag) WHERE queued AND blocked_until IS NULL;
CREATE INDEX flows_by_wake ON flows (provider, blocked_until) WHERE blocked_until IS NOT NULL;
CREATE INDEX flows_idle ON flows (provider, class, tag) WHERE NOT queued;
CREATE TRIGGER instants_are_finite_of_flows_on_insert BEFORE INSERT ON flows
    WHEN NEW.blocked_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'instants_are_finite: a constraint of flows');
END;
CREATE TRIGGER instants_are_finite_of_flows BEFORE UPDATE OF blocked_until ON flows
    WHEN NEW.blocked_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'instants_are_finite: a constraint of flows');
END;
CREATE TRIGGER jobs_leave_backlog AFTER UPDATE OF state ON jobs
    WHEN OLD.backlog AND NEW.backlog AND NEW.state <> OLD.state
BEGIN
    UPDATE flows SET waiting = max(waiting - 1, 0)
    WHERE provider = OLD.provider AND account = coalesce(OLD.account, '')
        AND class = CASE WHEN OLD.state = 'unknown' THEN 0 ELSE 10 - OLD.priority END;
    -- The trigger below counts the job out of the flow of its new state, where it never was.
    UPDATE flows SET waiting = waiting + 1
    WHERE NEW.state IN ('waiting', 'unknown') AND provider = NEW.provider AND account = coalesce(NEW.account, '')
        AND class = CASE WHEN NEW.state = 'unknown' THEN 0 ELSE 10 - NEW.priority END;
    UPDATE jobs SET backlog = 0 WHERE id = NEW.id;
END
;
CREATE TRIGGER jobs_uncount_backlog AFTER UPDATE OF backlog ON jobs
    WHEN OLD.backlog AND NOT NEW.backlog AND NEW.lease_until IS NULL AND OLD.state IN ('waiting', 'unknown')
BEGIN
    UPDATE flows SET waiting = max(waiting - 1, 0)
    WHERE provider = OLD.provider AND account = coalesce(OLD.account, '')
        AND class = CASE WHEN OLD.state = 'unknown' THEN 0 ELSE 10 - OLD.priority END;
END;
CREATE TRIGGER jobs_uncount_deleted AFTER DELETE ON jobs WHEN OLD.backlog
BEGIN
    UPDATE flows SET waiting = max(waiting - 1, 0)
    WHERE provider = OLD.provider AND account = coalesce(OLD.account, '')
        AND class = CASE WHEN OLD.state = 'unknown' THEN 0 ELSE 10 - OLD.priority END;
END;
CREATE TRIGGER instants_are_finite_of_limiter_authority_on_insert
    BEFORE INSERT ON limiter_authority
    WHEN NEW.since NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.clock_said_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_limiter_authority
    BEFORE UPDATE OF since, clock_said_at ON limiter_authority
    WHEN NEW.since NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.clock_said_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE INDEX job_audit_by_job ON job_audit (job_id);
CREATE TRIGGER instants_are_finite_of_job_audit_on_insert
    BEFORE INSERT ON job_audit
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_job_audit
    BEFORE UPDATE OF at ON job_audit
    WHEN NEW.at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER job_audit_never_changes BEFORE UPDATE ON job_audit
    WHEN OLD.os_user IS NOT NULL OR NEW.id <> OLD.id OR NEW.at <> OLD.at OR NEW.job_id <> OLD.job_id OR NEW.who <> OLD.who
        OR NEW.old_state <> OLD.old_state OR NEW.new_state IS NOT OLD.new_state
        OR NEW.cleared_maybe_charged <> OLD.cleared_maybe_charged OR NEW.erased <> OLD.erased
BEGIN
    SELECT raise(ABORT, 'rows of job_audit are never changed or deleted');
END;
CREATE TRIGGER job_audit_never_deleted BEFORE DELETE ON job_audit
BEGIN
    SELECT raise(ABORT, 'rows of job_audit are never changed or deleted');
END;
CREATE TRIGGER jobs_record_decision AFTER UPDATE OF state, maybe_charged ON jobs
    WHEN (OLD.maybe_charged AND NOT NEW.maybe_charged)
        OR (NEW.state <> OLD.state
            AND (OLD.state NOT IN ('waiting', 'sending', 'unknown')
                 OR (NOT (NEW.fence > OLD.fence AND (NEW.lease_until IS NOT NULL OR NEW.state IN ('expired', 'review')))
                     AND NOT (OLD.lease_until IS NOT NULL AND NEW.fence = OLD.fence AND NEW.state <> 'cancelled'
                              AND (NEW.updated_at <> OLD.updated_at
                                   OR OLD.updated_at
                                       > CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) - 1000)))))
BEGIN
    INSERT INTO job_audit (at, job_id, who, old_state, new_state, cleared_maybe_charged)
    VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        OLD.id, 'database file', OLD.state, NEW.state, OLD.maybe_charged AND NOT NEW.maybe_charged);
    -- The program changes fence or updated_at and writes its own events; plain SQL does neither.
    INSERT INTO outcome_events (job_id, provider, state, provider_reference, reason, attempts, at)
    SELECT NEW.id, NEW.provider, NEW.state, NEW.provider_reference, NEW.reason, NEW.attempts,
        CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)
    WHERE NEW.fence = OLD.fence AND NEW.updated_at = OLD.updated_at AND NEW.state <> OLD.state
        AND NEW.state NOT IN ('waiting', 'sending', 'unknown');
END
;
CREATE TRIGGER jobs_record_deletion AFTER DELETE ON jobs
BEGIN
    INSERT INTO job_audit (at, job_id, who, old_state, cleared_maybe_charged)
    VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        OLD.id, 'database file', OLD.state, 0);
END;
CREATE TRIGGER jobs_record_erasure AFTER UPDATE OF account ON jobs
    WHEN OLD.account IS NOT NULL AND NEW.account IS NULL
BEGIN
    INSERT INTO job_audit (at, job_id, who, old_state, new_state, cleared_maybe_charged, erased)
    VALUES (CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER),
        OLD.id, 'database file', OLD.state, NEW.state, 0, 1);
END;
CREATE TRIGGER final_states_are_for_good BEFORE UPDATE OF state ON jobs
    WHEN NEW.state <> OLD.state AND OLD.state IN ('succeeded', 'declined', 'expired', 'cancelled')
BEGIN
    SELECT raise(ABORT, 'final_states_are_for_good: publish a new payment');
END;
CREATE TRIGGER instants_are_finite_of_worker_reports_on_insert
    BEFORE INSERT ON worker_reports
    WHEN NEW.started_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.reported_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_worker_reports
    BEFORE UPDATE OF started_at, reported_at ON worker_reports
    WHEN NEW.started_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.reported_at NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_upkeep_turns_on_insert
    BEFORE INSERT ON upkeep_turns
    WHEN NEW.taken_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_upkeep_turns
    BEFORE UPDATE OF taken_until ON upkeep_turns
    WHEN NEW.taken_until NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_finished_mark_on_insert
    BEFORE INSERT ON finished_mark
    WHEN NEW.counted_from NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.counted_before NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.counted_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.recount_after NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE TRIGGER instants_are_finite_of_finished_mark
    BEFORE UPDATE OF counted_from, counted_before, counted_at, recount_after ON finished_mark
    WHEN NEW.counted_from NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.counted_before NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.counted_at NOT BETWEEN -62135596800000 AND 253402207199999
        OR NEW.recount_after NOT BETWEEN -62135596800000 AND 253402207199999
BEGIN
    SELECT raise(ABORT, 'CHECK constraint failed: instants_are_finite');
END;
CREATE INDEX queue_messages_next ON queue_messages (queue, taken, visible_at_ms, id);
COMMIT;
