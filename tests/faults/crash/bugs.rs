//! Seeded bugs: for each a run that makes it show, and the judge that has to notice; the same run without it finds nothing.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Duration;

use futures_util::future::{FutureExt as _, LocalBoxFuture};
use futures_util::{StreamExt as _, stream};
use serde_json::json;
use sluicegate::provider::simulated::{FakeOptions, OnLimit};

use super::cell::{Cell, Kind, PATIENCE, Setup, Verdict, Worker, until};
use super::engines::Engines;
use super::trap::Trap;
use crate::support::rabbitmq::RabbitNode;
use crate::support::redis::Redis;

/// Runs under way at once.
const AT_ONCE: usize = 4;
/// How long nothing may happen before a run that has lost something is over: longer than any wait of a job here, on a
/// machine that is slow, too.
const STILL: Duration = Duration::from_secs(20);
/// The delay queue for messages of a newer format, by its step.
const NEWER: &str = "delay.60000";

/// What arms a worker with the bug, or with nothing.
type Armed = &'static [(&'static str, &'static str)];
type Run = fn(Armed) -> LocalBoxFuture<'static, Verdict>;

struct Seeded {
    bug: &'static str,
    armed: Armed,
    /// The judge that is meant to notice.
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

const SEEDED: [Seeded; 7] = [
    seeded!("ack_before_commit", "lost", lost, killed_with_unacked_messages),
    seeded!("new_key_per_attempt", "double", double, killed_before_the_response),
    seeded!("slot_freed_at_grant", "breach", breach, shortened_transit),
    seeded!("no_cold_start", "breach", breach, flushed_store),
    seeded!("permits_counted_as_one", "breach", breach, saturated_gate),
    seeded!("delay_not_mandatory", "lost", lost, missing_delay_queue),
    seeded!("ack_without_confirm", "lost", lost, full_delay_queue),
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
        assert_eq!(*without, Verdict::default(), "the run for {} fails without it:\n{table}", seeded.bug);
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
    doomed.dies().await;
    cell.leases_run_out().await;
    let heir = cell.worker(armed).await;
    heir.says("lane open").await;
    if armed.is_empty() {
        cell.settled(&heir).await;
    } else {
        cell.settled_or_still(STILL).await;
    }
    cell.verdict().await
}

/// A provider that counts and never refuses, in front of a lane that is always full.
fn crowded() -> Setup {
    let fake =
        FakeOptions { limits: vec!["10/1s".parse().unwrap()], on_limit: OnLimit::Count, ..FakeOptions::default() };
    Setup { fake, row: "leak_per_second = 1000.0", ..Setup::of(Kind::Deduplicates) }
}

async fn saturated_gate(armed: Armed) -> Verdict {
    let mut cell = Cell::open("crowd", crowded()).await;
    cell.publish(40).await;
    let worker = cell.worker(armed).await;
    cell.settled(&worker).await;
    cell.verdict().await
}

async fn shortened_transit(armed: Armed) -> Verdict {
    let trap = Trap::default();
    trap.delay(Duration::from_millis(1_000));
    let mut cell = Cell::open("way", Setup { before_provider: Some(trap.clone()), ..crowded() }).await;
    cell.publish(40).await;
    let worker = cell.worker(armed).await;
    until("the first have arrived", PATIENCE, &worker, async || cell.fake.report().requests > 0).await;
    trap.delay(Duration::ZERO);
    cell.settled(&worker).await;
    cell.verdict().await
}

async fn flushed_store(armed: Armed) -> Verdict {
    let redis = tokio::task::spawn_blocking(Redis::start).await.unwrap();
    let mut cell = Cell::open("flush", Setup { redis: Some(redis.url()), ..crowded() }).await;
    cell.publish(40).await;
    let worker = cell.worker(armed).await;
    // What a state was born at: lua/quota.lua.
    let born = || redis.command::<Vec<u8>>(&format!("HGET {0}:{{{0}}} m", cell.name))[24..31].to_vec();
    let mut before = Vec::new();
    // Three times: a machine that stalls over one flush lets its window pass, and nothing is left to breach.
    for requests in [10, 20, 30] {
        until("a window is full", PATIENCE, &worker, async || cell.fake.report().requests >= requests).await;
        before = born();
        redis.command::<()>("FLUSHALL");
    }
    cell.settled(&worker).await;
    assert_ne!(before, born(), "the state is the old one");
    cell.verdict().await
}

/// Messages of a newer format are parked before any ledger knows of them: nobody can bring them back if they are lost.
struct Newer {
    cell: Cell,
    published: u64,
}

impl Newer {
    async fn open(what: &str) -> Self {
        // What is broken here must not be shared.
        let setup = Setup::of(Kind::Deduplicates).apart(what);
        Self { cell: Cell::open(what, setup).await, published: 0 }
    }

    async fn publish(&mut self, messages: u64) {
        for _ in 0..messages {
            self.published += 1;
            self.cell.publish_body(&json!({ "v": 2, "id": format!("future-{}", self.published) }).to_string()).await;
        }
    }

    async fn parked(&self) -> u64 {
        u64::from(self.cell.broker.ready(&self.cell.queue(NEWER)).await.unwrap_or(0))
    }

    /// Waits until each message is acknowledged, or its copy was refused and is tried again.
    async fn dealt_with(&self, worker: &Worker) {
        until("all are dealt with", PATIENCE, worker, async || {
            let refused = worker.log().matches("backend unavailable, retrying what=\"delay a job\"").count();
            self.held().await <= refused
        })
        .await;
    }

    /// Messages of the lane that are not acknowledged; what `list_queues` counts is some seconds old.
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

    /// What the broker still has once nobody holds anything. One that was handed back as its copy arrived is there twice.
    async fn verdict(&self) -> Verdict {
        let broker = &self.cell.broker;
        let waiting = broker.drain(&self.cell.queue(&self.cell.name)).await;
        let parked = broker.drain(&self.cell.queue(NEWER)).await;
        let kept: BTreeSet<&str> = waiting.iter().chain(&parked).map(|body| body["id"].as_str().unwrap()).collect();
        Verdict { lost: self.published - kept.len() as u64, ..Verdict::default() }
    }
}

/// A worker that may not take long to leave.
const HASTY: (&str, &str) = ("WORKER__DRAIN_TIMEOUT_MS", "500");

async fn missing_delay_queue(armed: Armed) -> Verdict {
    let mut newer = Newer::open("gone").await;
    let worker = newer.cell.worker(&with(armed, &[HASTY])).await;
    worker.says("lane open").await;
    newer.cell.broker.delete_queue(&newer.cell.queue(NEWER)).await;
    newer.publish(3).await;
    until("all have been looked at", PATIENCE, &worker, async || worker.log().matches("intake: delivery").count() >= 3)
        .await;
    newer.dealt_with(&worker).await;
    worker.leaves().await;
    newer.verdict().await
}

async fn full_delay_queue(armed: Armed) -> Verdict {
    let mut newer = Newer::open("full").await;
    let worker = newer.cell.worker(&with(armed, &[HASTY])).await;
    worker.says("lane open").await;
    let pattern = format!("^{}$", newer.cell.queue(NEWER).replace('.', "\\."));
    let limit = tokio::task::spawn_blocking(move || {
        let policy = ["set_policy", "-p", Engines::VHOST, &pattern, &pattern, r#"{"max-length":1}"#];
        RabbitNode::shared().ctl(&policy);
    });
    limit.await.unwrap();
    newer.publish(2).await;
    until("it is full", PATIENCE, &worker, async || newer.parked().await >= 2).await;
    newer.publish(4).await;
    until("all have been looked at", PATIENCE, &worker, async || worker.log().matches("intake: delivery").count() >= 6)
        .await;
    newer.dealt_with(&worker).await;
    worker.leaves().await;
    newer.verdict().await
}
