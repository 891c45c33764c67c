//! `cargo bench -p sluicegate-bench --bench backlog -- postgres://…`: the time of a dispatcher's claim from a large
//! backlog, in an empty database.
//!
//! One lane with 10,000 flows, of them 5,000 blocked, and 1,000,000 waiting jobs (`--jobs N`). Each claim takes 100
//! jobs, 4 of a flow. `--filled` measures again in a database that an earlier run has filled, `--json` prints JSON.

use std::time::Instant;

use sluicegate::domain::fair_order::FairClaim;
use sluicegate::domain::job::FlowClass;
use sluicegate::domain::provider::{JobOrder, ProviderName};
use sluicegate::ledger::backlog::{BacklogClaim, BacklogClaimRequest};
use sluicegate::ledger::database::Database;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

const FLOWS: u32 = 10_000;
const JOBS: &str = "1000000";
const CLAIMS: usize = 20;
/// Claims before the first one that counts: connections are opened, and pages read.
const WARM_UP: usize = 5;

fn filling(jobs: &str) -> [String; 3] {
    [
        format!(
            "INSERT INTO jobs (id, provider, idempotency_key, key_given, content_hash, amount, currency, account, cost, \
                 priority, payload, state, wake_at, backlog, fence, created_at, updated_at) \
             SELECT 'b-' || n, 'acme', 'b-' || n, false, decode(repeat('01', 32), 'hex'), 1299, 'EUR', \
                 'acct_' || (n % {FLOWS}), 1, 0, '{{\"token\": \"tok_1\"}}', 'waiting', now(), true, 0, now(), now() \
             FROM generate_series(1, {jobs}) AS n"
        ),
        format!(
            "INSERT INTO flows (provider, class, account, waiting, blocked_until, blocked_reason, blocked_limit) \
             SELECT 'acme', 10, 'acct_' || n, {jobs} / {FLOWS}, CASE WHEN n % 2 = 0 THEN now() + interval '1 hour' END, \
                 CASE WHEN n % 2 = 0 THEN 'limit' END, CASE WHEN n % 2 = 0 THEN 'per-second' END \
             FROM generate_series(0, {FLOWS} - 1) AS n"
        ),
        "VACUUM ANALYZE".to_owned(),
    ]
}

struct Options {
    url: String,
    jobs: String,
    is_filled: bool,
    json: bool,
}

impl Options {
    /// `None`: no database is named.
    fn from_arguments() -> Option<Self> {
        // Cargo adds `--bench`.
        let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
        let has = |name: &str| arguments.iter().any(|argument| argument == name);
        let jobs = arguments
            .iter()
            .skip_while(|argument| *argument != "--jobs")
            .nth(1)
            .filter(|number| number.parse::<u32>().is_ok());
        Some(Self {
            url: arguments.iter().find(|argument| argument.contains("://"))?.clone(),
            jobs: jobs.map_or_else(|| JOBS.to_owned(), Clone::clone),
            is_filled: has("--filled"),
            json: has("--json"),
        })
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(options) = Options::from_arguments() else {
        println!("name an empty PostgreSQL database, as postgres://user@host/database");
        return Ok(());
    };
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(measure(&options))
}

async fn measure(options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    let database = Database::open(&options.url, 4)?;
    if !options.is_filled {
        database.migrate().await?;
        let mut connection = PgConnection::connect(&options.url).await?;
        for text in filling(&options.jobs) {
            sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut connection).await?;
        }
    }
    let lane = ProviderName::new("acme")?;
    let bounds = FairClaim {
        at_most: 100,
        quantum: 4,
        flow_max: 8,
        except: Vec::new(),
        class_max: FlowClass::LAST,
        cost_below: None,
        order: JobOrder::None,
    };
    let request = BacklogClaimRequest { lane: &lane, holder: "bench", bounds: &bounds };
    let mut times = Vec::new();
    for _ in 0..WARM_UP + CLAIMS {
        let began = Instant::now();
        match database.claim_backlog(&request).await? {
            BacklogClaim::Claimed { jobs, .. } if jobs.len() == 100 => times.push(began.elapsed()),
            other => return Err(format!("not 100 jobs: {other:?}").into()),
        }
    }
    let mut counted = times.split_off(WARM_UP);
    counted.sort();
    let of = |at: usize| counted.get(at).copied().unwrap_or_default().as_secs_f64() * 1e3;
    let (median, fastest, slowest) = (of(CLAIMS / 2), of(0), of(CLAIMS - 1));
    if options.json {
        println!(r#"{{"median_ms": {median:.3}, "fastest_ms": {fastest:.3}, "slowest_ms": {slowest:.3}}}"#);
    } else {
        println!("claim of 100 jobs: median {median:.1} ms, fastest {fastest:.1} ms, slowest {slowest:.1} ms");
    }
    Ok(())
}
