//! Tests of explanations of finished jobs, and of jobs with a request in flight or without a record.

use super::*;

#[test]
fn finished_and_in_flight_jobs_are_explained() {
    let ended = |state: &str, requests: u32| {
        changed(|f| {
            let job = job(f);
            state.clone_into(&mut job.state);
            job.reason = Some("why".to_owned());
            job.requests = (1..=requests)
                .map(|number| SentRequest { number, began_at: job.created_at, ended_at: None, outcome: None })
                .collect();
        })
    };
    for (state, requests, words, blocked_at) in [
        ("succeeded", 1, "charged at 14:03:18 UTC (2 s ago), after 1 request: why", None),
        ("declined", 2, "after 2 requests: why; not charged", None),
        ("dead", 3, "`sluicegate dlq replay inv-7` tries again", None),
        ("dead", 3, "`sluicegate dlq discard inv-7 --yes` ends it", None),
        ("expired", 0, "nothing was ever sent: why; confirmed not charged", None),
        ("cancelled", 0, "cancelled at 14:03:18 UTC", None),
        ("review", 1, "`sluicegate jobs resolve inv-7 --as succeeded`", Some("outcome")),
        ("review", 0, "fix the cause, then `sluicegate jobs resolve inv-7 --as resend`", Some("outcome")),
        ("sending", 2, "request 2 is in flight since 14:03:15 UTC (5 s), and its worker is lost", Some("outcome")),
    ] {
        let explained = ended(state, requests);
        assert!(explained.summary.contains(words), "{state}: {}", explained.summary);
        assert_eq!(explained.blocked_at.map(|at| at.check), blocked_at, "{state}");
    }
    // The reason of a delay stays known after the request is sent; it belongs to this request only.
    let late = |state: &str, before: u32| {
        let explained = changed(|f| {
            let job = job(f);
            state.clone_into(&mut job.state);
            job.requests = vec![SentRequest { number: 1, began_at: NOW, ended_at: None, outcome: None }];
            let since = EpochMs(NOW.0 - 428_000);
            job.last_delay = Some(LastDelay { reason: Wait::for_limit("per-account"), since, request: before });
        });
        let check = explained.checks.into_iter().find(|check| check.name == "time").unwrap();
        (check.at, check.text)
    };
    let waited = "waited for limit per-account from 13:56:12 UTC to 14:03:20 UTC (7 min 8 s)".to_owned();
    for state in ["succeeded", "sending"] {
        assert_eq!(late(state, 1), (Some(EpochMs(NOW.0 - 428_000)), waited.clone()), "{state}");
        assert!(late(state, 2).1.starts_with("passed for"), "{state}");
    }
    let held = changed(|f| {
        job(f).state = "sending".to_owned();
        f.claim = ClaimState::OtherWorker { worker: "w2".to_owned() };
    });
    assert!(held.summary.contains("at worker w2; the response timeout is 30 s"), "{}", held.summary);

    let unknown = changed(|f| f.job = None);
    assert!(unknown.summary.contains("waits in its lane's queue"), "{}", unknown.summary);
    assert_eq!((unknown.state.as_str(), unknown.checks.len()), ("unrecorded", 0));
    let rejected = changed(|f| {
        f.job = None;
        let (lane, reason, detail) =
            ("stripe".to_owned(), "bad_amount".to_owned(), "amount must be above 0".to_owned());
        f.rejected = vec![Rejected { at: EpochMs(NOW.0 - 1_000), lane, reason, detail }];
    });
    assert!(
        rejected.summary.contains("can never be a job (bad_amount: amount must be above 0)"),
        "{}",
        rejected.summary
    );
}

/// A decision's text is the job's reason. An earlier change of the same job is not.
#[test]
fn decisive_reason_is_shown_once() {
    for (is_decisive, words) in [
        (true, "after 1 request: resolved by an operator: seen; changed by alice; not charged"),
        (false, "after 1 request: resolved by an operator: seen; changed by alice (seen); not charged"),
    ] {
        let explained = changed(|f| {
            let job = job(f);
            (job.state, job.reason) = ("declined".to_owned(), Some("resolved by an operator: seen".to_owned()));
            job.requests = vec![SentRequest { number: 1, began_at: NOW, ended_at: None, outcome: None }];
            let (operator, reason) = ("alice".to_owned(), Some("seen".to_owned()));
            job.manual_change = Some(ManualChange { operator, reason, is_decisive });
        });
        assert!(explained.summary.contains(words), "{}", explained.summary);
    }
}
