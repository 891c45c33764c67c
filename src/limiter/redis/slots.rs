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
    /// `None`: its preferred host name is not set, so it reports "?".
    master: Option<NodeAddress>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SlotMap {
    ranges: Vec<SlotRange>,
}

impl SlotMap {
    /// Parses the reply to `CLUSTER SLOTS`. A node that does not name its host is reached under the queried host.
    pub fn parse(answer: &Value, asked: &str) -> Result<Self, String> {
        let Value::Array(ranges) = answer else { return Err("the reply to CLUSTER SLOTS is no list".to_owned()) };
        let ranges = ranges.iter().map(|range| parse_range(range, asked)).collect::<Option<_>>();
        let ranges = ranges.ok_or_else(|| "the reply to CLUSTER SLOTS has an invalid range".to_owned())?;
        Ok(Self { ranges })
    }

    fn range(&self, slot: u16) -> Option<&SlotRange> {
        self.ranges.iter().find(|range| (range.first..=range.last).contains(&slot))
    }

    pub fn master(&self, slot: u16) -> Option<&NodeAddress> {
        self.range(slot)?.master.as_ref()
    }

    /// Every master once.
    pub fn masters(&self) -> Vec<&NodeAddress> {
        let mut masters: Vec<&NodeAddress> = Vec::new();
        for master in self.ranges.iter().filter_map(|range| range.master.as_ref()) {
            if !masters.contains(&master) {
                masters.push(master);
            }
        }
        masters
    }

    /// Number of slots without an owner.
    pub fn orphans(&self) -> u16 {
        SLOTS.saturating_sub(count_slots(self.ranges.iter()))
    }

    /// Number of slots whose master has no name to connect to.
    pub fn unnamed(&self) -> u16 {
        count_slots(self.ranges.iter().filter(|range| range.master.is_none()))
    }

    pub fn is_unnamed(&self, slot: u16) -> bool {
        self.range(slot).is_some_and(|range| range.master.is_none())
    }
}

fn count_slots<'a>(ranges: impl Iterator<Item = &'a SlotRange>) -> u16 {
    let slots: u32 = ranges.map(|range| u32::from(range.last.saturating_sub(range.first)) + 1).sum();
    u16::try_from(slots).unwrap_or(SLOTS).min(SLOTS)
}

/// Parses one range; `None` if it is invalid.
fn parse_range(range: &Value, asked: &str) -> Option<SlotRange> {
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
    let master = (host != "?").then_some(NodeAddress { host, port });
    Some(SlotRange { first, last, master })
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
