//! The order of the ledger's backlog, held against the model that the simulation uses.

use sluicegate::domain::fair_order::{FairOrder, FairReturn, WaitingJob};

use super::order::ended;
use super::races::Random;
use super::*;

on_every_database!(fair_order_is_that_of_the_ledger, passed_over_flows_go_before_new_ones);

/// Accounts and their weights; the first two have no row.
const ACCOUNTS: [(&str, u32); 4] = [("", 1), ("a", 1), ("b", 2), ("d", 7)];
/// Longer than the test takes.
const BLOCKED: Duration = Duration::from_secs(3_600);

/// The ledger and the model, told the same.
struct Pair<'a> {
    fixture: &'a Fixture,
    model: FairOrder<Identifier, u64>,
    /// The jobs as they were recorded, by their number.
    jobs: Vec<Job>,
    claimed: Vec<BacklogJob>,
    order: JobOrder,
    random: Random,
}

impl Pair<'_> {
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.random.below(from.len() as u64) as usize]
    }

    fn waiting(&self, number: u64) -> WaitingJob<u64> {
        let job = &self.jobs[number as usize];
        WaitingJob { seq: number, cost: u32::from(job.cost), job: number }
    }

    fn weight_of(job: &Job) -> u32 {
        let account = job.account.as_ref().map_or("", Identifier::as_str);
        ACCOUNTS.iter().find(|(name, _)| *name == account).unwrap().1
    }

    async fn record(&mut self) {
        let number = self.jobs.len() as u64;
        let (account, _) = self.pick(&ACCOUNTS);
        let account = (!account.is_empty()).then(|| Identifier::new(account).unwrap());
        let (priority, cost) = (self.pick(&[0, 0, 5]), self.pick(&[1, 1, 1, 4]));
        let job = Job { account, priority, cost, ..job(&format!("p{number:04}")) };
        self.fixture.record(&job).await;
        self.jobs.push(job);
        let job = &self.jobs[number as usize];
        self.model.add(FlowKey::of(job), Self::weight_of(job), self.waiting(number));
    }

    async fn claim(&mut self) {
        // No fewer than there are flows. Else the database chooses among those with the same tag;
        // `passed_over_flows_go_before_new_ones` has such claims.
        let (at_most, quantum) = (self.pick(&[8, 9, 13, 20]), self.pick(&[1, 2, 4]));
        let (flow_max, class_max) =
            (self.pick(&[2, 8, 1_000]), self.pick(&[FlowClass::LAST, FlowClass::of_priority(5)]));
        let except = FlowKey { class: FlowClass::LAST, account: Some(Identifier::new("d").unwrap()) };
        let except: Vec<FlowKey> = (0..self.random.below(2)).map(|_| except.clone()).collect();
        let cost_below = self.pick(&[None, None, Some(4), Some(1)]);
        let claim = FairClaim { at_most, quantum, flow_max, except, class_max, cost_below, order: self.order };
        let claimed = self.fixture.dispatch_with(&claim).await;
        let expected = self.model.claim(Duration::ZERO, &claim);
        let expected: Vec<&str> = expected.iter().map(|(_, job)| self.jobs[job.job as usize].id.as_str()).collect();
        assert_eq!(ids(&claimed), expected, "{claim:?}");
        self.claimed.extend(claimed);
    }

    fn take_claimed(&mut self) -> Option<BacklogJob> {
        let claimed = self.claimed.len() as u64;
        (claimed > 0).then(|| self.claimed.swap_remove(self.random.below(claimed) as usize))
    }

    async fn finish(&mut self) {
        let Some(claimed) = self.take_claimed() else { return };
        self.fixture.becomes(&claimed.claimed.lease, &ended(FinalState::Declined)).await;
        self.model.end(claimed.job.account.as_ref());
    }

    async fn give_back(&mut self) {
        let Some(claimed) = self.take_claimed() else { return };
        let is_blocked = self.random.below(4) == 0;
        let how = BacklogReturn { block: is_blocked.then(|| block(BLOCKED, "each")), ..RETURNED };
        self.fixture.give_back(&claimed, &how).await;
        let number = self.jobs.iter().position(|job| job.id == claimed.job.id).unwrap() as u64;
        let how = FairReturn { was_claimed: true, blocked_until: is_blocked.then_some(BLOCKED) };
        let job = &self.jobs[number as usize];
        self.model.put_back(FlowKey::of(job), Self::weight_of(job), self.waiting(number), how);
    }

    async fn end_blocks(&mut self) {
        self.fixture.database.unblock_flows(&name("stripe")).await.unwrap();
        self.model.wake(BLOCKED);
    }
}

/// Random events: the same jobs in the same order.
async fn fair_order_is_that_of_the_ledger(kind: Kind) {
    for (seed, order) in
        [(0x0DD5_EED1, JobOrder::None), (0x0DD5_EED2, JobOrder::None), (0x0DD5_EED3, JobOrder::Account)]
    {
        let fixture = Fixture::migrated(kind).await;
        fixture.with_weights(&ACCOUNTS[2..]).await;
        let mut pair = Pair {
            fixture: &fixture,
            model: FairOrder::default(),
            jobs: Vec::new(),
            claimed: Vec::new(),
            order,
            random: Random(seed),
        };
        for _ in 0..300 {
            match pair.random.below(18) {
                0..10 => pair.record().await,
                10..12 => pair.claim().await,
                12..15 => pair.give_back().await,
                15..17 => pair.finish().await,
                _ => pair.end_blocks().await,
            }
        }
        pair.end_blocks().await;
        while !pair.model.is_empty() {
            pair.claim().await;
            pair.finish().await;
        }
    }
}

/// Claims of one job, while new accounts keep coming with the same tag: those that were passed over are next, whichever
/// of the tied flows the database chooses.
async fn passed_over_flows_go_before_new_ones(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    let record = async |account: String| {
        let job = Job { account: Some(Identifier::new(&account).unwrap()), ..job(&account) };
        fixture.record(&job).await;
    };
    let first = ["a", "m", "z"];
    for account in first {
        record(account.to_owned()).await;
    }
    let mut served = Vec::new();
    for number in 0..12 {
        for account in [format!("b{}", 40 - number), format!("y{number:02}")] {
            record(account).await;
        }
        served.extend(ids(&fixture.dispatch(1, 1).await).into_iter().map(str::to_owned));
    }
    let place = |account: &str| served.iter().position(|id| id == account);
    // The two that came before the first claim may be served with them.
    assert!(first.iter().all(|account| place(account).is_some_and(|place| place < 5)), "{served:?}");
}
