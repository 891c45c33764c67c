-- Why a job waits, and why it waited last, becomes a code. So far it was a sentence, and rewording it would have ended
-- the waking of jobs. `wait_reason` and `wait_limit` get the code and the limit, and `wait_detail` the text that only
-- people read. A sentence that no code has is such a text as a whole. Rows are locked, and no table.
UPDATE jobs SET
    wait_reason = parsed.code,
    wait_limit = CASE WHEN parsed.code = 'limit' THEN substr(parsed.sentence, 17)
        WHEN parsed.code = 'cost_exceeds_limit' THEN substr(parsed.sentence, 17, strpos(parsed.sentence, ': ') - 17) END,
    wait_detail = parsed.detail,
    reason = CASE WHEN parsed.waits AND NOT parsed.is_decision THEN NULL ELSE jobs.reason END,
    wait_since = CASE WHEN parsed.is_last_wait THEN jobs.wait_since END,
    wait_until = CASE WHEN parsed.is_last_wait THEN jobs.wait_until END,
    wait_request = CASE WHEN parsed.is_last_wait THEN jobs.wait_request END
FROM (
    SELECT id, waits, is_last_wait, is_decision, sentence, code,
        CASE
            WHEN is_decision THEN CASE WHEN NOT waits THEN sentence END
            WHEN code IN ('retry', 'outcome_unknown', 'misconfigured', 'lookup', 'local_fault', 'ledger_unavailable',
                          'ledger_refused') THEN sentence
            WHEN code = 'provider_paused' AND sentence <> 'the provider asked for a pause' THEN sentence
            WHEN code = 'cost_exceeds_limit' THEN substr(sentence, strpos(sentence, ': ') + 2)
            WHEN code = 'unbuildable' THEN substr(sentence, length('the request cannot be built yet: ') + 1)
            WHEN code = 'circuit_open' THEN substr(sentence, length('the provider is down: ') + 1) END AS detail
    FROM (
        SELECT id, waits, is_last_wait, sentence,
            COALESCE(sentence LIKE 'sent again by %' OR sentence LIKE 'replayed by %', false) AS is_decision,
            CASE
                WHEN sentence IS NULL THEN NULL
                -- The operator's decision is the reason, until the job is delayed. An early delivery delayed it.
                WHEN sentence LIKE 'sent again by %' OR sentence LIKE 'replayed by %'
                    THEN CASE WHEN is_last_wait THEN 'not_before' END
                WHEN sentence LIKE 'waits for limit %: %' THEN 'cost_exceeds_limit'
                WHEN sentence LIKE 'waits for limit %' THEN 'limit'
                WHEN sentence LIKE 'account % is blocked by a rule of this provider' THEN 'account_blocked'
                WHEN sentence LIKE 'the request cannot be built yet: %' THEN 'unbuildable'
                WHEN sentence LIKE 'the provider is down: %' THEN 'circuit_open'
                WHEN sentence LIKE 'provider answered %: check %' THEN 'misconfigured'
                -- A job that was never charged waits for a wait that the provider named to another.
                WHEN state = 'waiting' AND (sentence LIKE 'provider answered %' OR sentence LIKE 'look-up failed: %')
                    THEN 'provider_paused'
                WHEN sentence LIKE 'look-up failed: %' OR sentence = 'the provider does not know this payment'
                    OR sentence = 'waited too long to be sent again: the provider is asked' THEN 'lookup'
                WHEN sentence = 'waits for its time' THEN 'not_before'
                WHEN sentence = 'waits for a worker slot at the egress rate' THEN 'egress'
                WHEN sentence = 'the provider asked for a pause' THEN 'provider_paused'
                WHEN sentence = 'throttled by the provider' THEN 'throttled'
                WHEN sentence = 'the limiter has lost its state and waits' THEN 'limiter_cold'
                WHEN sentence = 'usage of a limit is being read from the ledger' THEN 'needs_history'
                WHEN sentence = 'the limiter store is unavailable' THEN 'limiter_unavailable'
                WHEN sentence = 'newer settings are being loaded' THEN 'stale_settings'
                WHEN sentence = 'another job tests whether the provider is up again' THEN 'circuit_probing'
                WHEN sentence = 'the provider is paused' THEN 'operator_paused'
                WHEN sentence = 'the quota is not open in this worker' THEN 'quota_closed'
                WHEN sentence = 'the provider rejected several payments in a row' THEN 'rejected_streak'
                WHEN sentence LIKE 'this worker has used up its file descriptors%'
                    OR sentence LIKE 'this worker may start no more threads%'
                    OR sentence LIKE 'this worker''s machine has %' THEN 'local_fault'
                WHEN sentence = 'the provider is busy with this payment''s object' THEN 'object_busy'
                WHEN sentence = 'the provider is still working on this payment' THEN 'in_progress'
                WHEN sentence = 'the provider does not know this payment: it is sent once more' THEN 'resend'
                WHEN sentence = 'recorded too late for its permit, nothing was sent' THEN 'permit_missed'
                WHEN sentence = 'the ledger was unavailable, nothing was sent' THEN 'ledger_unavailable'
                WHEN sentence LIKE '%, nothing was sent' THEN 'ledger_refused'
                WHEN sentence = 'a worker was lost while the request was in flight' THEN 'worker_lost'
                WHEN state = 'unknown' THEN 'outcome_unknown'
                ELSE 'retry' END AS code
        FROM (
            SELECT id, state, state IN ('waiting', 'unknown') AS waits,
                state NOT IN ('waiting', 'unknown') OR COALESCE(reason, wait_reason) IS NOT DISTINCT FROM wait_reason
                    AS is_last_wait,
                CASE WHEN state IN ('waiting', 'unknown') THEN COALESCE(reason, wait_reason) ELSE wait_reason END AS sentence
            FROM jobs WHERE wait_reason IS NOT NULL OR (reason IS NOT NULL AND state IN ('waiting', 'unknown'))
        ) AS sentences
    ) AS codes
) AS parsed
WHERE parsed.id = jobs.id;
