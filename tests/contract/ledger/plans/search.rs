//! Searches for jobs by each kind of filter, and the indexes that they must use.

use sluicegate::domain::job_filter::{Range, ReasonFilter};
use sluicegate::ledger::operator::JobFilter;

use super::super::*;
use super::Explained;
use super::work::{Working, account, lane};

/// Lists of jobs, with an index of each.
pub const LISTS: [(&str, &str); 8] = [
    ("jobs are listed", "jobs_by_time"),
    ("a provider's jobs are listed", "jobs_by_state_and_time"),
    ("jobs of a state are listed", "jobs_by_state_and_time"),
    ("an account's jobs are listed", "jobs_by_account_and_time"),
    ("jobs are searched", "jobs_by_time"),
    ("jobs are searched", "jobs_by_reference"),
    ("jobs are totalled", "jobs_by_time"),
    ("jobs are totalled", "jobs_by_state_and_time"),
];

impl<E: Explained> Working<'_, E> {
    /// Two pages and the totals of each filter.
    pub async fn searches(&mut self, round: u32) {
        let operator = self.fixture.database.clone();
        for filter in searches(round) {
            let page = operator.list_jobs(&filter, None, 20).await.unwrap();
            let after = page.next.map(|id| Identifier::new(id).unwrap());
            operator.list_jobs(&filter, after.as_ref(), 20).await.unwrap();
            self.did("jobs are searched").await;
            operator.job_totals(&filter).await.unwrap();
            self.did("jobs are totalled").await;
        }
    }
}

/// Filters of each source, with conditions that it does not ensure.
fn searches(round: u32) -> [JobFilter; 7] {
    let euros = JobFilter {
        currency: Some("EUR".to_owned()),
        amounts: Range { from: Some(1), to: Some(50) },
        created: Range { from: Some(1), to: None },
        ..JobFilter::default()
    };
    let ended = Some(ReasonFilter::Ended("rare".to_owned()));
    let search = |text: String| JobFilter { search: Some(text), ..JobFilter::default() };
    [
        euros.clone(),
        JobFilter { provider: Some(name(&lane(round))), reason: ended.clone(), ..euros.clone() },
        JobFilter { states: vec!["dead", "review"], finished: Range { from: Some(1), to: None }, ..euros.clone() },
        JobFilter { account: Some(account(7)), ..euros },
        JobFilter { reason: ended, ..JobFilter::default() },
        search(format!("f-{round}77")),
        search("f-".to_owned()),
    ]
}
