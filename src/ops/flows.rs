//! The handler of `GET /api/v1/providers/{name}/flows`: the accounts whose payments wait in a lane's backlog.
//!
//! `provider flows` shows the same data without a running process. It reads the rows of the flows and no payment.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::OpsState;
use super::json::JsonResponse;
use super::json::{ApiError, ErrorBody};
use crate::domain::provider::ProviderName;
use crate::domain::time::millis_up;
use crate::domain::wait_reason::Wait;
use crate::ledger::backlog::{FlowReport, LaneFlows};
use crate::ledger::operator::DatabaseTime;

/// Flows that are listed unless the caller asks for more.
pub const FLOWS_DEFAULT: u32 = 20;
pub const FLOWS_MAX: u32 = 1_000;

/// The flows of a lane, as `/api/v1/providers/{name}/flows` and `provider flows --json` show them.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct FlowsResponse {
    /// Those with most waiting payments first.
    pub flows: Vec<FlowOverview>,
    /// Flows with waiting payments, those that are left out too.
    pub total_flows: u64,
    /// Payments in the lane's backlog.
    pub total_waiting: u64,
}

/// The payments of one account with one priority.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub struct FlowOverview {
    /// `null`: payments without an account.
    pub account: Option<String>,
    /// `null`: payments of unknown outcome.
    pub priority: Option<u8>,
    pub waiting: u64,
    pub weight: u32,
    /// Its part of what is sent of this priority, by the weights, 0 to 1; absent while it is blocked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocked: Option<FlowBlockOverview>,
}

/// What blocks a flow, and until when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FlowBlockOverview {
    /// The code of the reason.
    pub reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<String>,
    /// The reason as a sentence.
    pub text: String,
    /// RFC 3339, by the ledger's clock.
    pub until: String,
    pub left_ms: u64,
}

impl FlowBlockOverview {
    pub fn new(wait: &Wait, until: DatabaseTime, left_ms: u64) -> Self {
        Self {
            reason: wait.reason.code().to_owned(),
            limit: wait.reason.limit().map(str::to_owned),
            text: wait.to_string(),
            until: until.to_string(),
            left_ms,
        }
    }
}

impl From<&FlowReport> for FlowOverview {
    fn from(flow: &FlowReport) -> Self {
        let block = flow.status.block().zip(flow.blocked_until);
        Self {
            account: flow.status.account.as_ref().map(|account| account.as_str().to_owned()),
            priority: flow.status.class.priority(),
            waiting: flow.status.waiting,
            weight: flow.weight,
            share: flow.share(),
            blocked: block.map(|(block, until)| FlowBlockOverview::new(&block.wait(), until, millis_up(block.left))),
        }
    }
}

impl From<&LaneFlows> for FlowsResponse {
    fn from(lane: &LaneFlows) -> Self {
        Self {
            flows: lane.largest.iter().map(FlowOverview::from).collect(),
            total_flows: lane.flows,
            total_waiting: lane.waiting,
        }
    }
}

#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct FlowsQuery {
    /// Most flows that are listed, 1 to 1000; default 20.
    limit: Option<u32>,
}

/// The accounts whose payments wait in the backlog of a provider's lane, and what blocks them; most payments first.
#[utoipa::path(
    get,
    path = "/api/v1/providers/{name}/flows",
    tag = "providers",
    params(("name" = String, Path, description = "The provider's name"), FlowsQuery),
    responses(
        (status = 200, description = "Its largest flows, and the sums of all", body = FlowsResponse),
        (status = 400, description = "`limit` is out of range", body = ErrorBody),
        (status = 404, description = "There is no such provider", body = ErrorBody),
    )
)]
pub async fn show(
    State(state): State<OpsState>,
    Path(name): Path<String>,
    query: Result<Query<FlowsQuery>, QueryRejection>,
) -> Result<JsonResponse<FlowsResponse>, ApiError> {
    let at_most = query?.0.limit.unwrap_or(FLOWS_DEFAULT);
    if !(1..=FLOWS_MAX).contains(&at_most) {
        return Err(ApiError::bad_request(format!("`limit` must be 1 to {FLOWS_MAX}, got {at_most}")));
    }
    let unknown = || ApiError::not_found(format!("there is no provider `{name}`"));
    let lane = ProviderName::new(name.as_str()).map_err(|_| unknown())?;
    if state.reads.raw_rows(Some(&lane)).await?.is_empty() {
        return Err(unknown());
    }
    Ok(JsonResponse(FlowsResponse::from(&state.reads.largest_flows(&lane, at_most).await?)))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::ledger::provider_row::{LimitRow, ProviderRow};
    use crate::ops::openapi_tests::PublishedApi;
    use crate::ops::tests::{client, spawn_server, state};

    #[tokio::test]
    async fn flows_are_listed_with_the_sums_of_all() {
        let (state, _progress, database) = state(None).await;
        let limit = LimitRow { name: "all".to_owned(), max_requests: 5, window_ms: 1_000, ..LimitRow::default() };
        let row = |name: &str| {
            let url = "https://pay.example/".to_owned();
            ProviderRow { name: name.to_owned(), url, limits: vec![limit.clone()], ..ProviderRow::default() }
        };
        database.apply_settings(&[row("acme"), row("idle")], false).await.unwrap();
        let fill = "INSERT INTO flows (provider, class, account, waiting, weight, blocked_until, blocked_reason, \
                 blocked_limit) \
             VALUES ('acme', 10, 'flood', 400, 1, 4102444800000, 'limit', 'own'), ('acme', 10, '', 8, 1, NULL, NULL, \
                 NULL), ('acme', 10, 'big', 5, 3, NULL, NULL, NULL), ('acme', 0, 'lost', 2, 1, 1, 'limit', 'own'), \
                 ('acme', 10, 'gone', 0, 9, NULL, NULL, NULL), ('other', 10, 'flood', 9, 1, NULL, NULL, NULL)";
        sqlx::raw_sql(fill).execute(&database.sqlite_pool().unwrap()).await.unwrap();
        let (address, stop) = spawn_server(state).await;
        let published = PublishedApi::current();
        let get = async |path: &str| {
            let answer = client().get(format!("{address}{path}")).send().await.unwrap();
            let (status, body) = (answer.status().as_u16(), answer.json::<Value>().await.unwrap());
            assert_eq!(published.response_faults("get", path, status, &body), Vec::<String>::new());
            (status, body)
        };
        let (status, mut shown) = get("/api/v1/providers/acme/flows").await;
        let left_ms = shown["flows"][0]["blocked"]["left_ms"].take();
        assert!(left_ms.as_u64() > Some(1_000_000), "{left_ms}");
        let flow = |account: Value, priority: Value, waiting: u64, weight: u64, share: f64| json!({"account": account, "priority": priority, "waiting": waiting, "weight": weight, "share": share});
        let flood = json!({
            "account": "flood", "priority": 0, "waiting": 400, "weight": 1, "blocked": {
                "reason": "limit", "limit": "own", "text": "waits for limit own", "until": "2100-01-01T00:00:00.000Z",
                "left_ms": null,
            },
        });
        let all = [
            flood,
            flow(Value::Null, json!(0), 8, 1, 0.25),
            flow(json!("big"), json!(0), 5, 3, 0.75),
            // Its block has ended.
            flow(json!("lost"), Value::Null, 2, 1, 1.0),
        ];
        assert_eq!((status, shown), (200, json!({"flows": all, "total_flows": 4, "total_waiting": 415})));
        let (_, two) = get("/api/v1/providers/acme/flows?limit=2").await;
        assert_eq!(two["flows"].as_array().unwrap().len(), 2);
        assert_eq!((&two["total_flows"], &two["total_waiting"]), (&json!(4), &json!(415)));
        let none = json!({"flows": [], "total_flows": 0, "total_waiting": 0});
        assert_eq!(get("/api/v1/providers/idle/flows").await, (200, none));
        for (path, status, words) in [
            ("acme/flows?limit=0", 400, "`limit` must be 1 to 1000, got 0"),
            ("acme/flows?limit=1001", 400, "`limit` must be 1 to 1000, got 1001"),
            ("acme/flows?limit=x", 400, "invalid digit"),
            ("acme/flows?account=x", 400, "unknown field `account`"),
            ("other/flows", 404, "there is no provider `other`"),
            ("Bad/flows", 404, "there is no provider `Bad`"),
        ] {
            let (answered, body) = get(&format!("/api/v1/providers/{path}")).await;
            assert!(answered == status && body["error"].as_str().unwrap().contains(words), "{path}: {answered} {body}");
        }
        stop.cancel();
    }
}
