//! The finish time of a backlog and its provider's cut-off as text, in the time zone of the terminal.
//!
//! The zone is that of `TZ` or of the system. `--json` has instants in UTC.

use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::cli::console::group_thousands;
use crate::domain::format::plural;
use crate::fleet::ProviderOverview;
use crate::fleet::cutoff::{CutoffForecastOverview, CutoffOverview};
use crate::fleet::pace::ClearTimeOverview;

/// A backlog that clears sooner has no finish time beside its clear time.
const SHOWN_FROM_MS: u64 = 60_000;
const MINUTE_S: i64 = 60;

/// `clears at 14:32 CET · 3,120 payments miss the cut-off at 18:00 CET; 240/s would do`; `None`: no payment waits, or
/// there is nothing to say.
pub fn finish_note(provider: &ProviderOverview) -> Option<String> {
    note_in(provider, &TimeZone::system())
}

fn note_in(provider: &ProviderOverview, zone: &TimeZone) -> Option<String> {
    if provider.waiting == 0 {
        return None;
    }
    let cutoff = provider.cutoff.as_ref().and_then(|cutoff| cutoff_text(cutoff, zone));
    let parts: Vec<String> = clears_at_text(provider, zone).into_iter().chain(cutoff).collect();
    (!parts.is_empty()).then(|| parts.join(" · "))
}

fn clears_at_text(provider: &ProviderOverview, zone: &TimeZone) -> Option<String> {
    let at = provider.clears_at.as_ref()?.parse::<Timestamp>().ok()?;
    let in_ms = provider.clears.ms().filter(|ms| *ms >= SHOWN_FROM_MS)?;
    let now = at.checked_sub(Duration::from_millis(in_ms)).ok()?;
    let about = match provider.clears {
        ClearTimeOverview::DependsOnAccounts { about_ms: None, .. } => "not before ",
        ClearTimeOverview::DependsOnAccounts { .. } => "about ",
        _ => "",
    };
    // The minute that has passed when it is cleared: seconds would promise more than an estimate knows.
    let minute = at.as_second().div_euclid(MINUTE_S) + i64::from(at.as_second().rem_euclid(MINUTE_S) > 0);
    let minute = Timestamp::from_second(minute * MINUTE_S).unwrap_or(at);
    let at = local_minute(minute, now, zone);
    Some(if about.starts_with("not") { format!("clears {about}{at}") } else { format!("clears at {about}{at}") })
}

fn cutoff_text(cutoff: &CutoffOverview, zone: &TimeZone) -> Option<String> {
    let at = cutoff.at.parse::<Timestamp>().ok()?;
    let now = at.checked_sub(Duration::from_millis(cutoff.in_ms)).ok()?;
    let then = format!("the cut-off at {}", local_minute(at, now, zone));
    Some(match &cutoff.forecast {
        CutoffForecastOverview::OnTime { .. } => format!("in time for {then}"),
        CutoffForecastOverview::Unknown => format!("it is unknown whether payments miss {then}"),
        CutoffForecastOverview::Missed { payments, is_at_least, needed_per_s } => {
            let least = if *is_at_least { "at least " } else { "" };
            let miss = if *payments == 1 { "misses" } else { "miss" };
            let payments = format!("{} {}", group_thousands(*payments), plural(*payments, "payment"));
            let enough = needed_per_s.map_or_else(|| "no rate would do".to_owned(), enough_text);
            format!("{least}{payments} {miss} {then}; {enough}")
        }
    })
}

/// `240/s would do`, rounded up so that it is enough.
fn enough_text(per_second: f64) -> String {
    if per_second < 10.0 {
        return format!("{:.1}/s would do", (per_second * 10.0).ceil() / 10.0);
    }
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate of payments")]
    let whole = per_second.ceil() as u64;
    format!("{}/s would do", group_thousands(whole))
}

/// `14:32 CET`; with its date unless that is today's.
fn local_minute(at: Timestamp, now: Timestamp, zone: &TimeZone) -> String {
    let (at, now) = (at.to_zoned(zone.clone()), now.to_zoned(zone.clone()));
    let format = if at.date() == now.date() { "%H:%M %Z" } else { "%F %H:%M %Z" };
    at.strftime(format).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{OverviewInput, overview};
    use crate::ledger::provider_row::ProviderRow;

    fn waiting(clears: ClearTimeOverview, clears_at: &str, cutoff: Option<CutoffForecastOverview>) -> ProviderOverview {
        let row = ProviderRow { name: "acme".to_owned(), ..ProviderRow::default() };
        let mut overview = overview(&OverviewInput { rows: vec![row], ..OverviewInput::default() });
        let mut provider = overview.providers.remove(0);
        provider.waiting = 50_000;
        provider.clears = clears;
        provider.clears_at = Some(clears_at.to_owned()).filter(|at| !at.is_empty());
        provider.cutoff = cutoff.map(|forecast| CutoffOverview {
            rule: "18:00 Europe/Berlin".to_owned(),
            at: "2026-11-27T17:00:00.000Z".to_owned(),
            in_ms: 4 * 3_600_000,
            forecast,
        });
        provider
    }

    #[test]
    fn finish_time_is_in_the_time_zone_of_the_terminal() {
        let in_ms = |ms| ClearTimeOverview::ClearsIn { ms };
        let depends = |about_ms| ClearTimeOverview::DependsOnAccounts {
            at_least_ms: 120_000,
            limits: vec!["each".to_owned()],
            about_ms,
        };
        let missed = |payments, is_at_least, needed_per_s| {
            Some(CutoffForecastOverview::Missed { payments, is_at_least, needed_per_s })
        };
        let on_time = || Some(CutoffForecastOverview::OnTime { spare_ms: 1 });
        for (provider, zone, wanted) in [
            (waiting(in_ms(120_000), "2026-11-27T13:31:10.000Z", None), "Europe/Berlin", "clears at 14:32 CET"),
            (waiting(in_ms(120_000), "2026-11-27T13:32:00.000Z", None), "Europe/Berlin", "clears at 14:32 CET"),
            (waiting(in_ms(120_000), "2026-11-27T13:31:10.000Z", None), "UTC", "clears at 13:32 UTC"),
            (waiting(in_ms(7_200_000), "2026-11-28T00:30:00.000Z", None), "UTC", "clears at 2026-11-28 00:30 UTC"),
            (waiting(in_ms(7_200_000), "2026-11-28T00:30:00.000Z", None), "Asia/Tokyo", "clears at 09:30 JST"),
            (waiting(in_ms(59_000), "2026-11-27T13:31:10.000Z", None), "UTC", ""),
            (waiting(depends(Some(428_000)), "2026-11-27T13:31:10.000Z", None), "UTC", "clears at about 13:32 UTC"),
            (waiting(depends(None), "2026-11-27T13:31:10.000Z", None), "UTC", "clears not before 13:32 UTC"),
            (
                waiting(in_ms(120_000), "2026-11-27T17:31:10.000Z", missed(3_120, false, Some(239.2))),
                "Europe/Berlin",
                "clears at 18:32 CET · 3,120 payments miss the cut-off at 18:00 CET; 240/s would do",
            ),
            (
                waiting(ClearTimeOverview::NotWhilePaused, "", missed(1, true, Some(0.01))),
                "UTC",
                "at least 1 payment misses the cut-off at 17:00 UTC; 0.1/s would do",
            ),
            (
                waiting(ClearTimeOverview::NotWhilePaused, "", missed(7, false, None)),
                "UTC",
                "7 payments miss the cut-off at 17:00 UTC; no rate would do",
            ),
            (
                waiting(in_ms(1_000), "2026-11-27T13:31:10.000Z", on_time()),
                "UTC",
                "in time for the cut-off at 17:00 UTC",
            ),
            (
                waiting(ClearTimeOverview::NotWhilePaused, "", Some(CutoffForecastOverview::Unknown)),
                "UTC",
                "it is unknown whether payments miss the cut-off at 17:00 UTC",
            ),
        ] {
            let zone = jiff::tz::TimeZoneDatabase::bundled().get(zone).unwrap();
            assert_eq!(note_in(&provider, &zone).unwrap_or_default(), wanted);
        }
        let idle = ProviderOverview { waiting: 0, ..waiting(in_ms(120_000), "2026-11-27T13:31:10.000Z", on_time()) };
        assert_eq!(finish_note(&idle), None);
    }
}
