-- The limiter leader of each quota. Workers write it by compare-and-set; it is no setting.

CREATE TABLE limiter_authority (
    quota text NOT NULL PRIMARY KEY
        CONSTRAINT authority_quota_is_a_provider_name CHECK (quota ~ '^[a-z0-9][a-z0-9_-]{0,62}$'),
    holder text NOT NULL
        CONSTRAINT holder_is_share_or_redis_and_a_run_id
            CHECK (holder = 'share' OR holder ~ '^redis:[A-Za-z0-9_-]{1,64}$'),
    -- Increases by one with each change of the holder.
    term bigint NOT NULL CONSTRAINT term_is_1_or_more CHECK (term >= 1),
    -- When the holder took over, by the database's clock.
    since timestamptz NOT NULL
);

-- For recent changes: a rebuild of the limiter's state asks which providers left a quota lately.
CREATE INDEX settings_audit_by_time ON settings_audit (at);
