//! Which worlds are the same.

use std::collections::hash_map::DefaultHasher;
use std::hash::Hasher;

use super::{TICK_US, World};

/// Two hashes of all that the future depends on: every instant as its distance from now, since a world that is later by
/// any time does the same later, and what is long over is over.
pub fn identity(world: &World) -> u128 {
    let World { quota, now_us, workers, wire, counted_us, incarnations, crashes_left, returns_left } = world;
    let quota = format!("{quota:?}");
    // What it would say to a repeat comes last, and its last call is over.
    let (quota, last) = (quota.split(", replies:").next().unwrap_or_default(), "last_us: ");
    let cut = quota.find(last).map_or(0, |at| at + last.len());
    let rest = quota[cut..].trim_start_matches(|digit: char| digit.is_ascii_digit());
    let text = format!("{rest}{workers:?}{wire:?}{counted_us:?}{incarnations} {crashes_left} {returns_left}");
    let (far_us, mut seen) = (2_000_000, (now_us % TICK_US).to_le_bytes().to_vec());
    let mut rest = text.as_str();
    while let Some(at) = rest.find(|digit: char| digit.is_ascii_digit()) {
        let (words, from) = rest.split_at(at);
        let digits = from.len() - from.trim_start_matches(|digit: char| digit.is_ascii_digit()).len();
        let (number, after) = from.split_at(digits);
        seen.extend_from_slice(words.as_bytes());
        if digits < 13 {
            seen.extend_from_slice(number.as_bytes());
        } else {
            let number: u64 = number.parse().unwrap();
            let instant_us = if digits == 13 { number * 1_000 } else { number };
            seen.extend_from_slice(&(instant_us + far_us).saturating_sub(*now_us).to_le_bytes());
        }
        rest = after;
    }
    seen.extend_from_slice(rest.as_bytes());
    let mut hashers = [DefaultHasher::new(), DefaultHasher::new()];
    hashers[1].write_u8(2);
    hashers.iter_mut().for_each(|hasher| hasher.write(&seen));
    u128::from(hashers[0].finish()) << 64 | u128::from(hashers[1].finish())
}
