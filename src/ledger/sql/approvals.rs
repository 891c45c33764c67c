//! Pending approvals in SQL: a request is stored, decided once, listed, expired and deleted.
//!
//! An approval is a statement in the transaction of the approved change. It requires that the request is pending and in
//! time. So the change and its approval are written together or not at all.

use std::time::Duration;

use serde_json::json;

use super::dialect::Template;
use super::engine::{Args, Step, args};
use super::result::{FromRow, SqlRow, corrupt, read_or_log};
use super::storable;
use crate::domain::provider::ProviderName;
use crate::ledger::LedgerError;
use crate::ledger::approvals::{
    Approval, ApprovalDecision, ApprovalPage, ApprovalRequest, ApprovalState, NewApproval, Party,
};
use crate::ledger::database::Database;
use crate::ledger::operator::LIST_MAX;

static EXPIRE: Template = Template::new(
    "UPDATE pending_approvals SET state = 'expired' WHERE state = 'pending' AND expires_at <= {now} RETURNING id",
);

static REQUEST: Template = Template::new(
    "INSERT INTO pending_approvals (id, action, stored_action, members, digest, jobs, sums, requested_at, expires_at, \
         requested_by, requested_role, requested_path, requested_as, because) \
     VALUES ($1, $2, {json:$3}, {json:$4}, $5, $6, {json:$7}, {now}, {after:$8}, $9, $10, $11, $12, $13) \
     ON CONFLICT DO NOTHING RETURNING {ms:expires_at} AS expires_at_ms",
);

static SAME: Template = Template::new("SELECT id FROM pending_approvals WHERE digest = $1 AND state = 'pending'");

static DECIDE: Template = Template::new(
    "UPDATE pending_approvals SET state = $2, decided_at = {now}, decided_by = $3, decided_role = $4, decided_path = $5, \
         decided_because = $6, batch = $7 \
     WHERE id = $1 AND state = 'pending' AND expires_at > {now} RETURNING id",
);

/// A request whose time is over is expired, whether the sweeper has come or not.
const STATE: &str = "CASE WHEN state = 'pending' AND expires_at <= {now} THEN 'expired' ELSE state END";

fn select(which: &str) -> String {
    format!(
        "SELECT id, {STATE} AS state, {{text:stored_action}} AS stored_action, jobs, {{text:sums}} AS sums, \
             requested_by, requested_role, requested_path, requested_as, {{ms:requested_at}} AS requested_at_ms, \
             {{ms:expires_at}} AS expires_at_ms, because, decided_by, decided_role, decided_path, \
             {{ms:decided_at}} AS decided_at_ms, decided_because, batch \
         FROM pending_approvals WHERE {which}"
    )
}

static ONE: Template = Template::made(|_| select("id = $1"));

/// No id has a letter after `f`.
static PAGE: Template = Template::made(|_| {
    select(&format!("id < COALESCE($1, 'g') AND ($2 IS NULL OR {STATE} = $2) ORDER BY id DESC LIMIT $3"))
});

static MEMBERS: Template = Template::new("SELECT {text:members} AS members FROM pending_approvals WHERE id = $1");

static COUNT: Template =
    Template::new("SELECT count(*) AS pending FROM pending_approvals WHERE state = 'pending' AND expires_at > {now}");

static PROVIDER_VERSION: Template = Template::new("SELECT version FROM providers WHERE name = $1");

static FORGET: Template = Template::new(
    "DELETE FROM pending_approvals WHERE id IN (SELECT id FROM pending_approvals \
         WHERE state <> 'pending' AND expires_at <= {after:(0 - $1)} LIMIT $2) RETURNING id",
);

impl Database {
    /// Stores an action that needs a second person, unless the same one waits already.
    pub async fn request_approval(&self, new: &NewApproval) -> Result<ApprovalRequest, LedgerError> {
        let NewApproval { id, action, members, by, .. } = new;
        let action_text = json!(action).to_string();
        let jobs = i64::try_from(new.jobs).unwrap_or(i64::MAX);
        let members = members.as_ref().map(|members| json!(members).to_string());
        let (role, path) = (by.role.name(), by.path.name());
        let because = new.because.as_deref().map(storable);
        let request = args![
            id,
            action.gated_action().name(),
            action_text,
            members,
            action.digest(),
            jobs,
            json!(new.sums).to_string(),
            new.expire_after,
            storable(&by.name),
            role,
            path,
            storable(&new.author),
            because
        ];
        let steps = vec![self.step(&EXPIRE, []), self.must_affect(&REQUEST, request)];
        if let Some(rows) = self.engine.atomically(steps).await? {
            let row = rows.into_iter().nth(1).and_then(|rows| rows.into_iter().next()).ok_or_else(super::no_row)?;
            return Ok(ApprovalRequest::Stored { expires_at: row.get("expires_at")? });
        }
        let same = self.query_one(&SAME, args![action.digest()]).await?;
        let changed = || LedgerError::Unavailable("requests change faster than one can be stored".to_owned());
        Ok(ApprovalRequest::Pending(same.ok_or_else(changed)?.get("id")?))
    }

    /// Decides a request without any other change. False: it is not pending any more.
    pub async fn decide_approval(&self, id: &str, decision: &ApprovalDecision) -> Result<bool, LedgerError> {
        Ok(self.query_one(&DECIDE, decide_args(id, decision, None)).await?.is_some())
    }

    /// The steps by which this handle's approval becomes part of a change; none without one.
    pub(super) fn approval_steps(&self, batch: Option<&str>) -> Vec<Step> {
        let Some(grant) = &self.approval else { return Vec::new() };
        vec![self.must_affect(&DECIDE, decide_args(&grant.id, &grant.decision, batch))]
    }

    /// The step before a change of settings that was approved for one version of them. The change raises the version.
    pub(super) fn approval_condition(&self) -> Option<Step> {
        let version = self.approval.as_ref()?.settings_version?;
        Some(self.unless_changed_since(version))
    }

    /// `None`: there is no such request.
    pub async fn approval(&self, id: &str) -> Result<Option<Approval>, LedgerError> {
        self.query_one(&ONE, args![id]).await?.as_ref().map(Approval::from_row).transpose()
    }

    /// Requests, newest first, after `after`; at most `at_most`, and never more than [`LIST_MAX`].
    pub async fn list_approvals(
        &self,
        state: Option<ApprovalState>,
        after: Option<&str>,
        at_most: u32,
    ) -> Result<ApprovalPage, LedgerError> {
        let at_most = at_most.min(LIST_MAX);
        let rows = self.query(&PAGE, args![after, state.map(ApprovalState::name), at_most]).await?;
        let last = rows.last().filter(|_| rows.len() == at_most as usize);
        let next = last.and_then(|row| row.get("id").ok());
        Ok(ApprovalPage { approvals: read_or_log(&rows, "pending_approvals", "id"), next })
    }

    /// The ids of the payments of a stored batch.
    pub async fn approval_members(&self, id: &str) -> Result<Vec<String>, LedgerError> {
        let row = self.query_one(&MEMBERS, args![id]).await?.ok_or_else(super::no_row)?;
        let members: Option<String> = row.get("members")?;
        let parsed = members.as_deref().map_or(Ok(Vec::new()), serde_json::from_str);
        parsed.map_err(|_| corrupt("members", "is no list of ids"))
    }

    /// The number of requests that wait for a second person.
    pub async fn pending_approvals(&self) -> Result<u64, LedgerError> {
        self.query_row(&COUNT, []).await?.get("pending")
    }

    /// The version that stamped a provider's row; `None`: there is no such provider.
    pub async fn provider_version(&self, provider: &ProviderName) -> Result<Option<i64>, LedgerError> {
        self.query_one(&PROVIDER_VERSION, args![provider]).await?.map(|row| row.get("version")).transpose()
    }

    /// Ends requests that were not decided in time; returns how many.
    pub async fn expire_approvals(&self) -> Result<u32, LedgerError> {
        self.query_count(&EXPIRE, []).await
    }

    /// Deletes requests whose time ended longer ago than this, at most so many; returns how many.
    pub async fn forget_approvals(&self, older_than: Duration, at_most: u32) -> Result<u32, LedgerError> {
        self.query_count(&FORGET, args![older_than, at_most]).await
    }
}

fn decide_args(id: &str, decision: &ApprovalDecision, batch: Option<&str>) -> Args {
    let ApprovalDecision { state, by, because } = decision;
    let (role, path) = (by.role.name(), by.path.name());
    args![id, state.name(), storable(&by.name), role, path, because.as_deref().map(storable), batch].into()
}

impl FromRow for Approval {
    fn from_row(row: &SqlRow) -> Result<Self, LedgerError> {
        let (state, action, sums): (String, String, String) =
            (row.get("state")?, row.get("stored_action")?, row.get("sums")?);
        let decided_by = match row.get::<Option<String>>("decided_by")? {
            Some(name) => Some(Party { name, role: row.get("decided_role")?, path: row.get("decided_path")? }),
            None => None,
        };
        let (name, role, path) = (row.get("requested_by")?, row.get("requested_role")?, row.get("requested_path")?);
        Ok(Self {
            id: row.get("id")?,
            state: ApprovalState::from_name(&state).ok_or_else(|| corrupt("state", "has no known value"))?,
            action: serde_json::from_str(&action).map_err(|_| corrupt("stored_action", "is no known action"))?,
            jobs: row.get("jobs")?,
            sums: serde_json::from_str(&sums).map_err(|_| corrupt("sums", "is no list of sums"))?,
            requested_by: Party { name, role, path },
            requested_as: row.get("requested_as")?,
            requested_at: row.get("requested_at")?,
            expires_at: row.get("expires_at")?,
            because: row.get("because")?,
            decided_by,
            decided_at: row.get("decided_at")?,
            decided_because: row.get("decided_because")?,
            batch: row.get("batch")?,
        })
    }
}
