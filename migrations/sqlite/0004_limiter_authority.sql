-- The limiter leader of each quota. Workers write it by compare-and-set; it is no setting.

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
    since INTEGER NOT NULL
) STRICT;

-- For recent changes: a rebuild of the limiter's state asks which providers left a quota lately.
CREATE INDEX settings_audit_by_time ON settings_audit (at);
