//! The confirms that one channel awaits. Only those are polled that have woken since the last look.
//!
//! lapin resolves the confirms of a channel on one thread, and wakes each after it is resolved. So once no confirm is
//! woken that was not polled, each that was resolved before a known one is known, too. [`futures_util`]'s unordered
//! futures do not promise that: they return early after some polls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use futures_util::FutureExt as _;
use futures_util::task::AtomicWaker;
use lapin::{Confirmation, PublisherConfirm};
use parking_lot::Mutex;

#[derive(Default)]
pub struct AwaitedConfirms {
    awaited: BTreeMap<u64, AwaitedConfirm>,
    woken: Arc<WokenConfirms>,
}

struct AwaitedConfirm {
    confirm: PublisherConfirm,
    waker: Waker,
}

#[derive(Default)]
struct WokenConfirms {
    /// The publishes whose confirms are to be polled.
    ids: Mutex<Vec<u64>>,
    task: AtomicWaker,
}

struct ConfirmWaker {
    id: u64,
    woken: Arc<WokenConfirms>,
}

impl Wake for ConfirmWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.ids.lock().push(self.id);
        self.woken.task.wake();
    }
}

impl AwaitedConfirms {
    pub fn is_empty(&self) -> bool {
        self.awaited.is_empty()
    }

    /// Awaits the confirm of a publish. It is polled with those that have woken.
    pub fn add(&mut self, id: u64, confirm: PublisherConfirm) {
        let waker = Waker::from(Arc::new(ConfirmWaker { id, woken: Arc::clone(&self.woken) }));
        self.awaited.insert(id, AwaitedConfirm { confirm, waker });
        self.woken.ids.lock().push(id);
    }

    /// Wakes this task from now on.
    pub fn register(&self, task: &Waker) {
        self.woken.task.register(task);
    }

    /// Adds the confirms that have come to `came`. Returns whether any was polled.
    pub fn poll_woken(&mut self, came: &mut Vec<(u64, lapin::Result<Confirmation>)>) -> bool {
        let ids = std::mem::take(&mut *self.woken.ids.lock());
        for id in &ids {
            let Some(AwaitedConfirm { confirm, waker }) = self.awaited.get_mut(id) else { continue };
            if let Poll::Ready(confirmation) = confirm.poll_unpin(&mut Context::from_waker(waker)) {
                self.awaited.remove(id);
                came.push((*id, confirmation));
            }
        }
        !ids.is_empty()
    }
}
