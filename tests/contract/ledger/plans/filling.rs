//! A ledger with a history: jobs in all states with their attempts and events, written by a few statements.

use super::{Fixture, Kind};

pub const JOBS: u32 = 20_000;
pub const LANES: u32 = 10;
const NAMESAKES: u32 = 2_500;

/// State by `n % 20`, with `n` from 1: two thirds are finished, a quarter is open.
const STATE: &str = "CASE n % 20 WHEN 0 THEN 'waiting' WHEN 1 THEN 'waiting' WHEN 2 THEN 'waiting' \
     WHEN 3 THEN 'unknown' WHEN 4 THEN 'sending' WHEN 5 THEN 'declined' WHEN 6 THEN 'review' WHEN 7 THEN 'dead' \
     WHEN 8 THEN 'expired' WHEN 9 THEN 'cancelled' ELSE 'succeeded' END";

impl Fixture {
    /// Fills the ledger with [`JOBS`] jobs over [`LANES`] lanes; half of the waiting ones are due.
    pub async fn fill(&self, kind: Kind) {
        let sql = Dialect(kind);
        self.sql(&sql.jobs()).await.unwrap();
        self.sql(&sql.attempts()).await.unwrap();
        self.sql(&sql.events()).await.unwrap();
        self.sql(&sql.rejected()).await.unwrap();
        self.sql(&sql.audited()).await.unwrap();
        self.sql(&sql.history()).await.unwrap();
    }

    /// Payments of [`NAMESAKES`] other providers, which all have the charge `charge-work-sent-0`.
    pub async fn fill_namesakes(&self, kind: Kind) {
        self.sql(&Dialect(kind).namesakes()).await.unwrap();
    }
}

struct Dialect(Kind);

impl Dialect {
    /// The instant this many seconds ago.
    fn ago(&self, seconds: &str) -> String {
        match self.0 {
            Kind::Postgres => format!("(now() - ({seconds}) * interval '1 second')"),
            _ => format!("(CAST(round(unixepoch('subsec') * 1000) AS INTEGER) - ({seconds}) * 1000)"),
        }
    }

    fn bytes(&self, count: usize) -> String {
        let hex = "01".repeat(count);
        if self.0 == Kind::Postgres { format!("'\\x{hex}'::bytea") } else { format!("x'{hex}'") }
    }

    fn jobs(&self) -> String {
        let (made, hash, body) = (self.ago(&format!("{JOBS} - n")), self.bytes(32), self.bytes(80));
        // Every other open job is due; none is leased.
        let wake = self.ago("CASE WHEN (n / 200) % 2 = 0 THEN 100 + n % 97 ELSE -3600 - n % 97 END");
        let expiry = self.ago("-86400 - n");
        let sent = "n % 20 IN (3, 4, 5) OR n % 20 >= 10";
        let frozen = |value: &str| format!("CASE WHEN {sent} THEN {value} END");
        let (method, url, kind) = (frozen("'POST'"), frozen("'https://a.example/'"), frozen("'application/json'"));
        let (id, print, body) = (frozen("'f-' || n"), frozen("'0123456789abcdef'"), frozen(&body));
        let sent_at = frozen(&made);
        let one = frozen("1");
        format!(
            "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, cost, \
                 priority, expires_at, payload, state, wake_at, attempts, last_attempt, maybe_charged, fence, \
                 first_sent_at, first_sent_number, frozen_method, frozen_url, frozen_key, frozen_content_type, \
                 frozen_body, frozen_fingerprint, frozen_units, frozen_decimals, created_at, updated_at) \
             WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {JOBS}) \
             SELECT 'f-' || n, 'lane-' || ((n / 20) % {LANES}), 'f-' || n, n < 0, {hash}, 100, 'EUR', 'acct_' || (n % 500), \
                 1, 0, CASE WHEN n % 40 = 0 THEN {expiry} END, '{{}}', {STATE}, {wake}, \
                 CASE WHEN {sent} THEN 1 ELSE 0 END, CASE WHEN {sent} THEN 1 ELSE 0 END, n % 20 = 3, 1, {sent_at}, \
                 {one}, {method}, {url}, {id}, {kind}, {body}, {print}, {one}, {one}, {made}, {made} \
             FROM numbers"
        )
    }

    /// References are unique per provider only.
    fn namesakes(&self) -> String {
        let (made, hash) = (self.ago("n"), self.bytes(32));
        format!(
            "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, cost, priority, \
                 state, wake_at, fence, provider_reference, created_at, updated_at) \
             WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {NAMESAKES}) \
             SELECT 'n-' || n, 'other-' || n, 'n-' || n, n < 0, {hash}, 100, 'EUR', 1, 0, 'succeeded', {made}, 1, \
                 'charge-work-sent-0', {made}, {made} \
             FROM numbers"
        )
    }

    fn attempts(&self) -> String {
        let _ = self;
        "INSERT INTO attempts (job_id, number, provider, began_at, ended_at, outcome, counted) \
         SELECT id, 1, provider, updated_at, CASE WHEN state <> 'sending' THEN updated_at END, \
             CASE state WHEN 'sending' THEN NULL WHEN 'unknown' THEN 'unknown' WHEN 'declined' THEN 'declined' \
                 ELSE 'accepted' END, \
             CASE WHEN state <> 'sending' THEN last_attempt = 1 END \
         FROM jobs WHERE last_attempt = 1"
            .to_owned()
    }

    /// No event has its place yet.
    fn events(&self) -> String {
        let _ = self;
        "INSERT INTO events (job_id, n, provider, state, attempts, at) \
         SELECT id, 1, provider, state, attempts, updated_at FROM jobs \
         WHERE state NOT IN ('waiting', 'sending', 'unknown')"
            .to_owned()
    }

    fn audited(&self) -> String {
        format!(
            "INSERT INTO job_audit (at, job_id, who, old_state, new_state, cleared_maybe_charged) \
             SELECT {}, id, 'alice', 'review', state, maybe_charged FROM jobs WHERE state = 'succeeded'",
            self.ago("60")
        )
    }

    /// Fine and coarse samples of six lanes. Those of two lanes are fewer than a statement may read, and all are more.
    fn history(&self) -> String {
        let at = self.ago("step_s * n");
        format!(
            "INSERT INTO history_samples (provider, step_s, at, started, finished, throttled) \
             WITH RECURSIVE numbers (n) AS (SELECT 10 UNION ALL SELECT n + 1 FROM numbers WHERE n < 600), \
                 steps (step_s) AS (SELECT 10 UNION ALL SELECT 300), \
                 lanes (lane) AS (SELECT 0 UNION ALL SELECT lane + 1 FROM lanes WHERE lane < 5) \
             SELECT 'lane-' || lane, step_s, {at}, 1, 1, 0 FROM numbers CROSS JOIN steps CROSS JOIN lanes"
        )
    }

    fn rejected(&self) -> String {
        format!(
            "INSERT INTO rejected_messages (at, lane, job_id, reason, detail, body_sha256, body_bytes) \
             SELECT created_at, provider, id, 'schema', 'no amount', {}, 10 FROM jobs WHERE state = 'succeeded'",
            self.bytes(32)
        )
    }
}
