//! The handlers of account rules: they list those of a provider, and set and unset one.
//!
//! The commands `accounts list`, `set` and `unset` reject the same requests, with the same texts.

use axum::extract::{Path, State};
use axum::routing::{get, post};
use axum::{Extension, Router};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::changes::{actor, parse_provider_name, parse_until};
use crate::domain::job::Identifier;
use crate::domain::provider::ProviderName;
use crate::ledger::operator::{Actor, DatabaseTime};
use crate::ledger::provider_row::{AccountReturn, AccountRow};
use crate::ops::OpsState;
use crate::ops::account_rules::{AccountRuleLine, RuleSubject, WantedRule, WrittenRule, change_rule, list_rules};
use crate::ops::guard::ApiCaller;
use crate::ops::json::{ApiBody, ApiError, ErrorBody, JsonResponse};

pub fn routes() -> Router<OpsState> {
    Router::new()
        .route("/api/v1/providers/{name}/accounts", get(list))
        .route("/api/v1/providers/{name}/accounts/{account}", post(set))
        .route("/api/v1/providers/{name}/accounts/{account}/unset", post(unset))
}

/// The account rules of a provider.
#[derive(Debug, Serialize, ToSchema)]
pub struct AccountRules {
    rules: Vec<AccountRuleLine>,
}

/// An account's new rule. What is absent stays as it is.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RuleRequest {
    /// `5/1s`, `5 at once`, `blocked`, `refuse` or `exempt`. Absent: with `weight`, the present rule stays.
    rule: Option<String>,
    /// The limit that the rule is for. Absent: all limits of scope `account`; without any, `5/1s` is a limit of its own.
    limit: Option<String>,
    /// The account's share among the accounts of its lane, 1 to 1000.
    weight: Option<i64>,
    /// A time of day (`06:00 Europe/Berlin`), an RFC 3339 instant, or `none`. Then the rule before comes back.
    until: Option<String>,
    /// For the audit. 1 to 500 characters.
    because: String,
}

/// The rule that is to end.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UnsetRequest {
    /// The limit that the rule is for. Absent: the rule for all limits, with its weight.
    limit: Option<String>,
    /// For the audit. 1 to 500 characters.
    because: String,
}

/// An account's rule before and after.
#[derive(Debug, Serialize, ToSchema)]
pub struct RuleResult {
    account: String,
    limit: Option<String>,
    /// In words; `null`: there was none.
    from: Option<String>,
    to: Option<String>,
    /// False if rule and end are the same.
    changed: bool,
    /// When the rule ends by itself; `null`: it stays.
    until: Option<DatabaseTime>,
    /// The rule from then on, in words.
    then: Option<String>,
    /// No payment has ever named the account.
    warning: Option<String>,
}

/// The account rules of a provider: what each account may do, by whom, why and until when.
#[utoipa::path(
    get,
    path = "/api/v1/providers/{name}/accounts",
    tag = "providers",
    params(("name" = String, Path, description = "The provider's name")),
    responses(
        (status = 200, description = "By account and limit", body = AccountRules),
        (status = 404, description = "There is no such provider", body = ErrorBody),
        (status = 409, description = "The provider's row cannot be read", body = ErrorBody),
    )
)]
pub async fn list(
    State(ops): State<OpsState>,
    Path(name): Path<String>,
) -> Result<JsonResponse<AccountRules>, ApiError> {
    let rules = list_rules(&ops.operator_context.ledger, &parse_provider_name(name)?).await?;
    Ok(JsonResponse(AccountRules { rules }))
}

/// Sets an account's rule: blocks it, refuses it, exempts it from account limits, or limits it. It takes effect in every
/// worker within 2 s.
#[utoipa::path(
    post,
    path = "/api/v1/providers/{name}/accounts/{account}",
    tag = "providers",
    params(
        ("name" = String, Path, description = "The provider's name"),
        ("account" = String, Path, description = "The account"),
    ),
    request_body = RuleRequest,
    responses(
        (status = 200, description = "Set; workers follow within 2 s", body = RuleResult),
    )
)]
pub async fn set(
    State(ops): State<OpsState>,
    Path(path): Path<(String, String)>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<RuleRequest>,
) -> Result<JsonResponse<RuleResult>, ApiError> {
    let RuleRequest { rule, limit, weight, until, because } = asked;
    let rule = rule.as_deref().map(str::parse::<WrittenRule>).transpose();
    let rule = rule.map_err(|why| ApiError::bad_field("rule", why))?;
    if rule.is_none() && weight.is_none() {
        return Err(ApiError::bad_request("missing field `rule`: only with `weight` the present rule stays"));
    }
    let wanted = WantedRule::Set { rule, weight, until: parse_until(until.as_deref())? };
    change(&ops, RulePath::new(path, limit)?, &wanted, &reasoned(&caller, because)?).await
}

/// Removes an account's rule, and its weight.
#[utoipa::path(
    post,
    path = "/api/v1/providers/{name}/accounts/{account}/unset",
    tag = "providers",
    params(
        ("name" = String, Path, description = "The provider's name"),
        ("account" = String, Path, description = "The account"),
    ),
    request_body = UnsetRequest,
    responses(
        (status = 200, description = "Removed; workers follow within 2 s", body = RuleResult),
    )
)]
pub async fn unset(
    State(ops): State<OpsState>,
    Path(path): Path<(String, String)>,
    Extension(caller): Extension<ApiCaller>,
    ApiBody(asked): ApiBody<UnsetRequest>,
) -> Result<JsonResponse<RuleResult>, ApiError> {
    let by = reasoned(&caller, asked.because)?;
    change(&ops, RulePath::new(path, asked.limit)?, &WantedRule::Unset, &by).await
}

/// The actor of a change that needs a reason.
fn reasoned(caller: &ApiCaller, because: String) -> Result<Actor, ApiError> {
    let by = actor(caller, Some(because))?;
    if by.reason.is_none() {
        return Err(ApiError::bad_request("`because`: is empty: write why, for the audit"));
    }
    Ok(by)
}

/// The account of a rule, as address and body name it.
struct RulePath {
    provider: ProviderName,
    account: Identifier,
    limit: Option<String>,
}

impl RulePath {
    fn new(path: (String, String), limit: Option<String>) -> Result<Self, ApiError> {
        let provider = parse_provider_name(path.0)?;
        let account = Identifier::new(path.1).map_err(|why| ApiError::bad_field("account", why))?;
        Ok(Self { provider, account, limit })
    }
}

async fn change(
    ops: &OpsState,
    RulePath { provider, account, limit }: RulePath,
    wanted: &WantedRule,
    by: &Actor,
) -> Result<JsonResponse<RuleResult>, ApiError> {
    let of = RuleSubject { provider: &provider, account: &account, limit: limit.as_deref() };
    let change = change_rule(&ops.operator_context.ledger, &of, wanted, Some(by)).await?;
    let returns = change.after.as_ref().and_then(|row| row.returns.as_ref());
    Ok(JsonResponse(RuleResult {
        from: change.before.as_ref().map(AccountRow::describe),
        to: change.after.as_ref().map(AccountRow::describe),
        changed: change.is_change(),
        until: returns.map(|returns| returns.until),
        then: returns.map(AccountReturn::describe_then),
        warning: change.warning(&of),
        account: account.to_string(),
        limit,
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::ops::api::tests::TestApi;

    #[tokio::test]
    async fn account_is_blocked_listed_and_released() {
        let api = TestApi::new().await;
        let path = "/api/v1/providers/acme/accounts/shop-7";
        let (status, set) = api.post(path, json!({"rule": "blocked", "because": "fraud, ticket 12"})).await;
        let warning = "no payment of acme has ever named account `shop-7`: check its name";
        let expected = json!({"account": "shop-7", "limit": null, "from": null, "to": "blocked", "changed": true,
            "until": null, "then": null, "warning": warning});
        assert_eq!((status, set), (200, expected));
        api.add_job("p1", "shop-7", "waiting").await;
        let body = json!({"rule": "5/1s", "weight": 3, "until": "06:00", "because": "rehearsal"});
        let (status, set) = api.post(path, body).await;
        assert_eq!((status, &set["from"], &set["to"]), (200, &json!("blocked"), &json!("limit 5/1s, weight 3")));
        assert_eq!((&set["then"], &set["warning"]), (&json!("blocked"), &Value::Null));
        let (_, listed) = api.get("/api/v1/providers/acme/accounts").await;
        let rule = &listed["rules"][0];
        assert_eq!((&rule["rule"], &rule["weight"], &rule["then"]), (&json!("5/1s"), &json!(3), &json!("blocked")));
        assert!(rule["who"].as_str().unwrap().starts_with("alice@"), "{rule}");
        assert_eq!((&rule["because"], &rule["until"]), (&json!("rehearsal"), &set["until"]));
        let unset = json!({"because": "cleared"});
        assert_eq!(api.post(&format!("{path}/unset"), unset.clone()).await.1["to"], Value::Null);
        for (path, body, status, words) in [
            (path, json!({"rule": "blocked"}), 400, "missing field `because`"),
            (path, json!({"rule": "blocked", "because": " "}), 400, "`because`: is empty"),
            (path, json!({"rule": "blcked", "because": "x"}), 400, "write blocked, refuse, exempt or a rate"),
            (path, json!({"because": "x"}), 400, "missing field `rule`"),
            (path, json!({"rule": "exempt", "because": "x"}), 409, "rule `exempt` changes nothing"),
            (path, json!({"rule": "blocked", "limit": "none", "because": "x"}), 409, "`none` is not a limit"),
            (path, json!({"rule": "20000/1s", "because": "x"}), 409, "at most 10000"),
            (path, json!({"weight": 0, "because": "x"}), 409, "weight is 0"),
            (
                "/api/v1/providers/none/accounts/a",
                json!({"rule": "blocked", "because": "x"}),
                404,
                "no provider `none`",
            ),
            ("/api/v1/providers/acme/accounts/a/unset", json!({"because": "x"}), 404, "account a has no rule"),
        ] {
            let (got, answer) = api.post(path, body.clone()).await;
            assert!(got == status && answer["error"].as_str().unwrap().contains(words), "{body}: {got} {answer}");
        }
        assert_eq!(api.get("/api/v1/providers/acme/accounts").await.1, json!({"rules": []}));
    }
}
