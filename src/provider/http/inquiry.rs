//! Look-ups over HTTP: what became of a payment, asked at the row's own address and read by the row's own words.
//!
//! Refuses to guess: only a word that the row lists decides, and an accepted payment whose amount or currency the row
//! wants compared is not accepted until they are. Refuses the row's `statuses` where they would judge a payment: those
//! are a charge's; what they say of limits and locks holds here too.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use reqwest::Method;

use super::answer_json::{Ambiguous, AnswerJson, Field};
use super::classify::{Body, Meanings, Reading, is_token, reference, said_by_row};
use super::client::{self, Client, Outgoing};
use super::echo::{doubt, minor_units};
use super::expansion::lookup_url;
use super::outbound::OutboundPolicy;
use super::pool::Reuse;
use super::secrets::HeaderTemplates;
use super::strays::StrayLog;
use crate::domain::echo::PaymentIdentity;
use crate::domain::job::Job;
use crate::domain::lookup::{Finding, Lookup, LookupMethod};
use crate::domain::outcome::UnknownCause;
use crate::domain::provider::{Provider, StatusMeaning};
use crate::provider::{Answer, FreezeError, Question};

/// How one provider is asked. Keeps its own connections, because it may be another host that answers.
pub(super) struct Inquiry {
    policy: OutboundPolicy,
    lookup: Lookup,
    /// A charge's.
    meanings: Meanings,
    client: Client,
}

impl Inquiry {
    /// Checks where look-ups would go, and sets up their client. Resolves no secret.
    ///
    /// # Errors
    /// [`FreezeError::Url`] when the address is not allowed.
    pub(super) fn new(
        lookup: &Lookup,
        provider: &Provider,
        outbound: &OutboundPolicy,
        strays: Arc<StrayLog>,
    ) -> Result<Self, FreezeError> {
        let target = outbound.admit(&lookup.url.sample())?;
        // A question may be asked again, so a lost one costs nothing but time.
        let is_allowed = provider.reuse_connections.unwrap_or(true);
        let reuse = Reuse { is_allowed, max_age: provider.connection_max_age };
        Ok(Self {
            client: Client::new(&target, provider.timeout, reuse, strays)?,
            policy: outbound.clone(),
            lookup: lookup.clone(),
            meanings: Meanings::of(provider),
        })
    }

    pub(super) fn question(&self, job: &Job) -> Result<Question, String> {
        Ok(Question {
            method: match self.lookup.method {
                LookupMethod::Get => "GET",
                LookupMethod::Post => "POST",
            },
            url: lookup_url(&self.policy, &self.lookup.url, job).map_err(|error| error.to_string())?,
            account: job.account.as_ref().map(|account| account.as_str().to_owned()),
            payment: PaymentIdentity::from(job),
            currency: job.currency.clone(),
        })
    }

    /// `now` serves dates in an answer without a `Date` of its own.
    pub(super) async fn ask(
        &self,
        question: &Question,
        headers: &HeaderTemplates,
        now: fn() -> SystemTime,
    ) -> Answer<Finding> {
        let outgoing = match self.outgoing(question, headers).await {
            Ok(outgoing) => outgoing,
            Err(error) => return unanswered(Finding::LocalFault(error.into())),
        };
        match self.client.exchange(outgoing).await {
            Ok(answered) => {
                let reading = &answered.reading;
                let mut finding = meaning(reading, question, &self.lookup, &self.meanings, now());
                let settles =
                    matches!(finding, Finding::Accepted { .. } | Finding::Declined { .. } | Finding::Differs { .. });
                let doubt = doubt(reading, &self.lookup.echo, &question.payment, settles);
                if let Some(cause) = doubt {
                    finding = Finding::Unknown { cause, retry_after: None };
                }
                let (status, read_at) = (reading.status, answered.read_at);
                self.client.conclude(*answered, doubt);
                Answer { outcome: finding, status: Some(status), answer_age: read_at.elapsed() }
            }
            Err(failure) => unanswered(failure.finding()),
        }
    }

    async fn outgoing(&self, question: &Question, headers: &HeaderTemplates) -> Result<Outgoing, FreezeError> {
        let mut map = client::base_headers(None);
        let target = self.policy.admit(&question.url)?;
        headers.resolve(question.account.as_deref(), target.host()).await?.insert_into(&mut map)?;
        let method = if question.method == "POST" { Method::POST } else { Method::GET };
        // A POST without a length is refused by some servers (411).
        let body = (method == Method::POST).then(Vec::new);
        Ok(Outgoing { method, target, headers: map, body })
    }
}

fn unanswered(finding: Finding) -> Answer<Finding> {
    Answer { outcome: finding, status: None, answer_age: Duration::ZERO }
}

/// What an answer says about the payment. `now` serves dates in an answer without a `Date` of its own. An answer that says two
/// things where one is needed leaves it unknown.
fn meaning(reading: &Reading, question: &Question, lookup: &Lookup, meanings: &Meanings, now: SystemTime) -> Finding {
    let status = reading.status;
    let unreadable = Finding::Unknown { cause: UnknownCause::UnreadableAnswer(status), retry_after: None };
    let Ok(said_by_row) = said_by_row(reading, &meanings.statuses) else { return unreadable };
    let throttled = || Finding::Throttled { retry_after: meanings.throttled_for(reading, now) };
    let retry_after = || meanings.retry_after(reading, now);
    let server_error = |retry_after| Finding::Unknown { cause: UnknownCause::ServerError(status), retry_after };
    match said_by_row {
        Some(StatusMeaning::Throttled) => return throttled(),
        Some(StatusMeaning::Busy) => return Finding::Busy { retry_after: meanings.busy_for(reading, now) },
        Some(StatusMeaning::Unavailable) => return server_error(retry_after()),
        _ => {}
    }
    match status {
        200..=299 => found(reading, question, lookup).unwrap_or(unreadable),
        404 => Finding::NotFound,
        401 | 403 | 407 => Finding::Misconfigured { status },
        429 => throttled(),
        503 => server_error(retry_after()),
        408 | 500..=599 => server_error(None),
        405 => Finding::Unclear { reason: "provider answered a look-up with 405: check lookup.method".to_owned() },
        _ => Finding::Unclear { reason: format!("provider answered a look-up with {status}: check lookup.url") },
    }
}

fn found(reading: &Reading, question: &Question, lookup: &Lookup) -> Result<Finding, Ambiguous> {
    if let Body::Broken(cause) = reading.body {
        return Ok(Finding::Unknown { cause, retry_after: None });
    }
    let Some(body) = reading.json() else {
        let cause = UnknownCause::UnreadableAnswer(reading.status);
        return Ok(Finding::Unknown { cause, retry_after: None });
    };
    let state = body.field(&lookup.state)?;
    let Some((state, word)) = state.and_then(|state| state.word().map(|word| (state, word))) else {
        return Ok(Finding::Unclear { reason: format!("the look-up's answer has no word at {}", lookup.state) });
    };
    let among = |words: &[String]| words.iter().any(|word| state.is(word));
    let (accepted, declined) = (among(&lookup.accepted), among(&lookup.declined));
    if !accepted && !declined && !among(&lookup.in_progress) {
        let word = if is_token(&word) { format!("`{word}`") } else { "a word".to_owned() };
        return Ok(Finding::Unclear { reason: format!("the look-up answers {word} that no list of lookup names") });
    }
    Ok(match compared(&body, question, lookup)? {
        Compared::Differs(reason) => Finding::Differs { reason },
        Compared::Unreadable(what) if accepted => {
            Finding::Unclear { reason: format!("the look-up's answer has no {what} to compare with ours") }
        }
        Compared::Same | Compared::Unreadable(_) if accepted => {
            Finding::Accepted { reference: reference(&body, &lookup.reference)? }
        }
        _ if declined => Finding::Declined { reason: format!("{word}, as the provider says when asked") },
        _ => Finding::InProgress,
    })
}

enum Compared {
    Same,
    Differs(String),
    /// What could not be read.
    Unreadable(&'static str),
}

fn compared(body: &AnswerJson, question: &Question, lookup: &Lookup) -> Result<Compared, Ambiguous> {
    let field = |pointer: &Option<String>| pointer.as_ref().map(|pointer| body.field(pointer)).transpose();
    let amount = field(&lookup.amount)?.map(|field| minor_units(&field?));
    let currency = field(&lookup.currency)?.map(|field| match field? {
        Field::Text(code) if code.len() == 3 && is_token(&code) => Some(code.to_uppercase()),
        _ => None,
    });
    if amount == Some(None) {
        return Ok(Compared::Unreadable("amount in minor units"));
    }
    if currency == Some(None) {
        return Ok(Compared::Unreadable("currency"));
    }
    let theirs = (amount.flatten().unwrap_or(question.payment.amount), currency.flatten());
    let theirs = (theirs.0, theirs.1.unwrap_or_else(|| question.currency.clone()));
    if theirs == (question.payment.amount, question.currency.clone()) {
        return Ok(Compared::Same);
    }
    Ok(Compared::Differs(format!(
        "the provider has {} {} for this payment, we have {} {}: see it at the provider",
        theirs.0, theirs.1, question.payment.amount, question.currency
    )))
}

#[cfg(test)]
#[path = "inquiry_tests.rs"]
mod tests;
