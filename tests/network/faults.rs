//! Network faults, drawn from a seed and applied one after another: partitions, lost packets and killed workers.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};

use crate::hosts::{Cable, Drop};
use crate::stand::{Backend, Stand, WORKERS};

#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// No packet passes between a worker and a backend, in either direction.
    Part { worker: usize, backend: Backend },
    /// No packet passes from the provider to a worker: requests arrive, responses do not.
    LoseAnswers { worker: usize },
    /// A worker is cut off from all hosts and killed meanwhile.
    KillAlone { worker: usize },
    /// A worker's cable loses, delays and reorders packets.
    BadCable { worker: usize, cable: Cable },
    /// One packet in twenty between a worker and the provider is lost.
    LoseSome { worker: usize },
}

/// Draws faults: first one of each kind, in an order from the seed.
pub fn draw(seed: u64, count: usize) -> Vec<(Fault, Duration)> {
    let mut random = StdRng::seed_from_u64(seed);
    let kinds: [fn(usize, &mut StdRng) -> Fault; 5] = [
        |worker, random| {
            let backends = [Backend::Postgres, Backend::Redis, Backend::Rabbit];
            Fault::Part { worker, backend: *backends.choose(random).unwrap() }
        },
        |worker, _| Fault::LoseAnswers { worker },
        |worker, _| Fault::KillAlone { worker },
        |worker, random| {
            let cable = Cable { delay_ms: random.random_range(5..60), jitter_ms: 40, loss_percent: 5 };
            Fault::BadCable { worker, cable }
        },
        |worker, _| Fault::LoseSome { worker },
    ];
    let mut order: Vec<usize> = Vec::new();
    while order.len() < count {
        order.extend(rand::seq::index::sample(&mut random, kinds.len(), kinds.len()));
    }
    let fault = |kind: usize| {
        let worker = random.random_range(0..WORKERS.len());
        (kinds[kind](worker, &mut random), Duration::from_millis(random.random_range(1_500..3_500)))
    };
    order.into_iter().take(count).map(fault).collect()
}

/// Applies a fault from now until its end.
pub fn happen(stand: &Stand, fault: Fault, lasts: Duration) {
    let network = &stand.network;
    let provider = &network.here.address;
    let sleep = || std::thread::sleep(lasts);
    match fault {
        Fault::Part { worker, backend } => {
            network.part(&stand.address(worker), &network.host(backend as usize).address, None);
            sleep();
        }
        Fault::LoseAnswers { worker } => {
            let (from, to) = (provider.clone(), stand.address(worker));
            network.drop(&Drop { from, to, port: None, percent: 100 });
            sleep();
        }
        Fault::KillAlone { worker } => {
            let address = stand.address(worker);
            network.part(&address, "10.77.0.0/24", None);
            std::thread::sleep(lasts / 3);
            stand.kill_worker(worker);
            std::thread::sleep(lasts * 2 / 3);
            network.heal();
            stand.start_worker(worker);
        }
        Fault::BadCable { worker, cable } => {
            network.spoil(&stand.dir, WORKERS[worker], cable);
            sleep();
            network.mend(WORKERS[worker]);
        }
        Fault::LoseSome { worker } => {
            for (from, to) in [(stand.address(worker), provider.clone()), (provider.clone(), stand.address(worker))] {
                network.drop(&Drop { from, to, port: None, percent: 5 });
            }
            sleep();
        }
    }
    network.heal();
}
