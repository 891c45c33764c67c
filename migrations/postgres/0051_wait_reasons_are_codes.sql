-- The codes of `WaitReason` in src/domain/wait_reason.rs. 0050 has written them, so nothing needs validation.
-- Workers of an earlier build write sentences: they are stopped before.
ALTER TABLE jobs
    ADD CONSTRAINT wait_reason_is_known CHECK (wait_reason IN (
        'not_before', 'egress', 'limit', 'cost_exceeds_limit', 'account_blocked', 'provider_paused', 'throttled',
        'limiter_cold', 'needs_history', 'limiter_unavailable', 'stale_settings', 'circuit_open', 'circuit_probing',
        'operator_paused', 'quota_closed', 'misconfigured', 'rejected_streak', 'unbuildable', 'local_fault',
        'object_busy', 'in_progress', 'outcome_unknown', 'lookup', 'resend', 'retry', 'permit_missed',
        'ledger_unavailable', 'ledger_refused', 'worker_lost'
    )) NOT VALID,
    ADD CONSTRAINT wait_limit_is_named_by_its_reason CHECK (
        (wait_limit IS NOT NULL) = coalesce(wait_reason IN ('limit', 'cost_exceeds_limit'), false)) NOT VALID;
