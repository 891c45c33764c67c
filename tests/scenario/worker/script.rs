//! A payment provider in memory that follows a script of reactions and records every request.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use sluicegate::domain::expansion::{RequestBuildError, RequestPart, TooLarge, UrlTemplate};
use sluicegate::domain::job::Job;
use sluicegate::domain::local_fault::LocalFault;
use sluicegate::domain::outcome::{LookupResult, Outcome, UnknownCause};
use sluicegate::domain::provider::Provider;
use sluicegate::domain::response::PaymentIdentity;
use sluicegate::domain::sum::SentSum;
use sluicegate::provider::{
    ConnectionWatch, FreezeError, FrozenRequest, LookupRequest, PaymentProvider, ProviderFactory, RequestResult,
};
use tokio::sync::watch;
use tokio::time::Instant;

/// The provider's reaction to one request.
#[derive(Clone, Debug)]
pub enum Act {
    Answer(Outcome),
    /// Responds on a connection that carried a response before. Once the test releases the job, another response follows.
    AnswerOnUsedConnection(Outcome),
    /// Charges, but the response never arrives.
    ChargeAndLose,
    /// Responds, with acceptance, once the test releases it.
    Hold,
    Panic,
}

/// One request as the provider received it.
#[derive(Clone, Debug)]
pub struct Sent {
    pub id: String,
    pub provider: String,
    pub request: FrozenRequest,
    pub at: Instant,
    pub clock: SystemTime,
}

#[derive(Default)]
struct State {
    acts: HashMap<String, VecDeque<Act>>,
    always: HashMap<String, Act>,
    sent: Vec<Sent>,
    answered: HashMap<String, Instant>,
    findings: HashMap<String, VecDeque<LookupResult>>,
    /// Look-ups, oldest first: job and instant.
    asked: Vec<(String, Instant)>,
    /// Charges per provider and key. A provider that deduplicates charges a key once.
    charges: HashMap<(String, String), u32>,
}

/// The script of all providers of a test.
pub struct Script {
    state: Mutex<State>,
    released: watch::Sender<Released>,
}

/// Requests on hold that may get their response.
#[derive(Default)]
enum Released {
    #[default]
    None,
    One(String),
    All,
}

impl Released {
    fn includes(&self, id: &str) -> bool {
        match self {
            Self::None => false,
            Self::One(released) => released == id,
            Self::All => true,
        }
    }
}

impl Script {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), released: watch::Sender::default() })
    }

    /// Reactions to a job's next requests, in order. Later requests are accepted.
    pub fn plan(&self, id: &str, acts: impl IntoIterator<Item = Act>) {
        self.state.lock().unwrap().acts.insert(id.to_owned(), acts.into_iter().collect());
    }

    /// Reaction to every request at a provider whose job has no plan.
    pub fn always(&self, provider: &str, act: Act) {
        self.state.lock().unwrap().always.insert(provider.to_owned(), act);
    }

    /// Results of a job's next look-ups, in order. Later ones report the true outcome.
    pub fn plan_lookups(&self, id: &str, findings: impl IntoIterator<Item = LookupResult>) {
        self.state.lock().unwrap().findings.insert(id.to_owned(), findings.into_iter().collect());
    }

    /// Instants of this job's look-ups, oldest first.
    pub fn asked_for(&self, id: &str) -> Vec<Instant> {
        self.asked().into_iter().filter(|(asked, _)| asked == id).map(|(_, at)| at).collect()
    }

    pub fn asked(&self) -> Vec<(String, Instant)> {
        self.state.lock().unwrap().asked.clone()
    }

    /// Releases every held request, now and later.
    pub fn release_all(&self) {
        self.released.send_replace(Released::All);
    }

    /// Releases this job's held request.
    pub fn release(&self, id: &str) {
        self.released.send_replace(Released::One(id.to_owned()));
    }

    pub fn sent(&self) -> Vec<Sent> {
        self.state.lock().unwrap().sent.clone()
    }

    /// Requests for one job, oldest first.
    pub fn sent_for(&self, id: &str) -> Vec<Sent> {
        self.sent().into_iter().filter(|sent| sent.id == id).collect()
    }

    pub fn sent_to(&self, provider: &str) -> Vec<Sent> {
        self.sent().into_iter().filter(|sent| sent.provider == provider).collect()
    }

    /// Job ids in the order of their requests.
    pub fn order(&self) -> Vec<String> {
        self.sent().into_iter().map(|sent| sent.id).collect()
    }

    pub fn answered_at(&self, id: &str) -> Instant {
        self.state.lock().unwrap().answered[id]
    }

    /// Number of charges under this key.
    pub fn charges(&self, provider: &str, key: &str) -> u32 {
        let key = (provider.to_owned(), key.to_owned());
        self.state.lock().unwrap().charges.get(&key).copied().unwrap_or(0)
    }

    fn arrive(&self, provider: &Provider, request: &FrozenRequest) -> (String, Act) {
        let id = String::from_utf8(request.body.to_vec()).unwrap();
        let mut state = self.state.lock().unwrap();
        state.sent.push(Sent {
            id: id.clone(),
            provider: provider.name.to_string(),
            request: request.clone(),
            at: Instant::now(),
            clock: SystemTime::now(),
        });
        let planned = state.acts.get_mut(&id).and_then(VecDeque::pop_front);
        let act = planned.or_else(|| state.always.get(provider.name.as_str()).cloned());
        (id, act.unwrap_or(Act::Answer(accepted())))
    }

    fn charge(&self, provider: &Provider, key: &str) {
        let mut state = self.state.lock().unwrap();
        let charges = state.charges.entry((provider.name.to_string(), key.to_owned())).or_default();
        if provider.idempotency_retention.is_none() || *charges == 0 {
            *charges += 1;
        }
    }
}

pub fn accepted() -> Outcome {
    Outcome::Accepted { reference: None }
}

pub fn timeout() -> Outcome {
    Outcome::Unknown { cause: UnknownCause::Timeout, retry_after: None }
}

pub fn not_sent() -> Outcome {
    Outcome::NotSent { cause: "connection refused".to_owned() }
}

pub fn local_fault() -> Outcome {
    Outcome::LocalFault(LocalFault::ProcessDescriptors)
}

pub fn rejected() -> Outcome {
    Outcome::Rejected { reason: "provider answered 400".to_owned() }
}

pub fn throttled(wait: Duration) -> Outcome {
    Outcome::Throttled { retry_after: Some(wait) }
}

pub fn busy(retry_after: Option<Duration>) -> Outcome {
    Outcome::Busy { retry_after }
}

/// Builds clients for rows. It refuses a row whose URL contains `refused`.
pub struct Factory(pub Arc<Script>);

struct Scripted {
    row: Provider,
    script: Arc<Script>,
}

impl ProviderFactory for Factory {
    fn build(&self, provider: &Provider) -> Result<Arc<dyn PaymentProvider>, FreezeError> {
        if provider.url.contains("refused") {
            return Err(FreezeError::Url { url: provider.url.clone(), problem: "not today".to_owned() });
        }
        Ok(Arc::new(Scripted { row: provider.clone(), script: Arc::clone(&self.0) }))
    }
}

#[async_trait]
impl PaymentProvider for Scripted {
    /// The body is the job's id, so that the script can identify the job.
    async fn freeze(&self, job: &Job, sum: SentSum) -> Result<FrozenRequest, FreezeError> {
        self.check_size(job, sum).map_err(|too_large| FreezeError::Job(RequestBuildError::TooLarge(too_large)))?;
        let url = UrlTemplate::parse(&self.row.url).unwrap();
        let url = url.for_job(job, RequestPart::Url).map_err(FreezeError::Job)?;
        Ok(FrozenRequest {
            method: "POST".into(),
            url: url.into(),
            idempotency_key: job.effective_key().as_str().into(),
            // Makes a changed row freeze another request.
            content_type: format!("text/plain; workers={}", self.row.workers).into(),
            body: job.id.to_string().into(),
            account: None,
            sum,
            credential_fingerprint: self.credential_fingerprint(None).await?.into(),
        })
    }

    /// A header `missing` in the row names a missing secret.
    async fn credential_fingerprint(&self, _: Option<&str>) -> Result<String, FreezeError> {
        if self.row.headers.contains_key("missing") {
            return Err(FreezeError::Header { header: "missing".to_owned(), problem: "not set".to_owned() });
        }
        Ok(self.row.headers.get("authorization").map_or_else(|| "none".to_owned(), |value| format!("h-{value}")))
    }

    /// A header `narrow` in the row leaves no room for payloads.
    fn check_size(&self, job: &Job, _: SentSum) -> Result<(), TooLarge> {
        let is_too_large = self.row.headers.contains_key("narrow") && job.payload.is_some();
        if is_too_large { Err(TooLarge::new(RequestPart::Body, job)) } else { Ok(()) }
    }

    async fn send(&self, _: &Job, request: &FrozenRequest) -> RequestResult {
        let (id, act) = self.script.arrive(&self.row, request);
        let mut watch = None;
        let outcome = match act {
            Act::Answer(outcome) => outcome,
            Act::AnswerOnUsedConnection(outcome) => {
                let (mut released, id) = (self.script.released.subscribe(), id.clone());
                let other = async move { released.wait_for(|released| released.includes(&id)).await.is_ok() };
                watch = Some(ConnectionWatch::new(other));
                outcome
            }
            Act::ChargeAndLose => {
                self.script.charge(&self.row, &request.idempotency_key);
                timeout()
            }
            Act::Hold => {
                let mut released = self.script.released.subscribe();
                released.wait_for(|released| released.includes(&id)).await.unwrap();
                accepted()
            }
            Act::Panic => panic!("the script says so"),
        };
        let outcome = match outcome {
            Outcome::Accepted { reference } => {
                self.script.charge(&self.row, &request.idempotency_key);
                Outcome::Accepted { reference: reference.or_else(|| Some(format!("ch_{id}"))) }
            }
            other => other,
        };
        self.script.state.lock().unwrap().answered.insert(id, Instant::now());
        RequestResult { outcome, status: None, response_age: Duration::ZERO, watch }
    }

    /// The account is the job's id, so that the script can identify the job.
    fn lookup_request(&self, job: &Job, sum: SentSum) -> Result<LookupRequest, String> {
        if self.row.lookup.is_none() || job.reference.as_deref() == Some("unaskable") {
            return Err("the script says so".to_owned());
        }
        Ok(LookupRequest {
            method: "GET",
            url: self.row.url.clone(),
            account: Some((&job.id).into()),
            payment: PaymentIdentity::new(job, sum),
        })
    }

    async fn look_up(&self, question: &LookupRequest) -> RequestResult<LookupResult> {
        let id = question.account.as_deref().unwrap().to_owned();
        let mut state = self.script.state.lock().unwrap();
        state.asked.push((id.clone(), Instant::now()));
        let planned = state.findings.get_mut(&id).and_then(VecDeque::pop_front);
        let charged = state.charges.contains_key(&(self.row.name.to_string(), id.clone()));
        let known = if charged {
            LookupResult::Accepted { reference: Some(format!("ch_{id}")) }
        } else {
            LookupResult::NotFound
        };
        RequestResult {
            outcome: planned.unwrap_or(known),
            status: Some(200),
            response_age: Duration::ZERO,
            watch: None,
        }
    }
}
