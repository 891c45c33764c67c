//! One provider on several workers: trouble that one of them reports does not hide that the others run.

use super::*;

#[test]
fn cut_off_worker_does_not_hide_others() {
    let mut three = evidence(vec![row()], ["a", "b", "c"].map(|id| worker(id, json!({}))).to_vec());
    let cut_off =
        |worker: &mut WorkerProcess| worker.report.as_mut().unwrap().backends.get_mut("queue").unwrap().ok = false;
    cut_off(&mut three.workers[1]);
    let picture = overview(&three);
    assert_eq!((picture.providers[0].state, picture.providers[0].cause.as_deref()), (ProviderState::Running, None));
    assert_eq!(picture.warnings, ["worker host-b:7: queue: does not answer"]);
    three.workers.iter_mut().for_each(cut_off);
    let picture = overview(&three);
    assert_eq!(picture.providers[0].state, ProviderState::BackendUnavailable);
    assert_eq!(
        picture.warnings,
        ["workers host-a:7, host-b:7, host-c:7: queue: does not answer"],
        "one line, not three"
    );
}

#[test]
fn slow_database_lane_does_not_hide_others() {
    let mut two = evidence(vec![row()], ["a", "b"].map(|id| worker(id, json!({}))).to_vec());
    let pause = ReportedPause {
        by: PauseCause::Backend,
        limit: None,
        words: "the ledger is slow".to_owned(),
        ends_in_ms: Some(900),
    };
    let rest = |worker: &mut WorkerProcess| {
        let lane = worker.report.as_mut().unwrap().lanes.get_mut("acme").unwrap();
        (lane.does, lane.pause) = (LaneState::Resting, Some(pause.clone()));
    };
    rest(&mut two.workers[0]);
    assert_eq!(overview(&two).providers[0].state, ProviderState::Running);
    rest(&mut two.workers[1]);
    assert_eq!(status_of(&two), (ProviderState::BackendUnavailable, "the ledger is slow".to_owned(), None));
}
