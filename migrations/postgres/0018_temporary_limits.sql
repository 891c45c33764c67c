-- A limit's rate for a time: until when it applies, and the rate that comes back then. docs/configuration.md,
-- `provider_limits`. The triggers of 0001 audit every column of the row.
SELECT set_config('search_path', quote_ident(current_schema()) || ', pg_temp', true);

ALTER TABLE provider_limits
    ADD COLUMN until_at timestamptz,
    ADD COLUMN then_max_requests bigint
        CONSTRAINT then_max_requests_is_0_to_1000000 CHECK (then_max_requests BETWEEN 0 AND 1000000),
    ADD COLUMN then_window_ms bigint
        CONSTRAINT then_window_ms_is_1_ms_to_31_days CHECK (then_window_ms BETWEEN 1 AND 2678400000),
    ADD CONSTRAINT until_at_goes_with_then_max_requests
        CHECK ((until_at IS NULL) = (then_max_requests IS NULL)),
    ADD CONSTRAINT then_window_ms_goes_with_until_at CHECK (then_window_ms IS NULL OR until_at IS NOT NULL),
    ADD CONSTRAINT instants_are_finite CHECK (
        least(until_at) >= '0001-01-01 00:00:00+00' AND greatest(until_at) < '9999-12-30 22:00:00+00');

-- Any other change of a limit ends its return: the later change wins, also one by SQL or by an older program.
CREATE FUNCTION limits_end_return() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF NEW.until_at IS NOT DISTINCT FROM OLD.until_at
        AND NEW.then_max_requests IS NOT DISTINCT FROM OLD.then_max_requests
        AND NEW.then_window_ms IS NOT DISTINCT FROM OLD.then_window_ms
    THEN
        NEW.until_at := NULL;
        NEW.then_max_requests := NULL;
        NEW.then_window_ms := NULL;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER end_return BEFORE UPDATE ON provider_limits
    FOR EACH ROW WHEN (OLD.until_at IS NOT NULL AND OLD IS DISTINCT FROM NEW) EXECUTE FUNCTION limits_end_return();

-- The return itself, by a worker, which has no right to change a limit. It finds no row before the time has come, and
-- none after another worker has done it.
CREATE FUNCTION limits_return(of_provider text, of_limit text) RETURNS SETOF provider_limits
    LANGUAGE sql SECURITY DEFINER SET search_path FROM CURRENT AS $$
    UPDATE provider_limits SET max_requests = then_max_requests, window_ms = then_window_ms,
        until_at = NULL, then_max_requests = NULL, then_window_ms = NULL
    WHERE provider = of_provider AND name = of_limit AND until_at <= clock_timestamp() RETURNING *;
$$;

-- The same for an account's rule, whose columns are in 0001: any other change of the row ends the return.
CREATE FUNCTION accounts_end_return() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF NEW.until_at IS NOT DISTINCT FROM OLD.until_at AND NEW.then_row IS NOT DISTINCT FROM OLD.then_row THEN
        NEW.until_at := NULL;
        NEW.then_row := NULL;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER end_return BEFORE UPDATE ON account_overrides
    FOR EACH ROW WHEN (OLD.until_at IS NOT NULL AND OLD IS DISTINCT FROM NEW) EXECUTE FUNCTION accounts_end_return();

REVOKE ALL ON FUNCTION limits_end_return(), limits_return(text, text), accounts_end_return() FROM PUBLIC;
