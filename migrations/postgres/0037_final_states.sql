-- Final states and a payment's content do not change. A worker's step costs a comparison of its old and its new state.

-- Only jobs_decide(), which runs as the owner, leaves `review` and `dead`; a user with the owner's rights is audited.
-- No statement leaves the other final states.
CREATE FUNCTION jobs_refuse_reopening() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
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
REVOKE ALL ON FUNCTION jobs_refuse_reopening() FROM PUBLIC;
CREATE TRIGGER final_states_are_for_good BEFORE UPDATE OF state, maybe_charged ON jobs
    FOR EACH ROW WHEN (
        (NEW.state <> OLD.state AND OLD.state = ANY ('{succeeded,declined,dead,expired,review,cancelled}'))
        OR OLD.maybe_charged > NEW.maybe_charged)
    EXECUTE FUNCTION jobs_refuse_reopening();

CREATE FUNCTION jobs_refuse_change_of_content() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'check_violation', CONSTRAINT = 'content_never_changes',
        MESSAGE = 'what a payment is never changes: publish a new payment';
END $$;
REVOKE ALL ON FUNCTION jobs_refuse_change_of_content() FROM PUBLIC;
-- The personal data of a payment may be emptied once it has ended.
CREATE TRIGGER content_never_changes
    BEFORE UPDATE OF id, provider, idempotency_key, key_given, content_hash, amount, currency, account, reference, cost,
                     priority, not_before, expires_at, payload ON jobs
    FOR EACH ROW WHEN (
        (NEW.id, NEW.provider, NEW.idempotency_key, NEW.key_given, NEW.content_hash, NEW.amount, NEW.currency, NEW.cost,
         NEW.priority, NEW.not_before, NEW.expires_at)
        IS DISTINCT FROM
        (OLD.id, OLD.provider, OLD.idempotency_key, OLD.key_given, OLD.content_hash, OLD.amount, OLD.currency, OLD.cost,
         OLD.priority, OLD.not_before, OLD.expires_at)
        OR (NEW.account IS DISTINCT FROM OLD.account
            AND (NEW.account IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
        OR (NEW.reference IS DISTINCT FROM OLD.reference
            AND (NEW.reference IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown')))
        OR (NEW.payload IS DISTINCT FROM OLD.payload
            AND (NEW.payload IS NOT NULL OR NEW.state IN ('waiting', 'sending', 'unknown'))))
    EXECUTE FUNCTION jobs_refuse_change_of_content();

-- A worker leaves no final state and never clears maybe_charged. So any statement that does is audited, whatever else
-- it sets. The condition is evaluated at each statement, so it is short.
DROP TRIGGER record_decision ON jobs;
CREATE TRIGGER record_decision AFTER UPDATE OF state, maybe_charged ON jobs
    FOR EACH ROW WHEN (
        OLD.maybe_charged > NEW.maybe_charged
        OR (NEW.state <> OLD.state
            AND (OLD.state = ANY ('{succeeded,declined,dead,expired,review,cancelled}')
                 OR (NOT (NEW.fence > OLD.fence
                          AND (NEW.lease_until IS NOT NULL OR NEW.state = ANY ('{expired,review}')))
                     AND NOT (OLD.lease_until IS NOT NULL AND NEW.fence = OLD.fence AND NEW.state <> 'cancelled'
                              AND (NEW.updated_at <> OLD.updated_at
                                   OR OLD.updated_at > clock_timestamp() - interval '1 second'))))))
    EXECUTE FUNCTION jobs_record_decision();
