//! Who is committed with whom, and when, on a database that only takes note.

use std::sync::Mutex;

use async_trait::async_trait;
use tokio::task::JoinSet;

use super::super::dialect::{ChainText, Dialect, Returning};
use super::super::engine::{Sql, Step, Value};
use super::*;

const MS: Duration = Duration::from_millis(1);

/// Notes how many were committed together, and how long after the beginning.
struct Noting {
    begun: Instant,
    groups: Mutex<Vec<(usize, Duration)>>,
}

impl Noting {
    fn note(&self, units: usize) {
        self.groups.lock().unwrap().push((units, self.begun.elapsed()));
    }
}

#[async_trait]
impl Engine for Noting {
    fn dialect(&self) -> Dialect {
        Dialect::Postgres
    }

    async fn query(&self, _: &Sql, _: Args) -> Result<Vec<Row>, LedgerError> {
        unreachable!("a chain is written")
    }

    async fn atomically(&self, _: Vec<Step>) -> Result<Option<Vec<Vec<Row>>>, LedgerError> {
        unreachable!("a chain is written")
    }

    async fn alone(&self, _: &Chain, _: &Args) -> Result<Option<Row>, LedgerError> {
        self.note(1);
        Ok(None)
    }

    async fn group(&self, _: &Chain, units: Vec<Args>) -> Result<Group, LedgerError> {
        self.note(units.len());
        Ok(Group::Committed(units.iter().map(|_| None).collect()))
    }
}

struct Rig {
    noting: Arc<Noting>,
    grouped: Grouped,
    writing: JoinSet<()>,
    came: i64,
}

impl Rig {
    fn new() -> Self {
        let text = ChainText {
            write: "UPDATE jobs SET fence = 1 {from}",
            kept: "id",
            then: &[],
            returning: Returning::Job("id"),
        };
        let noting = Arc::new(Noting { begun: Instant::now(), groups: Mutex::default() });
        let grouped = Grouped::new(Dialect::Postgres.chain(&text));
        Self { noting, grouped, writing: JoinSet::new(), came: 0 }
    }

    fn come(&mut self, number: usize, may_wait: Duration) {
        for _ in 0..number {
            self.came += 1;
            let (engine, grouped): (Arc<dyn Engine>, _) = (self.noting.clone(), self.grouped.clone());
            let args: Args = Arc::from([Value::from(format!("pay_{}", self.came).as_str())]);
            self.writing.spawn(async move { assert!(grouped.write(&engine, args, may_wait).await.unwrap().is_none()) });
        }
    }

    async fn ended(mut self) -> Vec<(usize, Duration)> {
        while let Some(ended) = self.writing.join_next().await {
            ended.unwrap();
        }
        self.noting.groups.lock().unwrap().clone()
    }
}

#[tokio::test(start_paused = true)]
async fn who_may_not_wait_goes_at_once_and_takes_along_whoever_is_there() {
    let mut rig = Rig::new();
    rig.come(1, Duration::ZERO);
    assert_eq!(rig.ended().await, [(1, Duration::ZERO)]);

    let mut rig = Rig::new();
    rig.come(3, 10 * MS);
    sleep(4 * MS).await;
    rig.come(1, Duration::ZERO);
    assert_eq!(rig.ended().await, [(4, 4 * MS)]);
}

#[tokio::test(start_paused = true)]
async fn those_who_may_wait_go_together_when_the_first_of_them_may_no_longer() {
    let mut rig = Rig::new();
    rig.come(1, 10 * MS);
    sleep(2 * MS).await;
    rig.come(1, 5 * MS);
    sleep(2 * MS).await;
    rig.come(2, 10 * MS);
    assert_eq!(rig.ended().await, [(4, 7 * MS)]);
}

#[tokio::test(start_paused = true)]
async fn a_full_group_waits_for_nobody() {
    let mut rig = Rig::new();
    rig.come(UNITS_MAX - 1, 10 * MS);
    sleep(3 * MS).await;
    rig.come(2, 10 * MS);
    assert_eq!(rig.ended().await, [(UNITS_MAX, 3 * MS), (1, 13 * MS)]);
}
