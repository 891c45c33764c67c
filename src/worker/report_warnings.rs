//! The warnings of a report: what an operator should look at in this worker, in one sentence each.

use std::sync::Arc;

use super::meter::LaneMeter;
use super::supervisor::WorkerStatus;
use crate::domain::format::count;
use crate::domain::job::JobField;
use crate::domain::provider::{Provider, ProviderName};

pub(super) fn warnings(progress: &WorkerStatus) -> Vec<String> {
    let mut warnings = rows_without_lane(progress);
    warnings.extend(missing_field_warnings(progress));
    warnings.extend(progress.meter.evictions().warnings());
    warnings.extend(progress.meter.unpublished().and_then(|unpublished| unpublished.warning()));
    warnings
}

/// Warnings for enabled rows that have no lane here.
fn rows_without_lane(progress: &WorkerStatus) -> Vec<String> {
    if !progress.ready || progress.draining {
        return Vec::new();
    }
    let missing = |name: &&ProviderName| !progress.lanes.contains_key(*name);
    let enabled = progress.settings.providers.iter().filter(|(_, row)| row.enabled).map(|(name, _)| name);
    enabled.filter(missing).map(|name| format!("no lane for {name}: see this worker's log")).collect()
}

/// Warnings for lanes whose limits and rules did not apply to jobs without a field that their rows still do not
/// require.
fn missing_field_warnings(progress: &WorkerStatus) -> Vec<String> {
    let rows = progress.settings.providers.values().filter(|row| row.enabled);
    let lanes = rows.filter_map(|row| Some((row, progress.meter.find_lane(&row.name)?)));
    let warnings = |(row, lane): (&Arc<Provider>, Arc<LaneMeter>)| {
        let missing = JobField::ALL.into_iter().filter(|lacks| !row.require.contains(lacks) && row.counts_by(*lacks));
        let missing = missing.map(|lacks| (lacks, lane.without(lacks).get())).filter(|(_, jobs)| *jobs > 0);
        missing.map(|(lacks, jobs)| missing_field_warning(&row.name, lacks, jobs)).collect::<Vec<_>>()
    };
    lanes.flat_map(warnings).collect()
}

fn missing_field_warning(provider: &ProviderName, lacks: JobField, jobs: u64) -> String {
    let (field, jobs) = (lacks.name(), count(jobs, "job"));
    let passed = match lacks {
        JobField::Account => "account limits and rules",
        JobField::Reference => "reference limits",
    };
    format!(
        "{provider}: its {passed} did not apply to {jobs} without `{field}`; set require = [\"{field}\"] in its row, \
         or publish every payment with its `{field}`"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_fields_are_warned_of_with_a_fix() {
        let acme = ProviderName::new("acme").unwrap();
        assert_eq!(
            missing_field_warning(&acme, JobField::Account, 1),
            "acme: its account limits and rules did not apply to 1 job without `account`; set require = [\"account\"] \
             in its row, or publish every payment with its `account`"
        );
    }
}
