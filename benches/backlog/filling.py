"""Fills a ledger with past jobs by a few statements: half of them wait for their time and half are finished, by default."""

import sqlite3

import deployment
from deployment import psql

# What PostgreSQL and SQLite write differently.
POSTGRES = {
    "numbers": "SELECT n FROM generate_series(1, {jobs}) AS numbers (n)",
    "ago": "(now() - ({0}) * interval '1 second')",
    "hash": "decode(md5(n::text) || md5(n::text), 'hex')",
    "body": "convert_to('{{\"amount\":100,\"currency\":\"EUR\",\"id\":\"past-' || n || '\"}}', 'UTF8')",
    "false": "false",
}
SQLITE = {
    "numbers": "SELECT n FROM (WITH RECURSIVE c (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {jobs}) SELECT n FROM c)",
    # Not `subsec`: the SQLite of many Python versions is older.
    "ago": "(CAST(strftime('%s', 'now') AS INTEGER) * 1000 - ({0}) * 1000)",
    "hash": "randomblob(32)",
    "body": "CAST('{{\"amount\":100,\"currency\":\"EUR\",\"id\":\"past-' || n || '\"}}' AS BLOB)",
    "false": "0",
}


def statements(words, jobs, lane, finished="n % 2 = 0"):
    ago = lambda seconds: words["ago"].format(seconds)  # noqa: E731
    # Waiting jobs wait for an hour and more; the last finished job ended a minute ago.
    made = ago(f"60 + ({jobs} - n) / 100")
    sent = lambda value: f"CASE WHEN {finished} THEN {value} END"  # noqa: E731
    wake = ago(f"CASE WHEN {finished} THEN 60 ELSE -3600 - n % 3600 END")
    body = words["body"].format()
    yield f"""
        INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, cost, priority,
            payload, state, wake_at, attempts, last_attempt, fence, first_sent_at, first_sent_number, frozen_method,
            frozen_url, frozen_key, frozen_content_type, frozen_body, frozen_fingerprint, provider_reference, reason,
            created_at, updated_at)
        SELECT 'past-' || n, '{lane}', 'past-' || n, {words["false"]}, {words["hash"]}, 100, 'EUR', 'acct_' || (n % 1000), 1, 0,
            '{{"token":"tok_1234567890"}}', CASE WHEN {finished} THEN 'succeeded' ELSE 'waiting' END, {wake},
            CASE WHEN {finished} THEN 1 ELSE 0 END, CASE WHEN {finished} THEN 1 ELSE 0 END, 1, {sent(made)}, {sent("1")},
            {sent("'POST'")}, {sent("'http://127.0.0.1:9000/charges'")}, {sent("'past-' || n")},
            {sent("'application/json'")}, {sent(body)}, {sent("'0123456789abcdef'")}, {sent("'ch_past_' || n")},
            {sent("'accepted'")}, {made}, {made}
        FROM ({words["numbers"].format(jobs=jobs)}) AS past"""
    yield """
        INSERT INTO attempts (job_id, number, provider, began_at, ended_at, outcome, status, detail, counted)
        SELECT id, 1, provider, created_at, updated_at, 'accepted', 200, '', state = 'succeeded'
        FROM jobs WHERE state = 'succeeded'"""
    yield """
        INSERT INTO events (job_id, n, provider, state, provider_reference, reason, attempts, at)
        SELECT id, 1, provider, state, provider_reference, reason, 1, updated_at
        FROM jobs WHERE state = 'succeeded'"""


def postgres(url, jobs, lane, **finished):
    psql(url, *statements(POSTGRES, jobs, lane, **finished), "VACUUM ANALYZE", "CHECKPOINT")


def sqlite(file, jobs, lane):
    """Fills the ledger."""
    with sqlite3.connect(file, timeout=60) as connection:
        connection.execute("PRAGMA foreign_keys = on")
        for statement in statements(SQLITE, jobs, lane):
            connection.execute(statement)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def messages(jobs, lane):
    """Jobs that the ledger does not know yet: (id, body)."""
    for number in range(1, jobs + 1):
        identity = f"now-{number:08}"
        yield identity, deployment.message(identity, lane)
