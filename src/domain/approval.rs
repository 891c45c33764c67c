//! The gate of actions that need two people: the configured rules, the size of an action, and the gate's decision.
//!
//! It is pure. A rule without a threshold asks for a second person always, a rule with one from that size on. What is not
//! known counts as reaching the threshold: an unknown amount, and an amount in a currency that no rule of the action names.

use std::collections::BTreeMap;
use std::fmt;

use super::names::named_enum;
use super::person::Role;

named_enum! {
    /// An action that can need a second person.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
    pub enum GatedAction {
        /// Payments in `review` become `succeeded`.
        Succeeded = "succeeded",
        /// Payments in `review` become `declined`.
        Declined = "declined",
        /// Payments in `review` are sent again.
        Resend = "resend",
        /// Waiting payments are cancelled.
        Cancel = "cancel",
        /// Dead payments are tried again.
        Replay = "replay",
        /// Dead payments are discarded.
        Discard = "discard",
        /// The rate of a limit is changed.
        Limit = "limit",
        /// One provider, or all of them, are paused.
        Pause = "pause",
        /// One provider, or all that a pause of all holds, are resumed.
        Resume = "resume",
    }
    /// The name in the configuration.
    pub fn name(self);
}

impl GatedAction {
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|action| action.name() == name)
    }

    /// Whether the action is about payments, so that it has a number and sums.
    pub fn is_about_payments(self) -> bool {
        !matches!(self, Self::Limit | Self::Pause | Self::Resume)
    }

    /// The role that the action needs, and so its approval.
    pub fn needed_role(self) -> Role {
        if self == Self::Limit { Role::Admin } else { Role::Operator }
    }
}

impl fmt::Display for GatedAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The size from which an action needs a second person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Threshold {
    Always,
    Payments(u64),
    /// The sum in one currency.
    Amount {
        minor: i64,
        currency: String,
    },
}

/// One configured rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApprovalRule {
    pub action: GatedAction,
    pub threshold: Threshold,
}

/// What an action would change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActionSize {
    pub payments: u64,
    /// The sum of each currency in minor units; `None`: some amount is unknown.
    pub sums: Option<BTreeMap<String, i64>>,
}

/// Whether one person suffices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Gate {
    Open,
    NeedsSecondPerson,
}

/// The rules of a deployment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApprovalRules(pub Vec<ApprovalRule>);

impl ApprovalRules {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the action needs a second person at any size.
    pub fn concern(&self, action: GatedAction) -> bool {
        self.of(action).next().is_some()
    }

    /// The highest role that an approval needs.
    pub fn highest_role(&self) -> Option<Role> {
        self.0.iter().map(|rule| rule.action.needed_role()).max()
    }

    /// Whether an action of this size needs a second person. One rule that is reached suffices.
    pub fn gate(&self, action: GatedAction, size: &ActionSize) -> Gate {
        let is_reached =
            |rule: &ApprovalRule| match &rule.threshold {
                Threshold::Always => true,
                Threshold::Payments(from) => size.payments >= *from,
                Threshold::Amount { minor, currency } => size.sums.as_ref().is_none_or(|sums| {
                    sums.iter().any(|(summed, sum)| {
                        if summed == currency { sum >= minor } else { !self.names_currency(action, summed) }
                    })
                }),
            };
        if self.of(action).any(is_reached) { Gate::NeedsSecondPerson } else { Gate::Open }
    }

    fn of(&self, action: GatedAction) -> impl Iterator<Item = &ApprovalRule> {
        self.0.iter().filter(move |rule| rule.action == action)
    }

    fn names_currency(&self, action: GatedAction, wanted: &str) -> bool {
        let named =
            |rule: &ApprovalRule| matches!(&rule.threshold, Threshold::Amount { currency, .. } if currency == wanted);
        self.of(action).any(named)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rules(thresholds: &[Threshold]) -> ApprovalRules {
        let rule = |threshold: &Threshold| ApprovalRule { action: GatedAction::Resend, threshold: threshold.clone() };
        ApprovalRules(thresholds.iter().map(rule).collect())
    }

    fn amount(minor: i64, currency: &str) -> Threshold {
        Threshold::Amount { minor, currency: currency.to_owned() }
    }

    fn size(payments: u64, sums: &[(&str, i64)]) -> ActionSize {
        let sums = sums.iter().map(|(currency, sum)| ((*currency).to_owned(), *sum)).collect();
        ActionSize { payments, sums: Some(sums) }
    }

    #[test]
    fn gate_follows_thresholds() {
        let unknown = ActionSize { payments: 1, sums: None };
        let (many, eur) = (rules(&[Threshold::Payments(100)]), rules(&[amount(100_000, "EUR")]));
        let both = rules(&[Threshold::Payments(100), amount(100_000, "EUR"), amount(50_000, "USD")]);
        for (rules, size, needs) in [
            (&rules(&[]), size(1_000_000, &[("EUR", i64::MAX)]), false),
            (&rules(&[]), unknown.clone(), false),
            (&rules(&[Threshold::Always]), size(0, &[]), true),
            (&many, size(99, &[("EUR", i64::MAX)]), false),
            (&many, size(100, &[]), true),
            (&many, unknown.clone(), false),
            (&eur, size(100_000, &[("EUR", 99_999)]), false),
            (&eur, size(1, &[("EUR", 100_000)]), true),
            (&eur, unknown.clone(), true),
            // No rule says how much of this currency is little.
            (&eur, size(1, &[("USD", 1)]), true),
            (&both, size(99, &[("EUR", 99_999), ("USD", 49_999)]), false),
            (&both, size(99, &[("EUR", 99_999), ("USD", 50_000)]), true),
            (&both, size(100, &[("EUR", 1)]), true),
            (&both, size(1, &[("JPY", 1)]), true),
        ] {
            let gate = rules.gate(GatedAction::Resend, &size);
            assert_eq!(gate == Gate::NeedsSecondPerson, needs, "{rules:?} {size:?}");
            assert_eq!(rules.gate(GatedAction::Cancel, &size), Gate::Open, "a rule is about its own action");
        }
    }

    #[test]
    fn limits_need_an_admin() {
        for action in GatedAction::ALL {
            assert_eq!(GatedAction::from_name(action.name()), Some(action));
            assert_eq!(action.needed_role() == Role::Admin, action == GatedAction::Limit);
        }
        let limit = ApprovalRule { action: GatedAction::Limit, threshold: Threshold::Always };
        assert_eq!(rules(&[Threshold::Always]).highest_role(), Some(Role::Operator));
        assert_eq!(ApprovalRules(vec![limit]).highest_role(), Some(Role::Admin));
        assert!(!rules(&[Threshold::Always]).concern(GatedAction::Limit) && rules(&[]).highest_role().is_none());
    }

    fn thresholds() -> impl Strategy<Value = Threshold> {
        prop_oneof![
            Just(Threshold::Always),
            (0..200_u64).prop_map(Threshold::Payments),
            (0..200_i64, "EUR|USD").prop_map(|(minor, currency)| amount(minor, &currency)),
        ]
    }

    fn sizes() -> impl Strategy<Value = ActionSize> {
        let sums = prop::option::of(prop::collection::btree_map("EUR|USD|JPY", 0..200_i64, 0..4));
        (0..200_u64, sums).prop_map(|(payments, sums)| ActionSize { payments, sums })
    }

    proptest! {
        #[test]
        fn a_larger_action_never_needs_less(
            all in prop::collection::vec(thresholds(), 0..4), small in sizes(), payments in 0..200_u64,
            currency in "EUR|USD|JPY", more in 0..200_i64,
        ) {
            let rules = rules(&all);
            let mut large = small.clone();
            large.payments += payments;
            if let Some(sums) = &mut large.sums {
                *sums.entry(currency).or_default() += more;
            }
            let unknown = ActionSize { sums: None, ..large.clone() };
            let gate = |size: &ActionSize| rules.gate(GatedAction::Resend, size);
            prop_assert!(gate(&small) <= gate(&large), "{:?} {:?} {:?}", all, small, large);
            prop_assert!(gate(&large) <= gate(&unknown) || large.sums.is_none(), "{:?} {:?}", all, large);
        }

        #[test]
        fn a_rule_without_amount_never_opens_the_gate(
            all in prop::collection::vec(thresholds(), 0..4), from in 0..200_u64, size in sizes(),
        ) {
            let more = [all.clone(), vec![Threshold::Payments(from)]].concat();
            prop_assert!(rules(&all).gate(GatedAction::Resend, &size) <= rules(&more).gate(GatedAction::Resend, &size));
        }
    }
}
