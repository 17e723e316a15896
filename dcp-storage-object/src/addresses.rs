//! The addresses that connections may have.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::io;
use std::sync::Arc;

use dashmap::DashSet;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use crate::retry::random;

/// The names to which only a redirect has led. No address of the machine or of its links is one of
/// theirs.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses(Arc<DashSet<String>>);

impl Addresses {
    /// Notes that a redirect led to a host.
    pub(crate) fn note_redirect_to(&self, host: &str) {
        self.0.insert(host.to_owned());
    }

    fn allow(&self, host: &str, address: IpAddr) -> bool {
        Reach::of(address) == Reach::Beyond || !self.0.contains(host)
    }
}

/// Resolves names, in any order so that the addresses of a store share its load.
pub(crate) struct Resolver {
    pub(crate) addresses: Addresses,
    pub(crate) is_shuffled: bool,
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let (addresses, is_shuffled) = (self.addresses.clone(), self.is_shuffled);
        Box::pin(async move {
            let found = allowed(name.as_str(), &addresses, is_shuffled).await?;
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

/// The addresses of a name.
pub(crate) async fn resolved(host: &str) -> io::Result<Vec<SocketAddr>> {
    Ok(tokio::net::lookup_host((host, 0)).await?.collect())
}

async fn allowed(
    host: &str,
    addresses: &Addresses,
    is_shuffled: bool,
) -> io::Result<Vec<SocketAddr>> {
    let mut found = resolved(host).await?;
    let all = found.len();
    found.retain(|address| addresses.allow(host, address.ip()));
    if found.is_empty() && all > 0 {
        let reason = "a redirect leads to a name of this machine or of its link";
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    }
    if is_shuffled && !found.is_empty() {
        let by = random() % found.len() as u64;
        found.rotate_left(by as usize);
    }
    Ok(found)
}

/// The distance of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The machine itself.
    Machine,
    /// A link of the machine, where servers of credentials are.
    Link,
    /// Any other address.
    Beyond,
}

impl Reach {
    pub(crate) fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => Self::of_v4(address),
            IpAddr::V6(address) => match address.to_ipv4() {
                // ::1 has the form of an IPv4 address too.
                _ if address == Ipv6Addr::LOCALHOST => Self::Machine,
                Some(address) => Self::of_v4(address),
                None if address.is_unicast_link_local() || address == CREDENTIALS_V6 => Self::Link,
                None => Self::Beyond,
            },
        }
    }

    fn of_v4(address: Ipv4Addr) -> Self {
        match address {
            _ if address.is_loopback() || address.octets()[0] == 0 => Self::Machine,
            _ if address.is_link_local() => Self::Link,
            _ => Self::Beyond,
        }
    }

    /// The reach of a host that is an address or `localhost`; `None` for another name.
    pub(crate) fn of_host(host: &str) -> Option<Self> {
        let address = host.trim_start_matches('[').trim_end_matches(']');
        if let Ok(address) = address.parse() {
            return Some(Self::of(address));
        }
        let host = host.trim_end_matches('.');
        (host == "localhost" || host.ends_with(".localhost")).then_some(Self::Machine)
    }
}

/// The address from which instances of AWS have their credentials.
const CREDENTIALS_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_name_that_only_a_redirect_has_is_no_address_of_this_machine() {
        let addresses = Addresses::default();
        assert!(!allowed("localhost", &addresses, true).await.unwrap().is_empty());
        addresses.note_redirect_to("localhost");
        let error = allowed("localhost", &addresses, true).await.unwrap_err();
        assert!(error.to_string().contains("redirect"), "{error}");
    }
}
