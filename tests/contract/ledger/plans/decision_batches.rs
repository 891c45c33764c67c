//! Decision batches on a large ledger: the check of a set, its start, turns, lists, and the deletion of old ones.

use sluicegate::domain::job::JobId;
use sluicegate::domain::job_filter::JobFilter;
use sluicegate::ledger::decision_batches::{
    BatchDecision, BatchMember, BatchRate, BatchStart, NewBatch, OutcomeFilter, TurnAt, TurnResult,
};
use sluicegate::ledger::operator::{Actor, ResolutionRefusal};

use super::super::*;
use super::Explained;
use super::work::{Working, lane};

/// Duties that must reach a large table by an index.
pub const ON_THE_WAY: [&str; 4] =
    ["a set is selected", "a set is checked", "a batch begins", "a payment of a batch is decided"];

impl<E: Explained> Working<'_, E> {
    pub async fn decision_batches(&mut self, round: u32) {
        let ledger = self.fixture.database.clone();
        let filter = JobFilter { provider: Some(name(&lane(round))), ..JobFilter::of_state("dead") };
        let selected = ledger.selected_jobs(&filter).await.unwrap().unwrap();
        self.did("a set is selected").await;
        let ids: Vec<JobId> = selected.into_iter().take(20).collect();
        ledger.check_jobs(BatchDecision::Succeeded, &ids).await.unwrap();
        let checked = ledger.check_jobs(BatchDecision::Discard, &ids).await.unwrap();
        self.did("a set is checked").await;
        let members: Vec<BatchMember> =
            checked.into_iter().filter(|job| job.refusal.is_none()).map(|job| job.member).collect();
        assert!(members.len() > 5, "{members:?}");
        let by = Actor { os_user: "alice@desk".to_owned(), program: None, reason: Some("asked".to_owned()) };
        let rate = BatchRate::parse("1000/1s").unwrap();
        let id = format!("{:032x}", u32::from(self.run.as_bytes()[0]) * 1_000 + round);
        let batch = NewBatch { id: id.clone(), decision: BatchDecision::Discard, members, sums: Vec::new(), rate, by };
        assert_eq!(ledger.begin_batch(&batch).await.unwrap(), BatchStart::Started);
        self.did("a batch begins").await;
        let leased = ledger.lease_batches("worker-a").await.unwrap();
        let leased = leased.into_iter().find(|leased| leased.id == id).unwrap();
        self.did("a batch is leased").await;
        let turns = ledger.next_turns(&id, 3).await.unwrap();
        let at = |turn| TurnAt { batch: &leased, turn, worker: "worker-a" };
        let applied = ledger.apply_turn(&at(&turns[0]), turns[0].member.seen_fence).await.unwrap();
        assert_eq!(applied, TurnResult::Applied);
        let refused = ledger.refuse_turn(&at(&turns[1]), &ResolutionRefusal::Changed).await.unwrap();
        assert_eq!(refused, TurnResult::Refused("changed"));
        self.did("a payment of a batch is decided").await;
        ledger.batch(&id).await.unwrap().unwrap();
        assert!(!ledger.list_batches(None, 10).await.unwrap().batches.is_empty());
        for outcome in [None, Some(OutcomeFilter::Pending), Some(OutcomeFilter::Refused), Some(OutcomeFilter::Applied)]
        {
            assert!(!ledger.batch_jobs(&id, outcome, 0, 10).await.unwrap().jobs.is_empty());
        }
        assert!(ledger.stop_batch(&id, "alice@desk").await.unwrap());
        ledger.forget_batches(60 * SECOND, 10).await.unwrap();
        self.did("batches are shown and forgotten").await;
    }
}
