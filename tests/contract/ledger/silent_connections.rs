//! PostgreSQL behind a network path that silently drops its connections, and PostgreSQL demoted to a standby.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;

use sluicegate::domain::backend_fault::BackendFault;
use sluicegate::ledger::LedgerError;
use sluicegate::ledger::database::Database;
use sqlx::Connection;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::*;

const PATIENCE: Duration = Duration::from_secs(90);

/// A `Sync` message alone: a client sends it only to check that the connection is alive.
/// <https://www.postgresql.org/docs/current/protocol-message-formats.html>
const SYNC: &[u8] = &[b'S', 0, 0, 0, 4];

/// A proxy in front of a server.
struct Way {
    address: SocketAddr,
    lost: watch::Sender<Lost>,
    target: watch::Sender<SocketAddr>,
}

/// What the proxy drops. A connection that has lost something passes nothing ever again, and stays open.
#[derive(Clone, Copy, PartialEq)]
enum Lost {
    Nothing,
    /// Everything from the next liveness check on.
    Pings,
    Everything,
}

impl Way {
    async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let way = Self {
            address: listener.local_addr().unwrap(),
            lost: watch::Sender::new(Lost::Nothing),
            target: watch::Sender::new(target),
        };
        let (lost, target) = (way.lost.subscribe(), way.target.subscribe());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let target = *target.borrow();
                tokio::spawn(pass(client, target, lost.clone()));
            }
        });
        way
    }
}

async fn pass(client: TcpStream, target: SocketAddr, mut lost: watch::Receiver<Lost>) {
    let server = TcpStream::connect(target).await.unwrap();
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let now = lost.clone();
    let is_lost = |bytes: &[u8]| bytes == SYNC && *now.borrow() == Lost::Pings;
    let both = async {
        tokio::join!(
            copy(&mut from_client, &mut to_server, is_lost),
            copy(&mut from_server, &mut to_client, |_| false)
        );
    };
    tokio::select! {
        biased;
        // Held open until the test ends.
        () = falls(&mut lost) => pending().await,
        () = both => {}
    }
}

async fn falls(lost: &mut watch::Receiver<Lost>) {
    if lost.wait_for(|lost| *lost == Lost::Everything).await.is_err() {
        pending().await
    }
}

async fn copy(
    from: &mut (impl AsyncReadExt + Unpin),
    to: &mut (impl AsyncWriteExt + Unpin),
    is_lost: impl Fn(&[u8]) -> bool,
) {
    let mut buffer = vec![0; 65_536];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        if is_lost(&buffer[..read]) {
            pending().await
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}

/// Address of a cluster, and the same URL with the port of a proxy.
fn by_way(url: &str, way: Option<SocketAddr>) -> (SocketAddr, String) {
    let mut parsed = url::Url::parse(url).unwrap();
    let direct = SocketAddr::new(parsed.host_str().unwrap().parse().unwrap(), parsed.port().unwrap());
    if let Some(way) = way {
        parsed.set_port(Some(way.port())).unwrap();
    }
    (direct, parsed.to_string())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_are_replaced() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let way = Way::to(by_way(&fixture.url, None).0).await;
    let database = Database::open(&by_way(&fixture.url, Some(way.address)).1, 4).unwrap();
    // Every connection is in use when the proxy drops everything.
    let busy = Arc::new(tokio::sync::Semaphore::new(0));
    let writers: Vec<_> = (0..16)
        .map(|writer| {
            let (ledger, busy) = (database.clone(), Arc::clone(&busy));
            tokio::spawn(async move {
                for number in 0.. {
                    let claimed = ledger.claim(&job(&format!("p{writer}-{number}")), hash(1), "worker-a").await;
                    match claimed {
                        Ok(_) => busy.add_permits(1),
                        Err(error) => return error,
                    }
                }
                unreachable!()
            })
        })
        .collect();
    busy.acquire_many(160).await.unwrap().forget();
    way.lost.send_replace(Lost::Everything);
    for writer in writers {
        let error = tokio::time::timeout(PATIENCE, writer).await.unwrap().unwrap();
        assert!(matches!(error, LedgerError::Unavailable(_)), "{error:?}");
    }
    way.lost.send_replace(Lost::Nothing);
    let back = async { while database.claim(&job("after"), hash(1), "worker-a").await.is_err() {} };
    tokio::time::timeout(PATIENCE, back).await.unwrap();
}

/// The response has arrived, and the connection is returning to the pool.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_silent_after_a_response_are_replaced() {
    let fixture = Fixture::migrated(Kind::Postgres).await;
    let way = Way::to(by_way(&fixture.url, None).0).await;
    let database = Database::open(&by_way(&fixture.url, Some(way.address)).1, 4).unwrap();
    way.lost.send_replace(Lost::Pings);
    let claimed = async |id: &str| database.claim(&job(id), hash(1), "worker-a").await.is_ok();
    // More claims than connections.
    let mut before = 0;
    for number in 0..5 {
        before += u32::from(claimed(&format!("before-{number}")).await);
    }
    assert!(before > 0, "no connection had a response before it fell silent");
    way.lost.send_replace(Lost::Nothing);
    let back = async { while !claimed("after").await {} };
    tokio::time::timeout(PATIENCE, back).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_to_a_demoted_primary_are_replaced() {
    let (demoted, primary) = (Postgres::start(), Fixture::migrated(Kind::Postgres).await);
    let name = url::Url::parse(&primary.url).unwrap().path().trim_start_matches('/').to_owned();
    let standby = Database::open(&demoted.create_database(&name), 1).unwrap();
    standby.migrate().await.unwrap();
    let way = Way::to(by_way(&demoted.url(&name), None).0).await;
    let database = Database::open(&by_way(&primary.url, Some(way.address)).1, 4).unwrap();
    let mut operator = sqlx::PgConnection::connect(&demoted.url(&name)).await.unwrap();
    let read_only = format!("ALTER DATABASE \"{name}\" SET default_transaction_read_only = on");
    sqlx::raw_sql(AssertSqlSafe(read_only)).execute(&mut operator).await.unwrap();
    // Enough concurrent claims that every connection is used.
    let claims = async || {
        let claim = |number: u32| {
            let ledger = database.clone();
            async move { ledger.claim(&job(&format!("p{number}")), hash(1), "worker-a").await }
        };
        futures_util::future::join_all((0..16).map(claim)).await
    };
    for error in claims().await.into_iter().map(Result::unwrap_err) {
        assert!(matches!(&error, LedgerError::CannotWrite(BackendFault::ReadOnly)), "{error:?}");
    }
    // From now on the name leads to the new primary.
    way.target.send_replace(by_way(&primary.url, None).0);
    let back = async { while claims().await.iter().any(Result::is_err) {} };
    tokio::time::timeout(PATIENCE, back).await.unwrap();
    assert_eq!(primary.one("SELECT count(*) FROM jobs").await, "16");
}
