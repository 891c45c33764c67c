//! The examples in the headers of the library's parts, run as calls on a real redis-server.

use std::time::Duration;

use sluicegate::domain::permit_protocol::{
    CallKind, CostByKind, LimiterCall, LimiterReply, PermitRelease, PermitRequest, RebuildData, ReleaseKind,
};
use sluicegate::domain::quota_spec::QuotaSpec;
use sluicegate::limiter::redis::decode::decode_reply;
use sluicegate::limiter::redis::encode::encode_call;
use sluicegate::limiter::redis::keys::{call_keys, provider_keys};
use sluicegate::limiter::redis::library::LIBRARY;

use super::header::Header;
use super::{PEEK, QUOTA, call, read, spec};
use crate::support::redis::Redis;

/// A caller with numbered calls and its own key prefix.
struct Caller {
    connection: redis::Connection,
    prefix: &'static str,
    spec: QuotaSpec,
    calls: u64,
}

impl Caller {
    fn new(prefix: &'static str) -> Self {
        let mut connection = Redis::shared().connection();
        Redis::load(&LIBRARY, &mut connection);
        Self { connection, prefix, spec: spec(), calls: 0 }
    }

    fn call(&mut self, call: LimiterCall) -> LimiterReply {
        self.calls += 1;
        let call = LimiterCall { number: self.calls, ..call };
        let (keys, argument) = (call_keys(self.prefix, &self.spec, &call), encode_call(&self.spec, &call));
        let answer: Vec<u8> = LIBRARY.call(&keys, &argument).query(&mut self.connection).unwrap();
        decode_reply(&answer, 1, 1, call.requests.len()).unwrap()
    }

    /// Ends the cold start with a ledger that has no past use.
    fn warm(&mut self) {
        let born = self.call(call(Vec::new(), Vec::new())).state_epoch;
        let rebuild = Some(RebuildData { state_epoch: born, ended: Vec::new(), in_flight: CostByKind::default() });
        let reply = self.call(LimiterCall { rebuild, ..call(Vec::new(), Vec::new()) });
        assert_eq!(reply.refused, None);
    }
}

#[test]
fn call_example_matches_the_server() {
    let header = Header::of(QUOTA);
    let example = |name: &str| header.tuple("EXAMPLE", name);
    let lines = read(&encode_call(&spec(), &call(vec![PermitRequest::charges(1, 1)], Vec::new())), "run");
    for name in ["cell", "want"] {
        let line = lines.iter().find_map(|line| line.strip_prefix(&format!("{name}: "))).unwrap();
        let sent: Vec<u64> = line.split(", ").map(|item| item.rsplit_once(' ').unwrap().1.parse().unwrap()).collect();
        assert_eq!(sent, example(name), "{name}");
    }
    let mut caller = Caller::new("example-call");
    caller.warm();
    let reply = caller.call(call(vec![PermitRequest::charges(1, 1)], Vec::new()));
    assert_eq!((header.number("EXAMPLE", "refusal"), reply.refused), (0, None));
    assert_eq!(reply.remaining, header.number("EXAMPLE", "remaining"));
    assert_eq!(reply.reset_us, header.number("EXAMPLE", "reset"));
    let [run] = &reply.grants[..] else { panic!("{reply:?}") };
    assert_eq!(vec![u64::try_from(run.request_index).unwrap(), u64::from(run.permits), run.wait_us], example("run"));
    assert_eq!(run.origins, example("origin"));
}

/// A value of a reply as the header writes it.
fn in_header_notation(value: redis::Value) -> String {
    match value {
        redis::Value::Array(values) => {
            format!("{{{}}}", values.into_iter().map(in_header_notation).collect::<Vec<_>>().join(", "))
        }
        value => redis::from_redis_value(value).unwrap(),
    }
}

#[test]
fn peek_example_matches_the_server() {
    let example = Header::of(PEEK).part("EXAMPLE");
    let (terms, sent) = example.split_once('\n').unwrap();
    let (names, expected) = sent.trim().split_once(" → ").unwrap();
    let number_before = |word: &str| -> u32 {
        let before = terms.split_once(&format!(" {word}")).unwrap().0;
        before.rsplit(' ').next().unwrap().parse().unwrap()
    };
    let (answered, in_flight) = (number_before("answered"), number_before("in flight"));
    let mut caller = Caller::new("example-look");
    let keys = provider_keys(caller.prefix, &caller.spec);
    let look = |caller: &mut Caller| -> Vec<String> {
        let reply: Vec<redis::Value> = LIBRARY.peek(&keys, names.as_bytes()).query(&mut caller.connection).unwrap();
        reply.into_iter().map(in_header_notation).collect()
    };
    assert!(look(&mut caller).is_empty());
    caller.warm();
    let granting = caller.calls + 1;
    caller.call(call(vec![PermitRequest::charges(answered + in_flight, 1)], Vec::new()));
    let release = PermitRelease {
        call: granting,
        cost: answered,
        kind: CallKind::Charge,
        subjects: Vec::new(),
        release_kind: ReleaseKind::Used { age: Duration::ZERO },
    };
    caller.call(call(Vec::new(), vec![release]));
    let mut answer = look(&mut caller);
    let mut expected: Vec<&str> = expected.split(' ').map(|word| word.trim_matches('"')).collect();
    assert_eq!(answer.pop().unwrap(), expected.pop().unwrap(), "a window that is too short to be looked into");
    // An answer counts from the next whole millisecond, and calls in flight count for a whole window from now.
    let [reset_us, window_us] =
        [answer.pop().unwrap(), expected.pop().unwrap().to_owned()].map(|us| us.parse::<u64>().unwrap());
    assert!((window_us..window_us + 1_000).contains(&reset_us), "{reset_us}");
    assert_eq!(answer, expected);
}
