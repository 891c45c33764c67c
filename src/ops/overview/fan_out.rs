//! Concurrent queries to a backend, one per provider, with a bound on their number and a common timeout.
//!
//! Payments need the same backend, so the queries must not crowd it. A query without a response does not delay the
//! results of the others.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

/// Timeout for broker and limiter: below the timeout of a source, so that partial results are shown.
const BACKEND_TIMEOUT: Duration = Duration::from_millis(1_500);
/// Concurrent queries: each uses a channel of the broker meanwhile.
const CONCURRENCY: usize = 8;

/// The results in order; `None` for a query without a response when [`BACKEND_TIMEOUT`] ends for all of them.
pub(super) async fn query_concurrently<T>(asks: impl IntoIterator<Item = impl Future<Output = T>>) -> Vec<Option<T>> {
    let (places, until) = (&Semaphore::new(CONCURRENCY), Instant::now() + BACKEND_TIMEOUT);
    let each = asks.into_iter().map(|ask| async move {
        let in_turn = async {
            let _place = places.acquire().await;
            ask.await
        };
        timeout_at(until, in_turn).await.ok()
    });
    join_all(each).await
}

/// Splits the results into values and the last problem.
pub(super) fn split_results<T>(answers: Vec<Option<Result<T, String>>>) -> (Vec<T>, Option<String>) {
    let (mut values, mut problem) = (Vec::new(), None);
    for answer in answers {
        match answer.unwrap_or_else(|| Err("no answer in time".to_owned())) {
            Ok(value) => values.push(value),
            Err(error) => problem = Some(error),
        }
    }
    (values, problem)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn queries_run_with_bounded_concurrency() {
        let (under_way, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let ask = async |number: usize| {
            most.fetch_max(under_way.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            sleep(Duration::from_millis(1)).await;
            under_way.fetch_sub(1, Ordering::Relaxed);
            number
        };
        let results = query_concurrently((0..500).map(ask)).await;
        assert_eq!(results, (0..500).map(Some).collect::<Vec<_>>());
        assert_eq!(most.into_inner(), CONCURRENCY);
    }

    #[tokio::test(start_paused = true)]
    async fn hanging_query_does_not_block_others() {
        let began = Instant::now();
        let ask = async |number: usize| match number % 20 {
            0 => std::future::pending().await,
            3 => Err("away".to_owned()),
            _ => Ok(number),
        };
        let (results, problem) = split_results(query_concurrently((0..100).map(ask)).await);
        assert_eq!((results.len(), problem.as_deref()), (90, Some("away")));
        assert_eq!(began.elapsed(), BACKEND_TIMEOUT, "for all of them together");
        let hang = query_concurrently((0..20).map(|_| std::future::pending::<Result<(), String>>())).await;
        assert_eq!(split_results(hang), (Vec::new(), Some("no answer in time".to_owned())));
    }
}
