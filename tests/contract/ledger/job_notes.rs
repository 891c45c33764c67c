//! Notes on payments: a review is assigned, any payment is commented, and no note changes afterwards.

use sluicegate::ledger::job_notes::{Assignee, Comment, NewNote};
use sluicegate::ledger::operator::Actor;

use super::*;

on_every_database!(
    review_is_assigned_and_any_payment_commented,
    only_a_review_can_be_assigned,
    note_never_changes_and_names_its_author,
);

fn alice() -> Actor {
    Actor { os_user: "alice@desk".to_owned(), program: None, reason: None }
}

fn to(name: &str) -> NewNote {
    NewNote::Assigned(Some(Assignee::new(name).unwrap()))
}

fn comment(text: &str) -> NewNote {
    NewNote::Comment(Comment::new(text).unwrap())
}

impl Fixture {
    async fn note(&self, id: &str, note: &NewNote) -> Result<(), ResolutionRefusal> {
        settled(self.database.add_note(&Identifier::new(id).unwrap(), note, &alice()).await)
    }

    async fn in_review(&self, id: &str) {
        self.take(&job(id)).await;
        let review =
            format!("UPDATE jobs SET state = 'review', lease_owner = NULL, lease_until = NULL WHERE id = '{id}'");
        self.sql(&review).await.unwrap();
    }
}

async fn review_is_assigned_and_any_payment_commented(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.in_review("p1").await;
    fixture.take(&job("p2")).await;
    for note in [to("bob"), comment("asked them, ticket 4711"), to("carol")] {
        fixture.note("p1", &note).await.unwrap();
    }
    fixture.note("p2", &comment("ü".repeat(500).as_str())).await.unwrap();
    let id = Identifier::new("p1").unwrap();
    let details = fixture.database.job_details(&id).await.unwrap().unwrap();
    let notes: Vec<_> = details.notes.iter().map(|note| (note.kind.as_str(), note.text.as_deref().unwrap())).collect();
    assert_eq!(notes, [("assigned", "bob"), ("comment", "asked them, ticket 4711"), ("assigned", "carol")]);
    assert_eq!(details.assigned_to.as_deref(), Some("carol"));
    assert!(details.notes.iter().all(|note| note.os_user.as_deref() == Some("alice@desk") && note.at.0 > 0));
    // A note changes no payment.
    assert_eq!(details.line.state, "review");
    fixture.note("p1", &NewNote::Assigned(None)).await.unwrap();
    assert_eq!(fixture.database.job_details(&id).await.unwrap().unwrap().assigned_to, None);
}

async fn only_a_review_can_be_assigned(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.take(&job("p1")).await;
    let refused = fixture.note("p1", &to("bob")).await.unwrap_err();
    assert!(matches!(refused, ResolutionRefusal::WrongState { wanted: "review", .. }), "{refused}");
    for note in [to("bob"), comment("hello")] {
        assert_eq!(fixture.note("nothing", &note).await, Err(ResolutionRefusal::NoSuchJob));
    }
    assert_eq!(fixture.one("SELECT count(*) FROM job_notes").await, "0");
}

async fn note_never_changes_and_names_its_author(kind: Kind) {
    let fixture = Fixture::migrated(kind).await;
    fixture.take(&job("p1")).await;
    fixture.note("p1", &comment("hello")).await.unwrap();
    for change in ["UPDATE job_notes SET text = 'x'", "UPDATE job_notes SET os_user = 'bob'", "DELETE FROM job_notes"] {
        fixture.sql(change).await.expect_err(change);
    }
    for (columns, values, rule) in [
        ("job_id, kind, text", "'p1', 'shout', 'x'", "note_kind_is_known"),
        ("job_id, kind, text", "'p1', 'comment', ''", "note_text_is_1_to_500_characters"),
        ("job_id, kind", "'p1', 'comment'", "comment_has_a_text"),
    ] {
        let insert = format!("INSERT INTO job_notes ({columns}) VALUES ({values})");
        let error = fixture.sql(&insert).await.expect_err(&insert);
        assert!(error.contains(rule), "{insert}: {error}");
    }
    // PostgreSQL ignores the author of a statement, SQLite rejects it.
    let forged = "INSERT INTO job_notes (job_id, kind, text, who) VALUES ('p1', 'comment', 'x', 'mallory')";
    assert_eq!(fixture.sql(forged).await.is_ok(), kind == Kind::Postgres);
    assert_eq!(fixture.one("SELECT count(*) FROM job_notes WHERE who = 'mallory' OR who = ''").await, "0");
}
