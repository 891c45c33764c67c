//! Seeded bugs: each has a run that exposes it and an oracle that must notice it. The same run without the bug finds
//! nothing.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use futures_util::future::{FutureExt as _, LocalBoxFuture};
use futures_util::{StreamExt as _, stream};
use serde_json::json;
use sluicegate::provider::simulated::{FakeOptions, OnLimit};

use super::cell::{Cell, Kind, PATIENCE, Setup, Worker, until};
use super::engines::Engines;
use super::trap::Trap;
use super::verdict::Verdict;
use crate::support::rabbitmq::RabbitNode;
use crate::support::redis::Redis;

/// Concurrent runs.
const AT_ONCE: usize = 4;
/// Idle time after which a run that has lost jobs is over. It is longer than any wait of a job here, even on a slow
/// machine.
const STILL: Duration = Duration::from_secs(20);
/// The delay queue for messages of a newer format, by its step.
const NEWER: &str = "delay.60000";

/// Environment variables that seed the bug; empty for the run without it.
type Armed = &'static [(&'static str, &'static str)];
type Run = fn(Armed) -> LocalBoxFuture<'static, Verdict>;

struct Seeded {
    bug: &'static str,
    armed: Armed,
    /// The oracle that must notice the bug.
    caught_by: &'static str,
    count: fn(&Verdict) -> u64,
    run: Run,
}

macro_rules! seeded {
    ($bug:literal, $caught_by:literal, $count:ident, $run:ident) => {
        Seeded {
            bug: $bug,
            armed: &[("BUG", $bug)],
            caught_by: $caught_by,
            count: |verdict| verdict.$count,
            run: |armed| $run(armed).boxed_local(),
        }
    };
}

const SEEDED: [Seeded; 10] = [
    seeded!("ack_before_commit", "lost", lost, killed_with_unacked_messages),
    seeded!("new_key_per_attempt", "double", double, killed_before_the_response),
    seeded!("slot_freed_at_grant", "breach", breach, shortened_transit),
    seeded!("no_cold_start", "breach", breach, flushed_store),
    seeded!("permits_counted_as_one", "breach", breach, saturated_gate),
    seeded!("delay_not_mandatory", "lost", lost, missing_delay_queue),
    seeded!("ack_without_confirm", "lost", lost, full_delay_queue),
    seeded!("flow_not_counted", "unsettled", unsettled, limited_lane),
    seeded!("tag_not_moved", "unfair", unfair, flood_of_accounts),
    seeded!("flow_not_woken", "unsettled", unsettled, account_at_its_limit),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seeded_bugs_are_caught_without_false_alarms() {
    let runs = SEEDED.iter().map(async |seeded| ((seeded.run)(seeded.armed).await, (seeded.run)(&[]).await));
    let seen: Vec<(Verdict, Verdict)> = stream::iter(runs).buffered(AT_ONCE).collect().await;
    let mut table = String::from("bug | caught by | seen | without it\n");
    for (Seeded { bug, caught_by, .. }, (with, without)) in SEEDED.iter().zip(&seen) {
        writeln!(table, "{bug} | {caught_by} | {with} | {without}").unwrap();
    }
    println!("{table}");
    for (seeded, (with, without)) in SEEDED.iter().zip(&seen) {
        assert!((seeded.count)(with) > 0, "{} is not caught:\n{table}", seeded.bug);
        assert_eq!(*without, Verdict::default(), "the run for {} fails without the bug:\n{table}", seeded.bug);
    }
}

fn with<'a>(armed: Armed, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    armed.iter().chain(more).copied().collect()
}

async fn killed_with_unacked_messages(armed: Armed) -> Verdict {
    killed_at("after_delivery:3", armed).await
}

async fn killed_before_the_response(armed: Armed) -> Verdict {
    killed_at("request_unanswered:3", armed).await
}

async fn killed_at(place: &str, armed: Armed) -> Verdict {
    let mut cell = Cell::open("killed", Setup::of(Kind::Deduplicates)).await;
    cell.publish(12).await;
    let doomed = cell.worker(&with(armed, &[("CRASH_AT", place)])).await;
    cell.crashes(&doomed, place).await;
    cell.leases_run_out().await;
    let heir = cell.worker(armed).await;
    heir.until_logged("lane open").await;
    until_over(&cell, &heir, armed).await;
    cell.verdict().await
}

/// A provider that counts breaches and never refuses, with a lane that always has jobs.
fn crowded() -> Setup {
    let fake =
        FakeOptions { limits: vec!["10/1s".parse().unwrap()], on_limit: OnLimit::Count, ..FakeOptions::default() };
    Setup { fake, row: "leak_per_second = 1000.0", ..Setup::of(Kind::Deduplicates) }
}

async fn saturated_gate(armed: Armed) -> Verdict {
    let mut cell = Cell::open("crowd", crowded()).await;
    cell.publish(40).await;
    let worker = cell.worker(armed).await;
    cell.until_finished(&worker).await;
    cell.verdict().await
}

/// A lane at its limit records its jobs in the backlog.
async fn limited_lane(armed: Armed) -> Verdict {
    let mut cell = Cell::open("limited", crowded()).await;
    // No sweeper compares flows with jobs meanwhile: it would repair what is missing.
    let taken = "INSERT INTO upkeep_turns (duty, taken_until) VALUES ('flows_compare', now() + interval '1 hour')";
    sqlx::query(taken).execute(&cell.ledger).await.unwrap();
    let worker = cell.worker(armed).await;
    worker.until_logged("lane open").await;
    cell.publish(40).await;
    until_over(&cell, &worker, armed).await;
    cell.verdict().await
}

/// Accounts take turns, though all payments of one were published before the next one's.
async fn flood_of_accounts(armed: Armed) -> Verdict {
    let fake = FakeOptions { limits: vec!["40/1s".parse().unwrap()], ..crowded().fake };
    let mut cell = Cell::open("flood", Setup { fake, ..crowded() }).await;
    cell.publish_of_accounts(8, 60).await;
    let worker = cell.worker(armed).await;
    cell.until_finished(&worker).await;
    cell.verdict().await
}

async fn account_at_its_limit(armed: Armed) -> Verdict {
    let row = "leak_per_second = 1000.0\n[[provider.limit]]\nname = \"each\"\nscope = \"account\"\n\
               max_requests = 2\nwindow_ms = 1000\n";
    let mut cell = Cell::open("own-limit", Setup { row, ..crowded() }).await;
    let worker = cell.worker(armed).await;
    worker.until_logged("lane open").await;
    cell.publish(10).await;
    until_over(&cell, &worker, armed).await;
    cell.verdict().await
}

/// Waits until all payments have finished; with a bug, at most until nothing has changed for long.
async fn until_over(cell: &Cell, worker: &Worker, armed: Armed) {
    match armed.is_empty() {
        true => cell.until_finished(worker).await,
        false => cell.settled_or_still(STILL).await,
    }
}

async fn shortened_transit(armed: Armed) -> Verdict {
    let trap = Trap::default();
    trap.delay(Duration::from_millis(1_000));
    let mut cell = Cell::open("way", Setup { before_provider: Some(trap.clone()), ..crowded() }).await;
    cell.publish(40).await;
    let worker = cell.worker(armed).await;
    until("the first requests have arrived", PATIENCE, &worker, async || cell.fake.report().requests > 0).await;
    trap.delay(Duration::ZERO);
    cell.until_finished(&worker).await;
    cell.verdict().await
}

async fn flushed_store(armed: Armed) -> Verdict {
    let redis = tokio::task::spawn_blocking(Redis::start).await.unwrap();
    let mut cell = Cell::open("flush", Setup { redis: Some(redis.url()), ..crowded() }).await;
    cell.publish(40).await;
    let worker = cell.worker(armed).await;
    // Start of the state's epoch: lua/quota.lua.
    let born = || redis.command::<Vec<u8>>(&format!("HGET {0}:{{{0}}} m", cell.name))[24..31].to_vec();
    let mut before = Vec::new();
    // Three flushes: on a slow machine the window can pass during one flush, so that this flush causes no breach.
    for requests in [10, 20, 30] {
        until("a window is full", PATIENCE, &worker, async || cell.fake.report().requests >= requests).await;
        before = born();
        redis.command::<()>("FLUSHALL");
    }
    cell.until_finished(&worker).await;
    assert_ne!(before, born(), "the limiter's state was not reset");
    cell.verdict().await
}

/// Messages of a newer format. They are delayed before any ledger row exists, so no sweeper can republish a lost one.
struct Newer {
    cell: Cell,
    published: u64,
}

impl Newer {
    async fn open(what: &str) -> Self {
        // These queues are broken on purpose, so other cells must not use them.
        let setup = Setup::of(Kind::Deduplicates).apart(what);
        Self { cell: Cell::open(what, setup).await, published: 0 }
    }

    async fn publish(&mut self, messages: u64) {
        for _ in 0..messages {
            self.published += 1;
            self.cell.publish_body(&json!({ "v": 2, "id": format!("future-{}", self.published) }).to_string()).await;
        }
    }

    async fn delayed(&self) -> u64 {
        u64::from(self.cell.broker.ready(&self.cell.queue(NEWER)).await.unwrap_or(0))
    }

    /// Waits until each message is acknowledged, or its copy was refused and is being retried.
    async fn dealt_with(&self, worker: &Worker) {
        until("all messages are acknowledged or retried", PATIENCE, worker, async || {
            let refused = worker.log().matches("backend unavailable, retrying what=\"delay a job\"").count();
            self.held().await <= refused
        })
        .await;
    }

    /// Unacknowledged messages of the lane, from the queue's process: the counts of `list_queues` are some seconds old.
    async fn held(&self) -> usize {
        let (vhost, queue) = (Engines::VHOST, self.cell.queue(&self.cell.name));
        let program = format!(
            "{{ok, Queue}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"{vhost}\">>, queue, <<\"{queue}\">>)), \
             {{ok, {{_, Held}}, _}} = ra:local_query(amqqueue:get_pid(Queue), fun rabbit_fifo:query_messages_total/1), \
             Held."
        );
        let held = tokio::task::spawn_blocking(move || RabbitNode::shared().ctl(&["eval", &program]));
        held.await.unwrap().trim().parse().unwrap()
    }

    /// Messages left in the broker once no consumer holds any. A message that was requeued while its copy arrived is
    /// there twice, so ids are counted.
    async fn verdict(&self) -> Verdict {
        let broker = &self.cell.broker;
        let waiting = broker.drain(&self.cell.queue(&self.cell.name)).await;
        let delayed = broker.drain(&self.cell.queue(NEWER)).await;
        let kept: BTreeSet<&str> = waiting.iter().chain(&delayed).map(|body| body["id"].as_str().unwrap()).collect();
        Verdict { lost: self.published - kept.len() as u64, ..Verdict::default() }
    }
}

/// A short drain timeout, so that the worker stops soon.
const HASTY: (&str, &str) = ("WORKER__DRAIN_TIMEOUT_MS", "500");

async fn missing_delay_queue(armed: Armed) -> Verdict {
    let mut newer = Newer::open("gone").await;
    let worker = newer.cell.worker(&with(armed, &[HASTY])).await;
    worker.until_logged("lane open").await;
    newer.cell.broker.delete_queue(&newer.cell.queue(NEWER)).await;
    newer.publish(3).await;
    until("the worker has received all messages", PATIENCE, &worker, async || {
        worker.log().matches("intake: delivery").count() >= 3
    })
    .await;
    newer.dealt_with(&worker).await;
    worker.leaves().await;
    newer.verdict().await
}

async fn full_delay_queue(armed: Armed) -> Verdict {
    let mut newer = Newer::open("full").await;
    let worker = newer.cell.worker(&with(armed, &[HASTY])).await;
    worker.until_logged("lane open").await;
    let pattern = format!("^{}$", newer.cell.queue(NEWER).replace('.', "\\."));
    let limit = tokio::task::spawn_blocking(move || {
        let policy = ["set_policy", "-p", Engines::VHOST, &pattern, &pattern, r#"{"max-length":1}"#];
        RabbitNode::shared().ctl(&policy);
    });
    limit.await.unwrap();
    newer.publish(2).await;
    until("the delay queue is full", PATIENCE, &worker, async || newer.delayed().await >= 2).await;
    newer.publish(4).await;
    until("the worker has received all messages", PATIENCE, &worker, async || {
        worker.log().matches("intake: delivery").count() >= 6
    })
    .await;
    newer.dealt_with(&worker).await;
    worker.leaves().await;
    newer.verdict().await
}
