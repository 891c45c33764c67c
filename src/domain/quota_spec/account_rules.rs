//! Effect of account rules on a quota's limits, and on the charges of an account.
//!
//! A rule changes the numbers of a limit for one account, exempts it, or closes it. A refused account counts as usual,
//! because its look-ups are still sent.

use super::{LimitSpec, QuotaSpec};
use crate::domain::limit::{Algorithm, Rule};

impl QuotaSpec {
    /// Whether a rule refuses the charges of this account. Its look-ups count against the usual limits.
    pub fn refuses_charges_of(&self, account: Option<&str>) -> bool {
        let mut rules = self.account_rules.iter().filter(|rule| rule.rule == Rule::Refuse);
        rules.any(|rule| Some(rule.account.as_str()) == account)
    }
}

/// The limit as it applies to an account under a rule; `None`: the rule exempts the account. Numbers of a window do not
/// apply to requests in flight, nor the other way round: then the limit's own do.
pub fn limit_under_rule(rule: Rule, limit: &LimitSpec) -> Option<LimitSpec> {
    let (max_requests, window, burst) = match rule {
        Rule::Limit(own) if own.rate.is_at_once() != (limit.algorithm == Algorithm::Concurrency) => {
            return Some(limit.clone());
        }
        Rule::Exempt => return None,
        // Its look-ups count as those of any account.
        Rule::Refuse => return Some(limit.clone()),
        Rule::Limit(own) => (own.rate.max_requests(), own.rate.window(), own.burst),
        Rule::Blocked => (0, limit.window, limit.burst),
    };
    // A rule on several limits gives its burst only to those that can have one.
    let has_burst = matches!(limit.algorithm, Algorithm::TokenBucket | Algorithm::Gcra);
    Some(LimitSpec { max_requests, window, burst: burst.filter(|_| has_burst), ..limit.clone() })
}
