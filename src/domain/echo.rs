//! Echoed fields: what a provider's response must repeat of a payment, so that a response to another request finishes
//! nothing.
//!
//! HTTP/1.1 matches a response to its request only by its place on the connection. The echo detects a provider or
//! gateway that sends a response twice or mixes up its connections.

use std::collections::BTreeSet;

use super::job::Job;
use super::provider::ResponseLocation;

/// The validated `echo` of a `request` or a `lookup`. Empty: no response is compared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Echo {
    /// All of these fields are compared.
    pub fields: Vec<EchoedField>,
    /// Statuses whose responses need not repeat anything; fields that they do repeat are compared.
    pub exempt_statuses: BTreeSet<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EchoedField {
    pub field: EchoField,
    /// A response has the field at one or more of these places.
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

/// Values of one payment that responses are compared with.
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
