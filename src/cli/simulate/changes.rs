//! The setup of a simulation: rows and environment, and the changes of each variant.
//!
//! A changed row is validated like any other row.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;

use super::Args;
use crate::cli::CommandError;
use crate::domain::limit::Rate;
use crate::domain::time::parse_duration;
use crate::files;
use crate::ledger::provider_row::ProviderRow;
use crate::simulation::{LatencyModel, Model};
use crate::worker::quotas::quota_spec;
use crate::worker::settings_sync::LoadedSettings;

/// Largest recording of latencies, in bytes.
const LATENCY_BYTES_MAX: u64 = 64 * 1024 * 1024;

#[derive(Clone, Debug)]
pub(super) struct SimulationSetup {
    rows: Vec<ProviderRow>,
    provider_index: usize,
    processes: u32,
    latency: LatencyModel,
    transit: LatencyModel,
    round_trip: Duration,
    commit: Duration,
    faults: f64,
    cold: bool,
}

/// The name and the changes of `NAME: KEY=VALUE …`; without a name, the changes are the name.
pub(super) fn parse_variant(text: &str) -> Result<(String, Vec<String>), String> {
    let (name, changes) = text.split_once(": ").unwrap_or(("", text));
    let changes: Vec<String> = changes.split_whitespace().map(str::to_owned).collect();
    if changes.is_empty() {
        return Err(format!("--variant `{text}` changes nothing: write `NAME: KEY=VALUE`"));
    }
    let name = if name.trim().is_empty() { changes.join(" ") } else { name.trim().to_owned() };
    Ok((name, changes))
}

impl SimulationSetup {
    pub fn new(args: &Args, rows: Vec<ProviderRow>, provider: usize) -> Result<Self, CommandError> {
        let mut setup = Self {
            rows,
            provider_index: provider,
            processes: args.processes,
            latency: LatencyModel::Constant(0),
            transit: LatencyModel::Constant(0),
            round_trip: Duration::ZERO,
            commit: Duration::ZERO,
            faults: 0.0,
            cold: args.cold,
        };
        let named = [
            ("latency", &args.latency),
            ("transit", &args.transit),
            ("round_trip", &args.round_trip),
            ("commit", &args.commit),
            ("faults", &args.faults),
        ];
        for (key, value) in named {
            let usage_error = |problem| CommandError::Usage(format!("--{}: {problem}", key.replace('_', "-")));
            setup.apply_change(&format!("{key}={value}")).map_err(usage_error)?;
        }
        Ok(setup)
    }

    fn row_mut(&mut self) -> Result<&mut ProviderRow, String> {
        self.rows.get_mut(self.provider_index).ok_or_else(|| "there is no row".to_owned())
    }

    pub fn provider_name(&self) -> &str {
        self.rows.get(self.provider_index).map_or("", |row| row.name.as_str())
    }

    /// Applies one `KEY=VALUE`.
    pub fn apply_change(&mut self, change: &str) -> Result<(), String> {
        let (key, value) = change.split_once('=').ok_or_else(|| "write KEY=VALUE, like limit=200/1s".to_owned())?;
        match key {
            "processes" => {
                let count = value.parse().ok().filter(|count| (1..=1_000).contains(count));
                self.processes = count.ok_or_else(|| format!("`{value}` must be 1 to 1000"))?;
            }
            "latency" => self.latency = parse_latency(value)?,
            "transit" => self.transit = parse_latency(value)?,
            "round_trip" => self.round_trip = duration(value)?,
            "commit" => self.commit = duration(value)?,
            "faults" => {
                let share = value.parse().ok().filter(|share| (0.0..=1.0).contains(share));
                self.faults = share.ok_or_else(|| format!("`{value}` must be a share between 0 and 1"))?;
            }
            _ => match key.strip_prefix("limit") {
                Some("") => self.set_limit(None, value)?,
                Some(name) if name.starts_with('.') => self.set_limit(name.get(1..), value)?,
                _ => self.set_column(key, value)?,
            },
        }
        Ok(())
    }

    fn set_limit(&mut self, name: Option<&str>, value: &str) -> Result<(), String> {
        let rate = Rate::parse_limit(value).map_err(|problem| problem.to_string())?;
        let row = self.row_mut()?;
        let names: Vec<String> =
            row.limits.iter().filter(|limit| limit.enabled).map(|limit| limit.name.clone()).collect();
        let name = match (name, names.as_slice()) {
            (Some(name), _) => name.to_owned(),
            (None, [only]) => only.clone(),
            (None, _) => return Err(format!("name the limit, as limit.NAME=…: {}", names.join(", "))),
        };
        let limit = row.limits.iter_mut().find(|limit| limit.name == name);
        let limit = limit.ok_or_else(|| format!("there is no limit `{name}`; there are: {}", names.join(", ")))?;
        limit.set_rate(rate);
        limit.enabled = true;
        Ok(())
    }

    /// Sets a column, as JSON if the value is JSON and the column is no text, else as text.
    fn set_column(&mut self, key: &str, value: &str) -> Result<(), String> {
        let row = self.row_mut()?;
        let mut columns = serde_json::to_value(&*row).map_err(|error| error.to_string())?;
        let text = columns.get(key).is_some_and(Value::is_string);
        let value = serde_json::from_str(value).ok().filter(|_| !text).unwrap_or_else(|| Value::from(value));
        if let Some(map) = columns.as_object_mut() {
            map.insert(key.to_owned(), value);
        }
        *row = serde_json::from_value(columns).map_err(|error| error.to_string())?;
        Ok(())
    }

    /// Weights of the provider's accounts. A rule for one limit has none.
    fn weights(&self) -> BTreeMap<String, u32> {
        let accounts = self.rows.get(self.provider_index).map(|row| &row.accounts).into_iter().flatten();
        let weighted = accounts.filter(|own| own.limit_name.is_none());
        weighted.filter_map(|own| Some((own.account.clone(), u32::try_from(own.weight).ok()?))).collect()
    }

    /// The simulation model of the rows, as a worker would build the lane.
    pub fn model(&self, start: Timestamp) -> Result<Model, String> {
        let mut known = LoadedSettings { version: 1, ..LoadedSettings::default() };
        let mut simulated = None;
        for (index, row) in self.rows.iter().enumerate() {
            match row.validate(0) {
                Ok(provider) => {
                    let provider = Arc::new(provider);
                    if index == self.provider_index {
                        simulated = Some(Arc::clone(&provider));
                    }
                    known.providers.insert(provider.name.clone(), provider);
                }
                Err(invalid) if index == self.provider_index => return Err(invalid.problems.join("; ")),
                Err(invalid) => known.invalid_rows.push(invalid),
            }
        }
        let provider = simulated.ok_or_else(|| "there is no row".to_owned())?;
        if provider.paused || !provider.enabled {
            let what =
                if provider.paused { "paused: add --with paused=false" } else { "disabled: add --with enabled=true" };
            return Err(format!("{} is {what}", provider.name));
        }
        let spec = quota_spec(&known, &provider.quota)
            .ok_or_else(|| format!("another row of quota {} is invalid, so its limits are unknown", provider.quota))?;
        let start_us = u64::try_from(start.as_microsecond()).map_err(|_| "the start is before 1970".to_owned())?;
        Ok(Model {
            spec,
            provider: provider.as_ref().clone(),
            weights: self.weights(),
            processes: self.processes,
            start_us,
            latency: self.latency.clone(),
            transit: self.transit.clone(),
            round_trip: self.round_trip,
            commit: self.commit,
            faults: self.faults,
            cold: self.cold,
        })
    }
}

fn parse_latency(text: &str) -> Result<LatencyModel, String> {
    if Path::new(text).extension().is_some_and(|extension| extension.eq_ignore_ascii_case("csv")) {
        let csv = files::read(Path::new(text), LATENCY_BYTES_MAX).map_err(|error| format!("{text}: {error}"))?;
        return LatencyModel::observed(&csv.text).map_err(|problem| format!("{text}: {problem}"));
    }
    text.parse()
}

fn duration(text: &str) -> Result<Duration, String> {
    match text.strip_suffix("us") {
        Some(us) => us.parse().map(Duration::from_micros).map_err(|_| format!("`{text}` is not a duration")),
        None => parse_duration(text).map_err(|problem| problem.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unnamed_variant_is_named_by_its_changes() {
        let parsed = |text| parse_variant(text).unwrap();
        assert_eq!(
            parsed("at 50/s: limit=50/1s processes=2"),
            ("at 50/s".into(), vec!["limit=50/1s".into(), "processes=2".into()])
        );
        assert_eq!(parsed("limit=50/1s"), ("limit=50/1s".into(), vec!["limit=50/1s".into()]));
        assert!(parse_variant("slow: ").is_err());
    }
}
