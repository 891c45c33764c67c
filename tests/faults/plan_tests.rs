//! Tests of the fault plans: their seed and size alone determine them, and they keep their bounds.

use std::collections::BTreeSet;
use std::mem::discriminant;

use crate::plan::{Alarm, Engine, Fault, GRANT_LANE, LANES, PROVIDERS, Peer, Size, WORKERS, plan};
use crate::provider::Trouble;
use crate::proxy::{Flow, Rules};

#[test]
fn plan_depends_only_on_its_seed() {
    for size in [Size::SMALL, Size::LARGE, Size { jobs: 7, ..Size::SMALL }.with_faults(4)] {
        assert_eq!(plan(9, &size), plan(9, &size));
        assert_eq!(plan(9, &size).to_string(), plan(9, &size).to_string());
        assert_ne!(plan(9, &size).faults, plan(10, &size).faults);
    }
}

#[test]
fn plan_sizes_have_their_fault_counts() {
    let kills = |size: Size| size.worker_kills + size.engine_kills;
    assert_eq!((Size::SMALL.jobs, Size::SMALL.faults()), (2_000, 18));
    assert_eq!((Size::LARGE.jobs, kills(Size::LARGE), Size::LARGE.freezes, Size::LARGE.cuts), (10_000, 50, 10, 10));
    assert_eq!((Size::HUGE.jobs, kills(Size::HUGE)), (100_000, 1_000));
    for faults in [0, 1, 18, 70, 1_001] {
        assert_eq!(Size::LARGE.with_faults(faults).faults(), faults);
    }
}

#[test]
fn plan_publishes_once_and_schedules_every_fault() {
    for (seed, size) in [(1, Size::SMALL), (2, Size::LARGE), (3, Size::SMALL.with_faults(0)), (4, Size::HUGE)] {
        let plan = plan(seed, &size);
        assert_eq!(plan.faults.len(), size.faults());
        let mut jobs = [0; LANES.len()];
        for (provider, jobs) in jobs.iter_mut().enumerate() {
            let mut next = 0;
            let mut waves: Vec<_> = plan.waves.iter().filter(|wave| wave.provider == provider).collect();
            waves.sort_by_key(|wave| wave.first);
            for wave in waves {
                assert_eq!(wave.first, next, "the waves have a gap or a job twice");
                next += wave.jobs;
            }
            *jobs = next;
        }
        let granted = jobs[GRANT_LANE];
        assert_eq!((jobs.iter().sum::<usize>() - granted, granted), (size.jobs, size.grant_jobs()));
        let ordered = |instants: Vec<_>| instants.is_sorted();
        assert!(ordered(plan.faults.iter().map(|planned| planned.at).collect()));
        assert!(ordered(plan.waves.iter().map(|wave| wave.at).collect()));
        let text = plan.to_string();
        assert_eq!(text.lines().count(), 1 + plan.faults.len());
        assert!(plan.faults.iter().all(|planned| text.contains(&planned.fault.to_string())));
    }
}

#[test]
fn plans_cover_every_backend_and_fault() {
    let mut kinds = BTreeSet::new();
    let mut troubles = BTreeSet::new();
    let mut flows = BTreeSet::new();
    let (mut workers, mut peers) = (BTreeSet::new(), BTreeSet::new());
    let mut alarms = BTreeSet::new();
    let mut writes = BTreeSet::new();
    for seed in 0..40 {
        let plan = plan(seed, &Size::SMALL);
        for engine in [Engine::Redis, Engine::Rabbit, Engine::Postgres] {
            assert!(plan.faults.iter().any(|planned| planned.fault == Fault::KillEngine(engine)), "seed {seed}");
        }
        for planned in plan.faults {
            kinds.insert(format!("{:?}", discriminant(&planned.fault)));
            match planned.fault {
                Fault::Provider { trouble, .. } => drop(troubles.insert(format!("{trouble:?}"))),
                Fault::Writes(trouble) => drop(writes.insert(format!("{trouble:?}"))),
                Fault::Alarm(alarm) => drop(alarms.insert(alarm == Alarm::Disk)),
                Fault::KillWorker { worker, .. } => drop(workers.insert(worker)),
                Fault::Road { peer, rules, .. } => {
                    peers.insert(match peer {
                        Peer::Engine(engine) => format!("{engine:?}"),
                        Peer::Provider(provider) => PROVIDERS[provider].to_owned(),
                    });
                    flows.insert(shape(rules));
                }
                _ => {}
            }
        }
    }
    let shapes = ["cut", "delay", "reset", "short back", "short there", "silent back", "silent there"];
    assert_eq!(flows.into_iter().collect::<Vec<_>>(), shapes);
    assert_eq!((kinds.len(), troubles.len(), alarms.len(), writes.len()), (12, 9, 2, 3));
    assert_eq!((workers.len(), peers.len()), (WORKERS, 3 + PROVIDERS.len()));
}

/// Every small plan has the rare troubles; the first seed, with which `tests/run` runs it, has each kind of them.
#[test]
fn small_plans_contain_the_rare_troubles() {
    let has = |seed: u64, what: fn(&Fault) -> bool| {
        plan(seed, &Size::SMALL).faults.iter().any(|planned| what(&planned.fault))
    };
    for seed in 0..99 {
        assert!(has(seed, |fault| matches!(fault, Fault::Writes(_))), "seed {seed}");
        assert!(has(seed, |fault| matches!(fault, Fault::EvictQuota { .. })), "seed {seed}");
        assert!(has(seed, |fault| matches!(fault, Fault::Provider { .. })), "seed {seed}");
    }
    assert!(has(1, |fault| matches!(fault, Fault::Provider { trouble: Trouble::NotFound, .. })));
    assert!(has(1, |fault| matches!(fault, Fault::Provider { trouble: Trouble::Partial, .. })));
}

fn shape(rules: Rules) -> &'static str {
    match (rules.reset, rules.to_server, rules.to_client) {
        (true, _, _) => "reset",
        (_, Flow::Discard, Flow::Discard) => "cut",
        (_, Flow::Discard, Flow::Pass) => "silent there",
        (_, Flow::Pass, Flow::Discard) => "silent back",
        (_, Flow::Delay(_), Flow::Delay(_)) => "delay",
        (_, Flow::Truncate(_), Flow::Pass) => "short there",
        (_, Flow::Pass, Flow::Truncate(_)) => "short back",
        other => panic!("{other:?} is not a provider fault of the plan"),
    }
}
