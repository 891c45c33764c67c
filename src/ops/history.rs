//! The handler of `GET /api/v1/history`: the recorded history of one provider over a range of up to a month.
//!
//! It reads the samples of the ledger, so every worker shows the same, and a restart changes nothing. The resolution
//! follows from the range. The points are made by [`points`].

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::OpsState;
use super::json::{ApiError, ErrorBody, JsonResponse};
use crate::domain::time::EpochMs;
use crate::fleet::history::{HistoryRange, RANGE_MAX_MS, RecordedMark, RecordedPoint, points};
use crate::ledger::LedgerError;
use crate::ledger::database::Database;
use crate::ledger::history::{HistorySample, SampleStep};
use crate::ledger::operator::DatabaseTime;

/// Length of the range unless `from` is given.
const DEFAULT_MS: i64 = 3_600_000;
const RANGE_MIN_MS: i64 = 1_000;

/// The recorded history of one provider.
#[derive(Debug, Serialize, ToSchema)]
pub struct RecordedHistory {
    pub provider: String,
    #[schema(value_type = String)]
    pub from: DatabaseTime,
    #[schema(value_type = String)]
    pub to: DatabaseTime,
    /// Length of the step of each point.
    pub step_ms: i64,
    /// The last instant that is recorded: 10 to 20 s ago. `null`: none yet.
    #[schema(value_type = Option<String>)]
    pub recorded_until: Option<DatabaseTime>,
    /// In equal steps, oldest first; at most 721.
    pub points: Vec<RecordedPoint>,
    /// Changes of limits, pauses and other settings, starts of workers, changes of circuit breakers; oldest first. Of
    /// many, the newest 400.
    pub marks: Vec<RecordedMark>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct HistoryQuery {
    provider: String,
    /// Start: RFC 3339, or milliseconds since the Unix epoch. Default: an hour before `to`.
    from: Option<String>,
    /// End, in the same forms. Default: now.
    to: Option<String>,
}

fn instant(field: &str, text: &str) -> Result<i64, ApiError> {
    let given = text.parse::<i64>().ok().or_else(|| Some(text.parse::<Timestamp>().ok()?.as_millisecond()));
    given.filter(|at_ms| EpochMs(*at_ms).is_writable()).ok_or_else(|| {
        let forms = "RFC 3339, such as 2026-11-27T14:00:00Z, or milliseconds since the Unix epoch";
        ApiError::bad_request(format!("`{field}` must be {forms}, got `{text}`"))
    })
}

impl HistoryQuery {
    /// The range, by the ledger's clock.
    fn range(&self, now_ms: i64) -> Result<HistoryRange, ApiError> {
        let given = |field, text: &Option<String>| text.as_deref().map(|text| instant(field, text)).transpose();
        let to_ms = given("to", &self.to)?.unwrap_or(now_ms).min(now_ms);
        let from_ms = given("from", &self.from)?.unwrap_or(to_ms - DEFAULT_MS);
        if to_ms - from_ms < RANGE_MIN_MS {
            return Err(ApiError::bad_request("`from` must be at least a second before `to` and before now"));
        }
        if to_ms - from_ms > RANGE_MAX_MS {
            return Err(ApiError::bad_request("the range must be at most 31 days: samples are kept no longer"));
        }
        Ok(HistoryRange::new(from_ms, to_ms, now_ms))
    }
}

/// Rates, waiting payments, limit, 429s and reviews of one provider, as recorded in the database.
///
/// The same from every worker, after any restart. The step is 10 s or more: a response has at most 721 points. Steps of
/// less than five minutes exist for the last 25 hours. A figure that is not known is `null`.
#[utoipa::path(
    get,
    path = "/api/v1/history",
    tag = "overview",
    params(HistoryQuery),
    responses(
        (status = 200, description = "Points in equal steps", body = RecordedHistory),
        (status = 400, description = "A parameter is missing or invalid, or the range is too long", body = ErrorBody),
        (status = 404, description = "There is no such provider", body = ErrorBody),
    )
)]
pub async fn show(
    State(state): State<OpsState>,
    query: Result<Query<HistoryQuery>, QueryRejection>,
) -> Result<JsonResponse<RecordedHistory>, ApiError> {
    let query = query?.0;
    let ledger = &state.reads;
    let clock = ledger.history_clock().await?;
    let range = query.range(clock.now_ms)?;
    let samples = samples(ledger, &query.provider, &range).await?;
    if samples.is_empty() && !state.collector.overview().await.providers.iter().any(|row| row.name == query.provider) {
        return Err(ApiError::not_found(format!("there is no provider `{}`", query.provider)));
    }
    let runs = ledger.history_runs(range.start_ms(), range.end_ms()).await?;
    let marks = marks(ledger, &query.provider, &range).await?;
    Ok(JsonResponse(RecordedHistory {
        provider: query.provider,
        from: DatabaseTime(range.from_ms),
        to: DatabaseTime(range.to_ms),
        step_ms: range.step_ms,
        recorded_until: clock.last.map(|run| DatabaseTime(run.recorded_until_ms)),
        points: points(&range, &samples, &runs),
        marks,
    }))
}

/// The marks of a range: those that are recorded for charts, and the audit's changes of settings.
async fn marks(ledger: &Database, provider: &str, range: &HistoryRange) -> Result<Vec<RecordedMark>, LedgerError> {
    let recorded = ledger.history_marks(provider, range.from_ms, range.to_ms).await?;
    let changes = ledger.settings_changes(provider, range.from_ms, range.to_ms).await?;
    let mut marks: Vec<RecordedMark> = recorded.into_iter().map(RecordedMark::from).collect();
    marks.extend(changes.into_iter().map(RecordedMark::from));
    marks.sort_unstable();
    Ok(marks)
}

/// The samples of a range, and the last one before it. Fine ones follow the coarse ones that are written so far.
async fn samples(ledger: &Database, provider: &str, range: &HistoryRange) -> Result<Vec<HistorySample>, LedgerError> {
    let (start_ms, end_ms) = (range.start_ms(), range.end_ms());
    let before = ledger.history_before(provider, range.source, start_ms).await?;
    let mut samples: Vec<HistorySample> = before.into_iter().collect();
    samples.extend(ledger.history_samples(provider, range.source, start_ms, end_ms).await?);
    if range.source == SampleStep::Coarse {
        let folded_ms = samples.last().map_or(start_ms, |last| last.at_ms);
        samples.extend(ledger.history_samples(provider, SampleStep::Fine, folded_ms, end_ms).await?);
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::domain::limit::Rate;
    use crate::domain::provider::ProviderName;
    use crate::ledger::history::{HistoryMark, RecordedRun, RunUpdate};
    use crate::ledger::provider_row::{LimitRow, ProviderRow};
    use crate::ops::openapi_tests::PublishedApi;
    use crate::ops::tests::{client, spawn_server, state};

    struct TestHistory {
        database: Database,
        address: String,
        published: PublishedApi,
        stop: CancellationToken,
    }

    impl TestHistory {
        async fn new() -> Self {
            let (state, _, database) = state(None).await;
            let limit = LimitRow { name: "all".to_owned(), max_requests: 5, window_ms: 1_000, ..LimitRow::default() };
            let (name, url) = ("acme".to_owned(), "https://pay.example/".to_owned());
            let row = ProviderRow { name, url, limits: vec![limit], ..ProviderRow::default() };
            database.apply_settings(&[row], false).await.unwrap();
            let (address, stop) = spawn_server(state).await;
            Self { database, address, published: PublishedApi::current(), stop }
        }

        async fn get(&self, query: &str) -> (u16, Value) {
            let path = format!("/api/v1/history?{query}");
            let answer = client().get(format!("{}{path}", self.address)).send().await.unwrap();
            let (status, body) = (answer.status().as_u16(), answer.json::<Value>().await.unwrap());
            assert_eq!(self.published.response_faults("get", &path, status, &body), Vec::<String>::new());
            (status, body)
        }
    }

    #[tokio::test]
    async fn history_is_read_with_its_marks() {
        let test = TestHistory::new().await;
        let to_ms = test.database.history_clock().await.unwrap().now_ms / 10_000 * 10_000 - 60_000;
        let sample = |at_ms, started| HistorySample {
            provider: "acme".to_owned(),
            at_ms,
            started,
            waiting: Some(3),
            limit_per_s: Some(5.0),
            ..HistorySample::default()
        };
        let run = RecordedRun { began_at_ms: to_ms - 40_000, recorded_until_ms: to_ms };
        let samples = [sample(to_ms - 30_000, 20), sample(to_ms, 30)];
        assert!(test.database.record_history(&samples, RunUpdate::Begin(run)).await.unwrap());
        let opened = HistoryMark {
            provider: "acme".to_owned(),
            at_ms: to_ms - 5_000,
            kind: "breaker_opened".to_owned(),
            worker: "w".to_owned(),
            detail: "no answer".to_owned(),
        };
        test.database.record_marks(&[opened]).await.unwrap();
        let acme = ProviderName::new("acme").unwrap();
        test.database.set_rate(&acme, "all", "7/1s".parse::<Rate>().unwrap()).await.unwrap();
        test.database.set_paused(&acme, true).await.unwrap();
        let now = test.database.history_clock().await.unwrap().now_ms;
        let (status, history) = test.get(&format!("provider=acme&from={}&to={now}", to_ms - 50_000)).await;
        assert_eq!((status, &history["step_ms"]), (200, &json!(10_000)));
        let points = history["points"].as_array().unwrap();
        let seen: Vec<_> = points[..5].iter().map(|point| (&point["started"], &point["waiting"])).collect();
        let (null, three) = (Value::Null, json!(3));
        let expected =
            [(&null, &null), (&json!(20), &three), (&json!(0), &three), (&json!(0), &three), (&json!(30), &three)];
        assert_eq!(seen, expected);
        assert_eq!((&points[4]["started_per_s"], &points[4]["limit_per_s"]), (&json!(3.0), &json!(5.0)));
        let marks = history["marks"].as_array().unwrap();
        let kinds: Vec<&str> = marks.iter().map(|mark| mark["kind"].as_str().unwrap()).collect();
        assert_eq!(kinds[..1], ["breaker_opened"], "{marks:?}");
        assert!(kinds.ends_with(&["limit", "paused"]), "{marks:?}");
        let text = marks[marks.len() - 2]["text"].as_str().unwrap();
        assert!(text.starts_with("limit all: max_requests 5 → 7"), "{text}");
        // The same range as text.
        let [from, to] = [to_ms - 50_000, to_ms].map(|at| DatabaseTime(at).to_string());
        let (_, same) = test.get(&format!("provider=acme&from={from}&to={to}")).await;
        assert_eq!(same["points"].as_array().unwrap()[..], points[..5]);
        test.stop.cancel();
    }

    #[tokio::test]
    async fn invalid_range_is_refused_with_the_right_form() {
        let test = TestHistory::new().await;
        for (query, status, words) in [
            ("", 400, "missing field `provider`"),
            ("provider=acme&form=1", 400, "unknown field `form`"),
            ("provider=acme&from=yesterday", 400, "`from` must be RFC 3339, such as 2026-11-27T14:00:00Z"),
            ("provider=acme&to=99999999999999999", 400, "`to` must be RFC 3339"),
            ("provider=acme&from=2000&to=1000", 400, "`from` must be at least a second before `to` and before now"),
            ("provider=acme&from=2199-01-01T00:00:00Z", 400, "before now"),
            ("provider=acme&from=0", 400, "the range must be at most 31 days"),
            ("provider=other", 404, "there is no provider `other`"),
        ] {
            let (answered, body) = test.get(query).await;
            assert!(answered == status && body["error"].as_str().unwrap().contains(words), "{query}: {body}");
        }
        let (status, history) = test.get("provider=acme").await;
        // The recorder's first tick may have come already.
        let recorded_until = &history["recorded_until"];
        assert!(status == 200 && (recorded_until.is_null() || recorded_until.is_string()), "{history}");
        assert!((360..=361).contains(&history["points"].as_array().unwrap().len()));
        test.stop.cancel();
    }
}
