//! Resolves names for the HTTP client and hands over only addresses that the outbound policy permits.
//!
//! Refuses to check and let somebody else resolve again: the addresses that were judged are the ones connected to, so a
//! name that changes its answer in between (DNS rebinding) gains nothing.

use std::net::SocketAddr;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use super::address::AddressRule;

/// Every address of the name is one that we do not connect to.
#[derive(Debug, thiserror::Error)]
#[error("the name leads only to addresses that outbound.allow does not permit")]
pub(super) struct AddressRefused;

/// The system's resolver behind an [`AddressRule`].
pub(super) struct GuardedResolver {
    pub(super) rule: AddressRule,
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let rule = self.rule.clone();
        Box::pin(async move {
            // Port 0: the client puts the URL's port in its place.
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let permitted: Vec<SocketAddr> = found.filter(|address| rule.permits(address.ip())).collect();
            if permitted.is_empty() {
                return Err(AddressRefused.into());
            }
            Ok(Box::new(permitted.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_permitted_addresses_are_handed_over() {
        let resolve = |rule| GuardedResolver { rule }.resolve("localhost".parse::<Name>().unwrap());
        let public = AddressRule::Public { loopback: false, networks: vec![] };
        let refused = resolve(public).await.map(Iterator::count).unwrap_err();
        assert!(refused.is::<AddressRefused>(), "{refused}");
        let found: Vec<SocketAddr> = resolve(AddressRule::LoopbackOnly).await.unwrap().collect();
        assert!(!found.is_empty() && found.iter().all(|address| address.ip().is_loopback()));
    }
}
