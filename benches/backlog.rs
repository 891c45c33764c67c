//! `cargo bench -p sluicegate-bench --bench backlog -- postgres://…`: the time of a dispatcher's claim from a large backlog, in an empty
//! database.
//!
//! One lane with 10,000 flows, of them 5,000 blocked, and 1,000,000 waiting jobs. Each claim takes 100 jobs, 4 of a
//! flow.

use std::time::{Duration, Instant};

use sluicegate::domain::flow::FlowClass;
use sluicegate::domain::provider::{JobOrder, ProviderName};
use sluicegate::ledger::backlog::{BacklogClaim, BacklogClaimRequest};
use sluicegate::ledger::database::Database;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

const FLOWS: u32 = 10_000;
const JOBS: u32 = 1_000_000;
const CLAIMS: usize = 20;
/// Claims before the first one that counts: connections are opened, and pages read.
const WARM_UP: usize = 5;

fn filling() -> [String; 3] {
    [
        format!(
            "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, cost, \
                 priority, payload, state, wake_at, backlog, fence, created_at, updated_at) \
             SELECT 'b-' || n, 'acme', 'b-' || n, false, decode(repeat('01', 32), 'hex'), 1299, 'EUR', \
                 'acct_' || (n % {FLOWS}), 1, 0, '{{\"token\": \"tok_1\"}}', 'waiting', now(), true, 0, now(), now() \
             FROM generate_series(1, {JOBS}) AS n"
        ),
        format!(
            "INSERT INTO flows (provider, class, account, waiting, blocked_until, blocked_reason, blocked_limit) \
             SELECT 'acme', 10, 'acct_' || n, {JOBS} / {FLOWS}, CASE WHEN n % 2 = 0 THEN now() + interval '1 hour' END, \
                 CASE WHEN n % 2 = 0 THEN 'limit' END, CASE WHEN n % 2 = 0 THEN 'per-second' END \
             FROM generate_series(0, {FLOWS} - 1) AS n"
        ),
        "VACUUM ANALYZE".to_owned(),
    ]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Cargo adds `--bench`.
    let Some(url) = std::env::args().skip(1).find(|argument| argument != "--bench") else {
        println!(
            "name an empty PostgreSQL database: cargo bench -p sluicegate-bench --bench backlog -- postgres://user@host/database"
        );
        return Ok(());
    };
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(measure(&url))
}

async fn measure(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    let database = Database::open(url, 4)?;
    database.migrate().await?;
    let mut connection = PgConnection::connect(url).await?;
    for text in filling() {
        sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut connection).await?;
    }
    let lane = ProviderName::new("acme")?;
    let request = BacklogClaimRequest {
        lane: &lane,
        owner: "bench",
        lease: Duration::from_secs(60),
        at_most: 100,
        per_flow: 4,
        flow_max: 8,
        except: &[],
        class_max: FlowClass::LAST,
        order: JobOrder::None,
    };
    let mut times = Vec::new();
    for _ in 0..WARM_UP + CLAIMS {
        let began = Instant::now();
        match database.backlog().claim_backlog(&request).await? {
            BacklogClaim::Claimed { jobs, .. } if jobs.len() == 100 => times.push(began.elapsed()),
            other => return Err(format!("not 100 jobs: {other:?}").into()),
        }
    }
    let mut counted = times.split_off(WARM_UP);
    counted.sort();
    let of = |at: usize| counted.get(at).copied().unwrap_or_default().as_secs_f64() * 1e3;
    println!(
        "claim of 100 jobs: median {:.1} ms, fastest {:.1} ms, slowest {:.1} ms",
        of(CLAIMS / 2),
        of(0),
        of(CLAIMS - 1)
    );
    Ok(())
}
