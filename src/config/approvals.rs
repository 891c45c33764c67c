//! Validated keys about approvals: which actions need a second person from which size on, and how long a request waits.
//!
//! An entry is `ACTION` or `ACTION:THRESHOLD`. Several entries of one action are alternatives: one that is reached suffices.

use std::time::Duration;

use iso_currency::Currency;

use crate::amount::minor_amount;
use crate::config::people::PeopleConfig;
use crate::config::validated::KeyValidator;
use crate::domain::approval::{ApprovalRule, ApprovalRules, GatedAction, Threshold};
use crate::domain::person::Role;

const KEY: &str = "approvals.require";
const FIX: &str = "Write each as ACTION, ACTION:payments=100 or ACTION:amount=1000.00 EUR, like resend:payments=100";

/// When a second person is needed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApprovalsConfig {
    pub rules: ApprovalRules,
    /// How long a request waits for a second person.
    pub expire_after: Duration,
}

impl ApprovalsConfig {
    /// Why no request could ever be approved; `None`: two people can, as far as the configuration says.
    pub fn missing_people(&self, people: &PeopleConfig) -> Option<String> {
        let needed = self.rules.highest_role()?;
        if people.proxy.as_ref().is_some_and(|proxy| proxy.roles.iter().any(|entry| entry.role >= needed)) {
            return None;
        }
        let able = people.users.iter().filter(|user| user.role >= needed).count();
        let role = if needed == Role::Admin { "`admin`" } else { "`operator` or `admin`" };
        (able < 2).then(|| format!("an action needs two people, and {able} of ops.users has role {role}"))
    }
}

fn parse_rule(text: &str) -> Result<ApprovalRule, String> {
    let (name, threshold) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
    let known = || GatedAction::ALL.map(GatedAction::name).join(", ");
    let action =
        GatedAction::from_name(name.trim()).ok_or_else(|| format!("`{text}`: the action is none of {}", known()))?;
    let Some(threshold) = threshold.map(str::trim) else {
        return Ok(ApprovalRule { action, threshold: Threshold::Always });
    };
    if !action.is_about_payments() {
        return Err(format!("`{text}`: `{action}` has no size, so it takes no threshold"));
    }
    let threshold = match threshold.split_once('=') {
        Some(("payments", number)) => {
            let payments = number.parse().ok().filter(|payments| *payments > 0);
            Threshold::Payments(payments.ok_or_else(|| format!("`{text}`: `payments` is no number from 1"))?)
        }
        Some(("amount", amount)) => parse_amount(amount)
            .ok_or_else(|| format!("`{text}`: `amount` is no amount above 0 with its currency, like 1000.00 EUR"))?,
        _ => return Err(format!("`{text}`: the threshold is neither `payments=N` nor `amount=AMOUNT CURRENCY`")),
    };
    Ok(ApprovalRule { action, threshold })
}

fn parse_amount(text: &str) -> Option<Threshold> {
    let (amount, code) = text.split_once(' ')?;
    let currency = Currency::from_code(code).map(|currency| currency.code().to_owned())?;
    let minor = minor_amount(amount, &currency).filter(|minor| *minor > 0)?;
    Some(Threshold::Amount { minor, currency })
}

/// Validates both keys; `None` if one has a problem.
pub fn validate(keys: &mut KeyValidator<'_>) -> Option<ApprovalsConfig> {
    let hours = keys.integer("approvals.expire_after_hours", 1..=720);
    let (mut rules, mut problems) = (Vec::<ApprovalRule>::new(), Vec::new());
    for text in keys.texts(KEY) {
        let rule = match parse_rule(&text) {
            Ok(rule) => rule,
            Err(problem) => {
                problems.push(problem);
                continue;
            }
        };
        let same = |known: &&ApprovalRule| known.action == rule.action;
        if rules.contains(&rule) {
            problems.push(format!("`{text}` is there twice"));
        } else if rules.iter().find(same).is_some_and(|_| rule.threshold == Threshold::Always)
            || rules.iter().filter(same).any(|known| known.threshold == Threshold::Always)
        {
            problems.push(format!("`{text}`: `{}` is there with and without a threshold", rule.action));
        } else {
            rules.push(rule);
        }
    }
    if !problems.is_empty() {
        keys.add(KEY, problems.join("; "), FIX);
        return None;
    }
    Some(ApprovalsConfig { rules: ApprovalRules(rules), expire_after: Duration::from_secs(u64::from(hours?) * 3_600) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::load;

    fn loaded(sets: &[&str]) -> Result<(ApprovalsConfig, PeopleConfig), Vec<String>> {
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let config = load(None, [], &sets).map_err(|problems| problems.lines())?;
        Ok((config.approvals, config.ops.people))
    }

    #[test]
    fn rules_are_read_from_a_list() {
        let (none, _) = loaded(&[]).unwrap();
        assert!(none.rules.is_empty() && none.expire_after == Duration::from_secs(86_400));
        let entries = "approvals.require=resend:payments=100, resend:amount=1000.00 EUR, cancel:amount=5000 JPY, limit";
        let (config, _) = loaded(&[entries, "approvals.expire_after_hours=2"]).unwrap();
        let amount = |minor, currency: &str| Threshold::Amount { minor, currency: currency.to_owned() };
        let rule = |action, threshold| ApprovalRule { action, threshold };
        let expected = [
            rule(GatedAction::Resend, Threshold::Payments(100)),
            rule(GatedAction::Resend, amount(100_000, "EUR")),
            rule(GatedAction::Cancel, amount(5_000, "JPY")),
            rule(GatedAction::Limit, Threshold::Always),
        ];
        assert_eq!((config.rules.0.as_slice(), config.expire_after), (&expected[..], Duration::from_secs(7_200)));
    }

    #[test]
    fn problems_name_entry_and_field() {
        for (entry, words) in [
            ("refund", "`refund`: the action is none of succeeded, declined"),
            ("Resend", "the action is none of"),
            ("resend:100", "the threshold is neither `payments=N` nor"),
            ("resend:payments=0", "`resend:payments=0`: `payments` is no number from 1"),
            ("resend:payments=many", "`payments` is no number"),
            ("resend:amount=1000.00", "`amount` is no amount above 0 with its currency"),
            ("resend:amount=10.001 EUR", "`amount` is no amount"),
            ("resend:amount=-1 EUR", "`amount` is no amount"),
            ("resend:amount=0 EUR", "`amount` is no amount"),
            ("resend:amount=1 EURO", "`amount` is no amount"),
            ("limit:payments=1", "`limit` has no size"),
            ("pause:amount=1 EUR", "`pause` has no size"),
            ("resend, resend", "is there twice"),
            ("resend, resend:payments=5", "with and without a threshold"),
            ("resend:payments=5, resend", "with and without a threshold"),
        ] {
            let problems = loaded(&[&format!("approvals.require={entry}")]).unwrap_err();
            assert!(problems[1].contains(words) && problems[1].contains(KEY), "{entry}: {problems:?}");
        }
        assert!(loaded(&["approvals.expire_after_hours=0"]).is_err());
    }

    #[test]
    fn two_people_must_be_able_to_approve() {
        let (alice, bob) = ("alice:operator:env:A", "bob:admin:env:B");
        let proxy = |role: &str| {
            let roles = format!("ops.proxy_roles=*:{role}");
            vec!["ops.proxy_user_header=x-user".to_owned(), roles, "ops.proxy_trusted=10.0.0.1".to_owned()]
        };
        let users = |users: &[&str]| vec![format!("ops.users={}", users.join(","))];
        for (require, people, suffice) in [
            ("", vec![], true),
            ("resend", vec![], false),
            ("resend", users(&[alice]), false),
            ("resend", users(&[alice, "carol:viewer:env:C"]), false),
            ("resend", users(&[alice, bob]), true),
            ("limit", users(&[alice, bob]), false),
            ("limit", users(&["carol:admin:env:C", bob]), true),
            ("resend", proxy("operator"), true),
            ("resend", proxy("viewer"), false),
            ("limit", proxy("operator"), false),
        ] {
            let sets = [vec![format!("approvals.require={require}")], people].concat();
            let (config, people) = loaded(&sets.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
            assert_eq!(config.missing_people(&people).is_none(), suffice, "{sets:?}");
        }
    }
}
