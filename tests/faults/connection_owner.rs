//! Owner of a proxied connection: the worker process behind a client port, from the kernel's socket tables.
//!
//! All workers read one provider row, so they connect to the same address. The URL cannot tell them apart either,
//! because it is frozen with the first request. The tables are long, so one read answers all questions that wait.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::mpsc;

use crate::proxy::Question;

/// Answers questions until all senders are dropped. `pids`: the workers' processes; 0 is no process.
pub fn serve(pids: Arc<Mutex<Vec<u32>>>) -> mpsc::UnboundedSender<Question> {
    let (questions, mut asked) = mpsc::unbounded_channel::<Question>();
    std::thread::spawn(move || {
        while let Some(first) = asked.blocking_recv() {
            let mut together = vec![first];
            while let Ok(question) = asked.try_recv() {
                together.push(question);
            }
            let pids = pids.lock().unwrap().clone();
            let (sockets, owners) = (sockets(), owners(&pids));
            for (port, answer) in together {
                let owner = sockets.get(&port).and_then(|socket| owners.get(socket));
                // A proxy that has ended needs no answer.
                let _ = answer.send(owner.copied());
            }
        }
    });
    questions
}

/// Sockets by their local port on loopback.
fn sockets() -> HashMap<u16, String> {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let socket = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let port = words.next()?.strip_prefix("0100007F:")?;
        // A socket without an inode is closed.
        let inode = words.nth(7).filter(|inode| *inode != "0")?;
        Some((u16::from_str_radix(port, 16).ok()?, format!("socket:[{inode}]")))
    };
    table.lines().filter_map(socket).collect()
}

/// Workers by the sockets that they have open.
fn owners(pids: &[u32]) -> HashMap<String, usize> {
    let mut owners = HashMap::new();
    for (worker, pid) in pids.iter().enumerate() {
        for file in std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            if let Ok(link) = std::fs::read_link(file.path()) {
                owners.insert(link.to_string_lossy().into_owned(), worker);
            }
        }
    }
    owners
}
