//! A TCP proxy that fails as networks do: in one direction or both, silently or with a reset, late, or in mid-stream.
//!
//! It knows no protocol. Rules change while it runs, and each applies to one worker's connections to one peer.

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

/// Most bytes of one read.
const CHUNK: usize = 16 * 1024;
/// Delayed bytes that a direction holds before it stops reading.
const HELD_MAX: usize = 4 << 20;

/// Treatment of the bytes of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Pass,
    /// Bytes are read and dropped, and the sender does not notice. A connection that has lost bytes stays cut.
    Discard,
    /// Bytes are delivered in order, later by this time.
    Delay(Duration),
    /// Each connection passes this many more bytes in this direction; then both sides are closed.
    Truncate(u64),
}

/// Rules of one network path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    pub to_server: Flow,
    pub to_client: Flow,
    /// Every connection is reset (RST), including new ones.
    pub reset: bool,
}

impl Rules {
    pub const PASS: Self = Self { to_server: Flow::Pass, to_client: Flow::Pass, reset: false };
    pub const CUT: Self = Self { to_server: Flow::Discard, to_client: Flow::Discard, reset: false };
    pub const RESET: Self = Self { reset: true, ..Self::PASS };
}

/// The network path from one worker to one peer.
#[derive(Debug)]
pub struct Road {
    rules: watch::Sender<Rules>,
    /// Connections whose bytes were dropped, delayed or truncated, or that were reset.
    troubled: AtomicU64,
}

impl Road {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { rules: watch::Sender::new(Rules::PASS), troubled: AtomicU64::new(0) })
    }

    pub fn set(&self, rules: Rules) {
        self.rules.send_replace(rules);
    }

    /// No rule affects its bytes.
    pub fn passes(&self) -> bool {
        *self.rules.borrow() == Rules::PASS
    }

    /// Connections that a rule other than `Pass` affected.
    pub fn troubled(&self) -> u64 {
        self.troubled.load(Ordering::Relaxed)
    }
}

/// How to find a connection's path.
#[derive(Clone)]
pub enum Whose {
    Known(Arc<Road>),
    /// Found by the client's port; see [`crate::connection_owner`].
    Asked(Asking),
}

/// Paths of several clients that connect to one port.
#[derive(Clone)]
pub struct Asking {
    pub questions: mpsc::UnboundedSender<Question>,
    pub roads: Arc<Mutex<Vec<Arc<Road>>>>,
}

/// A client's port, and the channel for the index of its path.
pub type Question = (u16, oneshot::Sender<Option<usize>>);

impl Whose {
    /// No path has a rule that affects the first bytes of a connection.
    fn all_pass(&self) -> bool {
        let passes = |road: &Arc<Road>| *road.rules.borrow() == Rules::PASS;
        match self {
            Self::Known(road) => passes(road),
            Self::Asked(asking) => asking.roads.lock().unwrap().iter().all(passes),
        }
    }

    /// `None`: no worker owns the client's socket, or it is closed.
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

/// Listens on a free port, which it returns, and forwards to `target` until the runtime ends.
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

/// A connection's copy of its path's rules. It passes all bytes until the path is known.
struct Followed {
    rules: watch::Sender<Rules>,
    road: OnceLock<Arc<Road>>,
}

impl Followed {
    /// Updates the copy; never returns.
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
    // The look-up of the owner takes time, so a connection waits for it only if a path has a rule. Otherwise a slow
    // test process would itself be a fault.
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
    // Small responses must not wait for acknowledgements.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    tokio::select! {
        () = followed.follow(road) => {}
        () = connection(&client, &server, &followed) => {}
    }
}

/// Forwards both directions until the connection is closed.
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

/// Effect of a direction's end on the connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// This direction has ended; the other one continues.
    Over,
    /// Both sides are closed.
    Close,
    /// Both sides are reset.
    Broken,
}

/// Closes the socket with a reset, which drops unsent bytes.
fn reset(stream: &TcpStream) {
    let _ = stream.set_zero_linger();
}

/// Forwards one direction until it ends.
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
                    // A silent cut also drops the end of the stream.
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

/// Delayed bytes of one direction.
#[derive(Default)]
struct Line {
    held: VecDeque<(Instant, Vec<u8>)>,
    bytes: usize,
    /// Bytes were dropped, so the receiver could not interpret later ones.
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
        // No earlier than the bytes before it.
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

/// Empty at the end of the stream; `None` if the connection is broken.
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

/// Signals the end of the stream.
fn shut(to: &TcpStream) {
    if let Ok(copy) = to.as_fd().try_clone_to_owned() {
        let _ = std::net::TcpStream::from(copy).shutdown(Shutdown::Write);
    }
}
