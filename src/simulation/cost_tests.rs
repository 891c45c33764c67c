//! Jobs of different costs: a costly one waits alone.

use super::tests::{limit, model, row, run};
use super::*;
use crate::ledger::provider_row::ProviderRow;

/// Of a hundred an hour, sixty are used, and jobs that cost fifty wait. Thirty that cost one are sent within a second, in
/// both modes, by one process or two, of the same account or of another. The costly ones follow when the hour is over.
#[test]
fn cheaper_jobs_pass_costly_ones() {
    for (mode, processes, account) in [("blocking", 1, None), ("blocking", 2, Some(1)), ("requeue", 2, Some(1))] {
        let strict = ProviderRow { mode: mode.to_owned(), ..row(vec![limit("hundred", 100, 3_600_000)]) };
        let model = Model { processes, ..model(&strict) };
        let mut arrivals = JobArrivals::default();
        let accounts = ["whale", "other"].map(|name| arrivals.account(name));
        let job = |at_ms: u64, cost, account: Option<usize>| {
            let account = account.map(|account| accounts[account]);
            JobArrival { cost, account, ..JobArrival::at(at_ms * 1_000) }
        };
        arrivals.add((0..6).map(|_| job(0, 10, Some(1))));
        arrivals.add((0..8).map(|_| job(10_000, 50, Some(0))));
        arrivals.add((0..30).map(|number| job(20_000 + number, 1, account)));
        let figures = run(&model, &arrivals);
        let starts: Vec<u64> = figures.arrivals_us.iter().map(|at_us| at_us / 1_000).collect();
        // An instant for each unit of cost.
        assert_eq!((starts.len(), figures.succeeded), (60 + 30 + 8 * 50, 44), "{mode}, {processes}");
        assert!(starts[60..90].iter().all(|at| (20_000..21_000).contains(at)), "{mode}, {processes}: {starts:?}");
        assert!(starts[90..].iter().all(|at| *at > 3_600_000), "{mode}, {processes}: {starts:?}");
    }
}
