//! Fields of a payment that a provider's answer must repeat, so that an answer to another request settles nothing.
//!
//! HTTP/1.1 knows an answer's request by its place on the connection alone. A provider or a gateway that sends an answer
//! twice, or mixes its connections up, is found out by what the answer says.

use std::collections::BTreeSet;

use super::job::Job;
use super::provider::ResponseLocation;

/// The `echo` of a `request` or a `lookup`, as validated. Empty: no answer is compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Echo {
    /// All of them are compared.
    pub fields: Vec<EchoedField>,
    /// Statuses whose answers need not repeat anything; what they do repeat is compared.
    pub exempt_statuses: BTreeSet<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EchoedField {
    pub field: EchoField,
    /// An answer has the field at one of these places at least.
    pub locations: Vec<ResponseLocation>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EchoField {
    Id,
    IdempotencyKey,
    Reference,
    /// In minor units.
    Amount,
}

/// Values of one payment that answers are compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaymentIdentity {
    pub id: String,
    pub idempotency_key: String,
    pub reference: Option<String>,
    /// Minor units.
    pub amount: i64,
}

impl From<&Job> for PaymentIdentity {
    fn from(job: &Job) -> Self {
        Self {
            id: job.id.to_string(),
            idempotency_key: job.effective_key().to_string(),
            reference: job.reference.clone(),
            amount: job.amount,
        }
    }
}
