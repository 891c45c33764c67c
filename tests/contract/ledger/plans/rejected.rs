//! The work of operators on a large table of rejected messages, and the comparison of published ids with the ledger.

use sluicegate::ledger::operator::Actor;
use sluicegate::ledger::rejected::{ContentOfId, RejectedDecision, RejectedFilter};

use super::super::*;
use super::Explained;
use super::work::{CROWD, Working, lane};

/// Duties that must reach a large table by an index.
pub const ON_THE_WAY: [&str; 4] = [
    "rejected messages are listed",
    "a rejected message is read",
    "a rejected message is decided",
    "published ids are compared",
];

impl<E: Explained> Working<'_, E> {
    pub async fn rejected(&mut self, round: u32) {
        let ledger = self.fixture.database.clone();
        let (acme, reason) = (Some(name(&lane(round))), Some("schema".to_owned()));
        for (provider, reason) in [(None, None), (acme.clone(), None), (None, reason.clone()), (acme, reason)] {
            let filter = RejectedFilter { provider, reason, decided: false };
            assert!(!ledger.list_rejected(&filter, None, 10).await.unwrap().messages.is_empty());
            self.did("rejected messages are listed").await;
        }
        let alice = Actor { os_user: "alice@desk".to_owned(), program: None, reason: None };
        let newest = ledger.list_rejected(&RejectedFilter::default(), None, 1).await.unwrap().messages[0].id;
        ledger.rejected_message(newest).await.unwrap().unwrap();
        self.did("a rejected message is read").await;
        ledger.stored_rejected(newest).await.unwrap();
        self.did("a rejected message is read").await;
        let events = ledger.unannounced_rejected(10, &["other"]).await.unwrap();
        ledger.mark_announced(&events.iter().map(|event| event.id).collect::<Vec<_>>()).await.unwrap();
        self.did("rejected messages are announced").await;
        assert!(ledger.open_rejected(100_000, 65_536).await.unwrap().messages > 0);
        self.did("open rejected messages are measured").await;
        assert_eq!(ledger.decide_rejected(newest, RejectedDecision::Discarded, &alice).await.unwrap(), None);
        self.did("a rejected message is decided").await;
        let decided = RejectedFilter { decided: true, ..RejectedFilter::default() };
        assert!(!ledger.list_rejected(&decided, None, 10).await.unwrap().messages.is_empty());
        self.did("decided messages are listed").await;
        ledger.count_rejected().await.unwrap();
        self.did("rejected messages are counted").await;
        let published: Vec<ContentOfId> =
            (0..CROWD).map(|n| ContentOfId { id: self.job("in", n).id, hash: ContentHash([1; 32]) }).collect();
        ledger.find_conflicts(&published).await.unwrap();
        self.did("published ids are compared").await;
    }
}
