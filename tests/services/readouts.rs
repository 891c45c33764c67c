//! The service tests' stand as a source for the readout oracle, read by external programs: psql, pika, redis.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::readout_oracle::{Deployment, Published, WorkerTruth, is_redis_kept};
use crate::stand::Stand;

/// A stand whose load was published before.
pub struct Watched<'a> {
    pub stand: &'a Stand,
    pub published: BTreeMap<String, Published>,
}

impl Watched<'_> {
    /// Rows of two or three columns.
    fn rows(&self, sql: &str) -> Option<Vec<Vec<String>>> {
        let output = self.stand.psql().args(["-At", "-F", " ", "-c", sql]).output().ok()?;
        let text = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
        Some(text.lines().map(|line| line.split(' ').map(str::to_owned).collect()).collect())
    }
}

impl Deployment for Watched<'_> {
    fn workers(&self) -> Vec<WorkerTruth> {
        let truth = |worker: usize| WorkerTruth {
            worker,
            pid: self.stand.worker_pid(worker),
            ops_port: self.stand.ops_port(worker),
            healthy: true,
        };
        self.stand.running().into_iter().map(truth).collect()
    }

    fn ledger(&self) -> Option<BTreeMap<String, BTreeMap<String, u64>>> {
        let mut states: BTreeMap<String, BTreeMap<String, u64>> = BTreeMap::new();
        for row in self.rows("SELECT provider, state, count(*) FROM jobs GROUP BY provider, state")? {
            states.entry(row[0].clone()).or_default().insert(row[1].clone(), row[2].parse().ok()?);
        }
        Some(states)
    }

    fn ready(&self) -> Option<BTreeMap<String, u64>> {
        let queue = |name: &&str| format!("payments.{name}");
        let names: Vec<&str> = self.stand.providers.keys().copied().collect();
        let ready = self.stand.ready(&names.iter().map(queue).collect::<Vec<_>>());
        Some(names.into_iter().map(str::to_owned).zip(ready).collect())
    }

    fn limiter_kept(&self) -> Option<bool> {
        is_redis_kept(&self.stand.redis.url())
    }

    fn published(&self) -> BTreeMap<String, Published> {
        self.published.clone()
    }

    fn received(&self, provider: &str, from: Instant, to: Instant) -> u64 {
        let fake = &self.stand.providers[provider];
        // The provider's clock starts at another instant.
        let (now, now_us) = (Instant::now(), fake.now_us());
        let micros = |at: Instant| now_us.saturating_sub(u64::try_from((now - at).as_micros()).unwrap());
        let (from_us, to_us) = (micros(from), micros(to));
        let arrivals = fake.arrivals_us();
        let received = arrivals.partition_point(|at| *at < to_us) - arrivals.partition_point(|at| *at < from_us);
        u64::try_from(received).unwrap()
    }

    /// Its report has no times, so the last ones are known only if there is none at all.
    fn throttled(&self, provider: &str, within: Option<Duration>) -> Option<u64> {
        let ever = self.stand.providers[provider].report().refused_429;
        (ever == 0 || within.is_none()).then_some(ever)
    }

    fn state_of(&self, job: &str) -> Option<String> {
        let rows = self.rows(&format!("SELECT state FROM jobs WHERE id = '{job}'"))?;
        rows.first().map(|row| row[0].clone())
    }
}
