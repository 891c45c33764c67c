//! Name resolver of the HTTP client, which returns only addresses that the outbound policy permits.
//!
//! The client connects to the addresses that were checked, without resolving the name again. So DNS rebinding, a name
//! whose addresses change in between, has no effect. Each provider has its own resolver threads: a host whose name
//! server does not respond delays no other provider.

use std::error::Error;
use std::fs::File;
use std::future::Future;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use std::{io, vec};

use hyper_util::client::legacy::connect::dns::Name;
use tower::Service;

use super::outbound::AddressRule;
use super::secret_files::BlockingThreads;
use crate::domain::local_fault::LocalFault;

/// Longest wait for the addresses of a name: the longest time for a whole connection.
const RESOLVE_MAX: Duration = Duration::from_secs(5);
/// File descriptors that the machine's resolver may need at once: its databases, a name server, a local daemon.
const RESOLVER_FILE_DESCRIPTORS: usize = 4;

/// The policy permits no address of the name.
#[derive(Debug, thiserror::Error)]
#[error("the host name has only addresses that outbound.allow does not permit")]
pub struct AddressRefused;

/// The machine's resolver returned no address.
#[derive(Debug, thiserror::Error)]
#[error("the host name cannot be resolved")]
pub struct NameUnresolved(#[source] io::Error);

/// Source of the addresses of a name. It may block.
type ResolveFn = dyn Fn(&str) -> io::Result<Vec<SocketAddr>> + Send + Sync;

/// The machine's own resolver.
fn resolve_with_system(name: &str) -> io::Result<Vec<SocketAddr>> {
    // Port 0: the client replaces it by the URL's port.
    Ok((name, 0).to_socket_addrs().map_err(local_fault_or)?.collect())
}

/// Detects a lack of file descriptors. The C library does not report that it could open no file or socket: it returns
/// the error for a name without addresses.
fn local_fault_or(error: io::Error) -> io::Error {
    let opened: io::Result<Vec<File>> = (0..RESOLVER_FILE_DESCRIPTORS).map(|_| File::open("/dev/null")).collect();
    opened.err().as_ref().and_then(LocalFault::from_io_error).map_or(error, io::Error::other)
}

/// A resolver behind an [`AddressRule`].
#[derive(Clone)]
pub struct GuardedResolver {
    rule: AddressRule,
    threads: BlockingThreads,
    resolve_fn: Arc<ResolveFn>,
}

type ResolvedAddresses = vec::IntoIter<SocketAddr>;
type ResolveError = Box<dyn Error + Send + Sync>;

impl GuardedResolver {
    pub fn system(rule: AddressRule) -> Self {
        Self { rule, threads: BlockingThreads::new(RESOLVE_MAX), resolve_fn: Arc::new(resolve_with_system) }
    }

    async fn resolve(self, name: &str) -> Result<ResolvedAddresses, ResolveError> {
        let (resolve, name) = (self.resolve_fn, name.to_owned());
        let found = self.threads.run(move || resolve(&name)).await.flatten().map_err(NameUnresolved)?.into_iter();
        let permitted: Vec<SocketAddr> = found.filter(|address| self.rule.permits(address.ip())).collect();
        if permitted.is_empty() {
            return Err(AddressRefused.into());
        }
        Ok(permitted.into_iter())
    }
}

impl Service<Name> for GuardedResolver {
    type Response = ResolvedAddresses;
    type Error = ResolveError;
    type Future = Pin<Box<dyn Future<Output = Result<ResolvedAddresses, ResolveError>> + Send>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), ResolveError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let resolver = self.clone();
        Box::pin(async move { resolver.resolve(name.as_str()).await })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_permitted_addresses_are_returned() {
        let resolve = |rule| GuardedResolver::system(rule).resolve("localhost");
        let public = AddressRule::Public { loopback: false, networks: vec![] };
        let refused = resolve(public).await.map(Iterator::count).unwrap_err();
        assert!(refused.is::<AddressRefused>(), "{refused}");
        let found: Vec<SocketAddr> = resolve(AddressRule::LoopbackOnly).await.unwrap().collect();
        assert!(!found.is_empty() && found.iter().all(|address| address.ip().is_loopback()));
    }

    fn hangs_for_one(name: &str) -> io::Result<Vec<SocketAddr>> {
        if name != "hangs.test" {
            return resolve_with_system(name);
        }
        loop {
            std::thread::park();
        }
    }

    #[tokio::test]
    async fn hanging_host_does_not_block_other_hosts() {
        let resolver = |within| GuardedResolver {
            rule: AddressRule::LoopbackOnly,
            threads: BlockingThreads::new(within),
            resolve_fn: Arc::new(hangs_for_one),
        };
        let (hangs, others) = (resolver(Duration::from_millis(50)), resolver(Duration::MAX));
        let hung = futures_util::future::join_all((0..20).map(|_| hangs.clone().resolve("hangs.test"))).await;
        for error in hung.into_iter().map(|end| end.map(Iterator::count).unwrap_err()) {
            let NameUnresolved(error) = *error.downcast().unwrap();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
        assert!(others.resolve("localhost").await.unwrap().count() > 0);
    }

    use std::collections::VecDeque;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use crate::domain::provider::ProviderName;
    use crate::provider::http::classify::ResponseBody;
    use crate::provider::http::client::{ClientSettings, ConnectionReuse};
    use crate::provider::http::client::{HttpClient, PreparedRequest};
    use crate::provider::http::failure::RequestFailure;
    use crate::provider::http::failure::UnexpectedResponseLog;
    use crate::provider::http::outbound::{OutboundPolicy, OutboundTarget};

    /// Responds with the address that it was reached at; each connection serves `requests` requests.
    async fn answering(listener: TcpListener, requests: usize) {
        let at = listener.local_addr().unwrap().ip().to_string();
        while let Ok((mut stream, _)) = listener.accept().await {
            for left in (0..requests).rev() {
                let mut request = [0; 1_024];
                if stream.read(&mut request).await.unwrap_or(0) == 0 {
                    break;
                }
                let option = if left == 0 { "close" } else { "keep-alive" };
                let head = format!("HTTP/1.1 200 OK\r\nconnection: {option}\r\ncontent-length: {}\r\n\r\n", at.len());
                stream.write_all(format!("{head}{at}").as_bytes()).await.unwrap();
            }
        }
    }

    /// Servers at 127.0.0.1 and 127.0.0.2, and a client that resolves their name by `resolve_fn`.
    async fn client_with(
        resolve_fn: Arc<ResolveFn>,
        rule: AddressRule,
        requests: usize,
    ) -> (HttpClient, OutboundTarget) {
        let first = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = first.local_addr().unwrap().port();
        let second = TcpListener::bind(("127.0.0.2", port)).await.unwrap();
        tokio::spawn(answering(first, requests));
        tokio::spawn(answering(second, requests));
        let allow = OutboundPolicy::parse(&[format!("http://pay.example:{port}")]).unwrap();
        let target = allow.admit(&format!("http://pay.example:{port}/")).unwrap();
        let reuse = ConnectionReuse { is_allowed: true, max_age: Duration::from_millis(300) };
        let resolver = GuardedResolver { rule, threads: BlockingThreads::new(RESOLVE_MAX), resolve_fn };
        let settings = ClientSettings {
            timeout: Duration::from_secs(5),
            reuse,
            header_names: Arc::default(),
            response_log: Arc::new(UnexpectedResponseLog::new(ProviderName::new("acme").unwrap())),
        };
        (HttpClient::with_resolver(&target, resolver, settings).unwrap(), target)
    }

    /// The address that a request came to, or why it was not sent.
    async fn reached((client, target): &(HttpClient, OutboundTarget)) -> String {
        let (method, headers) = (hyper::Method::GET, hyper::HeaderMap::new());
        let outgoing = PreparedRequest { method, target: Arc::new(target.clone()), headers, body: None };
        match client.exchange(outgoing).await {
            Ok(answered) => {
                let ResponseBody::Whole(body) = answered.response.body.clone() else {
                    panic!("{:?}", answered.response)
                };
                client.release_connection(*answered, None);
                String::from_utf8(body).unwrap()
            }
            Err(RequestFailure::NotSent(cause)) => cause,
            Err(other) => panic!("{other:?}"),
        }
    }

    /// DNS rebinding: 127.0.0.1 stands for an allowed address, 127.0.0.2 for one in our network.
    #[tokio::test]
    async fn rebound_name_is_checked_at_each_resolution() {
        let answers = [vec!["127.0.0.1"], vec!["127.0.0.2"], vec!["127.0.0.2", "127.0.0.1"], vec!["::ffff:127.0.0.2"]];
        let rule = AddressRule::Public { loopback: false, networks: vec!["127.0.0.1/32".parse().unwrap()] };
        let answers = Mutex::new(VecDeque::from(answers));
        let rebinding = move |_: &str| {
            let answer = answers.lock().unwrap().pop_front().expect("asked once per connection");
            Ok(answer.into_iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 0)).collect())
        };
        let client = client_with(Arc::new(rebinding), rule, 1).await;
        let mut addresses = Vec::new();
        for _ in 0..4 {
            addresses.push(reached(&client).await);
        }
        let refused = AddressRefused.to_string();
        assert_eq!(addresses, ["127.0.0.1", &refused, "127.0.0.1", &refused]);
    }

    #[tokio::test]
    async fn steady_traffic_follows_a_changed_address() {
        let has_moved = Arc::new(AtomicBool::new(false));
        let moved = Arc::clone(&has_moved);
        let moving = move |_: &str| {
            let last = if moved.load(Ordering::SeqCst) { 2 } else { 1 };
            Ok(vec![SocketAddr::from(([127, 0, 0, last], 0))])
        };
        let client = client_with(Arc::new(moving), AddressRule::Any, usize::MAX).await;
        assert_eq!(reached(&client).await, "127.0.0.1");
        has_moved.store(true, Ordering::SeqCst);
        // Never idle, and the old server never closes.
        let following = async {
            while reached(&client).await != "127.0.0.2" {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), following).await.expect("the new address is called");
    }
}
