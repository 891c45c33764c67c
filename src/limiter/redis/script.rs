//! A call as the script's arguments, and its answer as a reply.
//!
//! Refuses every answer that is not of the announced shape: an unknown code or a missing number is an error, never a
//! grant. The layout is the header of `lua/sliding_log.lua`.

use redis::{Script, ScriptInvocation};

use super::keys::call_keys;
use crate::domain::decision::{Call, Fate, QuotaSpec, Refusal, Refused, Reply, Run};
use crate::domain::provider::BOOKING_HORIZON;
use crate::domain::time::{Micros, micros_down, micros_up};

/// The carousel as Redis runs it.
pub const SLIDING_LOG: &str = include_str!("../../../lua/sliding_log.lua");
/// A look at the carousel.
pub const SLIDING_LOG_PEEK: &str = include_str!("../../../lua/sliding_log_peek.lua");

/// Most runs that one reply can hold; more is not a reply.
const RUNS_MAX: i64 = 1_000;

pub(super) fn invocation<'a>(script: &'a Script, prefix: &str, spec: &QuotaSpec, call: &Call) -> ScriptInvocation<'a> {
    let mut invocation = script.prepare_invoke();
    for key in call_keys(prefix, spec) {
        invocation.key(key);
    }
    for argument in arguments(spec, call) {
        invocation.arg(argument);
    }
    invocation
}

/// The script's ARGV, in its order.
#[must_use]
pub fn arguments(spec: &QuotaSpec, call: &Call) -> Vec<String> {
    let mut arguments = vec![
        call.run_id.clone(),
        spec.version.to_string(),
        call.incarnation.to_string(),
        call.number.to_string(),
        spec.grant_jitter.map_or_else(|| "-1".to_owned(), |jitter| micros_up(jitter).to_string()),
        micros_up(spec.hold_max).to_string(),
        micros_up(BOOKING_HORIZON).to_string(),
        call.pause.map_or(0, micros_up).to_string(),
        call.warm.map_or(0, |born| born.0).to_string(),
        spec.limits.len().to_string(),
    ];
    for limit in &spec.limits {
        arguments.push(limit.name.clone());
        arguments.push(limit.max_requests.to_string());
        arguments.push(limit.padded_window_us().to_string());
    }
    arguments.push(call.wants.len().to_string());
    arguments.extend(call.wants.iter().map(ToString::to_string));
    arguments.push(call.settlements.len().to_string());
    for settlement in &call.settlements {
        arguments.push(settlement.call.to_string());
        arguments.push(settlement.cost.to_string());
        match &settlement.fate {
            Fate::Used { age } => {
                arguments.push("0".to_owned());
                arguments.push(micros_down(*age).to_string());
            }
            Fate::NotSent { origins } => {
                arguments.push("1".to_owned());
                let origins = origins.iter().copied().chain(std::iter::repeat(0)).take(spec.limits.len());
                arguments.extend(origins.map(|origin| origin.to_string()));
            }
        }
    }
    arguments
}

/// Reads the script's answer.
///
/// # Errors
/// Says what does not fit. Nothing may be taken as granted then.
pub fn parse_reply(numbers: &[i64], limits: usize) -> Result<Reply, String> {
    let [code, index, wait, exact, now, version, born, unused, runs, rest @ ..] = numbers else {
        return Err(format!("{} numbers are no reply", numbers.len()));
    };
    let unsigned = |value: &i64| u64::try_from(*value).map_err(|_| format!("{value} is negative"));
    if !(0..=RUNS_MAX).contains(runs) {
        return Err(format!("{runs} runs"));
    }
    let width = 2 + limits;
    if usize::try_from(*runs).unwrap_or(usize::MAX).checked_mul(width) != Some(rest.len()) {
        return Err(format!("{runs} runs do not fit {} numbers", rest.len()));
    }
    let mut granted = Vec::with_capacity(rest.len() / width);
    for run in rest.chunks_exact(width) {
        let [permits, wait, origins @ ..] = run else { return Err("a run is too short".to_owned()) };
        granted.push(Run {
            permits: usize::try_from(*permits).map_err(|_| format!("{permits} permits"))?,
            wait_us: unsigned(wait)?,
            origins: origins.iter().map(unsigned).collect::<Result<_, _>>()?,
        });
    }
    let index = usize::try_from(*index).map_err(|_| format!("limit {index}"))?;
    let by = match code {
        0 => None,
        1 if index < limits => Some(Refusal::Limit { index }),
        2 => Some(Refusal::Cold),
        3 => Some(Refusal::Paused),
        4 => Some(Refusal::StaleVersion),
        5 => Some(Refusal::StaleCall),
        other => return Err(format!("refusal {other} by limit {index}")),
    };
    let wait_us = unsigned(wait)?;
    Ok(Reply {
        now: Micros(unsigned(now)?),
        version: *version,
        born: Micros(unsigned(born)?),
        granted,
        remaining: unsigned(unused)?,
        refused: by.map(|by| Refused { by, wait_us, exact: *exact == 1 }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_is_read_as_the_header_says() {
        let reply = parse_reply(&[1, 0, 900, 1, 50, 7, 3, 0, 1, 2, 0, 11], 1).unwrap();
        assert_eq!(reply.granted, [Run { permits: 2, wait_us: 0, origins: vec![11] }]);
        assert_eq!(reply.refused, Some(Refused { by: Refusal::Limit { index: 0 }, wait_us: 900, exact: true }));
    }

    #[test]
    fn anything_else_is_no_reply() {
        let bad: [&[i64]; 7] = [
            &[],
            &[0, 0, 0, 0, 1, 1, 1, 0],
            &[6, 0, 0, 0, 1, 1, 1, 0, 0],
            &[1, 1, 0, 0, 1, 1, 1, 0, 0],
            &[0, 0, -1, 0, 1, 1, 1, 0, 0],
            &[0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 0],
            &[0, 0, 0, 0, 1, 1, 1, 0, i64::MAX, 1, 0],
        ];
        for numbers in bad {
            assert!(parse_reply(numbers, 1).is_err(), "{numbers:?}");
        }
    }
}
