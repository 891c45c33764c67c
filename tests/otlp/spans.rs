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
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Kinds of spans in the protocol.
const INTERNAL: i64 = 1;
const CLIENT: i64 = 3;
const CONSUMER: i64 = 5;
/// Steps of the run that sends the request, in order. If the run has a message, its acknowledgement follows.
const STEPS: [(&str, i64); 5] = [
    ("wait for a permit", INTERNAL),
    ("write the request down", INTERNAL),
    ("wait for the permit's start", INTERNAL),
    ("charge", CLIENT),
    ("write the outcome down", INTERNAL),
];
const ACKNOWLEDGEMENT: (&str, i64) = ("finish the delivery", INTERNAL);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trace_spans_producer_job_and_outcome() {
    let collector = Collector::default();
    let rig = Rig::new("traced", &collector.serve().await, (WINDOW, WAIT_MAX)).await;
    rig.publish("traced-1", &[&format!("00-{TRACE}-{PRODUCER}-01"), "shop=42"]);
    rig.publish("plain-1", &[]);
    let worker = rig.start();
    let seen = rig.outcomes(2).await;
    let log = end(&worker).await;

    let spans = collector.spans();
    let traced = runs(&spans, "traced-1");
    assert_eq!((traced[0].trace.as_str(), traced[0].parent.as_str()), (TRACE, PRODUCER));
    let untraced = runs(&spans, "plain-1");
    assert!(untraced[0].parent.is_empty() && untraced[0].trace != TRACE, "{untraced:?}");
    let job = paying(&spans, &traced);
    let untraced = paying(&spans, &untraced);
    // One request in three seconds: the later payment waited in one run, or between two.
    let apart = charge_of(&spans, job).began_ns.abs_diff(charge_of(&spans, untraced).began_ns);
    assert!(Duration::from_nanos(apart) > WINDOW / 3, "{apart} ns: {spans:#?}");

    // The consumer of the outcome continues the job's trace.
    let event = seen.iter().find(|event| event["body"]["id"] == "traced-1").unwrap();
    assert_eq!(event["headers"]["traceparent"], format!("00-{TRACE}-{}-01", job.id));
    assert_eq!(event["headers"]["tracestate"], "shop=42");
    // Sender and outcome.
    let resource = collector.resource();
    assert_eq!((&*resource["service.name"], &*resource["service.version"]), ("sluicegate", env!("CARGO_PKG_VERSION")));
    assert!(resource["service.instance.id"].len() == 36, "{resource:?}");
    for job in [job, untraced] {
        assert_eq!((&*job.attributes["sluicegate.outcome"], job.status), ("succeeded", 0), "{job:?}");
        let charge = charge_of(&spans, job);
        let came = [&*charge.attributes["sluicegate.outcome"], &*charge.attributes["http.response.status_code"]];
        assert_eq!((came, charge.status), (["accepted", "200"], 0), "{charge:?}");
    }
    silent_about_canaries(&collector.text());
    assert!(!log.contains("wait for a permit"), "spans are no log lines: {log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unavailable_collector_loses_only_spans() {
    let nobody = format!("http://127.0.0.1:{}", free_port());
    let rig = Rig::new("untraced", &nobody, (Duration::from_secs(1), WAIT_MAX)).await;
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
    let both = [runs(&spans, "parked-1"), runs(&spans, "parked-2")];
    assert!(both.iter().any(|runs| runs.len() > 1), "{both:#?}");
    for runs in &both {
        assert_eq!((runs[0].trace.as_str(), runs[0].parent.as_str()), (TRACE, PRODUCER), "{runs:#?}");
        assert_eq!(paying(&spans, runs).attributes["sluicegate.outcome"], "succeeded");
        assert!(runs.iter().all(|run| run.status == 0), "{runs:#?}");
    }
    // Each wait names its reason, and a permit that a limit refused also names the limit.
    let waits = spans.iter().filter(|span| span.name == "wait for a permit").map(|span| &span.attributes);
    for wait in waits.filter(|wait| wait.contains_key("sluicegate.refused_for")) {
        let limit = (wait["sluicegate.refused_for"] == "limit").then_some("one");
        assert_eq!(wait.get("sluicegate.limit").map(String::as_str), limit, "{wait:?}");
    }
}

/// A response with 4xx is an error of the request's span. A declined payment is no error of the job's span.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decline_marks_only_the_request_span() {
    let collector = Collector::default();
    let refusing = FakeOptions { decline_rate: 1.0, ..FakeOptions::default() };
    let rig = Rig::with(refusing, "declined", &collector.serve().await, (Duration::from_secs(1), WAIT_MAX)).await;
    rig.publish("declined-1", &[]);
    let worker = rig.start();
    rig.outcomes(1).await;
    end(&worker).await;
    let spans = collector.spans();
    let runs = runs(&spans, "declined-1");
    let job = paying(&spans, &runs);
    let charge = charge_of(&spans, job);
    assert_eq!((&*job.attributes["sluicegate.outcome"], job.status), ("declined", 0), "{job:?}");
    assert_eq!((&*charge.attributes["error.type"], charge.status), ("402", 2), "{charge:?}");
}

/// Steps of a job's span, by start.
fn steps_of<'a>(spans: &'a [Span], job: &Span) -> Vec<&'a Span> {
    let mut steps: Vec<&Span> = spans.iter().filter(|span| span.parent == job.id).collect();
    steps.sort_by_key(|step| step.began_ns);
    steps
}

fn charge_of<'a>(spans: &'a [Span], job: &Span) -> &'a Span {
    steps_of(spans, job).into_iter().find(|step| step.name == "charge").unwrap()
}

/// The runs of a job, the first of them with its message, each below the one before.
fn runs<'a>(spans: &'a [Span], id: &str) -> Vec<&'a Span> {
    let named =
        |span: &&Span| span.name == "job" && span.attributes.get("sluicegate.job_id").is_some_and(|of| of == id);
    let mut runs: Vec<&Span> = spans.iter().filter(named).collect();
    runs.sort_by_key(|run| run.began_ns);
    assert!(!runs.is_empty(), "{id}: {spans:#?}");
    assert!(
        runs.windows(2).all(|pair| (&pair[1].trace, &pair[1].parent) == (&pair[0].trace, &pair[0].id)),
        "{runs:#?}"
    );
    for run in &runs {
        assert_eq!((run.kind, run.attributes["sluicegate.provider"].as_str()), (CONSUMER, "acme"));
        assert_eq!(run.attributes["sluicegate.end"], "acknowledged");
    }
    runs
}

/// The last run of a job, with all of its steps below it, one after another.
fn paying<'a>(spans: &'a [Span], runs: &[&'a Span]) -> &'a Span {
    let job = runs[runs.len() - 1];
    // Runs are below each other, too.
    let mut steps = steps_of(spans, job);
    steps.retain(|span| span.name != "job");
    let seen: Vec<(&str, i64)> = steps.iter().map(|span| (span.name.as_str(), span.kind)).collect();
    let has_message = runs.len() == 1;
    let expected: Vec<(&str, i64)> = STEPS.into_iter().chain(has_message.then_some(ACKNOWLEDGEMENT)).collect();
    assert_eq!(seen, expected, "{spans:#?}");
    assert!(steps.iter().all(|step| step.trace == job.trace), "{steps:#?}");
    assert!(steps.iter().all(|step| job.began_ns <= step.began_ns && step.ended_ns <= job.ended_ns), "{steps:#?}");
    assert!(steps.windows(2).all(|pair| pair[0].ended_ns <= pair[1].began_ns), "{steps:#?}");
    job
}
