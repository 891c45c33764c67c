//! A TCP proxy that fails as networks do: in one direction or both, silently or with a reset, late, or in mid-stream.
//!
//! Refuses to know protocols. Rules are switched while it runs and hold per road; a road is one worker's way to one peer.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

/// Bytes read at once.
const CHUNK: usize = 16 * 1024;
/// Delayed bytes that a direction holds before it stops reading.
const HELD_MAX: usize = 4 << 20;

/// What happens to the bytes of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Pass,
    /// Read and thrown away; the sender notices nothing. What a connection has lost it never gets back.
    Discard,
    /// Delivered that much later, in order.
    Delay(Duration),
    /// Each connection passes so many bytes more in this direction, then it is closed both ways.
    Truncate(u64),
}

/// The rules of one road.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    pub to_server: Flow,
    pub to_client: Flow,
    /// Every connection is reset (RST), and each new one too.
    pub reset: bool,
}

impl Rules {
    pub const PASS: Self = Self { to_server: Flow::Pass, to_client: Flow::Pass, reset: false };
    pub const CUT: Self = Self { to_server: Flow::Discard, to_client: Flow::Discard, reset: false };
    pub const RESET: Self = Self { reset: true, ..Self::PASS };
}

/// One worker's way to one peer.
#[derive(Debug)]
pub struct Road {
    rules: watch::Sender<Rules>,
    /// Connections whose bytes were thrown away, late, or cut; or that were reset.
    troubled: AtomicU64,
}

impl Road {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { rules: watch::Sender::new(Rules::PASS), troubled: AtomicU64::new(0) })
    }

    pub fn set(&self, rules: Rules) {
        self.rules.send_replace(rules);
    }

    /// Nothing happens to its bytes.
    pub fn passes(&self) -> bool {
        *self.rules.borrow() == Rules::PASS
    }

    /// Connections that met a rule other than passing.
    pub fn troubled(&self) -> u64 {
        self.troubled.load(Ordering::Relaxed)
    }
}

/// Which road a connection takes.
#[derive(Clone)]
pub enum Whose {
    Known(Arc<Road>),
    /// Asked for by the client's port; see [`crate::connection_owner`].
    Asked(Asking),
}

/// Roads of several clients that connect to one port.
#[derive(Clone)]
pub struct Asking {
    pub questions: mpsc::UnboundedSender<Question>,
    pub roads: Arc<Mutex<Vec<Arc<Road>>>>,
}

/// A client's port, and where to say which of the roads is its.
pub type Question = (u16, oneshot::Sender<Option<usize>>);

impl Whose {
    /// No road has a rule that matters to the first bytes of a connection.
    fn all_pass(&self) -> bool {
        let passes = |road: &Arc<Road>| *road.rules.borrow() == Rules::PASS;
        match self {
            Self::Known(road) => passes(road),
            Self::Asked(asking) => asking.roads.lock().unwrap().iter().all(passes),
        }
    }

    /// `None`: the client is nobody's, or is gone.
    async fn road(self, port: u16) -> Option<Arc<Road>> {
        match self {
            Self::Known(road) => Some(road),
            Self::Asked(asking) => {
                let (answer, answered) = oneshot::channel();
                asking.questions.send((port, answer)).ok()?;
                let number = answered.await.ok()??;
                asking.roads.lock().unwrap().get(number).cloned()
            }
        }
    }
}

/// Listens on a port of its own, which it returns, and forwards to `target` until the runtime ends.
pub async fn listen(target: u16, whose: Whose) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let Ok((client, peer)) = listener.accept().await else { continue };
            tokio::spawn(forward(client, peer, target, whose.clone()));
        }
    });
    port
}

/// A connection's own copy of its road's rules; passes until it is known whose road it is.
struct Followed {
    rules: watch::Sender<Rules>,
    road: OnceLock<Arc<Road>>,
}

impl Followed {
    /// Keeps the copy; never ends.
    async fn follow(&self, road: impl Future<Output = Option<Arc<Road>>>) {
        if let Some(road) = road.await {
            let road = self.road.get_or_init(|| road);
            let mut rules = road.rules.subscribe();
            loop {
                let now = *rules.borrow_and_update();
                self.rules.send_if_modified(|before| std::mem::replace(before, now) != now);
                if rules.changed().await.is_err() {
                    break;
                }
            }
        }
        std::future::pending().await
    }

    fn note_trouble(&self) {
        if let Some(road) = self.road.get() {
            road.troubled.fetch_add(1, Ordering::Relaxed);
        }
    }
}

async fn forward(client: TcpStream, peer: SocketAddr, target: u16, whose: Whose) {
    let followed = Followed { rules: watch::Sender::new(Rules::PASS), road: OnceLock::new() };
    // To ask takes a moment, which only a road in trouble is worth: a harness that is slow is a fault that nobody planned.
    let at_once = whose.all_pass();
    let mut road: Pin<Box<dyn Future<Output = Option<Arc<Road>>> + Send>> = Box::pin(whose.road(peer.port()));
    if !at_once {
        let Some(known) = road.await else { return reset(&client) };
        if known.rules.borrow().reset {
            known.troubled.fetch_add(1, Ordering::Relaxed);
            return reset(&client);
        }
        followed.rules.send_replace(*known.rules.borrow());
        road = Box::pin(async move { Some(known) });
    }
    let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, target)).await else { return reset(&client) };
    // Small answers must not wait for acknowledgements.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    tokio::select! {
        () = followed.follow(road) => {}
        () = connection(&client, &server, &followed) => {}
    }
}

/// Forwards both directions until the connection is over.
async fn connection(client: &TcpStream, server: &TcpStream, followed: &Followed) {
    let mut rules = followed.rules.subscribe();
    let mut up = pin!(pump(client, server, rules.clone(), |rules| rules.to_server, followed));
    let mut down = pin!(pump(server, client, rules.clone(), |rules| rules.to_client, followed));
    let (mut up_over, mut down_over) = (false, false);
    let end = loop {
        if up_over && down_over {
            return;
        }
        let end = tokio::select! {
            _ = rules.wait_for(|rules| rules.reset) => {
                followed.note_trouble();
                break End::Broken;
            }
            end = &mut up, if !up_over => { up_over = true; end }
            end = &mut down, if !down_over => { down_over = true; end }
        };
        if end != End::Over {
            break end;
        }
    };
    if end == End::Broken {
        reset(client);
        reset(server);
    }
}

/// What a direction's end means for the connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Nothing more comes this way; the other way goes on.
    Over,
    /// Both sides are closed.
    Close,
    /// Both sides are reset.
    Broken,
}

/// The socket's end is a reset: what is unsent is dropped.
fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger();
}

/// Forwards one direction to its end.
async fn pump(
    from: &TcpStream,
    to: &TcpStream,
    mut rules: watch::Receiver<Rules>,
    flow_of: fn(&Rules) -> Flow,
    followed: &Followed,
) -> End {
    let mut line = Line::default();
    let mut flow = flow_of(&rules.borrow_and_update());
    let mut left = truncated(flow);
    let mut ended = false;
    loop {
        let due = line.due();
        tokio::select! {
            changed = rules.changed() => {
                if changed.is_err() { return End::Close }
                let now = flow_of(&rules.borrow_and_update());
                if now != flow { (flow, left) = (now, truncated(now)); }
            }
            () = async { sleep_until(due.unwrap_or_else(Instant::now)).await }, if due.is_some() => {
                for bytes in line.take_due() {
                    if !write_all(to, &bytes).await { return End::Broken }
                }
                if line.is_empty() && ended {
                    shut(to);
                    return End::Over;
                }
            }
            read = read_some(from), if !ended && line.bytes < HELD_MAX => {
                let Some(mut bytes) = read else { return End::Broken };
                line.lost |= flow == Flow::Discard;
                if flow != Flow::Pass && !std::mem::replace(&mut line.troubled, true) {
                    followed.note_trouble();
                }
                ended = bytes.is_empty();
                if line.lost {
                    // A silent cut drops what closes a connection, too.
                    if ended { return End::Over }
                    continue;
                }
                if let Some(left) = &mut left {
                    bytes.truncate(usize::try_from(*left).unwrap_or(usize::MAX));
                    *left -= bytes.len() as u64;
                    let over = *left == 0;
                    if !write_all(to, &bytes).await { return End::Broken }
                    if over { return End::Close }
                } else if ended && line.is_empty() {
                    shut(to);
                    return End::Over;
                } else if !ended {
                    let wait = if let Flow::Delay(wait) = flow { wait } else { Duration::ZERO };
                    if wait.is_zero() && line.is_empty() {
                        if !write_all(to, &bytes).await { return End::Broken }
                    } else {
                        line.push(bytes, Instant::now() + wait);
                    }
                }
            }
        }
    }
}

fn truncated(flow: Flow) -> Option<u64> {
    if let Flow::Truncate(bytes) = flow { Some(bytes) } else { None }
}

/// Bytes on their way in one direction.
#[derive(Default)]
struct Line {
    held: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    /// Something was thrown away: nothing that follows would make sense to the receiver.
    lost: bool,
    troubled: bool,
}

impl Line {
    fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    fn due(&self) -> Option<Instant> {
        self.held.front().map(|(due, _)| *due)
    }

    fn push(&mut self, bytes: Vec<u8>, due: Instant) {
        // Never before what was sent earlier.
        let due = self.held.back().map_or(due, |(last, _)| due.max(*last));
        self.bytes += bytes.len();
        self.held.push_back((due, bytes));
    }

    fn take_due(&mut self) -> Vec<Vec<u8>> {
        let now = Instant::now();
        let mut taken = Vec::new();
        while let Some((_, bytes)) = self.held.pop_front_if(|(due, _)| *due <= now) {
            self.bytes -= bytes.len();
            taken.push(bytes);
        }
        taken
    }
}

/// Empty at the end of the stream; `None` when the connection is broken.
async fn read_some(from: &TcpStream) -> Option<Vec<u8>> {
    let mut buffer = vec![0; CHUNK];
    loop {
        from.readable().await.ok()?;
        match from.try_read(&mut buffer) {
            Ok(read) => {
                buffer.truncate(read);
                return Some(buffer);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return None,
        }
    }
}

async fn write_all(to: &TcpStream, mut bytes: &[u8]) -> bool {
    while !bytes.is_empty() {
        if to.writable().await.is_err() {
            return false;
        }
        match to.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return false,
        }
    }
    true
}

/// Says that no more bytes follow.
fn shut(to: &TcpStream) {
    if let Ok(copy) = to.as_fd().try_clone_to_owned() {
        let _ = std::net::TcpStream::from(copy).shutdown(Shutdown::Write);
    }
}
