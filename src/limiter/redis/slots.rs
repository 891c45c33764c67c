//! The slot map of a Redis Cluster: which master owns which hash slot, as a node reported it.
//!
//! A slot that the node did not name has no owner. Hash slots and tags: Redis cluster specification, "Key distribution
//! model", <https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/>.

use redis::Value;

/// Number of hash slots of a cluster.
const SLOTS: u16 = 16_384;

/// The address of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeAddress {
    pub host: String,
    pub port: u16,
}

/// Slots from `first` to `last` and their master.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SlotRange {
    first: u16,
    last: u16,
    master: NodeAddress,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SlotMap {
    ranges: Vec<SlotRange>,
    /// First and last slot of each range whose master has no name to connect to.
    unnamed: Vec<(u16, u16)>,
}

/// The owner of a range of slots.
enum SlotOwner {
    Named(SlotRange),
    /// The node's preferred host name is not set, so it reports "?".
    Unnamed(u16, u16),
}

impl SlotMap {
    /// Parses the reply to `CLUSTER SLOTS`. A node that does not name its host is reached under the queried host.
    pub fn parse(answer: &Value, asked: &str) -> Result<Self, String> {
        let Value::Array(ranges) = answer else { return Err("the reply to CLUSTER SLOTS is no list".to_owned()) };
        let mut map = Self::default();
        for range in ranges {
            match parse_range(range, asked) {
                Some(SlotOwner::Named(range)) => map.ranges.push(range),
                Some(SlotOwner::Unnamed(first, last)) => map.unnamed.push((first, last)),
                None => return Err("the reply to CLUSTER SLOTS has an invalid range".to_owned()),
            }
        }
        Ok(map)
    }

    pub fn master(&self, slot: u16) -> Option<&NodeAddress> {
        self.ranges.iter().find(|range| (range.first..=range.last).contains(&slot)).map(|range| &range.master)
    }

    /// Every master once.
    pub fn masters(&self) -> Vec<&NodeAddress> {
        let mut masters: Vec<&NodeAddress> = Vec::new();
        for range in &self.ranges {
            if !masters.contains(&&range.master) {
                masters.push(&range.master);
            }
        }
        masters
    }

    /// Number of slots without an owner.
    pub fn orphans(&self) -> u16 {
        let named = self.ranges.iter().map(|range| (range.first, range.last));
        SLOTS.saturating_sub(count_slots(named.chain(self.unnamed.iter().copied())))
    }

    /// Number of slots whose master has no name to connect to.
    pub fn unnamed(&self) -> u16 {
        count_slots(self.unnamed.iter().copied())
    }

    pub fn is_unnamed(&self, slot: u16) -> bool {
        self.unnamed.iter().any(|(first, last)| (*first..=*last).contains(&slot))
    }
}

fn count_slots(ranges: impl Iterator<Item = (u16, u16)>) -> u16 {
    let slots: u32 = ranges.map(|(first, last)| u32::from(last.saturating_sub(first)) + 1).sum();
    u16::try_from(slots).unwrap_or(SLOTS).min(SLOTS)
}

/// Parses one range; `None` if it is invalid.
fn parse_range(range: &Value, asked: &str) -> Option<SlotOwner> {
    let Value::Array(parts) = range else { return None };
    let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = parts.as_slice() else { return None };
    let [host, Value::Int(port), ..] = master.as_slice() else { return None };
    let host = match host {
        Value::Nil => asked.to_owned(),
        Value::BulkString(bytes) if bytes.is_empty() => asked.to_owned(),
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok()?,
        Value::SimpleString(text) => text.clone(),
        _ => return None,
    };
    let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
    let port = u16::try_from(*port).ok()?;
    Some(match host.as_str() {
        "?" => SlotOwner::Unnamed(first, last),
        _ => SlotOwner::Named(SlotRange { first, last, master: NodeAddress { host, port } }),
    })
}

/// The hash slot of all keys with this hash tag: CRC16 (XMODEM) of the tag.
pub(super) fn hash_slot(tag: &str) -> u16 {
    const POLYNOMIAL: u16 = 0x1021;
    let shift = |crc: u16| if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ POLYNOMIAL };
    let byte = |crc: u16, byte: u8| (0..8).fold(crc ^ (u16::from(byte) << 8), |crc, _| shift(crc));
    tag.bytes().fold(0, byte) % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(host: Value, port: i64) -> Value {
        Value::Array(vec![host, Value::Int(port), Value::BulkString(b"id".to_vec()), Value::Array(vec![])])
    }

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    #[test]
    fn key_slots_match_the_redis_specification() {
        // Its appendix A: the CRC of "123456789" is 0x31C3.
        assert_eq!(hash_slot("123456789"), 0x31C3 % SLOTS);
        assert_eq!(hash_slot(""), 0);
    }

    #[test]
    fn slot_map_gaps_have_no_owner() {
        let range = |first, last, node| Value::Array(vec![Value::Int(first), Value::Int(last), node]);
        let answer = Value::Array(vec![
            range(0, 5_000, node(text("10.0.0.1"), 7_000)),
            range(5_001, 9_999, node(Value::Nil, 7_001)),
            range(10_000, 16_380, node(text("10.0.0.1"), 7_000)),
            range(16_383, 16_383, node(text("?"), 7_002)),
        ]);
        let map = SlotMap::parse(&answer, "seed").unwrap();
        let master = |slot| map.master(slot).map(|endpoint| (endpoint.host.as_str(), endpoint.port));
        assert_eq!(master(5_000), Some(("10.0.0.1", 7_000)));
        assert_eq!(master(5_001), Some(("seed", 7_001)));
        assert_eq!((master(16_383), map.is_unnamed(16_383), map.unnamed()), (None, true, 1));
        assert_eq!((master(16_382), map.is_unnamed(16_382), map.orphans()), (None, false, 2), "slots without an owner");
        assert_eq!(map.masters().len(), 2);
        for bad in [Value::Okay, Value::Array(vec![Value::Int(1)]), Value::Array(vec![range(0, 70_000, text("x"))])] {
            assert!(SlotMap::parse(&bad, "seed").is_err(), "{bad:?}");
        }
    }
}
