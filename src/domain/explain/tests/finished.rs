//! What a job in a final state, or with a request in flight, is told with.

use super::*;

#[test]
fn finished_and_in_flight_jobs_are_explained() {
    let ended = |state: &str, requests: u32| {
        changed(|f| {
            let it = job(f);
            state.clone_into(&mut it.state);
            it.reason = Some("why".to_owned());
            it.requests = (1..=requests)
                .map(|number| SentRequest { number, began_at: it.created_at, ended_at: None, outcome: None })
                .collect();
        })
    };
    for (state, requests, words, stands) in [
        ("succeeded", 1, "charged, 14:03:18 UTC (2 s ago), after 1 request: why", None),
        ("declined", 2, "after 2 requests: why; nothing was charged", None),
        ("dead", 3, "`sluicegate dlq replay inv-7` tries again", None),
        ("dead", 3, "`sluicegate dlq discard inv-7 --yes` ends it", None),
        ("expired", 0, "nothing was ever sent: why; surely not charged", None),
        ("cancelled", 0, "cancelled 14:03:18 UTC", None),
        ("review", 1, "`sluicegate jobs resolve inv-7 --as succeeded`", Some("outcome")),
        ("review", 0, "mend what that names and then `sluicegate jobs resolve inv-7 --as resend`", Some("outcome")),
        (
            "sending",
            2,
            "request 2 has been on the wire since 14:03:15 UTC (5 s), and its worker is lost",
            Some("outcome"),
        ),
    ] {
        let explained = ended(state, requests);
        assert!(explained.summary.contains(words), "{state}: {}", explained.summary);
        assert_eq!(explained.blocked_at.map(|at| at.check), stands, "{state}");
    }
    // Why it was late stays known once it has been sent; what it waited for before another request is not told of this.
    let late = |state: &str, before: u32| {
        let explained = changed(|f| {
            let it = job(f);
            state.clone_into(&mut it.state);
            it.requests = vec![SentRequest { number: 1, began_at: NOW, ended_at: None, outcome: None }];
            let since = EpochMs(NOW.0 - 428_000);
            it.last_delay =
                Some(LastDelay { reason: "waits for limit per-account".to_owned(), since, request: before });
        });
        let gate = explained.checks.into_iter().find(|gate| gate.name == "time").unwrap();
        (gate.at, gate.text)
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
    assert!(held.summary.contains("in hand of worker w2; its answer is waited for at most 30 s"), "{}", held.summary);

    let nobody = changed(|f| f.job = None);
    assert!(nobody.summary.contains("still in its lane's queue"), "{}", nobody.summary);
    assert_eq!((nobody.state.as_str(), nobody.checks.len()), ("unrecorded", 0));
    let put_aside = changed(|f| {
        f.job = None;
        let (lane, reason, detail) =
            ("stripe".to_owned(), "bad_amount".to_owned(), "amount must be above 0".to_owned());
        f.rejected = vec![Rejected { at: EpochMs(NOW.0 - 1_000), lane, reason, detail }];
    });
    assert!(
        put_aside.summary.contains("can never be a job (bad_amount: amount must be above 0)"),
        "{}",
        put_aside.summary
    );
}
