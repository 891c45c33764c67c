//! The tests' broker in memory keeps the promises of all queues, so tests of the worker may rely on it.

use std::sync::Arc;

use sluicegate::queue::Queue;

use super::conformance;
use crate::support::memory_queue::MemoryQueue;

struct Bench {
    queue: Arc<dyn Queue>,
}

async fn bench(_name: &str) -> Bench {
    Bench { queue: Arc::new(MemoryQueue::default()) }
}

conformance!(bench);
