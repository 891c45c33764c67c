//! A trace of a payment, from a tracing producer through RabbitMQ and the program to the event of its outcome.

use std::time::Duration;

use sluicegate::provider::simulated::FakeOptions;

use crate::collector::{Collector, Span};
use crate::rig::{Rig, end, silent_about_canaries};
use crate::support::process::free_port;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PRODUCER: &str = "00f067aa0ba902b7";
const WINDOW: Duration = Duration::from_secs(3);
/// Longer than any wait of these tests.
const IN_HAND: Duration = Duration::from_secs(60);
/// Kinds of spans in the protocol.
const INTERNAL: i64 = 1;
const CLIENT: i64 = 3;
const CONSUMER: i64 = 5;
/// First steps of a job's span: a payment with a permit within a quarter of a second is claimed with its request.
const WITH_PERMIT: [(&str, i64); 1] = [("wait for a permit", INTERNAL)];
/// A payment that may be known, or whose gate is not open, is claimed first.
const CLAIMED: [(&str, i64); 2] = [("claim", INTERNAL), ("wait for a permit", INTERNAL)];
/// Without a permit in time, it is claimed, and goes on waiting.
const CLAIMED_LATE: [(&str, i64); 3] = [WITH_PERMIT[0], CLAIMED[0], CLAIMED[1]];
/// The further steps, in order.
const STEPS: [(&str, i64); 5] = [
    ("write the request down", INTERNAL),
    ("wait for the permit's start", INTERNAL),
    ("charge", CLIENT),
    ("write the outcome down", INTERNAL),
    ("finish the delivery", INTERNAL),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trace_spans_producer_job_and_outcome() {
    let collector = Collector::default();
    let rig = Rig::new("traced", &collector.serve().await, (WINDOW, IN_HAND)).await;
    rig.publish("traced-1", &[&format!("00-{TRACE}-{PRODUCER}-01"), "shop=42"]);
    rig.publish("plain-1", &[]);
    let worker = rig.start();
    let seen = rig.outcomes(2).await;
    let log = end(&worker).await;

    let spans = collector.spans();
    let job = whole(&spans, "traced-1");
    assert_eq!((job.trace.as_str(), job.parent.as_str()), (TRACE, PRODUCER));
    let untraced = whole(&spans, "plain-1");
    assert!(untraced.parent.is_empty() && untraced.trace != TRACE, "{untraced:?}");
    // One request in three seconds: the later payment waited, and the span of its wait is that long.
    let waited = |job: &Span| {
        let steps = steps_of(&spans, job);
        steps.iter().filter(|step| step.name.starts_with("wait ")).map(|step| step.length()).sum::<Duration>()
    };
    let longest = waited(&job).max(waited(&untraced));
    assert!(longest > WINDOW / 3, "{longest:?}: {spans:#?}");

    // The consumer of the outcome continues the job's trace.
    let event = seen.iter().find(|event| event["body"]["id"] == "traced-1").unwrap();
    assert_eq!(event["headers"]["traceparent"], format!("00-{TRACE}-{}-01", job.id));
    assert_eq!(event["headers"]["tracestate"], "shop=42");
    // Sender and outcome.
    let resource = collector.resource();
    assert_eq!((&*resource["service.name"], &*resource["service.version"]), ("sluicegate", env!("CARGO_PKG_VERSION")));
    assert!(resource["service.instance.id"].len() == 36, "{resource:?}");
    for job in [&job, &untraced] {
        assert_eq!((&*job.attributes["sluicegate.outcome"], job.status), ("succeeded", 0), "{job:?}");
        let charge = *steps_of(&spans, job).iter().find(|step| step.name == "charge").unwrap();
        let came = [&*charge.attributes["sluicegate.outcome"], &*charge.attributes["http.response.status_code"]];
        assert_eq!((came, charge.status), (["accepted", "200"], 0), "{charge:?}");
    }
    silent_about_canaries(&collector.text());
    assert!(!log.contains("wait for a permit"), "spans are no log lines: {log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unavailable_collector_loses_only_spans() {
    let nobody = format!("http://127.0.0.1:{}", free_port());
    let rig = Rig::new("untraced", &nobody, (Duration::from_secs(1), IN_HAND)).await;
    rig.publish("traced-1", &[&format!("00-{TRACE}-{PRODUCER}-01")]);
    let worker = rig.start();
    let seen = rig.outcomes(1).await;
    assert_eq!(seen[0]["body"]["state"], "succeeded", "{seen:?}");
    // The log reports that spans were lost.
    let log = end(&worker).await;
    assert!(log.contains("HTTP export failed"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delayed_job_continues_its_trace() {
    let collector = Collector::default();
    let rig = Rig::new("parked", &collector.serve().await, (WINDOW, Duration::from_millis(50))).await;
    let context = format!("00-{TRACE}-{PRODUCER}-01");
    rig.publish("parked-1", &[&context]);
    rig.publish("parked-2", &[&context]);
    let worker = rig.start();
    rig.outcomes(2).await;
    end(&worker).await;

    let spans = collector.spans();
    let jobs: Vec<&Span> = spans.iter().filter(|span| span.name == "job").collect();
    let ends = |end: &str| jobs.iter().filter(|job| job.attributes["sluicegate.end"] == end).count();
    assert!(ends("delayed") >= 1 && ends("acknowledged") == 2, "{jobs:#?}");
    // Each wait names its reason, and a permit that a limit refused also names the limit.
    let waits = spans.iter().filter(|span| span.name == "wait for a permit").map(|span| &span.attributes);
    for wait in waits.filter(|wait| wait.contains_key("sluicegate.refused_for")) {
        let limit = (wait["sluicegate.refused_for"] == "limit").then_some("one");
        assert_eq!(wait.get("sluicegate.limit").map(String::as_str), limit, "{wait:?}");
    }
    assert!(jobs.iter().all(|job| job.attributes.contains_key("sluicegate.outcome") && job.status == 0), "{jobs:#?}");
    assert!(jobs.iter().all(|job| (job.trace.as_str(), job.parent.as_str()) == (TRACE, PRODUCER)), "{jobs:#?}");
}

/// A response with 4xx is an error of the request's span. A declined payment is no error of the job's span.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decline_marks_only_the_request_span() {
    let collector = Collector::default();
    let refusing = FakeOptions { decline_rate: 1.0, ..FakeOptions::default() };
    let rig = Rig::with(refusing, "declined", &collector.serve().await, (Duration::from_secs(1), IN_HAND)).await;
    rig.publish("declined-1", &[]);
    let worker = rig.start();
    rig.outcomes(1).await;
    end(&worker).await;
    let spans = collector.spans();
    let one = |name: &str| spans.iter().find(|span| span.name == name).unwrap();
    let (job, charge) = (one("job"), one("charge"));
    assert_eq!((&*job.attributes["sluicegate.outcome"], job.status), ("declined", 0), "{job:?}");
    assert_eq!((&*charge.attributes["error.type"], charge.status), ("402", 2), "{charge:?}");
}

/// Steps of a job's span, by start.
fn steps_of<'a>(spans: &'a [Span], job: &Span) -> Vec<&'a Span> {
    let mut steps: Vec<&Span> = spans.iter().filter(|span| span.parent == job.id).collect();
    steps.sort_by_key(|step| step.began_ns);
    steps
}

/// The one span of a job, with all of its steps below it, one after another.
fn whole(spans: &[Span], id: &str) -> Span {
    let named =
        |span: &&Span| span.name == "job" && span.attributes.get("sluicegate.job_id").is_some_and(|of| of == id);
    let jobs: Vec<&Span> = spans.iter().filter(named).collect();
    let [job] = jobs.as_slice() else { panic!("{id}: {spans:#?}") };
    assert_eq!((job.kind, job.attributes["sluicegate.provider"].as_str()), (CONSUMER, "acme"));
    assert_eq!(job.attributes["sluicegate.end"], "acknowledged");
    let steps = steps_of(spans, job);
    let seen: Vec<(&str, i64)> = steps.iter().map(|span| (span.name.as_str(), span.kind)).collect();
    let first = seen.strip_suffix(&STEPS).unwrap_or_else(|| panic!("{seen:?}"));
    assert!([&WITH_PERMIT[..], &CLAIMED, &CLAIMED_LATE].contains(&first), "{first:?}");
    assert!(steps.iter().all(|step| step.trace == job.trace), "{steps:#?}");
    assert!(steps.iter().all(|step| job.began_ns <= step.began_ns && step.ended_ns <= job.ended_ns), "{steps:#?}");
    assert!(steps.windows(2).all(|pair| pair[0].ended_ns <= pair[1].began_ns), "{steps:#?}");
    (*job).clone()
}
