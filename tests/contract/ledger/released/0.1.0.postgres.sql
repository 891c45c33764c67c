-- A PostgreSQL database of Sluicegate 0.1.0 with rows in every table, by pg_dump. See tests/contract/ledger/upgrade.rs.

-- Dumped from database version 15.18 (Debian 15.18-0+deb12u1)
-- Dumped by pg_dump version 15.18 (Debian 15.18-0+deb12u1)

SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;

CREATE DOMAIN public.job_account AS text
	CONSTRAINT job_account_is_1_to_64_of_letters_digits_underscore_dash CHECK (((VALUE ~ '^[A-Za-z0-9_-]+$'::text) AND (char_length(VALUE) <= 64)));

CREATE DOMAIN public.job_currency AS text
	CONSTRAINT currency_is_3_capital_letters CHECK (((VALUE ~ '^[A-Z]+$'::text) AND (char_length(VALUE) = 3)));

CREATE DOMAIN public.job_id AS text
	CONSTRAINT id_is_1_to_64_of_letters_digits_underscore_dash CHECK (((VALUE ~ '^[A-Za-z0-9_-]+$'::text) AND (char_length(VALUE) <= 64)));

CREATE DOMAIN public.job_idempotency_key AS text
	CONSTRAINT idempotency_key_is_1_to_64_of_letters_digits_underscore_dash CHECK (((VALUE ~ '^[A-Za-z0-9_-]+$'::text) AND (char_length(VALUE) <= 64)));

CREATE DOMAIN public.job_provider AS text
	CONSTRAINT job_provider_is_a_provider_name CHECK (((VALUE ~ '^[a-z0-9][a-z0-9_-]*$'::text) AND (char_length(VALUE) <= 63)));

CREATE FUNCTION public.audit_refuse_change() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'audits_never_change',
        MESSAGE = format('rows of %s are never changed or deleted', TG_TABLE_NAME);
END $$;

CREATE FUNCTION public.jobs_cancel_ahead(job text, lane text, because text) RETURNS SETOF text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, cost, priority, state,
                      wake_at, fence, created_at, updated_at)
    VALUES (job, lane, job, false, decode(repeat('00', 32), 'hex'), 1, 'XXX', 1, 0, 'waiting',
            statement_timestamp(), 0, statement_timestamp(), statement_timestamp())
    ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN QUERY SELECT jobs_decide(job, 'waiting', 'cancelled', because, NULL, 0);
    END IF;
END $$;

CREATE FUNCTION public.jobs_decide(job text, old_state text, new_state text, because text, reference text DEFAULT NULL::text, seen_fence bigint DEFAULT NULL::bigint) RETURNS SETOF text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    IF (old_state, new_state) NOT IN (('waiting', 'cancelled'), ('dead', 'cancelled'), ('dead', 'waiting'),
                                      ('review', 'succeeded'), ('review', 'declined'), ('review', 'waiting')) THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'decision_is_known',
            MESSAGE = format('no decision changes a payment from %s to %s', old_state, new_state);
    END IF;
    IF EXISTS (SELECT 1 FROM attempts WHERE job_id = job AND ended_at IS NULL) THEN
        RETURN;
    END IF;
    IF new_state = 'waiting' THEN
        -- The time of the first request stays: the provider may have remembered the key since then. The reference is
        -- cleared: the next response brings its own, and the former one may belong to another payment.
        RETURN QUERY UPDATE jobs SET state = new_state, fence = fence + 1, reason = because, maybe_charged = false,
                attempts = 0, lookups = 0, resend = NULL, lost_holders = 0, provider_reference = NULL,
                wake_at = statement_timestamp(), wait_reason = NULL, wait_limit = NULL, wait_detail = NULL,
                revived_at = statement_timestamp(), copy = copy + 1, delayed_copy = NULL, delayed_until = NULL,
                updated_at = statement_timestamp()
            WHERE id = job AND state = old_state AND fence = coalesce(seen_fence, fence) AND lease_until IS NULL
                AND (state = 'review' OR NOT maybe_charged)
                AND scrubbed_at IS NULL AND (frozen_body IS NULL OR frozen_body <> '')
                AND (expires_at IS NULL OR expires_at > statement_timestamp())
            RETURNING id::text;
        RETURN;
    END IF;
    RETURN QUERY WITH decided AS (
            UPDATE jobs SET state = new_state, fence = fence + 1, lease_owner = NULL, lease_until = NULL,
                reason = because, provider_reference = coalesce(jobs_decide.reference, provider_reference),
                scrubbed_at = NULL, updated_at = statement_timestamp()
            WHERE id = job AND state = old_state AND fence = coalesce(seen_fence, fence)
            RETURNING jobs.*),
        events AS (
            INSERT INTO outcome_events (job_id, provider, state, provider_reference, reason, attempts, at)
            SELECT id, provider, state, provider_reference, reason, attempts, updated_at FROM decided RETURNING job_id)
        SELECT job_id FROM events;
END $$;

CREATE FUNCTION public.jobs_erase(of_account text, at_most bigint, because text DEFAULT NULL::text, OUT erased_jobs bigint, OUT erased_requests bigint) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET enable_seqscan TO 'off'
    SET search_path TO 'public', 'pg_temp'
    AS $$
DECLARE
    ids text[];
BEGIN
    IF because IS NOT NULL THEN
        PERFORM set_config('sluicegate.because', because, true);
    END IF;
    -- The account as a range, and no scan of a table: whatever statistics say, its payments are found by their own index.
    WITH chosen AS (
            SELECT id FROM jobs
            WHERE account >= of_account AND account <= of_account AND state IN ('succeeded', 'declined', 'dead', 'expired', 'cancelled')
                AND NOT EXISTS (SELECT 1 FROM outcome_events AS event
                                WHERE event.job_id = jobs.id AND event.published_at IS NULL)
            ORDER BY account, id LIMIT at_most FOR UPDATE),
        changed AS (
            -- The totals of finished jobs do not include the last minutes yet, and find those jobs by `scrubbed_at`.
            UPDATE jobs SET account = NULL, reference = NULL, provider_reference = NULL, payload = NULL,
                reason = CASE WHEN reason = 'accepted' THEN reason ELSE 'erased' END,
                wait_reason = NULL, wait_limit = NULL, wait_detail = NULL, wait_since = NULL, wait_until = NULL, wait_request = NULL,
                frozen_url = CASE WHEN frozen_url IS NOT NULL THEN '' END,
                frozen_body = CASE WHEN frozen_body IS NOT NULL THEN ''::bytea END, frozen_account = NULL,
                scrubbed_at = coalesce(scrubbed_at, CASE
                    WHEN state = 'dead' OR updated_at < (SELECT counted_before FROM finished_mark)
                    THEN statement_timestamp() END)
            FROM chosen WHERE jobs.id = chosen.id RETURNING jobs.id)
        SELECT array_agg(id::text) FROM changed INTO ids;
    erased_jobs := coalesce(cardinality(ids), 0);
    UPDATE outcome_events SET provider_reference = NULL,
        reason = CASE WHEN reason = 'accepted' THEN reason ELSE 'erased' END
        WHERE job_id = ANY (ids);
    UPDATE attempts SET detail = '' WHERE job_id = ANY (ids) AND detail <> '';
    WITH RECURSIVE lanes (provider) AS (
            SELECT min(provider::text) FROM jobs
            UNION ALL
            SELECT (SELECT min(provider::text) FROM jobs WHERE jobs.provider > lanes.provider) FROM lanes
            WHERE lanes.provider IS NOT NULL),
        old AS (
            SELECT attempts.job_id, attempts.number
            FROM lanes JOIN attempts ON attempts.provider = lanes.provider AND attempts.account = of_account
            JOIN jobs ON jobs.id = attempts.job_id AND jobs.account IS NULL
            WHERE attempts.began_at <= statement_timestamp() - interval '32 days'
            LIMIT at_most)
        UPDATE attempts SET account = NULL, reference = NULL FROM old
        WHERE attempts.job_id = old.job_id AND attempts.number = old.number;
    GET DIAGNOSTICS erased_requests = ROW_COUNT;
END $$;

CREATE FUNCTION public.jobs_forget_sweep() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    NEW.sweep_after := NULL;
    RETURN NEW;
END $$;

CREATE FUNCTION public.jobs_leave_backlog() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    NEW.backlog := false;
    RETURN NEW;
END $$;

CREATE FUNCTION public.jobs_record_decision() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO job_audit (job_id, who, os_user, program, old_state, new_state, cleared_maybe_charged, because)
    VALUES (OLD.id, session_user, nullif(current_setting('sluicegate.os_user', true), ''),
            nullif(current_setting('application_name'), ''), OLD.state,
            CASE TG_OP WHEN 'UPDATE' THEN NEW.state END,
            CASE TG_OP WHEN 'UPDATE' THEN OLD.maybe_charged AND NOT NEW.maybe_charged ELSE false END,
            nullif(current_setting('sluicegate.because', true), ''));
    -- The program changes fence or updated_at and writes its own events; plain SQL does neither.
    IF TG_OP = 'UPDATE' AND NEW.fence = OLD.fence AND NEW.updated_at = OLD.updated_at AND NEW.state <> OLD.state
        AND NEW.state NOT IN ('waiting', 'sending', 'unknown') THEN
        INSERT INTO outcome_events (job_id, provider, state, provider_reference, reason, attempts, at)
        VALUES (NEW.id, NEW.provider, NEW.state, NEW.provider_reference, NEW.reason, NEW.attempts, clock_timestamp());
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION public.jobs_record_erasure() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO job_audit (job_id, who, os_user, program, old_state, new_state, cleared_maybe_charged, because, erased)
    VALUES (OLD.id, session_user, nullif(current_setting('sluicegate.os_user', true), ''),
            nullif(current_setting('application_name'), ''), OLD.state, NEW.state, false,
            nullif(current_setting('sluicegate.because', true), ''), true);
    RETURN NULL;
END $$;

CREATE FUNCTION public.jobs_refuse_change_of_content() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'content_never_changes',
        MESSAGE = 'what a payment is never changes: publish a new payment';
END $$;

CREATE FUNCTION public.jobs_refuse_change_of_frozen_request() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF NOT OLD.maybe_charged AND OLD.state = 'waiting' AND NEW.state = 'sending'
       AND (NEW.frozen_method, NEW.frozen_url, NEW.frozen_key, NEW.frozen_content_type, NEW.frozen_body,
            NEW.frozen_account)
           IS NOT DISTINCT FROM
           (OLD.frozen_method, OLD.frozen_url, OLD.frozen_key, OLD.frozen_content_type, OLD.frozen_body,
            OLD.frozen_account)
    THEN
        RETURN NEW;
    END IF;
    IF NEW.state NOT IN ('waiting', 'sending', 'unknown') AND NEW.frozen_url = '' AND NEW.frozen_body = ''
       AND (NEW.frozen_account IS NULL OR NEW.frozen_account IS NOT DISTINCT FROM OLD.frozen_account)
       AND (NEW.frozen_method, NEW.frozen_key, NEW.frozen_content_type, NEW.frozen_fingerprint)
           IS NOT DISTINCT FROM
           (OLD.frozen_method, OLD.frozen_key, OLD.frozen_content_type, OLD.frozen_fingerprint)
    THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'frozen_request_never_changes',
        MESSAGE = 'the frozen request of a job never changes';
END $$;

CREATE FUNCTION public.jobs_refuse_reopening() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF NEW.state <> OLD.state AND OLD.state IN ('succeeded', 'declined', 'expired', 'cancelled') THEN
        RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'final_states_are_for_good',
            MESSAGE = format('a payment that is %s stays so: publish a new payment', OLD.state);
    END IF;
    IF NOT pg_catalog.pg_has_role(current_user, (SELECT relowner FROM pg_catalog.pg_class WHERE oid = TG_RELID), 'USAGE')
    THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', CONSTRAINT = 'people_decide_by_jobs_decide',
            MESSAGE = format('jobs_decide() alone changes a payment that is %s, or maybe_charged back to false', OLD.state);
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION public.jobs_refuse_what_is_too_large() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = TG_NAME,
        MESSAGE = format('a row of jobs violates constraint "%s"', TG_NAME);
END $$;

CREATE FUNCTION public.jobs_uncount_backlog() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    UPDATE flows SET waiting = greatest(waiting - 1, 0)
    WHERE provider = OLD.provider AND account = coalesce(OLD.account, '')
        AND class = CASE WHEN OLD.state = 'unknown' THEN 0 ELSE 10 - OLD.priority END;
    RETURN NULL;
END $$;

CREATE FUNCTION public.settings_audit_person() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    NEW.os_user := nullif(current_setting('sluicegate.os_user', true), '');
    NEW.because := nullif(current_setting('sluicegate.because', true), '');
    RETURN NEW;
END $$;

CREATE FUNCTION public.settings_bump_version() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    UPDATE settings_version SET version = version + 1;
    RETURN NULL;
END $$;

CREATE FUNCTION public.settings_hint() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM pg_notify('sluicegate_settings', '');
    RETURN NULL;
END $$;

CREATE FUNCTION public.settings_hold_version(expected bigint) RETURNS SETOF bigint
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
    SELECT version FROM settings_version WHERE version = expected FOR UPDATE;
$$;

CREATE FUNCTION public.settings_raise_version(expected bigint, raised bigint) RETURNS SETOF bigint
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
    UPDATE settings_version SET version = raised WHERE version = expected AND raised > expected RETURNING version;
$$;

CREATE FUNCTION public.settings_record_change() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
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

CREATE FUNCTION public.settings_refuse_truncate() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    RAISE EXCEPTION 'use DELETE: TRUNCATE of % would not be audited', TG_TABLE_NAME;
END $$;

CREATE FUNCTION public.settings_refuse_version() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'settings_version_rises_by_one',
        MESSAGE = 'the version of the settings rises by one; only settings_raise_version() raises it further, to 2^48 at most';
END $$;

CREATE FUNCTION public.settings_stamp_provider() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    NEW.version := (SELECT version FROM settings_version);
    NEW.updated_at := clock_timestamp();
    RETURN NEW;
END $$;

CREATE FUNCTION public.settings_touch_provider() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        UPDATE providers SET version = version WHERE name = OLD.provider;
    END IF;
    IF TG_OP = 'INSERT' OR (TG_OP = 'UPDATE' AND NEW.provider <> OLD.provider) THEN
        UPDATE providers SET version = version WHERE name = NEW.provider;
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION public.settings_version_audit() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'public', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO settings_audit (who, program, table_name, row_key, old_row, new_row)
    VALUES (session_user, nullif(current_setting('application_name'), ''), 'settings_version', 'version',
            jsonb_build_object('version', OLD.version), jsonb_build_object('version', NEW.version));
    RETURN NULL;
END $$;

SET default_tablespace = '';

SET default_table_access_method = heap;

CREATE TABLE public._sqlx_migrations (
    version bigint NOT NULL,
    description text NOT NULL,
    installed_on timestamp with time zone DEFAULT now() NOT NULL,
    success boolean NOT NULL,
    checksum bytea NOT NULL,
    execution_time bigint NOT NULL
);

CREATE TABLE public.account_overrides (
    id bigint NOT NULL,
    provider text NOT NULL,
    account text NOT NULL,
    limit_name text,
    rule text,
    max_requests bigint,
    window_ms bigint,
    burst bigint,
    weight bigint DEFAULT 1 NOT NULL,
    CONSTRAINT account_is_1_to_64_of_letters_digits_underscore_dash CHECK ((account ~ '^[A-Za-z0-9_-]{1,64}$'::text)),
    CONSTRAINT override_burst_goes_with_rule_limit CHECK (((burst IS NULL) OR (COALESCE(rule, ''::text) = 'limit'::text))),
    CONSTRAINT override_burst_is_1_to_1000000 CHECK (((burst >= 1) AND (burst <= 1000000))),
    CONSTRAINT override_burst_is_given_back_within_31_days CHECK (((max_requests = 0) OR ((burst * window_ms) <= ('2678400000'::bigint * max_requests)))),
    CONSTRAINT override_max_requests_is_0_to_1000000 CHECK (((max_requests >= 0) AND (max_requests <= 1000000))),
    CONSTRAINT override_weight_is_1_to_1000 CHECK (((weight >= 1) AND (weight <= 1000))),
    CONSTRAINT override_window_ms_is_1_ms_to_31_days CHECK (((window_ms >= 1) AND (window_ms <= '2678400000'::bigint))),
    CONSTRAINT rule_is_known CHECK ((rule = ANY (ARRAY['exempt'::text, 'blocked'::text, 'refuse'::text, 'limit'::text]))),
    CONSTRAINT rule_limit_alone_has_max_requests CHECK (((COALESCE(rule, ''::text) = 'limit'::text) = (max_requests IS NOT NULL))),
    CONSTRAINT rule_refuse_has_no_limit_name CHECK (((limit_name IS NULL) OR (COALESCE(rule, ''::text) <> 'refuse'::text))),
    CONSTRAINT weight_above_1_has_no_limit_name CHECK (((limit_name IS NULL) OR (weight = 1))),
    CONSTRAINT window_ms_goes_with_rule_limit CHECK (((window_ms IS NULL) OR (COALESCE(rule, ''::text) = 'limit'::text))),
    CONSTRAINT without_rule_weight_is_above_1 CHECK (((rule IS NOT NULL) OR (weight > 1)))
);

ALTER TABLE public.account_overrides ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.account_overrides_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE public.attempts (
    job_id text NOT NULL,
    number bigint NOT NULL,
    provider text NOT NULL,
    kind text DEFAULT 'charge'::text NOT NULL,
    account text,
    reference text,
    began_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone,
    outcome text,
    status bigint,
    detail text,
    counted boolean,
    CONSTRAINT attempt_end_is_whole_or_absent CHECK ((((ended_at IS NULL) = (outcome IS NULL)) AND ((ended_at IS NULL) = (counted IS NULL)))),
    CONSTRAINT attempt_number_is_1_or_more CHECK ((number >= 1)),
    CONSTRAINT instants_are_finite CHECK (((LEAST(began_at, ended_at) >= '0001-01-01 00:00:00+00'::timestamp with time zone) AND (GREATEST(began_at, ended_at) < '9999-12-30 22:00:00+00'::timestamp with time zone))),
    CONSTRAINT kind_is_charge_or_lookup CHECK ((kind = ANY (ARRAY['charge'::text, 'lookup'::text]))),
    CONSTRAINT outcome_is_a_short_word CHECK (((outcome ~ '^[a-z_]+$'::text) AND (char_length(outcome) <= 32))),
    CONSTRAINT status_is_100_to_999 CHECK (((status >= 100) AND (status <= 999)))
);

CREATE TABLE public.deployment (
    only_row integer DEFAULT 1 NOT NULL,
    id uuid NOT NULL,
    CONSTRAINT deployment_has_one_row CHECK ((only_row = 1))
);

CREATE TABLE public.finished_jobs (
    provider text NOT NULL,
    state text NOT NULL,
    jobs bigint NOT NULL,
    CONSTRAINT finished_jobs_is_0_or_more CHECK ((jobs >= 0)),
    CONSTRAINT finished_state_is_for_good CHECK ((state = ANY (ARRAY['succeeded'::text, 'declined'::text, 'expired'::text, 'cancelled'::text])))
);

CREATE TABLE public.finished_mark (
    only_row boolean DEFAULT true NOT NULL,
    counted_from timestamp with time zone NOT NULL,
    counted_before timestamp with time zone NOT NULL,
    counted_at timestamp with time zone NOT NULL,
    recount_after timestamp with time zone NOT NULL,
    CONSTRAINT finished_mark_has_one_row CHECK (only_row),
    CONSTRAINT instants_are_finite CHECK (((LEAST(counted_from, counted_before, counted_at, recount_after) >= '0001-01-01 00:00:00+00'::timestamp with time zone) AND (GREATEST(counted_from, counted_before, counted_at, recount_after) < '9999-12-30 22:00:00+00'::timestamp with time zone)))
);

CREATE TABLE public.flow_clocks (
    provider text NOT NULL,
    class bigint NOT NULL,
    virtual_time bigint NOT NULL,
    CONSTRAINT clock_class_is_0_to_10 CHECK (((class >= 0) AND (class <= 10))),
    CONSTRAINT clock_provider_is_a_provider_name CHECK (((provider ~ '^[a-z0-9][a-z0-9_-]*$'::text) AND (char_length(provider) <= 63))),
    CONSTRAINT virtual_time_is_0_or_more CHECK ((virtual_time >= 0))
)
WITH (fillfactor='50');

CREATE TABLE public.flow_turns (
    provider text NOT NULL,
    claims bigint DEFAULT 0 NOT NULL,
    CONSTRAINT turn_provider_is_a_provider_name CHECK (((provider ~ '^[a-z0-9][a-z0-9_-]*$'::text) AND (char_length(provider) <= 63)))
)
WITH (fillfactor='50');

CREATE TABLE public.flows (
    provider text NOT NULL,
    class bigint NOT NULL,
    account text NOT NULL,
    tag bigint DEFAULT 0 NOT NULL,
    weight bigint DEFAULT 1 NOT NULL,
    waiting bigint DEFAULT 0 NOT NULL,
    queued boolean GENERATED ALWAYS AS ((waiting > 0)) STORED NOT NULL,
    blocked_until timestamp with time zone,
    blocked_reason text,
    blocked_limit text,
    CONSTRAINT block_is_whole_or_absent CHECK ((((blocked_until IS NULL) = (blocked_reason IS NULL)) AND ((blocked_limit IS NULL) OR (blocked_until IS NOT NULL)))),
    CONSTRAINT blocked_limit_is_at_most_255_characters CHECK ((char_length(blocked_limit) <= 255)),
    CONSTRAINT blocked_reason_is_known CHECK ((blocked_reason = ANY (ARRAY['limit'::text, 'account_blocked'::text, 'misconfigured'::text, 'rejected_streak'::text]))),
    CONSTRAINT class_is_0_to_10 CHECK (((class >= 0) AND (class <= 10))),
    CONSTRAINT flow_account_is_0_to_64_of_letters_digits_underscore_dash CHECK (((account ~ '^[A-Za-z0-9_-]*$'::text) AND (char_length(account) <= 64))),
    CONSTRAINT flow_provider_is_a_provider_name CHECK (((provider ~ '^[a-z0-9][a-z0-9_-]*$'::text) AND (char_length(provider) <= 63))),
    CONSTRAINT instants_are_finite CHECK (((blocked_until >= '0001-01-01 00:00:00+00'::timestamp with time zone) AND (blocked_until < '9999-12-30 22:00:00+00'::timestamp with time zone))),
    CONSTRAINT tag_is_0_or_more CHECK ((tag >= 0)),
    CONSTRAINT waiting_is_0_or_more CHECK ((waiting >= 0)),
    CONSTRAINT weight_is_1_to_1000 CHECK (((weight >= 1) AND (weight <= 1000)))
)
WITH (fillfactor='70');

CREATE TABLE public.job_audit (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    job_id text NOT NULL,
    who text NOT NULL,
    os_user text,
    program text,
    because text,
    old_state text NOT NULL,
    new_state text,
    cleared_maybe_charged boolean NOT NULL,
    erased boolean DEFAULT false NOT NULL,
    CONSTRAINT instants_are_finite CHECK (((LEAST(at) >= '0001-01-01 00:00:00+00'::timestamp with time zone) AND (GREATEST(at) < '9999-12-30 22:00:00+00'::timestamp with time zone)))
);

ALTER TABLE public.job_audit ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.job_audit_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE public.jobs (
    id public.job_id NOT NULL,
    provider public.job_provider NOT NULL,
    idempotency_key public.job_idempotency_key NOT NULL,
    key_given boolean NOT NULL,
    content_hash bytea NOT NULL,
    amount bigint NOT NULL,
    currency public.job_currency NOT NULL,
    account public.job_account,
    reference text,
    cost bigint NOT NULL,
    priority bigint NOT NULL,
    not_before timestamp with time zone,
    expires_at timestamp with time zone,
    payload text,
    state text NOT NULL,
    reason text,
    wake_at timestamp with time zone NOT NULL,
    attempts bigint DEFAULT 0 NOT NULL,
    last_attempt bigint DEFAULT 0 NOT NULL,
    lookups bigint DEFAULT 0 NOT NULL,
    resend text,
    maybe_charged boolean DEFAULT false NOT NULL,
    provider_reference text,
    fence bigint NOT NULL,
    lease_owner text,
    lease_until timestamp with time zone,
    lost_holders bigint DEFAULT 0 NOT NULL,
    first_sent_at timestamp with time zone,
    first_sent_number bigint,
    frozen_method text,
    frozen_url text,
    frozen_key text,
    frozen_content_type text,
    frozen_body bytea,
    frozen_account text,
    frozen_fingerprint text,
    wait_reason text,
    wait_limit text,
    wait_detail text,
    wait_since timestamp with time zone,
    wait_until timestamp with time zone,
    wait_request bigint,
    wait_begun_at timestamp with time zone,
    seq bigint NOT NULL,
    backlog boolean DEFAULT false NOT NULL,
    in_order boolean DEFAULT false NOT NULL,
    unqueued boolean DEFAULT false NOT NULL,
    copy bigint DEFAULT 0 NOT NULL,
    delayed_copy bigint,
    delayed_until timestamp with time zone,
    sweeps bigint DEFAULT 0 NOT NULL,
    sweep_after timestamp with time zone,
    created_at timestamp with time zone NOT NULL,
    updated_at timestamp with time zone NOT NULL,
    revived_at timestamp with time zone,
    scrubbed_at timestamp with time zone,
    CONSTRAINT a_delayed_copy_has_a_number_and_an_end CHECK (((delayed_copy IS NULL) = (delayed_until IS NULL))),
    CONSTRAINT amount_is_above_0 CHECK ((amount > 0)),
    CONSTRAINT attempts_is_0_or_more CHECK ((attempts >= 0)),
    CONSTRAINT backlog_has_no_lease_and_no_message CHECK (((NOT backlog) OR ((lease_until IS NULL) AND (NOT unqueued)))),
    CONSTRAINT content_hash_is_32_bytes CHECK ((octet_length(content_hash) = 32)),
    CONSTRAINT copy_is_0_or_more CHECK ((copy >= 0)),
    CONSTRAINT cost_is_1_to_1000 CHECK (((cost >= 1) AND (cost <= 1000))),
    CONSTRAINT fence_is_0_or_more CHECK ((fence >= 0)),
    CONSTRAINT final_states_have_no_lease CHECK (((state = ANY (ARRAY['waiting'::text, 'sending'::text, 'unknown'::text])) OR (lease_until IS NULL))),
    CONSTRAINT first_sent_is_whole_or_absent CHECK (((first_sent_at IS NULL) = (first_sent_number IS NULL))),
    CONSTRAINT frozen_request_is_whole_or_absent CHECK (((num_nulls(frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_fingerprint) = ANY (ARRAY[0, 6])) AND ((frozen_account IS NULL) OR (frozen_method IS NOT NULL)))),
    CONSTRAINT instants_are_finite CHECK (((LEAST(not_before, expires_at, wake_at, lease_until, first_sent_at, created_at, updated_at, sweep_after, scrubbed_at, revived_at, wait_since, wait_until, wait_begun_at, delayed_until) >= '0001-01-01 00:00:00+00'::timestamp with time zone) AND (GREATEST(not_before, expires_at, wake_at, lease_until, first_sent_at, created_at, updated_at, sweep_after, scrubbed_at, revived_at, wait_since, wait_until, wait_begun_at, delayed_until) < '9999-12-30 22:00:00+00'::timestamp with time zone))),
    CONSTRAINT last_attempt_is_0_or_more CHECK ((last_attempt >= 0)),
    CONSTRAINT lease_is_whole_or_absent CHECK (((lease_owner IS NULL) = (lease_until IS NULL))),
    CONSTRAINT lookups_is_0_or_more CHECK ((lookups >= 0)),
    CONSTRAINT lost_holders_is_0_or_more CHECK ((lost_holders >= 0)),
    CONSTRAINT maybe_charged_is_never_waiting_dead_expired_or_cancelled CHECK ((NOT (maybe_charged AND (state = ANY (ARRAY['waiting'::text, 'dead'::text, 'expired'::text, 'cancelled'::text]))))),
    CONSTRAINT open_jobs_are_not_scrubbed CHECK (((scrubbed_at IS NULL) OR (state <> ALL (ARRAY['waiting'::text, 'sending'::text, 'unknown'::text])))),
    CONSTRAINT priority_is_0_to_9 CHECK (((priority >= 0) AND (priority <= 9))),
    CONSTRAINT reference_is_at_most_255_characters CHECK ((char_length(reference) <= 255)),
    CONSTRAINT resend_is_granted_or_used CHECK ((resend = ANY (ARRAY['granted'::text, 'used'::text]))),
    CONSTRAINT sending_and_unknown_have_a_frozen_request CHECK (((state <> ALL (ARRAY['sending'::text, 'unknown'::text])) OR ((frozen_method IS NOT NULL) AND (first_sent_at IS NOT NULL)))),
    CONSTRAINT state_is_known CHECK ((state = ANY (ARRAY['waiting'::text, 'sending'::text, 'unknown'::text, 'succeeded'::text, 'declined'::text, 'dead'::text, 'expired'::text, 'review'::text, 'cancelled'::text]))),
    CONSTRAINT sweeps_is_0_or_more CHECK ((sweeps >= 0)),
    CONSTRAINT unknown_is_maybe_charged CHECK (((state <> 'unknown'::text) OR maybe_charged)),
    CONSTRAINT wait_limit_is_named_by_its_reason CHECK (((wait_limit IS NOT NULL) = COALESCE((wait_reason = ANY (ARRAY['limit'::text, 'cost_exceeds_limit'::text])), false))),
    CONSTRAINT wait_reason_is_known CHECK ((wait_reason = ANY (ARRAY['not_before'::text, 'egress'::text, 'limit'::text, 'cost_exceeds_limit'::text, 'account_blocked'::text, 'provider_paused'::text, 'throttled'::text, 'limiter_cold'::text, 'needs_history'::text, 'limiter_unavailable'::text, 'stale_settings'::text, 'circuit_open'::text, 'circuit_probing'::text, 'operator_paused'::text, 'quota_closed'::text, 'misconfigured'::text, 'rejected_streak'::text, 'unbuildable'::text, 'local_fault'::text, 'object_busy'::text, 'in_progress'::text, 'outcome_unknown'::text, 'lookup'::text, 'resend'::text, 'retry'::text, 'permit_missed'::text, 'ledger_unavailable'::text, 'ledger_refused'::text, 'worker_lost'::text])))
);

ALTER TABLE public.jobs ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.jobs_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE public.limiter_authority (
    quota text NOT NULL,
    holder text NOT NULL,
    term bigint NOT NULL,
    since timestamp with time zone NOT NULL,
    clock_ahead_least_us bigint,
    clock_ahead_most_us bigint,
    clock_since_us bigint,
    clock_said_at timestamp with time zone,
    CONSTRAINT a_word_on_the_clock_is_whole CHECK ((num_nulls(clock_ahead_least_us, clock_ahead_most_us, clock_since_us, clock_said_at) = ANY (ARRAY[0, 4]))),
    CONSTRAINT authority_quota_is_a_provider_name CHECK ((quota ~ '^[a-z0-9][a-z0-9_-]{0,62}$'::text)),
    CONSTRAINT holder_is_share_or_redis_and_a_run_id CHECK (((holder = 'share'::text) OR (holder ~ '^redis:[A-Za-z0-9_-]{1,64}$'::text))),
    CONSTRAINT instants_are_finite CHECK (((LEAST(since, clock_said_at) >= '0001-01-01 00:00:00+00'::timestamp with time zone) AND (GREATEST(since, clock_said_at) < '9999-12-30 22:00:00+00'::timestamp with time zone))),
    CONSTRAINT term_is_1_or_more CHECK ((term >= 1))
);

CREATE TABLE public.outcome_events (
    sequence bigint NOT NULL,
    job_id text NOT NULL,
    provider text NOT NULL,
    state text NOT NULL,
    provider_reference text,
    reason text,
    attempts bigint NOT NULL,
    at timestamp with time zone NOT NULL,
    taken_until timestamp with time zone,
    published_at timestamp with time zone,
    tries bigint DEFAULT 0 NOT NULL,
    next_try_at timestamp with time zone,
    CONSTRAINT event_state_is_final CHECK ((state = ANY (ARRAY['succeeded'::text, 'declined'::text, 'dead'::text, 'expired'::text, 'review'::text, 'cancelled'::text]))),
    CONSTRAINT instants_are_finite CHECK (((LEAST(at, taken_until, published_at, next_try_at) >= '0001-01-01 00:00:00+00'::timestamp with time zone) AND (GREATEST(at, taken_until, published_at, next_try_at) < '9999-12-30 22:00:00+00'::timestamp with time zone))),
    CONSTRAINT tries_is_0_or_more CHECK ((tries >= 0))
);

ALTER TABLE public.outcome_events ALTER COLUMN sequence ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.outcome_events_sequence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE public.provider_limits (
    provider text NOT NULL,
    name text NOT NULL,
    algorithm text DEFAULT 'sliding_log'::text NOT NULL,
    max_requests bigint NOT NULL,
    window_ms bigint,
    offset_ms bigint DEFAULT 0 NOT NULL,
    burst bigint,
    scope text DEFAULT 'provider'::text NOT NULL,
    applies_to text DEFAULT 'all'::text NOT NULL,
    shadow boolean DEFAULT false NOT NULL,
    enabled boolean DEFAULT true NOT NULL,
    CONSTRAINT algorithm_is_known CHECK ((algorithm = ANY (ARRAY['sliding_log'::text, 'fixed_window'::text, 'sliding_window'::text, 'token_bucket'::text, 'gcra'::text, 'concurrency'::text]))),
    CONSTRAINT applies_to_is_known CHECK ((applies_to = ANY (ARRAY['all'::text, 'charge'::text, 'lookup'::text]))),
    CONSTRAINT burst_goes_with_token_bucket_or_gcra CHECK (((burst IS NULL) OR (algorithm = ANY (ARRAY['token_bucket'::text, 'gcra'::text])))),
    CONSTRAINT burst_is_1_to_1000000 CHECK (((burst >= 1) AND (burst <= 1000000))),
    CONSTRAINT burst_is_given_back_within_31_days CHECK (((max_requests = 0) OR (((burst +
CASE algorithm
    WHEN 'gcra'::text THEN 1
    ELSE 0
END) * window_ms) <= ('2678400000'::bigint * max_requests)))),
    CONSTRAINT concurrency_alone_has_no_window_ms CHECK (((algorithm = 'concurrency'::text) = (window_ms IS NULL))),
    CONSTRAINT limit_name_is_1_to_63_of_a_z_0_9_underscore_dash CHECK ((name ~ '^[a-z0-9][a-z0-9_-]{0,62}$'::text)),
    CONSTRAINT max_requests_is_0_to_1000000 CHECK (((max_requests >= 0) AND (max_requests <= 1000000))),
    CONSTRAINT offset_ms_goes_with_fixed_window_and_is_below_window_ms CHECK (((offset_ms = 0) OR ((algorithm = 'fixed_window'::text) AND (offset_ms < window_ms)))),
    CONSTRAINT offset_ms_is_0_to_31_days CHECK (((offset_ms >= 0) AND (offset_ms <= '2678400000'::bigint))),
    CONSTRAINT scope_is_known CHECK ((scope = ANY (ARRAY['provider'::text, 'account'::text, 'reference'::text]))),
    CONSTRAINT sliding_log_by_account_or_reference_is_at_most_10000 CHECK (((algorithm <> 'sliding_log'::text) OR (scope = 'provider'::text) OR (max_requests <= 10000))),
    CONSTRAINT sliding_window_has_window_ms_of_1000_or_more CHECK (((algorithm <> 'sliding_window'::text) OR (window_ms >= 1000))),
    CONSTRAINT window_ms_is_1_ms_to_31_days CHECK (((window_ms >= 1) AND (window_ms <= '2678400000'::bigint)))
);

CREATE TABLE public.providers (
    name text NOT NULL,
    kind text DEFAULT 'http'::text NOT NULL,
    quota text,
    enabled boolean DEFAULT true NOT NULL,
    paused boolean DEFAULT false NOT NULL,
    resumed_at timestamp with time zone,
    url text NOT NULL,
    headers jsonb DEFAULT '{}'::jsonb NOT NULL,
    request jsonb,
    lookup jsonb,
    statuses jsonb,
    require jsonb DEFAULT '[]'::jsonb NOT NULL,
    idempotency_retention_s bigint,
    timeout_ms bigint DEFAULT 10000 NOT NULL,
    send_budget_ms bigint DEFAULT 500 NOT NULL,
    connection_max_age_ms bigint DEFAULT 60000 NOT NULL,
    reuse_connections boolean,
    mode text DEFAULT 'blocking'::text NOT NULL,
    "order" text DEFAULT 'none'::text NOT NULL,
    workers bigint DEFAULT 32 NOT NULL,
    bucket_capacity bigint DEFAULT 256 NOT NULL,
    leak_per_second double precision,
    max_wait_ms bigint DEFAULT 5000 NOT NULL,
    max_attempts bigint DEFAULT 8 NOT NULL,
    max_age_s bigint DEFAULT 259200 NOT NULL,
    backoff_base_ms bigint DEFAULT 500 NOT NULL,
    backoff_max_ms bigint DEFAULT 60000 NOT NULL,
    slot_release text DEFAULT 'response'::text NOT NULL,
    transit_jitter_ms bigint DEFAULT 50 NOT NULL,
    pacing text DEFAULT 'burst'::text NOT NULL,
    reserve_percent bigint DEFAULT 0 NOT NULL,
    store_down text DEFAULT 'wait'::text NOT NULL,
    share_of bigint,
    version bigint DEFAULT 0 NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT backoff_base_ms_is_at_least_1 CHECK ((backoff_base_ms >= 1)),
    CONSTRAINT backoff_base_ms_is_at_most_backoff_max_ms CHECK ((backoff_base_ms <= backoff_max_ms)),
    CONSTRAINT backoff_max_ms_is_at_most_86400000 CHECK (((backoff_max_ms >= 1) AND (backoff_max_ms <= 86400000))),
    CONSTRAINT bucket_capacity_is_1_to_65535 CHECK (((bucket_capacity >= 1) AND (bucket_capacity <= 65535))),
    CONSTRAINT connection_max_age_ms_is_1000_to_3600000 CHECK (((connection_max_age_ms >= 1000) AND (connection_max_age_ms <= 3600000))),
    CONSTRAINT headers_is_an_object_of_strings CHECK (((jsonb_typeof(headers) = 'object'::text) AND (NOT jsonb_path_exists(headers, '$.*?(@.type() != "string")'::jsonpath)))),
    CONSTRAINT idempotency_retention_s_is_1_to_315360000_or_null CHECK (((idempotency_retention_s >= 1) AND (idempotency_retention_s <= 315360000))),
    CONSTRAINT instants_are_finite CHECK (((LEAST(updated_at, resumed_at) >= '0001-01-01 00:00:00+00'::timestamp with time zone) AND (GREATEST(updated_at, resumed_at) < '9999-12-30 22:00:00+00'::timestamp with time zone))),
    CONSTRAINT kind_is_http CHECK ((kind = 'http'::text)),
    CONSTRAINT leak_per_second_is_above_0 CHECK (((leak_per_second > (0)::double precision) AND (leak_per_second <= (1000000)::double precision))),
    CONSTRAINT lookup_is_an_object CHECK ((jsonb_typeof(lookup) = 'object'::text)),
    CONSTRAINT max_age_s_is_1_to_315360000 CHECK (((max_age_s >= 1) AND (max_age_s <= 315360000))),
    CONSTRAINT max_attempts_is_1_to_1000 CHECK (((max_attempts >= 1) AND (max_attempts <= 1000))),
    CONSTRAINT max_wait_ms_is_0_to_60000 CHECK (((max_wait_ms >= 0) AND (max_wait_ms <= 60000))),
    CONSTRAINT mode_is_blocking_or_requeue CHECK ((mode = ANY (ARRAY['blocking'::text, 'requeue'::text]))),
    CONSTRAINT name_is_1_to_63_of_a_z_0_9_underscore_dash CHECK ((name ~ '^[a-z0-9][a-z0-9_-]{0,62}$'::text)),
    CONSTRAINT name_is_not_one_of_our_queues CHECK ((name <> ALL (ARRAY['invalid'::text, 'dead'::text, 'outcomes'::text]))),
    CONSTRAINT order_is_none_or_account CHECK (("order" = ANY (ARRAY['none'::text, 'account'::text]))),
    CONSTRAINT pacing_is_burst_or_even CHECK ((pacing = ANY (ARRAY['burst'::text, 'even'::text]))),
    CONSTRAINT placeholders_of_url_are_id_idempotency_key_reference_or_account CHECK ((regexp_replace(url, '\$\{(job:)?(id|idempotency_key|reference|account)\}'::text, ''::text, 'g'::text) !~ '\$\{'::text)),
    CONSTRAINT quota_is_1_to_63_of_a_z_0_9_underscore_dash CHECK ((quota ~ '^[a-z0-9][a-z0-9_-]{0,62}$'::text)),
    CONSTRAINT request_is_an_object CHECK ((jsonb_typeof(request) = 'object'::text)),
    CONSTRAINT require_is_a_list_of_account_and_reference CHECK (((jsonb_typeof(require) = 'array'::text) AND (require <@ '["account", "reference"]'::jsonb))),
    CONSTRAINT reserve_percent_is_0_to_99 CHECK (((reserve_percent >= 0) AND (reserve_percent <= 99))),
    CONSTRAINT send_budget_ms_is_1_to_60000 CHECK (((send_budget_ms >= 1) AND (send_budget_ms <= 60000))),
    CONSTRAINT share_of_is_1_to_10000 CHECK (((share_of >= 1) AND (share_of <= 10000))),
    CONSTRAINT slot_release_is_response_or_grant CHECK ((slot_release = ANY (ARRAY['response'::text, 'grant'::text]))),
    CONSTRAINT statuses_is_an_object CHECK ((jsonb_typeof(statuses) = 'object'::text)),
    CONSTRAINT store_down_is_wait_or_share CHECK ((store_down = ANY (ARRAY['wait'::text, 'share'::text]))),
    CONSTRAINT store_down_share_needs_share_of CHECK (((store_down <> 'share'::text) OR (share_of IS NOT NULL))),
    CONSTRAINT timeout_ms_is_1_to_600000 CHECK (((timeout_ms >= 1) AND (timeout_ms <= 600000))),
    CONSTRAINT transit_jitter_ms_is_10_to_60000 CHECK (((transit_jitter_ms >= 10) AND (transit_jitter_ms <= 60000))),
    CONSTRAINT url_has_no_placeholder_in_its_host CHECK ((url !~ '^[^:]*://[/\\]*[^/\\?#]*\$\{'::text)),
    CONSTRAINT url_is_http_or_https_without_spaces CHECK (((url ~ '^https?://[^[:space:][:cntrl:]]+$'::text) AND (char_length(url) <= 2048))),
    CONSTRAINT workers_is_1_to_10000 CHECK (((workers >= 1) AND (workers <= 10000)))
);

CREATE TABLE public.rejected_messages (
    id bigint NOT NULL,
    at timestamp with time zone NOT NULL,
    lane text NOT NULL,
    job_id text,
    reason text NOT NULL,
    detail text NOT NULL,
    body_sha256 bytea NOT NULL,
    body_bytes bigint NOT NULL,
    CONSTRAINT body_bytes_is_0_or_more CHECK ((body_bytes >= 0)),
    CONSTRAINT body_sha256_is_32_bytes CHECK ((octet_length(body_sha256) = 32)),
    CONSTRAINT instants_are_finite CHECK (((LEAST(at) >= '0001-01-01 00:00:00+00'::timestamp with time zone) AND (GREATEST(at) < '9999-12-30 22:00:00+00'::timestamp with time zone))),
    CONSTRAINT lane_is_a_provider_name CHECK ((lane ~ '^[a-z0-9][a-z0-9_-]{0,62}$'::text)),
    CONSTRAINT rejected_job_id_is_at_most_255_characters CHECK ((char_length(job_id) <= 255)),
    CONSTRAINT rejected_reason_is_a_short_word CHECK ((reason ~ '^[a-z_]{1,32}$'::text))
);

ALTER TABLE public.rejected_messages ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.rejected_messages_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE public.settings_audit (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    who text NOT NULL,
    os_user text,
    program text,
    because text,
    table_name text NOT NULL,
    row_key text NOT NULL,
    old_row jsonb,
    new_row jsonb,
    CONSTRAINT instants_are_finite CHECK (((LEAST(at) >= '0001-01-01 00:00:00+00'::timestamp with time zone) AND (GREATEST(at) < '9999-12-30 22:00:00+00'::timestamp with time zone)))
);

ALTER TABLE public.settings_audit ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.settings_audit_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE public.settings_version (
    only_row boolean DEFAULT true NOT NULL,
    version bigint NOT NULL,
    CONSTRAINT settings_version_has_one_row CHECK (only_row)
);

CREATE TABLE public.upkeep_turns (
    duty text NOT NULL,
    taken_until timestamp with time zone NOT NULL,
    CONSTRAINT duty_is_a_short_word CHECK ((duty ~ '^[a-z_]{1,32}$'::text)),
    CONSTRAINT instants_are_finite CHECK (((LEAST(taken_until) >= '0001-01-01 00:00:00+00'::timestamp with time zone) AND (GREATEST(taken_until) < '9999-12-30 22:00:00+00'::timestamp with time zone)))
);

CREATE TABLE public.worker_reports (
    id text NOT NULL,
    host text NOT NULL,
    pid bigint NOT NULL,
    version text NOT NULL,
    started_at timestamp with time zone NOT NULL,
    reported_at timestamp with time zone NOT NULL,
    format bigint NOT NULL,
    report jsonb NOT NULL,
    CONSTRAINT format_is_1_or_more CHECK ((format >= 1)),
    CONSTRAINT host_is_at_most_255_characters CHECK ((char_length(host) <= 255)),
    CONSTRAINT instants_are_finite CHECK (((LEAST(started_at, reported_at) >= '0001-01-01 00:00:00+00'::timestamp with time zone) AND (GREATEST(started_at, reported_at) < '9999-12-30 22:00:00+00'::timestamp with time zone))),
    CONSTRAINT pid_is_0_or_more CHECK ((pid >= 0)),
    CONSTRAINT version_is_at_most_64_characters CHECK ((char_length(version) <= 64)),
    CONSTRAINT worker_id_is_1_to_64_of_letters_digits_underscore_dash CHECK ((id ~ '^[A-Za-z0-9_-]{1,64}$'::text))
);

INSERT INTO public._sqlx_migrations (version, description, installed_on, success, checksum, execution_time) VALUES (1, 'settings', '2026-11-27 00:19:00.959435+00', true, '\x6f473eb74149406eca44081334c823026208ecc4b3642dd544958c921a039a8969940b026cff69c6987f3d6599af37cd', 42539880);
INSERT INTO public._sqlx_migrations (version, description, installed_on, success, checksum, execution_time) VALUES (2, 'ledger', '2026-11-27 00:19:01.002556+00', true, '\x04344a644714c10ac09a6d0f2354c50e8c7dd8c01867b246f987b4ef2cdd9a1fd1f82346f721ec21eb0065f52e33b24b', 69159570);
INSERT INTO public._sqlx_migrations (version, description, installed_on, success, checksum, execution_time) VALUES (3, 'limiter', '2026-11-27 00:19:01.072097+00', true, '\x975d7cc825039bab2fe97fa3f98149bc9ea6a244f380efa876bd8e7a7e924b2cb930cbe803319d4728233e8a8c7dd20f', 6656417);
INSERT INTO public._sqlx_migrations (version, description, installed_on, success, checksum, execution_time) VALUES (4, 'operators', '2026-11-27 00:19:01.078947+00', true, '\x678d014a0b1631a1547baa8efd38443a1150e243108067924389817baca09a8c6b11627948776c442fafda75a63e8dcd', 15302374);
INSERT INTO public._sqlx_migrations (version, description, installed_on, success, checksum, execution_time) VALUES (5, 'workers', '2026-11-27 00:19:01.094554+00', true, '\x895516232d1ef730953301570d6dc3f23411822f59e179d0fe0e8e1feb40ed5dfe473eff844da4400444d7f4b8113ee1', 15735336);

INSERT INTO public.account_overrides (id, provider, account, limit_name, rule, max_requests, window_ms, burst, weight) OVERRIDING SYSTEM VALUE VALUES (1, 'acme', 'acct_1', 'per-second', 'limit', 5, 1000, 2, 1);
INSERT INTO public.account_overrides (id, provider, account, limit_name, rule, max_requests, window_ms, burst, weight) OVERRIDING SYSTEM VALUE VALUES (2, 'acme', 'acct_2', NULL, 'refuse', NULL, NULL, NULL, 1);
INSERT INTO public.account_overrides (id, provider, account, limit_name, rule, max_requests, window_ms, burst, weight) OVERRIDING SYSTEM VALUE VALUES (3, 'acme', 'acct_3', NULL, NULL, NULL, NULL, NULL, 3);

INSERT INTO public.attempts (job_id, number, provider, kind, account, reference, began_at, ended_at, outcome, status, detail, counted) VALUES ('pay-1', 1, 'acme', 'charge', 'acct_1', 'invoice 7', '2026-11-01 10:00:00+00', '2026-11-01 10:00:01.25+00', 'throttled', 429, 'too many requests', true);
INSERT INTO public.attempts (job_id, number, provider, kind, account, reference, began_at, ended_at, outcome, status, detail, counted) VALUES ('pay-1', 2, 'acme', 'charge', 'acct_1', 'invoice 7', '2026-11-01 10:00:01.25+00', '2026-11-01 10:00:05+00', 'accepted', 200, '', true);
INSERT INTO public.attempts (job_id, number, provider, kind, account, reference, began_at, ended_at, outcome, status, detail, counted) VALUES ('pay-3', 1, 'acme', 'charge', NULL, 'order 3', '2026-11-01 10:00:01.25+00', '2026-11-01 10:00:05+00', 'timeout', NULL, 'no answer in time', true);
INSERT INTO public.attempts (job_id, number, provider, kind, account, reference, began_at, ended_at, outcome, status, detail, counted) VALUES ('pay-4', 1, 'bolt', 'lookup', NULL, NULL, '2026-11-01 10:00:01.25+00', NULL, NULL, NULL, NULL, NULL);

INSERT INTO public.deployment (only_row, id) VALUES (1, 'b56b7fc1-7134-4908-ba7a-e5c23b708c76');

INSERT INTO public.finished_jobs (provider, state, jobs) VALUES ('acme', 'succeeded', 41);

INSERT INTO public.finished_mark (only_row, counted_from, counted_before, counted_at, recount_after) VALUES (true, '1970-01-01 00:00:00+00', '1970-01-01 00:00:00+00', '2026-11-27 00:19:01.094554+00', '2026-11-27 00:19:01.094554+00');

INSERT INTO public.flow_clocks (provider, class, virtual_time) VALUES ('acme', 10, 1000000);

INSERT INTO public.flow_turns (provider, claims) VALUES ('acme', 17);

INSERT INTO public.flows (provider, class, account, tag, weight, waiting, blocked_until, blocked_reason, blocked_limit) VALUES ('acme', 10, 'acct_1', 1000000, 3, 1, '2026-11-02 10:00:00+00', 'limit', 'per-second');
INSERT INTO public.flows (provider, class, account, tag, weight, waiting, blocked_until, blocked_reason, blocked_limit) VALUES ('acme', 0, '', 0, 1, 0, NULL, NULL, NULL);

INSERT INTO public.job_audit (id, at, job_id, who, os_user, program, because, old_state, new_state, cleared_maybe_charged, erased) OVERRIDING SYSTEM VALUE VALUES (1, '2026-11-27 00:19:01.215189+00', 'pay-6', 'postgres', NULL, 'psql', NULL, 'waiting', 'cancelled', false, false);

INSERT INTO public.jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, cost, priority, not_before, expires_at, payload, state, reason, wake_at, attempts, last_attempt, lookups, resend, maybe_charged, provider_reference, fence, lease_owner, lease_until, lost_holders, first_sent_at, first_sent_number, frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account, frozen_fingerprint, wait_reason, wait_limit, wait_detail, wait_since, wait_until, wait_request, wait_begun_at, seq, backlog, in_order, unqueued, copy, delayed_copy, delayed_until, sweeps, sweep_after, created_at, updated_at, revived_at, scrubbed_at) OVERRIDING SYSTEM VALUE VALUES ('pay-1', 'acme', 'key-1', true, '\xabababababababababababababababababababababababababababababababab', 1299, 'EUR', 'acct_1', 'invoice 7', 1, 9, '2026-11-01 10:00:00+00', '2026-11-02 10:00:00+00', '{"token": "tok_1"}', 'succeeded', 'accepted', '2026-11-01 10:00:00+00', 2, 2, 0, NULL, false, 'ch_1', 3, NULL, NULL, 0, '2026-11-01 10:00:00+00', 1, 'POST', 'https://acme.example/charges/invoice%207', 'key-1', 'application/json', '\x7b7d', 'acct_1', '0123456789abcdef', 'limit', 'per-second', NULL, '2026-11-01 10:00:00+00', '2026-11-01 10:00:01.25+00', 1, '2026-11-01 10:00:00+00', 1, false, false, false, 1, NULL, NULL, 0, NULL, '2026-11-01 10:00:00+00', '2026-11-01 10:00:05+00', NULL, NULL);
INSERT INTO public.jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, cost, priority, not_before, expires_at, payload, state, reason, wake_at, attempts, last_attempt, lookups, resend, maybe_charged, provider_reference, fence, lease_owner, lease_until, lost_holders, first_sent_at, first_sent_number, frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account, frozen_fingerprint, wait_reason, wait_limit, wait_detail, wait_since, wait_until, wait_request, wait_begun_at, seq, backlog, in_order, unqueued, copy, delayed_copy, delayed_until, sweeps, sweep_after, created_at, updated_at, revived_at, scrubbed_at) OVERRIDING SYSTEM VALUE VALUES ('pay-2', 'acme', 'pay-2', false, '\xabababababababababababababababababababababababababababababababab', 500, 'USD', 'acct_1', NULL, 1, 0, NULL, NULL, NULL, 'waiting', NULL, '2026-11-01 10:00:01.25+00', 0, 0, 0, NULL, false, NULL, 1, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'limit', 'per-second', NULL, '2026-11-01 10:00:01.25+00', '2026-11-01 10:00:05+00', 1, '2026-11-01 10:00:01.25+00', 2, true, false, false, 0, NULL, NULL, 0, NULL, '2026-11-01 10:00:01.25+00', '2026-11-01 10:00:01.25+00', NULL, NULL);
INSERT INTO public.jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, cost, priority, not_before, expires_at, payload, state, reason, wake_at, attempts, last_attempt, lookups, resend, maybe_charged, provider_reference, fence, lease_owner, lease_until, lost_holders, first_sent_at, first_sent_number, frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account, frozen_fingerprint, wait_reason, wait_limit, wait_detail, wait_since, wait_until, wait_request, wait_begun_at, seq, backlog, in_order, unqueued, copy, delayed_copy, delayed_until, sweeps, sweep_after, created_at, updated_at, revived_at, scrubbed_at) OVERRIDING SYSTEM VALUE VALUES ('pay-3', 'acme', 'pay-3', false, '\xabababababababababababababababababababababababababababababababab', 700, 'EUR', NULL, 'order 3', 2, 5, NULL, NULL, '{}', 'unknown', NULL, '2026-11-01 10:00:05+00', 1, 1, 1, 'granted', true, NULL, 4, NULL, NULL, 0, '2026-11-01 10:00:01.25+00', 1, 'POST', 'https://acme.example/charges/order%203', 'pay-3', 'application/json', '\x7b7d', NULL, '0123456789abcdef', 'outcome_unknown', NULL, 'no answer in time', '2026-11-01 10:00:01.25+00', '2026-11-01 10:00:05+00', 2, '2026-11-01 10:00:01.25+00', 3, false, false, false, 1, 1, '2026-11-02 10:00:00+00', 1, NULL, '2026-11-01 10:00:01.25+00', '2026-11-01 10:00:05+00', NULL, NULL);
INSERT INTO public.jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, cost, priority, not_before, expires_at, payload, state, reason, wake_at, attempts, last_attempt, lookups, resend, maybe_charged, provider_reference, fence, lease_owner, lease_until, lost_holders, first_sent_at, first_sent_number, frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account, frozen_fingerprint, wait_reason, wait_limit, wait_detail, wait_since, wait_until, wait_request, wait_begun_at, seq, backlog, in_order, unqueued, copy, delayed_copy, delayed_until, sweeps, sweep_after, created_at, updated_at, revived_at, scrubbed_at) OVERRIDING SYSTEM VALUE VALUES ('pay-4', 'bolt', 'pay-4', false, '\xabababababababababababababababababababababababababababababababab', 900, 'EUR', NULL, NULL, 1, 0, NULL, NULL, NULL, 'review', 'the provider contradicts itself', '2026-11-01 10:00:01.25+00', 1, 1, 0, NULL, true, NULL, 5, NULL, NULL, 0, '2026-11-01 10:00:01.25+00', 1, 'POST', 'https://bolt.example/pay', 'pay-4', 'application/json', '\x7b7d', NULL, 'fedcba9876543210', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 4, false, false, false, 0, NULL, NULL, 0, NULL, '2026-11-01 10:00:01.25+00', '2026-11-01 10:00:05+00', NULL, NULL);
INSERT INTO public.jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, cost, priority, not_before, expires_at, payload, state, reason, wake_at, attempts, last_attempt, lookups, resend, maybe_charged, provider_reference, fence, lease_owner, lease_until, lost_holders, first_sent_at, first_sent_number, frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account, frozen_fingerprint, wait_reason, wait_limit, wait_detail, wait_since, wait_until, wait_request, wait_begun_at, seq, backlog, in_order, unqueued, copy, delayed_copy, delayed_until, sweeps, sweep_after, created_at, updated_at, revived_at, scrubbed_at) OVERRIDING SYSTEM VALUE VALUES ('pay-5', 'bolt', 'pay-5', false, '\xabababababababababababababababababababababababababababababababab', 100, 'CHF', 'acct_9', NULL, 1, 0, NULL, '2026-11-01 10:00:01.25+00', NULL, 'declined', 'erased', '2026-11-01 10:00:00+00', 1, 1, 0, NULL, false, NULL, 3, NULL, NULL, 0, '2026-11-01 10:00:00+00', 1, 'POST', '', 'pay-5', 'application/json', '\x', NULL, 'fedcba9876543210', NULL, NULL, NULL, NULL, NULL, NULL, NULL, 5, false, false, false, 0, NULL, NULL, 0, NULL, '2026-11-01 10:00:00+00', '2026-11-01 10:00:01.25+00', NULL, '2026-11-01 10:00:05+00');
INSERT INTO public.jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, cost, priority, not_before, expires_at, payload, state, reason, wake_at, attempts, last_attempt, lookups, resend, maybe_charged, provider_reference, fence, lease_owner, lease_until, lost_holders, first_sent_at, first_sent_number, frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account, frozen_fingerprint, wait_reason, wait_limit, wait_detail, wait_since, wait_until, wait_request, wait_begun_at, seq, backlog, in_order, unqueued, copy, delayed_copy, delayed_until, sweeps, sweep_after, created_at, updated_at, revived_at, scrubbed_at) OVERRIDING SYSTEM VALUE VALUES ('pay-6', 'bolt', 'pay-6', false, '\xabababababababababababababababababababababababababababababababab', 100, 'CHF', 'acct_9', NULL, 1, 0, NULL, '2026-11-02 10:00:00+00', '{}', 'cancelled', 'ordered twice', '2026-11-01 10:00:01.25+00', 0, 0, 0, NULL, false, NULL, 1, NULL, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 'egress', NULL, NULL, '2026-11-01 10:00:01.25+00', '2026-11-01 10:00:05+00', 1, '2026-11-01 10:00:01.25+00', 6, false, false, false, 0, NULL, NULL, 0, NULL, '2026-11-01 10:00:01.25+00', '2026-11-01 10:00:01.25+00', NULL, NULL);

INSERT INTO public.limiter_authority (quota, holder, term, since, clock_ahead_least_us, clock_ahead_most_us, clock_since_us, clock_said_at) VALUES ('acme', 'redis:0a1b2c', 3, '2026-11-01 10:00:00+00', -500, 700, 1700000000000000, '2026-11-01 10:00:01.25+00');

INSERT INTO public.outcome_events (sequence, job_id, provider, state, provider_reference, reason, attempts, at, taken_until, published_at, tries, next_try_at) OVERRIDING SYSTEM VALUE VALUES (1, 'pay-1', 'acme', 'succeeded', 'ch_1', 'accepted', 2, '2026-11-01 10:00:05+00', NULL, '2026-11-01 10:00:05+00', 0, NULL);
INSERT INTO public.outcome_events (sequence, job_id, provider, state, provider_reference, reason, attempts, at, taken_until, published_at, tries, next_try_at) OVERRIDING SYSTEM VALUE VALUES (2, 'pay-4', 'bolt', 'review', NULL, 'the provider contradicts itself', 1, '2026-11-01 10:00:05+00', '2026-11-02 10:00:00+00', NULL, 2, '2026-11-02 10:00:00+00');
INSERT INTO public.outcome_events (sequence, job_id, provider, state, provider_reference, reason, attempts, at, taken_until, published_at, tries, next_try_at) OVERRIDING SYSTEM VALUE VALUES (3, 'pay-6', 'bolt', 'cancelled', NULL, 'ordered twice', 0, '2026-11-27 00:19:01.215479+00', NULL, NULL, 0, NULL);

INSERT INTO public.provider_limits (provider, name, algorithm, max_requests, window_ms, offset_ms, burst, scope, applies_to, shadow, enabled) VALUES ('acme', 'per-second', 'token_bucket', 100, 1000, 0, 20, 'provider', 'all', false, true);
INSERT INTO public.provider_limits (provider, name, algorithm, max_requests, window_ms, offset_ms, burst, scope, applies_to, shadow, enabled) VALUES ('acme', 'at-once', 'concurrency', 5, NULL, 0, NULL, 'account', 'all', false, true);
INSERT INTO public.provider_limits (provider, name, algorithm, max_requests, window_ms, offset_ms, burst, scope, applies_to, shadow, enabled) VALUES ('bolt', 'per-minute', 'sliding_log', 600, 60000, 0, NULL, 'provider', 'all', false, true);

INSERT INTO public.providers (name, kind, quota, enabled, paused, resumed_at, url, headers, request, lookup, statuses, require, idempotency_retention_s, timeout_ms, send_budget_ms, connection_max_age_ms, reuse_connections, mode, "order", workers, bucket_capacity, leak_per_second, max_wait_ms, max_attempts, max_age_s, backoff_base_ms, backoff_max_ms, slot_release, transit_jitter_ms, pacing, reserve_percent, store_down, share_of, version, updated_at) VALUES ('acme', 'http', 'acme', true, false, '2026-11-01 10:00:00+00', 'https://acme.example/charges/${job:reference}', '{"Authorization": "Bearer ${file:/run/secrets/acme}"}', '{"method": "POST"}', '{"url": "https://acme.example/charges/${id}"}', '{"402": "declined"}', '["account"]', 86400, 10000, 500, 60000, false, 'blocking', 'account', 32, 256, 12.5, 5000, 8, 259200, 500, 60000, 'response', 50, 'burst', 0, 'share', 4, 10, '2026-11-27 00:19:01.206418+00');
INSERT INTO public.providers (name, kind, quota, enabled, paused, resumed_at, url, headers, request, lookup, statuses, require, idempotency_retention_s, timeout_ms, send_budget_ms, connection_max_age_ms, reuse_connections, mode, "order", workers, bucket_capacity, leak_per_second, max_wait_ms, max_attempts, max_age_s, backoff_base_ms, backoff_max_ms, slot_release, transit_jitter_ms, pacing, reserve_percent, store_down, share_of, version, updated_at) VALUES ('bolt', 'http', NULL, true, true, NULL, 'https://bolt.example/pay', '{}', NULL, NULL, NULL, '[]', NULL, 10000, 500, 60000, NULL, 'blocking', 'none', 32, 256, NULL, 5000, 8, 259200, 500, 60000, 'response', 50, 'burst', 0, 'wait', NULL, 11, '2026-11-27 00:19:01.206848+00');

INSERT INTO public.rejected_messages (id, at, lane, job_id, reason, detail, body_sha256, body_bytes) OVERRIDING SYSTEM VALUE VALUES (1, '2026-11-01 10:00:01.25+00', 'acme', 'pay-1', 'conflict', 'recorded before with other content', '\xabababababababababababababababababababababababababababababababab', 120);

INSERT INTO public.settings_audit (id, at, who, os_user, program, because, table_name, row_key, old_row, new_row) OVERRIDING SYSTEM VALUE VALUES (1, '2026-11-27 00:19:01.192069+00', 'postgres', NULL, 'psql', NULL, 'providers', 'acme', NULL, '{"url": "https://acme.example/charges/${job:reference}", "kind": "http", "mode": "blocking", "name": "acme", "order": "account", "quota": "acme", "lookup": {"url": "https://acme.example/charges/${id}"}, "pacing": "burst", "paused": false, "enabled": true, "headers": {"Authorization": "Bearer ${file:/run/secrets/acme}"}, "request": {"method": "POST"}, "require": ["account"], "workers": 32, "share_of": 4, "statuses": {"402": "declined"}, "max_age_s": 259200, "resumed_at": "2026-11-01T10:00:00+00:00", "store_down": "share", "timeout_ms": 10000, "max_wait_ms": 5000, "max_attempts": 8, "slot_release": "response", "backoff_max_ms": 60000, "send_budget_ms": 500, "backoff_base_ms": 500, "bucket_capacity": 256, "leak_per_second": 12.5, "reserve_percent": 0, "reuse_connections": false, "transit_jitter_ms": 50, "connection_max_age_ms": 60000, "idempotency_retention_s": 86400}');
INSERT INTO public.settings_audit (id, at, who, os_user, program, because, table_name, row_key, old_row, new_row) OVERRIDING SYSTEM VALUE VALUES (2, '2026-11-27 00:19:01.192513+00', 'postgres', NULL, 'psql', NULL, 'providers', 'bolt', NULL, '{"url": "https://bolt.example/pay", "kind": "http", "mode": "blocking", "name": "bolt", "order": "none", "quota": null, "lookup": null, "pacing": "burst", "paused": false, "enabled": true, "headers": {}, "request": null, "require": [], "workers": 32, "share_of": null, "statuses": null, "max_age_s": 259200, "resumed_at": null, "store_down": "wait", "timeout_ms": 10000, "max_wait_ms": 5000, "max_attempts": 8, "slot_release": "response", "backoff_max_ms": 60000, "send_budget_ms": 500, "backoff_base_ms": 500, "bucket_capacity": 256, "leak_per_second": null, "reserve_percent": 0, "reuse_connections": null, "transit_jitter_ms": 50, "connection_max_age_ms": 60000, "idempotency_retention_s": null}');
INSERT INTO public.settings_audit (id, at, who, os_user, program, because, table_name, row_key, old_row, new_row) OVERRIDING SYSTEM VALUE VALUES (3, '2026-11-27 00:19:01.198918+00', 'postgres', NULL, 'psql', NULL, 'provider_limits', 'acme/per-second', NULL, '{"name": "per-second", "burst": 20, "scope": "provider", "shadow": false, "enabled": true, "provider": "acme", "algorithm": "token_bucket", "offset_ms": 0, "window_ms": 1000, "applies_to": "all", "max_requests": 100}');
INSERT INTO public.settings_audit (id, at, who, os_user, program, because, table_name, row_key, old_row, new_row) OVERRIDING SYSTEM VALUE VALUES (4, '2026-11-27 00:19:01.199635+00', 'postgres', NULL, 'psql', NULL, 'provider_limits', 'acme/at-once', NULL, '{"name": "at-once", "burst": null, "scope": "account", "shadow": false, "enabled": true, "provider": "acme", "algorithm": "concurrency", "offset_ms": 0, "window_ms": null, "applies_to": "all", "max_requests": 5}');
INSERT INTO public.settings_audit (id, at, who, os_user, program, because, table_name, row_key, old_row, new_row) OVERRIDING SYSTEM VALUE VALUES (5, '2026-11-27 00:19:01.200001+00', 'postgres', NULL, 'psql', NULL, 'provider_limits', 'bolt/per-minute', NULL, '{"name": "per-minute", "burst": null, "scope": "provider", "shadow": false, "enabled": true, "provider": "bolt", "algorithm": "sliding_log", "offset_ms": 0, "window_ms": 60000, "applies_to": "all", "max_requests": 600}');
INSERT INTO public.settings_audit (id, at, who, os_user, program, because, table_name, row_key, old_row, new_row) OVERRIDING SYSTEM VALUE VALUES (6, '2026-11-27 00:19:01.20122+00', 'postgres', NULL, 'psql', NULL, 'account_overrides', 'acme/acct_1/per-second', NULL, '{"id": 1, "rule": "limit", "burst": 2, "weight": 1, "account": "acct_1", "provider": "acme", "window_ms": 1000, "limit_name": "per-second", "max_requests": 5}');
INSERT INTO public.settings_audit (id, at, who, os_user, program, because, table_name, row_key, old_row, new_row) OVERRIDING SYSTEM VALUE VALUES (7, '2026-11-27 00:19:01.201768+00', 'postgres', NULL, 'psql', NULL, 'account_overrides', 'acme/acct_2/*', NULL, '{"id": 2, "rule": "refuse", "burst": null, "weight": 1, "account": "acct_2", "provider": "acme", "window_ms": null, "limit_name": null, "max_requests": null}');
INSERT INTO public.settings_audit (id, at, who, os_user, program, because, table_name, row_key, old_row, new_row) OVERRIDING SYSTEM VALUE VALUES (8, '2026-11-27 00:19:01.206323+00', 'postgres', NULL, 'psql', NULL, 'account_overrides', 'acme/acct_3/*', NULL, '{"id": 3, "rule": null, "burst": null, "weight": 3, "account": "acct_3", "provider": "acme", "window_ms": null, "limit_name": null, "max_requests": null}');
INSERT INTO public.settings_audit (id, at, who, os_user, program, because, table_name, row_key, old_row, new_row) OVERRIDING SYSTEM VALUE VALUES (9, '2026-11-27 00:19:01.207017+00', 'postgres', NULL, 'psql', NULL, 'providers', 'bolt', '{"url": "https://bolt.example/pay", "kind": "http", "mode": "blocking", "name": "bolt", "order": "none", "quota": null, "lookup": null, "pacing": "burst", "paused": false, "enabled": true, "headers": {}, "request": null, "require": [], "workers": 32, "share_of": null, "statuses": null, "max_age_s": 259200, "resumed_at": null, "store_down": "wait", "timeout_ms": 10000, "max_wait_ms": 5000, "max_attempts": 8, "slot_release": "response", "backoff_max_ms": 60000, "send_budget_ms": 500, "backoff_base_ms": 500, "bucket_capacity": 256, "leak_per_second": null, "reserve_percent": 0, "reuse_connections": null, "transit_jitter_ms": 50, "connection_max_age_ms": 60000, "idempotency_retention_s": null}', '{"url": "https://bolt.example/pay", "kind": "http", "mode": "blocking", "name": "bolt", "order": "none", "quota": null, "lookup": null, "pacing": "burst", "paused": true, "enabled": true, "headers": {}, "request": null, "require": [], "workers": 32, "share_of": null, "statuses": null, "max_age_s": 259200, "resumed_at": null, "store_down": "wait", "timeout_ms": 10000, "max_wait_ms": 5000, "max_attempts": 8, "slot_release": "response", "backoff_max_ms": 60000, "send_budget_ms": 500, "backoff_base_ms": 500, "bucket_capacity": 256, "leak_per_second": null, "reserve_percent": 0, "reuse_connections": null, "transit_jitter_ms": 50, "connection_max_age_ms": 60000, "idempotency_retention_s": null}');

INSERT INTO public.settings_version (only_row, version) VALUES (true, 11);

INSERT INTO public.upkeep_turns (duty, taken_until) VALUES ('reconcile', '2026-11-01 10:00:05+00');

INSERT INTO public.worker_reports (id, host, pid, version, started_at, reported_at, format, report) VALUES ('w-1', 'desk', 4711, '0.1.0', '2026-11-01 10:00:00+00', '2026-11-01 10:00:05+00', 3, '{"lanes": []}');

SELECT pg_catalog.setval('public.account_overrides_id_seq', 3, true);

SELECT pg_catalog.setval('public.job_audit_id_seq', 1, true);

SELECT pg_catalog.setval('public.jobs_seq_seq', 6, true);

SELECT pg_catalog.setval('public.outcome_events_sequence_seq', 3, true);

SELECT pg_catalog.setval('public.rejected_messages_id_seq', 1, true);

SELECT pg_catalog.setval('public.settings_audit_id_seq', 9, true);

ALTER TABLE ONLY public._sqlx_migrations
    ADD CONSTRAINT _sqlx_migrations_pkey PRIMARY KEY (version);

ALTER TABLE ONLY public.account_overrides
    ADD CONSTRAINT account_overrides_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.attempts
    ADD CONSTRAINT attempts_pkey PRIMARY KEY (job_id, number);

ALTER TABLE ONLY public.deployment
    ADD CONSTRAINT deployment_pkey PRIMARY KEY (only_row);

ALTER TABLE ONLY public.finished_jobs
    ADD CONSTRAINT finished_jobs_pkey PRIMARY KEY (provider, state);

ALTER TABLE ONLY public.finished_mark
    ADD CONSTRAINT finished_mark_pkey PRIMARY KEY (only_row);

ALTER TABLE ONLY public.flow_clocks
    ADD CONSTRAINT flow_clocks_pkey PRIMARY KEY (provider, class);

ALTER TABLE ONLY public.flow_turns
    ADD CONSTRAINT flow_turns_pkey PRIMARY KEY (provider);

ALTER TABLE ONLY public.flows
    ADD CONSTRAINT flows_pkey PRIMARY KEY (provider, class, account);

ALTER TABLE ONLY public.job_audit
    ADD CONSTRAINT job_audit_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT jobs_one_payment_per_provider_and_key UNIQUE (provider, idempotency_key);

ALTER TABLE ONLY public.jobs
    ADD CONSTRAINT jobs_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.limiter_authority
    ADD CONSTRAINT limiter_authority_pkey PRIMARY KEY (quota);

ALTER TABLE ONLY public.outcome_events
    ADD CONSTRAINT outcome_events_pkey PRIMARY KEY (sequence);

ALTER TABLE ONLY public.provider_limits
    ADD CONSTRAINT provider_limits_pkey PRIMARY KEY (provider, name);

ALTER TABLE ONLY public.providers
    ADD CONSTRAINT providers_pkey PRIMARY KEY (name);

ALTER TABLE ONLY public.rejected_messages
    ADD CONSTRAINT rejected_messages_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.settings_audit
    ADD CONSTRAINT settings_audit_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.settings_version
    ADD CONSTRAINT settings_version_pkey PRIMARY KEY (only_row);

ALTER TABLE ONLY public.upkeep_turns
    ADD CONSTRAINT upkeep_turns_pkey PRIMARY KEY (duty);

ALTER TABLE ONLY public.worker_reports
    ADD CONSTRAINT worker_reports_pkey PRIMARY KEY (id);

CREATE UNIQUE INDEX account_overrides_one_rule_per_account_and_limit ON public.account_overrides USING btree (provider, account, COALESCE(limit_name, ''::text));

CREATE INDEX attempts_by_account ON public.attempts USING btree (provider, account, began_at) WHERE (account IS NOT NULL);

CREATE INDEX attempts_by_provider_and_end ON public.attempts USING btree (provider, ended_at);

CREATE INDEX attempts_by_reference ON public.attempts USING btree (provider, reference, began_at) WHERE (reference IS NOT NULL);

CREATE INDEX attempts_with_a_reference ON public.attempts USING btree (began_at) WHERE ((reference || ''::text) IS NOT NULL);

CREATE INDEX flows_by_wake ON public.flows USING btree (provider, blocked_until) WHERE (blocked_until IS NOT NULL);

CREATE INDEX flows_idle ON public.flows USING btree (provider, class, tag) WHERE (NOT queued);

CREATE INDEX flows_in_order ON public.flows USING btree (provider, class, tag) WHERE (queued AND (blocked_until IS NULL));

CREATE INDEX job_audit_by_job ON public.job_audit USING btree (job_id);

CREATE INDEX jobs_by_account ON public.jobs USING btree (account, id) WHERE (account IS NOT NULL);

CREATE INDEX jobs_by_provider_and_state ON public.jobs USING btree (provider, state);

CREATE INDEX jobs_finished_by_update ON public.jobs USING btree (updated_at) WHERE ((scrubbed_at IS NULL) AND (state = ANY (ARRAY['succeeded'::text, 'declined'::text, 'dead'::text, 'expired'::text, 'cancelled'::text])));

CREATE INDEX jobs_in_backlog ON public.jobs USING btree (provider, (
CASE
    WHEN (state = 'unknown'::text) THEN (0)::bigint
    ELSE (10 - priority)
END), COALESCE((account)::text, ''::text), seq) WHERE backlog;

CREATE INDEX jobs_in_order ON public.jobs USING btree (provider, account) WHERE (in_order AND (NOT backlog) AND (state = ANY (ARRAY['waiting'::text, 'sending'::text, 'unknown'::text, 'review'::text])));

CREATE INDEX jobs_in_review_by_update ON public.jobs USING btree (updated_at) WHERE (state = 'review'::text);

CREATE UNIQUE INDEX jobs_one_payment_per_charge ON public.jobs USING btree (provider_reference, (((provider)::text || ''::text))) WHERE (state = 'succeeded'::text);

CREATE INDEX jobs_open_by_sweep ON public.jobs USING btree (provider, (
CASE
    WHEN (sweep_after > wake_at) THEN sweep_after
    ELSE wake_at
END)) WHERE (state = ANY (ARRAY['waiting'::text, 'sending'::text, 'unknown'::text]));

CREATE INDEX jobs_unknown_by_wake ON public.jobs USING btree (provider, wake_at) WHERE (state = 'unknown'::text);

CREATE INDEX jobs_unqueued_by_wake ON public.jobs USING btree (provider, wake_at) WHERE (unqueued AND (state = 'waiting'::text));

CREATE INDEX jobs_waiting_by_expiry ON public.jobs USING btree (expires_at) WHERE ((state = 'waiting'::text) AND (expires_at IS NOT NULL));

CREATE INDEX jobs_waiting_for_limits ON public.jobs USING btree (provider, wake_at) WHERE ((state = ANY (ARRAY['waiting'::text, 'unknown'::text])) AND (wait_reason = ANY (ARRAY['limit'::text, 'cost_exceeds_limit'::text])));

CREATE INDEX jobs_waiting_for_providers ON public.jobs USING btree (provider, wake_at) WHERE ((state = ANY (ARRAY['waiting'::text, 'unknown'::text])) AND (wait_reason = ANY (ARRAY['provider_paused'::text, 'throttled'::text])));

CREATE INDEX jobs_with_a_message_left ON public.jobs USING btree (provider) WHERE (delayed_until <= created_at);

CREATE INDEX outcome_events_by_job ON public.outcome_events USING btree (job_id);

CREATE INDEX outcome_events_by_try ON public.outcome_events USING btree (next_try_at, sequence) WHERE (published_at IS NULL);

CREATE INDEX rejected_messages_by_job ON public.rejected_messages USING btree (job_id) WHERE (job_id IS NOT NULL);

CREATE INDEX settings_audit_by_time ON public.settings_audit USING btree (at);

CREATE TRIGGER audit AFTER UPDATE ON public.settings_version FOR EACH ROW WHEN (((new.version > old.version) AND (pg_trigger_depth() = 0))) EXECUTE FUNCTION public.settings_version_audit();

CREATE TRIGGER bump_version BEFORE INSERT OR DELETE OR UPDATE ON public.account_overrides FOR EACH STATEMENT EXECUTE FUNCTION public.settings_bump_version();

CREATE TRIGGER bump_version BEFORE INSERT OR DELETE OR UPDATE ON public.provider_limits FOR EACH STATEMENT EXECUTE FUNCTION public.settings_bump_version();

CREATE TRIGGER bump_version BEFORE INSERT OR DELETE OR UPDATE ON public.providers FOR EACH STATEMENT EXECUTE FUNCTION public.settings_bump_version();

CREATE TRIGGER content_never_changes BEFORE UPDATE OF id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, cost, priority, not_before, expires_at, payload ON public.jobs FOR EACH ROW WHEN ((((((((((((((new.id)::text IS DISTINCT FROM (old.id)::text) OR ((new.provider)::text IS DISTINCT FROM (old.provider)::text)) OR ((new.idempotency_key)::text IS DISTINCT FROM (old.idempotency_key)::text)) OR (new.key_given IS DISTINCT FROM old.key_given)) OR (new.content_hash IS DISTINCT FROM old.content_hash)) OR (new.amount IS DISTINCT FROM old.amount)) OR ((new.currency)::text IS DISTINCT FROM (old.currency)::text)) OR (new.cost IS DISTINCT FROM old.cost)) OR (new.priority IS DISTINCT FROM old.priority)) OR (new.not_before IS DISTINCT FROM old.not_before)) OR (new.expires_at IS DISTINCT FROM old.expires_at)) OR (((new.account)::text IS DISTINCT FROM (old.account)::text) AND ((new.account IS NOT NULL) OR (new.state = ANY (ARRAY['waiting'::text, 'sending'::text, 'unknown'::text])))) OR ((new.reference IS DISTINCT FROM old.reference) AND ((new.reference IS NOT NULL) OR (new.state = ANY (ARRAY['waiting'::text, 'sending'::text, 'unknown'::text])))) OR ((new.payload IS DISTINCT FROM old.payload) AND ((new.payload IS NOT NULL) OR (new.state = ANY (ARRAY['waiting'::text, 'sending'::text, 'unknown'::text])))))) EXECUTE FUNCTION public.jobs_refuse_change_of_content();

CREATE TRIGGER final_states_are_for_good BEFORE UPDATE OF state, maybe_charged ON public.jobs FOR EACH ROW WHEN ((((new.state <> old.state) AND (old.state = ANY ('{succeeded,declined,dead,expired,review,cancelled}'::text[]))) OR (old.maybe_charged > new.maybe_charged))) EXECUTE FUNCTION public.jobs_refuse_reopening();

CREATE TRIGGER frozen_request_is_at_most_1_mib_to_a_url_of_8_kib BEFORE INSERT OR UPDATE OF frozen_body, frozen_url ON public.jobs FOR EACH ROW WHEN (((octet_length(new.frozen_body) > 1048576) OR (octet_length(new.frozen_url) > 8192))) EXECUTE FUNCTION public.jobs_refuse_what_is_too_large();

CREATE TRIGGER frozen_request_never_changes BEFORE UPDATE OF frozen_method, frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_account, frozen_fingerprint ON public.jobs FOR EACH ROW WHEN (((old.frozen_method IS NOT NULL) AND (((((((new.frozen_method IS DISTINCT FROM old.frozen_method) OR (new.frozen_url IS DISTINCT FROM old.frozen_url)) OR (new.frozen_key IS DISTINCT FROM old.frozen_key)) OR (new.frozen_content_type IS DISTINCT FROM old.frozen_content_type)) OR (new.frozen_account IS DISTINCT FROM old.frozen_account)) OR (new.frozen_fingerprint IS DISTINCT FROM old.frozen_fingerprint)) OR ((new.frozen_body IS DISTINCT FROM old.frozen_body) AND (NOT ((new.frozen_body = '\x'::bytea) AND (new.state <> ALL (ARRAY['waiting'::text, 'sending'::text, 'unknown'::text])))))))) EXECUTE FUNCTION public.jobs_refuse_change_of_frozen_request();

CREATE TRIGGER hint AFTER UPDATE ON public.settings_version FOR EACH STATEMENT EXECUTE FUNCTION public.settings_hint();

CREATE TRIGGER leave_backlog BEFORE UPDATE OF state, lease_until ON public.jobs FOR EACH ROW WHEN ((old.backlog AND new.backlog AND ((new.state <> old.state) OR (new.lease_until IS NOT NULL)))) EXECUTE FUNCTION public.jobs_leave_backlog();

CREATE TRIGGER never_changes BEFORE DELETE OR UPDATE OR TRUNCATE ON public.job_audit FOR EACH STATEMENT EXECUTE FUNCTION public.audit_refuse_change();

CREATE TRIGGER never_changes BEFORE DELETE OR UPDATE OR TRUNCATE ON public.settings_audit FOR EACH STATEMENT EXECUTE FUNCTION public.audit_refuse_change();

CREATE TRIGGER never_deleted BEFORE DELETE OR TRUNCATE ON public.settings_version FOR EACH STATEMENT EXECUTE FUNCTION public.settings_refuse_version();

CREATE TRIGGER new_wait_resets_the_sweep_interval BEFORE UPDATE OF wake_at, fence ON public.jobs FOR EACH ROW WHEN (((old.sweep_after IS NOT NULL) AND ((new.wake_at <> old.wake_at) OR (new.fence <> old.fence)))) EXECUTE FUNCTION public.jobs_forget_sweep();

CREATE TRIGGER payload_is_at_most_64_kib BEFORE INSERT OR UPDATE OF payload ON public.jobs FOR EACH ROW WHEN ((octet_length(new.payload) > 65536)) EXECUTE FUNCTION public.jobs_refuse_what_is_too_large();

CREATE TRIGGER person BEFORE INSERT ON public.settings_audit FOR EACH ROW EXECUTE FUNCTION public.settings_audit_person();

CREATE TRIGGER record_change AFTER INSERT OR DELETE OR UPDATE ON public.account_overrides FOR EACH ROW EXECUTE FUNCTION public.settings_record_change('provider', 'account', 'limit_name');

CREATE TRIGGER record_change AFTER INSERT OR DELETE OR UPDATE ON public.provider_limits FOR EACH ROW EXECUTE FUNCTION public.settings_record_change('provider', 'name');

CREATE TRIGGER record_change AFTER INSERT OR DELETE OR UPDATE ON public.providers FOR EACH ROW EXECUTE FUNCTION public.settings_record_change('name');

CREATE TRIGGER record_decision AFTER UPDATE OF state, maybe_charged ON public.jobs FOR EACH ROW WHEN (((old.maybe_charged > new.maybe_charged) OR ((new.state <> old.state) AND ((old.state = ANY ('{succeeded,declined,dead,expired,review,cancelled}'::text[])) OR ((NOT ((new.fence > old.fence) AND ((new.lease_until IS NOT NULL) OR (new.state = ANY ('{expired,review}'::text[]))))) AND (NOT ((old.lease_until IS NOT NULL) AND (new.fence = old.fence) AND (new.state <> 'cancelled'::text) AND ((new.updated_at <> old.updated_at) OR (old.updated_at > (clock_timestamp() - '00:00:01'::interval)))))))))) EXECUTE FUNCTION public.jobs_record_decision();

CREATE TRIGGER record_deletion AFTER DELETE ON public.jobs FOR EACH ROW EXECUTE FUNCTION public.jobs_record_decision();

CREATE TRIGGER record_erasure AFTER UPDATE OF account ON public.jobs FOR EACH ROW WHEN (((old.account IS NOT NULL) AND (new.account IS NULL))) EXECUTE FUNCTION public.jobs_record_erasure();

CREATE TRIGGER reference_never_changes BEFORE UPDATE OF reference ON public.attempts FOR EACH ROW WHEN (((new.reference IS NOT NULL) AND (new.reference IS DISTINCT FROM old.reference))) EXECUTE FUNCTION public.jobs_refuse_change_of_content();

CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON public.account_overrides FOR EACH STATEMENT EXECUTE FUNCTION public.settings_refuse_truncate();

CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON public.jobs FOR EACH STATEMENT EXECUTE FUNCTION public.settings_refuse_truncate();

CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON public.provider_limits FOR EACH STATEMENT EXECUTE FUNCTION public.settings_refuse_truncate();

CREATE TRIGGER refuse_truncate BEFORE TRUNCATE ON public.providers FOR EACH STATEMENT EXECUTE FUNCTION public.settings_refuse_truncate();

CREATE TRIGGER stamp BEFORE INSERT OR UPDATE ON public.providers FOR EACH ROW EXECUTE FUNCTION public.settings_stamp_provider();

CREATE TRIGGER touch_provider AFTER INSERT OR DELETE OR UPDATE ON public.account_overrides FOR EACH ROW EXECUTE FUNCTION public.settings_touch_provider();

CREATE TRIGGER touch_provider AFTER INSERT OR DELETE OR UPDATE ON public.provider_limits FOR EACH ROW EXECUTE FUNCTION public.settings_touch_provider();

CREATE CONSTRAINT TRIGGER uncount_backlog AFTER UPDATE OF state, backlog ON public.jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN ((old.backlog AND (NOT new.backlog) AND (new.lease_until IS NULL))) EXECUTE FUNCTION public.jobs_uncount_backlog();

CREATE CONSTRAINT TRIGGER uncount_deleted AFTER DELETE ON public.jobs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (old.backlog) EXECUTE FUNCTION public.jobs_uncount_backlog();

CREATE TRIGGER version_rises_by_one BEFORE UPDATE ON public.settings_version FOR EACH ROW WHEN (((new.version < old.version) OR ((new.version > (old.version + 1)) AND (new.version > '281474976710656'::bigint)))) EXECUTE FUNCTION public.settings_refuse_version();

ALTER TABLE ONLY public.account_overrides
    ADD CONSTRAINT account_overrides_provider_fkey FOREIGN KEY (provider) REFERENCES public.providers(name) ON DELETE CASCADE;

ALTER TABLE ONLY public.attempts
    ADD CONSTRAINT attempts_job_id_fkey FOREIGN KEY (job_id) REFERENCES public.jobs(id);

ALTER TABLE ONLY public.account_overrides
    ADD CONSTRAINT limit_name_is_a_limit_of_this_provider FOREIGN KEY (provider, limit_name) REFERENCES public.provider_limits(provider, name);

ALTER TABLE ONLY public.outcome_events
    ADD CONSTRAINT outcome_events_job_id_fkey FOREIGN KEY (job_id) REFERENCES public.jobs(id);

ALTER TABLE ONLY public.provider_limits
    ADD CONSTRAINT provider_limits_provider_fkey FOREIGN KEY (provider) REFERENCES public.providers(name) ON DELETE CASCADE;

REVOKE ALL ON FUNCTION public.audit_refuse_change() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.jobs_cancel_ahead(job text, lane text, because text) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.jobs_decide(job text, old_state text, new_state text, because text, reference text, seen_fence bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.jobs_erase(of_account text, at_most bigint, because text, OUT erased_jobs bigint, OUT erased_requests bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.jobs_forget_sweep() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.jobs_leave_backlog() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.jobs_record_decision() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.jobs_record_erasure() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.jobs_refuse_change_of_content() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.jobs_refuse_change_of_frozen_request() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.jobs_refuse_reopening() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.jobs_uncount_backlog() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.settings_audit_person() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.settings_bump_version() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.settings_hint() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.settings_hold_version(expected bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.settings_raise_version(expected bigint, raised bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION public.settings_record_change() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.settings_refuse_truncate() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.settings_refuse_version() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.settings_stamp_provider() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.settings_touch_provider() FROM PUBLIC;

REVOKE ALL ON FUNCTION public.settings_version_audit() FROM PUBLIC;

