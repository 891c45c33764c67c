//! Validated keys about the callers of the ops server: named tokens, the authenticating proxy before it, and the role of
//! `ops.token`.
//!
//! A named token's secret is a reference, `env:NAME` or `file:/PATH`, never a value. It is read when the server starts.

use std::net::IpAddr;

use ipnet::IpNet;
use toml::{Table, Value};

use crate::config::validated::KeyValidator;
use crate::domain::person::Role;
use crate::domain::sensitive::secret::quote_if_safe;
use crate::provider::secret_grants::{SecretReference, SecretReferenceError};

/// Name of the identity that `ops.token` gives, so that no named token has it.
pub const TOKEN_NAME: &str = "token";
/// Longest name of a token, and of a proxy's user, in characters.
pub const NAME_CHARS_MAX: usize = 64;
/// Shortest token that other machines cannot guess, in characters.
pub const TOKEN_CHARS_MIN: usize = 32;
/// Fewest different characters of a token that other machines cannot guess.
pub const TOKEN_DISTINCT_CHARACTERS_MIN: usize = 8;
/// Headers with a meaning of their own, which no proxy may use for a person.
const TAKEN_HEADERS: [&str; 12] = [
    "accept",
    "authorization",
    "connection",
    "content-length",
    "content-type",
    "cookie",
    "host",
    "origin",
    "sec-fetch-dest",
    "sec-fetch-mode",
    "sec-fetch-site",
    "user-agent",
];
/// In `ops.proxy_roles`: everyone that the proxy lets through.
pub const EVERYONE: &str = "*";

/// Who may use the ops server, beside the holders of `ops.token`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeopleConfig {
    pub tokens: Vec<TokenEntry>,
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

/// One entry of `ops.tokens`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenEntry {
    pub name: String,
    pub role: Role,
    /// The source of the secret.
    pub reference: SecretReference,
}

impl TokenEntry {
    const FIELDS: [&str; 3] = ["name", "role", "secret"];

    /// Every problem of a table; none repeats a text that may be a secret.
    fn parse(table: &Table) -> Result<Self, Vec<String>> {
        let text = |field: &str| {
            table.get(field).and_then(Value::as_str).ok_or_else(|| format!("`{field}` is missing, or is no text"))
        };
        let name = text("name").and_then(parse_name);
        let role = text("role")
            .and_then(|role| Role::from_name(role).ok_or_else(|| format!("`role` is none of {}", role_names())));
        let reference = text("secret").and_then(parse_secret);
        let unknown = table.keys().filter(|field| !Self::FIELDS.contains(&field.as_str()));
        let mut problems: Vec<String> = unknown.map(|field| format!("{} is no field", quote_if_safe(field))).collect();
        problems.extend(
            [name.as_ref().err(), role.as_ref().err(), reference.as_ref().err()].into_iter().flatten().cloned(),
        );
        match (name, role, reference) {
            (Ok(name), Ok(role), Ok(reference)) if problems.is_empty() => Ok(Self { name, role, reference }),
            _ => Err(problems),
        }
    }
}

fn parse_name(name: &str) -> Result<String, String> {
    if name.eq_ignore_ascii_case(TOKEN_NAME) {
        return Err(format!("`name` is `{TOKEN_NAME}`, which is the name of ops.token"));
    }
    let fits = (1..=NAME_CHARS_MAX).contains(&name.len())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "._+@-".contains(c));
    fits.then(|| name.to_owned()).ok_or_else(|| format!("`name` is not 1 to {NAME_CHARS_MAX} of A-Z a-z 0-9 . _ + @ -"))
}

fn parse_secret(text: &str) -> Result<SecretReference, String> {
    let words = |error| match error {
        SecretReferenceError::ConfigVariable => "`secret` names a variable that sets a key of this program",
        SecretReferenceError::RelativePath => "`secret` needs an absolute path after `file:`",
        SecretReferenceError::Other => "`secret` is not env:NAME or file:/PATH",
    };
    SecretReference::parse(text).map_err(|error| words(error).to_owned())
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

/// Validates all keys about people; `None` if one has a problem.
pub fn validate(keys: &mut KeyValidator<'_>) -> Option<PeopleConfig> {
    let token_role = keys.choice("ops.token_role", &Role::ALL.map(|role| (role.name(), role)));
    let tokens = validate_tokens(keys);
    let proxy = validate_proxy(keys);
    Some(PeopleConfig { tokens: tokens?, proxy: proxy?, token_role: TokenRole(token_role?) })
}

fn validate_tokens(keys: &mut KeyValidator<'_>) -> Option<Vec<TokenEntry>> {
    const KEY: &str = "ops.tokens";
    const FIX: &str = "Write each as a table [[ops.tokens]] with name = \"prometheus\", role = \"viewer\" and \
                       secret = \"file:/run/secrets/prometheus\"";
    let mut tokens = Vec::<TokenEntry>::new();
    let mut problems = Vec::new();
    for (number, table) in (1..).zip(keys.tables(KEY)) {
        match TokenEntry::parse(table) {
            Ok(token) if tokens.iter().any(|known| known.name.eq_ignore_ascii_case(&token.name)) => {
                problems.push(format!("table {number}: the name `{}` is there twice", token.name));
            }
            Ok(token) => tokens.push(token),
            Err(found) => problems.extend(found.into_iter().map(|problem| format!("table {number}: {problem}"))),
        }
    }
    if problems.is_empty() {
        return Some(tokens);
    }
    keys.add(KEY, problems.join("; "), FIX);
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

    /// The configuration of a file with these lines below `[ops]`.
    fn loaded_file(lines: &str) -> Result<PeopleConfig, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("[ops]\n{lines}")).unwrap();
        let config = load(Some(file.path()), [], &[]).map_err(|problems| problems.to_string())?;
        Ok(config.ops.people)
    }

    /// A table of `ops.tokens`.
    fn table(name: &str, role: &str, secret: &str) -> String {
        format!("[[ops.tokens]]\nname = \"{name}\"\nrole = \"{role}\"\nsecret = \"{secret}\"\n")
    }

    #[test]
    fn tokens_are_tables_of_the_file() {
        let lines = [
            "token_role = \"viewer\"\n".to_owned(),
            table("prometheus", "viewer", "file:/run/secrets/prometheus"),
            table("deploy@ci.example", "admin", "env:DEPLOY_TOKEN"),
        ];
        let people = loaded_file(&lines.concat()).unwrap();
        let token = |name: &str, role, reference| TokenEntry { name: name.to_owned(), role, reference };
        let expected = [
            token("prometheus", Role::Viewer, SecretReference::File("/run/secrets/prometheus".into())),
            token("deploy@ci.example", Role::Admin, SecretReference::Env("DEPLOY_TOKEN".to_owned())),
        ];
        assert_eq!((people.tokens.as_slice(), people.token_role), (&expected[..], TokenRole(Role::Viewer)));
        assert!(people.are_configured() && !PeopleConfig::default().are_configured());
    }

    #[test]
    fn every_problem_of_the_tokens_is_named() {
        let tables = [
            "[[ops.tokens]]\nnaem = \"a\"\nrole = 1\nsecret = \"hunter2hunter2\"\n".to_owned(),
            table("Token", "root", "env:A"),
            table("a b", "viewer", "file:a"),
            table("alice", "viewer", "env:SLUICEGATE_OPS__TOKEN"),
            table("bob", "viewer", "env:A"),
            table("Bob", "admin", "env:B"),
        ];
        let problems = loaded_file(&tables.concat()).unwrap_err();
        for words in [
            "ops.tokens (",
            "table 1: `naem` is no field; table 1: `name` is missing, or is no text",
            "table 1: `role` is missing, or is no text; table 1: `secret` is not env:NAME or file:/PATH",
            "table 2: `name` is `token`, which is the name of ops.token",
            "table 2: `role` is none of viewer, operator, admin",
            "table 3: `name` is not 1 to 64 of",
            "table 3: `secret` needs an absolute path",
            "table 4: `secret` names a variable that sets a key of this program",
            "table 6: the name `Bob` is there twice",
            "[[ops.tokens]]",
        ] {
            assert!(problems.contains(words), "{words}: {problems}");
        }
        assert!(!problems.contains("hunter2"), "{problems}");
        let list = loaded_file("tokens = [\"prometheus:viewer:env:A\"]").unwrap_err();
        assert!(list.contains("ops.tokens") && list.contains("must be tables"), "{list}");
    }

    #[test]
    fn tokens_are_set_by_the_file_alone() {
        let only = "is set by the configuration file alone";
        let by_flag = loaded(&["ops.tokens=prometheus:viewer:env:A"]).unwrap_err();
        assert!(by_flag[1].contains("ops.tokens (--set)") && by_flag[1].contains(only), "{by_flag:?}");
        let variable = ("SLUICEGATE_OPS__TOKENS".to_owned(), "x".to_owned());
        let by_variable = load(None, [variable], &[]).unwrap_err().to_string();
        assert!(by_variable.contains("SLUICEGATE_OPS__TOKENS") && by_variable.contains(only), "{by_variable}");
    }

    #[test]
    fn proxy_is_read_from_lists() {
        assert_eq!(loaded(&[]).unwrap(), PeopleConfig::default());
        let people = loaded(&[
            "ops.proxy_user_header=X-Forwarded-User",
            "ops.proxy_role_header=x-forwarded-groups",
            "ops.proxy_roles=/payments:ops:operator, *:viewer",
            "ops.proxy_trusted=10.0.4.7, 10.0.5.0/24, ::ffff:10.0.6.1",
            "ops.token_role=viewer",
        ]);
        let people = people.unwrap();
        let proxy = people.proxy.clone().unwrap();
        assert_eq!(proxy.user_header, "x-forwarded-user");
        assert_eq!(proxy.roles[0], GroupRole { group: "/payments:ops".to_owned(), role: Role::Operator });
        assert!(proxy.trusted[2].contains(&"10.0.6.1".parse::<IpAddr>().unwrap()));
        assert_eq!(people.token_role, TokenRole(Role::Viewer));
    }

    #[test]
    fn invalid_people_are_problems() {
        let proxy = |key: &'static str| {
            let all = ["ops.proxy_user_header=x-user", "ops.proxy_roles=*:viewer", "ops.proxy_trusted=10.0.0.1"];
            [&all[..], &[key]].concat()
        };
        assert!(loaded(&proxy("ops.token_role=admin")).is_ok());
        for (sets, words) in [
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
        }
    }

    #[test]
    fn named_tokens_replace_the_token_off_loopback() {
        let listen = "ops.listen=0.0.0.0:9464";
        assert!(loaded(&[listen]).is_err());
        let tokens = format!("listen = \"0.0.0.0:9464\"\n{}", table("alice", "viewer", "env:A"));
        assert!(loaded_file(&tokens).is_ok());
        assert!(loaded(&[listen, "ops.token_role=viewer"]).is_err());
    }
}
