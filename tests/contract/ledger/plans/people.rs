//! The work of operators on a ledger: they list payments, decide about them and erase accounts.

use sluicegate::domain::job_filter::JobFilter;
use sluicegate::ledger::operator::{Actor, DatabaseTime, JobResolution};

use super::super::*;
use super::Explained;
use super::work::{CROWD, Working, account, lane};

impl<E: Explained> Working<'_, E> {
    /// A provider with few jobs among all the others: queries about it read no other provider's jobs.
    async fn a_small_provider(&mut self) {
        let operator = self.fixture.database.clone();
        let small = name("small");
        for number in 0..3 {
            let key = (number == 1).then(|| Identifier::new(format!("{}-key", self.run)).unwrap());
            let job = Job { provider: small.clone(), idempotency_key: key, ..self.job("zz", number) };
            self.take_all(&[job]).await;
        }
        let of_provider = JobFilter { provider: Some(small.clone()), ..JobFilter::default() };
        for _ in 0..8 {
            let first = operator.list_jobs(&of_provider, None, 2).await.unwrap().jobs;
            let last = Identifier::new(first[1].id.clone()).unwrap();
            assert_eq!(operator.list_jobs(&of_provider, Some(&last), 2).await.unwrap().jobs.len(), 1);
            self.did("a provider's jobs are listed").await;
            let [from, to] = [-60_000, 60_000].map(|ms| DatabaseTime(first[0].created_at.0 + ms));
            assert_eq!(operator.arrivals(&small, from, to, 100).await.unwrap().len(), 3);
            // Nothing arrived that early, although each page is full.
            assert_eq!(operator.arrivals(&name("lane-1"), DatabaseTime(1), DatabaseTime(2), 100).await.unwrap(), []);
            self.did("a provider's arrivals are read").await;
        }
    }

    pub async fn people(&mut self) {
        self.a_small_provider().await;
        let operator = self.fixture.database.clone();
        let by = Actor { os_user: "alice@desk".to_owned(), program: None, reason: Some("asked".to_owned()) };
        for round in 0..8 {
            let finished = self.job("sent", round * CROWD).id;
            operator.job_details(&finished).await.unwrap().unwrap();
            self.did("a job's history is read").await;
            operator.queue_position(&finished, &[name(&lane(round))]).await.unwrap();
            self.did("a job's queue position is read").await;
            let waiting = self.job("parked", round * CROWD).id;
            operator.resolve_job(&waiting, &JobResolution::Cancel, None, &by).await.unwrap();
            self.did("a person decides").await;
            let of_account = JobFilter { account: Some(account(7)), ..JobFilter::default() };
            operator.list_jobs(&of_account, None, 20).await.unwrap();
            self.did("an account's jobs are listed").await;
            operator.list_jobs(&JobFilter::default(), None, 20).await.unwrap();
            self.did("jobs are listed").await;
            operator.list_jobs(&JobFilter::of_state("review"), None, 20).await.unwrap();
            self.did("jobs of a state are listed").await;
            self.searches(round).await;
            self.decision_batches(round).await;
            operator.erasure_counts(&account(round)).await.unwrap();
            self.did("an erasure is counted").await;
            operator.erase_account(&account(round + 50), 20, &by).await.unwrap();
            self.did("an account is erased").await;
        }
    }
}
