//! What the contract names and this version's limiter and client cannot do yet.
//!
//! A setting that is silently ignored would be a limit that is silently broken, so each is a problem of its row. When a
//! part is built, its lines here go.

use super::ProviderRow;

/// One line per setting that this version cannot honour.
pub(super) fn unsupported(row: &ProviderRow) -> Vec<String> {
    let mut problems = Vec::new();
    let mut refuse = |what: String| problems.push(format!("{what} is not supported yet by this version"));
    if row.pacing == "even" {
        refuse("pacing `even`".to_owned());
    }
    if row.store_down == "share" {
        refuse("store_down `share`".to_owned());
    }
    if row.lookup.is_some() {
        refuse("lookup".to_owned());
    }
    for limit in row.limits.iter().filter(|limit| limit.enabled) {
        let name = &limit.name;
        if limit.algorithm != "sliding_log" {
            refuse(format!("limit `{name}`: algorithm `{}`", limit.algorithm));
        }
        if limit.scope != "provider" {
            refuse(format!("limit `{name}`: scope `{}`", limit.scope));
        }
        if limit.applies_to == "lookup" {
            refuse(format!("limit `{name}`: applies_to `lookup`"));
        }
        if limit.shadow {
            refuse(format!("limit `{name}`: shadow"));
        }
    }
    for account in &row.accounts {
        refuse(format!("account `{}`: rule `{}`", account.account, account.rule));
    }
    problems
}
