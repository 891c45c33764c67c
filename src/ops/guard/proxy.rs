//! The authenticating proxy: it names its user in a header, which counts from the proxy's addresses alone.
//!
//! From any other address a request with such a header is refused, even with a right token: it is a forgery, or the
//! list of trusted addresses is wrong. A header that could be read in two ways is refused too.

use std::net::IpAddr;

use axum::http::{HeaderMap, StatusCode};

use super::Refusal;
use crate::config::people::{EVERYONE, NAME_CHARS_MAX, ProxyConfig};
use crate::domain::person::{Identity, IdentityPath, Role};

/// The user that the proxy names; `None`: the request has no header of the proxy.
pub fn identify(proxy: &ProxyConfig, headers: &HeaderMap, client: IpAddr) -> Result<Option<Identity>, Refusal> {
    let names = || [Some(&proxy.user_header), proxy.role_header.as_ref()].into_iter().flatten();
    let Some(given) = names().find(|name| headers.contains_key(name.as_str())) else { return Ok(None) };
    let client = client.to_canonical();
    if !proxy.trusted.iter().any(|network| network.contains(&client)) {
        let words = format!("header `{given}` is accepted from the addresses of ops.proxy_trusted only");
        return Err(Refusal::new(StatusCode::FORBIDDEN, words));
    }
    if let Some(name) = names().find(|name| headers.get_all(name.as_str()).iter().nth(1).is_some()) {
        return Err(ambiguous(format!("the request has more than one header `{name}`: let the proxy replace it")));
    }
    if headers.contains_key("authorization") {
        let words =
            format!("header `{given}` and header `authorization` name two identities: let the proxy remove one");
        return Err(ambiguous(words));
    }
    let user = headers.get(&proxy.user_header).and_then(|value| value.to_str().ok()).map(str::trim).unwrap_or_default();
    let is_name = (1..=NAME_CHARS_MAX).contains(&user.len())
        && user.chars().all(|c| c.is_ascii_alphanumeric() || "._+@\\|:/-".contains(c));
    if !is_name {
        let words = format!("header `{}` must name one user, with 1 to {NAME_CHARS_MAX} characters", proxy.user_header);
        return Err(ambiguous(words));
    }
    let Some(role) = role(proxy, headers) else {
        let words = format!("no group of user `{user}` has a role: see ops.proxy_roles");
        return Err(Refusal::new(StatusCode::FORBIDDEN, words));
    };
    Ok(Some(Identity { name: user.to_owned(), role, path: IdentityPath::Proxy }))
}

fn ambiguous(words: String) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, words)
}

/// The highest role of the user's groups.
fn role(proxy: &ProxyConfig, headers: &HeaderMap) -> Option<Role> {
    let header = proxy.role_header.as_ref().and_then(|name| headers.get(name)).and_then(|value| value.to_str().ok());
    let groups: Vec<&str> = header.unwrap_or_default().split(',').map(str::trim).collect();
    let entries = proxy.roles.iter().filter(|entry| entry.group == EVERYONE || groups.contains(&entry.group.as_str()));
    entries.map(|entry| entry.role).max()
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;
    use crate::config::people::GroupRole;

    const OPERATORS: &str = "payments-operators";

    pub fn proxy() -> ProxyConfig {
        let group = |group: &str, role| GroupRole { group: group.to_owned(), role };
        ProxyConfig {
            user_header: "x-forwarded-user".to_owned(),
            role_header: Some("x-forwarded-groups".to_owned()),
            roles: vec![group(OPERATORS, Role::Operator), group("admins", Role::Admin), group("staff", Role::Viewer)],
            trusted: vec!["10.0.4.0/24".parse().unwrap(), "fd00:4::/64".parse().unwrap()],
        }
    }

    fn identified(client: &str, headers: &[(&str, &str)]) -> Result<Option<(String, Role)>, u16> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let name: HeaderName = name.parse().unwrap();
            map.append(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        let identity = identify(&proxy(), &map, client.parse().unwrap());
        identity.map(|one| one.map(|one| (one.name, one.role))).map_err(|refusal| refusal.status.as_u16())
    }

    #[test]
    fn headers_count_from_trusted_addresses_only() {
        let (user, groups) = (("x-forwarded-user", "alice"), ("x-forwarded-groups", OPERATORS));
        let alice = Ok(Some(("alice".to_owned(), Role::Operator)));
        for client in ["10.0.4.9", "::ffff:10.0.4.9", "fd00:4::1"] {
            assert_eq!(identified(client, &[user, groups]), alice, "{client}");
            assert_eq!(identified(client, &[]), Ok(None), "{client}");
        }
        for client in ["10.0.5.9", "127.0.0.1", "::1", "fd00:5::1", "::ffff:10.0.5.9"] {
            for headers in [&[user, groups][..], &[user], &[groups], &[("X-Forwarded-User", "")]] {
                assert_eq!(identified(client, headers), Err(403), "{client} {headers:?}");
            }
            assert_eq!(identified(client, &[]), Ok(None), "{client}");
        }
    }

    #[test]
    fn ambiguous_headers_are_refused() {
        let (user, groups) = (("x-forwarded-user", "alice"), ("x-forwarded-groups", OPERATORS));
        for headers in [
            &[user, user, groups][..],
            &[user, ("x-forwarded-user", "bob"), groups],
            &[user, groups, ("x-forwarded-groups", "admins")],
            &[("x-forwarded-user", "alice, bob"), groups],
            &[("x-forwarded-user", ""), groups],
            &[("x-forwarded-user", "alice@page (admin"), groups],
            &[("x-forwarded-user", "ali\u{e7}e"), groups],
            &[("x-forwarded-user", &"a".repeat(65)), groups],
            &[groups],
            &[user, groups, ("authorization", "Bearer x")],
        ] {
            assert_eq!(identified("10.0.4.9", headers), Err(400), "{headers:?}");
        }
    }

    #[test]
    fn highest_role_of_the_groups_counts() {
        let role = |groups: &str| {
            let headers = [("x-forwarded-user", "alice"), ("x-forwarded-groups", groups)];
            identified("10.0.4.9", &headers).map(|one| one.map(|(_, role)| role))
        };
        assert_eq!(role("staff, admins,x"), Ok(Some(Role::Admin)));
        assert_eq!(role("staff"), Ok(Some(Role::Viewer)));
        for none in ["", "Admins", "admins2", "*"] {
            assert_eq!(role(none), Err(403), "{none}");
        }
        let everyone = vec![GroupRole { group: EVERYONE.to_owned(), role: Role::Viewer }];
        let proxy = ProxyConfig { role_header: None, roles: everyone, ..proxy() };
        let headers =
            HeaderMap::from_iter([(HeaderName::from_static("x-forwarded-user"), HeaderValue::from_static("a"))]);
        let identity = identify(&proxy, &headers, "10.0.4.9".parse().unwrap()).unwrap().unwrap();
        assert_eq!(identity.role, Role::Viewer);
    }
}
