//! Validated keys about people: the users of the ops server, the authenticating proxy before it, and the token's role.
//!
//! A user's password is a reference, `env:NAME` or `file:/PATH`, never a value. It is resolved when the server starts.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::config::validated::KeyValidator;
use crate::domain::person::Role;
use crate::provider::secret_grants::{SecretReference, SecretReferenceError};

/// Name of the identity that `ops.token` gives, so that no user has it.
pub const TOKEN_NAME: &str = "token";
/// Longest name of a user, in characters.
pub const NAME_CHARS_MAX: usize = 64;
/// Headers with a meaning of their own, which no proxy may use for a person.
const TAKEN_HEADERS: [&str; 10] = [
    "accept",
    "authorization",
    "connection",
    "content-length",
    "content-type",
    "cookie",
    "host",
    "origin",
    "sec-fetch-site",
    "user-agent",
];
/// In `ops.proxy_roles`: everyone that the proxy lets through.
pub const EVERYONE: &str = "*";

/// Who may use the ops server, beside the holders of `ops.token`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeopleConfig {
    pub users: Vec<UserEntry>,
    pub proxy: Option<ProxyConfig>,
    pub token_role: TokenRole,
}

impl PeopleConfig {
    /// Whether people are distinguished, so that the audit names role and path of each.
    pub fn are_configured(&self) -> bool {
        *self != Self::default()
    }
}

/// The role of a program with `ops.token`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRole(pub Role);

impl Default for TokenRole {
    fn default() -> Self {
        Self(Role::Admin)
    }
}

/// One entry of `ops.users`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserEntry {
    pub name: String,
    pub role: Role,
    /// The source of the password's Argon2 hash, or of the password.
    pub reference: SecretReference,
}

impl UserEntry {
    /// Parses `NAME:ROLE:REFERENCE`.
    fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.splitn(3, ':');
        let (Some(name), Some(role), Some(reference)) = (parts.next(), parts.next(), parts.next()) else {
            return Err("an entry has no name, role and reference".to_owned());
        };
        if !is_user_name(name) {
            return Err(format!("a name is not 1 to {NAME_CHARS_MAX} of A-Z a-z 0-9 . _ + @ -, or is `{TOKEN_NAME}`"));
        }
        let role = Role::from_name(role).ok_or_else(|| format!("the role of `{name}` is none of {}", role_names()))?;
        let reference = SecretReference::parse(reference).map_err(|error| match error {
            SecretReferenceError::ConfigVariable => format!("the variable of `{name}` sets a key of this program"),
            SecretReferenceError::RelativePath => format!("the path of `{name}` is relative"),
            SecretReferenceError::Other => format!("the password of `{name}` is not env:NAME or file:/PATH"),
        })?;
        Ok(Self { name: name.to_owned(), role, reference })
    }
}

/// An authenticating proxy, such as oauth2-proxy, that names its user in a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyConfig {
    /// Lower case.
    pub user_header: String,
    /// Header with the user's groups, separated by commas; lower case.
    pub role_header: Option<String>,
    pub roles: Vec<GroupRole>,
    /// The only addresses whose headers count.
    pub trusted: Vec<IpNet>,
}

impl ProxyConfig {
    /// Whether a range has more than 65536 addresses, more than a proxy's network needs.
    pub fn trusts_a_wide_range(&self) -> bool {
        self.trusted.iter().any(|network| network.max_prefix_len() - network.prefix_len() > 16)
    }
}

/// The role of a group's members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRole {
    /// Or [`EVERYONE`].
    pub group: String,
    pub role: Role,
}

pub fn role_names() -> String {
    Role::ALL.map(Role::name).join(", ")
}

fn is_user_name(name: &str) -> bool {
    (1..=NAME_CHARS_MAX).contains(&name.len())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "._+@-".contains(c))
        && !name.eq_ignore_ascii_case(TOKEN_NAME)
}

/// Validates all keys about people; `None` if one has a problem.
pub fn validate(keys: &mut KeyValidator<'_>) -> Option<PeopleConfig> {
    let token_role = keys.choice("ops.token_role", &Role::ALL.map(|role| (role.name(), role)));
    let (users, proxy) = (validate_users(keys), validate_proxy(keys));
    Some(PeopleConfig { users: users?, proxy: proxy?, token_role: TokenRole(token_role?) })
}

fn validate_users(keys: &mut KeyValidator<'_>) -> Option<Vec<UserEntry>> {
    const KEY: &str = "ops.users";
    let fix =
        "Write each as NAME:ROLE:env:VARIABLE or NAME:ROLE:file:/PATH, like alice:operator:file:/run/secrets/alice";
    let (mut users, mut problems) = (Vec::<UserEntry>::new(), Vec::new());
    for text in keys.texts(KEY) {
        match UserEntry::parse(&text) {
            Ok(user) if users.iter().any(|known| known.name.eq_ignore_ascii_case(&user.name)) => {
                problems.push(format!("`{}` is there twice", user.name));
            }
            Ok(user) => users.push(user),
            Err(problem) => problems.push(problem),
        }
    }
    if problems.is_empty() {
        return Some(users);
    }
    keys.add(KEY, problems.join("; "), fix);
    None
}

/// `Some(None)`: there is no proxy.
fn validate_proxy(keys: &mut KeyValidator<'_>) -> Option<Option<ProxyConfig>> {
    let user_header = header_name("ops.proxy_user_header", keys);
    let role_header = header_name("ops.proxy_role_header", keys);
    let (trusted, roles) = (validate_trusted(keys), validate_roles(keys));
    let (user_header, role_header, trusted, roles) = (user_header?, role_header?, trusted?, roles?);
    let Some(user_header) = user_header else {
        if role_header.is_some() || !trusted.is_empty() || !roles.is_empty() {
            let fix = "Set it to the header in which the proxy names its user, like x-forwarded-user";
            keys.add("ops.proxy_user_header", "is empty, and other keys of the proxy are set", fix);
            return None;
        }
        return Some(None);
    };
    let mut problem = None;
    if trusted.is_empty() {
        problem =
            Some(("ops.proxy_trusted", "is empty, so no request could use the header", "Name the proxy's address"));
    } else if roles.is_empty() {
        let fix = "Write each as GROUP:ROLE, or `*:viewer` for everyone that the proxy lets through";
        problem = Some(("ops.proxy_roles", "is empty, so no user would have a role", fix));
    } else if role_header.is_none() && roles.iter().any(|entry| entry.group != EVERYONE) {
        let fix = "Set it to the header with the user's groups, like x-forwarded-groups";
        problem = Some(("ops.proxy_role_header", "is empty, and ops.proxy_roles names groups", fix));
    } else if role_header.as_ref() == Some(&user_header) {
        problem = Some(("ops.proxy_role_header", "is the header of the user", "Name another header"));
    }
    match problem {
        Some((key, what, fix)) => {
            keys.add(key, what, fix);
            None
        }
        None => Some(Some(ProxyConfig { user_header, role_header, roles, trusted })),
    }
}

/// A header's name in lower case; `Some(None)`: none is set.
fn header_name(key: &'static str, keys: &mut KeyValidator<'_>) -> Option<Option<String>> {
    let name = keys.text(key).to_ascii_lowercase();
    if name.is_empty() {
        return Some(None);
    }
    let fits = name.len() <= 64 && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-');
    if !fits || TAKEN_HEADERS.contains(&name.as_str()) {
        let fix = "Write 1 to 64 of A-Z a-z 0-9 -, like x-forwarded-user";
        keys.add(key, "is no name of a header that a proxy can use for a person", fix);
        return None;
    }
    Some(Some(name))
}

fn validate_trusted(keys: &mut KeyValidator<'_>) -> Option<Vec<IpNet>> {
    const KEY: &str = "ops.proxy_trusted";
    let texts = keys.texts(KEY);
    let parse = |text: &String| {
        let address = || text.parse::<IpAddr>().ok().map(|address| IpNet::from(address.to_canonical()));
        text.parse::<IpNet>().ok().or_else(address).filter(|network| network.prefix_len() > 0)
    };
    let trusted: Vec<IpNet> = texts.iter().filter_map(parse).collect();
    if trusted.len() == texts.len() {
        return Some(trusted);
    }
    keys.add(KEY, "has an entry that is no address, or is every address", "Write each like 10.0.0.5 or 10.0.4.0/24");
    None
}

fn validate_roles(keys: &mut KeyValidator<'_>) -> Option<Vec<GroupRole>> {
    const KEY: &str = "ops.proxy_roles";
    let texts = keys.texts(KEY);
    let parse = |text: &String| {
        let (group, role) = text.rsplit_once(':')?;
        let role = Role::from_name(role.trim())?;
        let group = group.trim();
        (!group.is_empty()).then(|| GroupRole { group: group.to_owned(), role })
    };
    let roles: Vec<GroupRole> = texts.iter().filter_map(parse).collect();
    if roles.len() == texts.len() {
        return Some(roles);
    }
    let fix = "Write each as GROUP:ROLE, like payments-operators:operator, or `*:viewer` for everyone";
    keys.add(KEY, format!("has an entry without a group, or with a role that is none of {}", role_names()), fix);
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load;

    fn loaded(sets: &[&str]) -> Result<PeopleConfig, Vec<String>> {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        load(None, [], &sets).map(|config| config.ops.people).map_err(|problems| problems.lines())
    }

    #[test]
    fn people_are_read_from_lists() {
        assert_eq!(loaded(&[]).unwrap(), PeopleConfig::default());
        let people = loaded(&[
            "ops.users=alice:operator:file:/run/secrets/alice, bob@corp.example:viewer:env:BOB_HASH",
            "ops.proxy_user_header=X-Forwarded-User",
            "ops.proxy_role_header=x-forwarded-groups",
            "ops.proxy_roles=/payments:ops:operator, *:viewer",
            "ops.proxy_trusted=10.0.4.7, 10.0.5.0/24, ::ffff:10.0.6.1",
            "ops.token_role=viewer",
        ]);
        let people = people.unwrap();
        let users: Vec<_> = people.users.iter().map(|user| (user.name.as_str(), user.role)).collect();
        assert_eq!(users, [("alice", Role::Operator), ("bob@corp.example", Role::Viewer)]);
        assert_eq!(people.users[1].reference, SecretReference::Env("BOB_HASH".to_owned()));
        let proxy = people.proxy.clone().unwrap();
        assert_eq!(proxy.user_header, "x-forwarded-user");
        assert_eq!(proxy.roles[0], GroupRole { group: "/payments:ops".to_owned(), role: Role::Operator });
        assert!(proxy.trusted[2].contains(&"10.0.6.1".parse::<IpAddr>().unwrap()));
        assert_eq!(people.token_role, TokenRole(Role::Viewer));
        assert!(people.are_configured() && !PeopleConfig::default().are_configured());
    }

    #[test]
    fn invalid_people_are_problems() {
        let proxy = |key: &'static str| {
            let all = ["ops.proxy_user_header=x-user", "ops.proxy_roles=*:viewer", "ops.proxy_trusted=10.0.0.1"];
            [&all[..], &[key]].concat()
        };
        assert!(loaded(&proxy("ops.token_role=admin")).is_ok());
        for (sets, words) in [
            (vec!["ops.users=alice:operator"], "no name, role and reference"),
            (vec!["ops.users=alice:root:env:A"], "none of viewer, operator, admin"),
            (vec!["ops.users=alice:viewer:hunter2hunter2"], "is not env:NAME or file:/PATH"),
            (vec!["ops.users=alice:viewer:file:alice"], "is relative"),
            (vec!["ops.users=alice:viewer:env:SLUICEGATE_OPS__TOKEN"], "sets a key of this program"),
            (vec!["ops.users=a b:viewer:env:A"], "a name is not"),
            (vec!["ops.users=Token:viewer:env:A"], "is `token`"),
            (vec!["ops.users=alice:viewer:env:A, Alice:admin:env:B"], "is there twice"),
            (vec!["ops.token_role=root"], "Use one of: viewer, operator, admin"),
            (vec!["ops.proxy_trusted=10.0.0.1"], "ops.proxy_user_header"),
            (vec!["ops.proxy_user_header=x-user", "ops.proxy_roles=*:viewer"], "ops.proxy_trusted"),
            (vec!["ops.proxy_user_header=x-user", "ops.proxy_trusted=10.0.0.1"], "ops.proxy_roles"),
            (proxy("ops.proxy_roles=staff:viewer"), "ops.proxy_role_header"),
            (proxy("ops.proxy_role_header=X-User"), "is the header of the user"),
            (proxy("ops.proxy_user_header=Authorization"), "ops.proxy_user_header"),
            (proxy("ops.proxy_user_header=x user"), "ops.proxy_user_header"),
            (proxy("ops.proxy_trusted=0.0.0.0/0"), "ops.proxy_trusted"),
            (proxy("ops.proxy_trusted=proxy.internal"), "ops.proxy_trusted"),
            (proxy("ops.proxy_roles=staff"), "ops.proxy_roles"),
        ] {
            let problems = loaded(&sets).unwrap_err();
            assert!(problems.iter().any(|problem| problem.contains(words)), "{sets:?}: {problems:?}");
            assert!(problems.iter().all(|problem| !problem.contains("hunter2")), "{problems:?}");
        }
    }

    #[test]
    fn people_replace_the_token_off_loopback() {
        let listen = "ops.listen=0.0.0.0:9464";
        assert!(loaded(&[listen]).is_err());
        assert!(loaded(&[listen, "ops.users=alice:viewer:env:A"]).is_ok());
        assert!(loaded(&[listen, "ops.token_role=viewer"]).is_err());
    }
}
