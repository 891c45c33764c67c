//! Tests of the fair order in memory: shares, costs, classes, blocks, and the order of accounts.

use proptest::prelude::*;

use super::*;

type Order = FairOrder<u8, u64>;

fn claim(at_most: u32) -> FairClaim<u8> {
    FairClaim {
        at_most,
        quantum: 1,
        flow_max: u32::MAX,
        except: Vec::new(),
        class_max: FlowClass::LAST,
        cost_below: None,
        order: JobOrder::None,
    }
}

fn fill(order: &mut Order, flow: Flow<u8>, weight: u32, seqs: std::ops::Range<u64>) {
    seqs.for_each(|seq| order.add(flow, weight, WaitingJob { seq, cost: 1, job: seq }));
}

fn flow(account: u8) -> Flow<u8> {
    Flow { class: FlowClass::LAST, account: Some(account) }
}

/// How many of the next jobs belong to each account.
fn shares<const N: usize>(order: &mut Order, rounds: usize, at_most: u32) -> [usize; N] {
    let mut shares = [0; N];
    for _ in 0..rounds {
        for (flow, _) in order.claim(Duration::ZERO, &claim(at_most)) {
            shares[usize::from(flow.account.unwrap())] += 1;
        }
    }
    shares
}

#[test]
fn weights_divide_the_order() {
    let mut order = Order::default();
    fill(&mut order, flow(0), 1, 0..400);
    fill(&mut order, flow(1), 3, 400..800);
    assert_eq!(shares(&mut order, 50, 4), [50, 150]);
}

#[test]
fn costs_count_against_a_share() {
    let mut order = Order::default();
    (0..100).for_each(|seq| order.add(flow(0), 1, WaitingJob { seq, cost: 4, job: seq }));
    fill(&mut order, flow(1), 1, 100..400);
    assert_eq!(shares(&mut order, 50, 1), [10, 40]);
}

#[test]
fn late_or_blocked_flow_does_not_make_up_for_the_past() {
    let mut order = Order::default();
    fill(&mut order, flow(0), 1, 0..400);
    assert_eq!(shares(&mut order, 10, 10), [100]);
    fill(&mut order, flow(1), 1, 400..500);
    let [_, late] = shares(&mut order, 20, 2);
    assert!((19..=21).contains(&late), "{late}");
    let how = FairReturn { was_claimed: false, blocked_until: Some(Duration::from_secs(9)) };
    order.put_back(flow(1), 1, WaitingJob { seq: 900, cost: 1, job: 900 }, how);
    assert_eq!(shares(&mut order, 10, 10), [100, 0]);
    order.wake(Duration::from_secs(9));
    let [_, woken] = shares(&mut order, 20, 2);
    assert!((19..=21).contains(&woken), "{woken}");
}

/// A claim of fewer jobs than flows with the same tag leaves some out. The accounts that come then have later names, or
/// earlier ones.
#[test]
fn passed_over_flow_goes_before_new_ones() {
    for left_out in [0, 200] {
        let mut order = Order::default();
        fill(&mut order, flow(left_out), 1, 0..1);
        fill(&mut order, flow(100), 1, 1..2);
        let mut served = Vec::new();
        for account in (0..50).map(|number| 101 - number * 2) {
            fill(&mut order, flow(account), 1, u64::from(account) + 10..u64::from(account) + 11);
            served.extend(order.claim(Duration::ZERO, &claim(1)).into_iter().map(|(of, _)| of.account));
        }
        let place = served.iter().position(|account| *account == Some(left_out));
        assert!(place.is_some_and(|place| place <= 2), "{left_out}: {served:?}");
    }
}

#[test]
fn higher_class_is_always_first() {
    let mut order = Order::default();
    fill(&mut order, flow(0), 1, 0..9);
    let urgent = Flow { class: FlowClass::of_priority(9), account: Some(7) };
    fill(&mut order, urgent, 1, 9..11);
    let waiting: Vec<Flow<u8>> = order.waiting_flows().map(|(flow, _)| flow).collect();
    assert_eq!(waiting, [urgent, flow(0)]);
    let next: Vec<u64> = order.claim(Duration::ZERO, &claim(3)).iter().map(|(_, job)| job.job).collect();
    assert_eq!(next, [9, 10, 0]);
    let bounds = FairClaim { class_max: urgent.class, ..claim(3) };
    assert_eq!(order.claim(Duration::ZERO, &bounds), []);
}

#[test]
fn returned_job_is_first_again() {
    let mut order = Order::default();
    fill(&mut order, flow(0), 1, 0..3);
    let (of, first) = order.claim(Duration::ZERO, &claim(1))[0];
    let how = FairReturn { was_claimed: true, blocked_until: None };
    order.put_back(of, 1, first, how);
    let next: Vec<u64> = order.claim(Duration::ZERO, &claim(9)).iter().map(|(_, job)| job.job).collect();
    assert_eq!((next, order.len(), order.flows.len()), (vec![0, 1, 2], 0, 1));
}

#[test]
fn one_job_of_an_account_is_on_its_way() {
    let mut order = Order::default();
    let [urgent, none] =
        [(9, Some(1)), (0, None)].map(|(priority, account)| Flow { class: FlowClass::of_priority(priority), account });
    fill(&mut order, flow(1), 1, 0..3);
    fill(&mut order, flow(2), 1, 3..4);
    fill(&mut order, none, 1, 4..6);
    fill(&mut order, urgent, 1, 6..7);
    let in_order = FairClaim { order: JobOrder::Account, ..claim(9) };
    let next = |order: &mut Order| -> Vec<u64> {
        order.claim(Duration::ZERO, &in_order).iter().map(|(_, job)| job.job).collect()
    };
    assert_eq!(next(&mut order), [6, 4, 3, 5]);
    assert_eq!(next(&mut order).len(), 0);
    order.end(Some(&1));
    assert_eq!(next(&mut order), [0]);
    let how = FairReturn { was_claimed: true, blocked_until: None };
    order.put_back(flow(1), 1, WaitingJob { seq: 0, cost: 1, job: 0 }, how);
    assert_eq!(next(&mut order), [0]);
    order.end(Some(&1));
    assert_eq!(next(&mut order), [1]);
}

proptest! {
    /// Classes are strict, each flow is first in first out, and no flow falls behind its share by more than a few
    /// quanta while all of them have jobs.
    #[test]
    fn each_flow_gets_its_share(
        weights in prop::collection::vec(1..5_u32, 2..6),
        (quantum, at_most, rounds) in (1..5_u32, 1..20_u32, 1..40_usize),
    ) {
        let mut order = Order::default();
        let mut seq = 0;
        for (account, weight) in weights.iter().enumerate() {
            let of = flow(u8::try_from(account).unwrap());
            fill(&mut order, of, *weight, seq..seq + 1_000);
            seq += 1_000;
        }
        let mut served = vec![Vec::new(); weights.len()];
        for _ in 0..rounds {
            for (of, job) in order.claim(Duration::ZERO, &FairClaim { quantum, ..claim(at_most) }) {
                served[usize::from(of.account.unwrap())].push(job.seq);
            }
        }
        prop_assert!(served.iter().all(|seqs| seqs.is_sorted()));
        let all = served.iter().map(Vec::len).sum::<usize>();
        prop_assert_eq!(all, at_most as usize * rounds);
        prop_assert_eq!(order.len(), weights.len() * 1_000 - all);
        let sum = f64::from(weights.iter().sum::<u32>());
        for (seqs, weight) in served.iter().zip(&weights) {
            let share = all as f64 * f64::from(*weight) / sum;
            let apart = (seqs.len() as f64 - share).abs();
            // A claim takes whole quanta, and as many as start in it.
            prop_assert!(apart <= (2 * quantum as usize * weights.len() + at_most as usize) as f64, "{served:?} for {weights:?}");
        }
    }

    /// Whatever happens, jobs are neither lost nor doubled, and flows without jobs are forgotten.
    #[test]
    fn no_job_is_lost(steps in prop::collection::vec((0..5_u8, 0..3_u8, 0..3_u8, 1..4_u32), 1..200)) {
        let (mut order, mut out, mut seq) = (Order::default(), BTreeMap::new(), 0_u64);
        for (step, account, priority, cost) in steps {
            let class = FlowClass::of_priority(priority);
            let at = Duration::from_millis(seq);
            match step {
                0..3 => {
                    order.add(Flow { class, account: Some(account) }, cost, WaitingJob { seq, cost, job: seq });
                    seq += 1;
                }
                3 => {
                    for (of, job) in order.claim(at, &FairClaim { class_max: class, ..claim(cost) }) {
                        prop_assert!(of.class <= class);
                        prop_assert!(out.insert(job.seq, (of, job)).is_none(), "claimed twice");
                    }
                }
                _ => if let Some((_, (of, job))) = out.pop_first() {
                    let blocked_until = (cost > 1).then(|| at + Duration::from_millis(u64::from(cost) * 5));
                    order.put_back(of, 1, job, FairReturn { was_claimed: true, blocked_until });
                },
            }
            prop_assert_eq!(order.len() + out.len(), usize::try_from(seq).unwrap());
        }
        order.wake(Duration::MAX);
        let left = order.claim(Duration::MAX, &claim(u32::MAX)).len();
        prop_assert_eq!((left + out.len(), order.is_empty()), (usize::try_from(seq).unwrap(), true));
        prop_assert!(order.free.is_empty() && order.blocked.is_empty());
    }
}
