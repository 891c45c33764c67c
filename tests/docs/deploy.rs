//! The manifests and the unit in deploy/: they parse, name keys, files and arguments that exist, and stop later than the
//! program does.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use sluicegate::cli::Cli;
use sluicegate::config::{self, Config};
use sluicegate::ledger::provider_row::ProviderRow;

use crate::page::Page;
use crate::settings::{keys, wrong};

/// Debian's own interpreter, which sees Debian's python3-yaml.
const PYTHON: &str = "/usr/bin/python3";
const MANIFESTS: [&str; 5] = [
    "deploy/kubernetes/configuration.yaml",
    "deploy/kubernetes/secrets.example.yaml",
    "deploy/kubernetes/migrate.yaml",
    "deploy/kubernetes/deployment.yaml",
    "deploy/keda/scaledobject.yaml",
];
const UNIT: &str = "deploy/systemd/sluicegate.service";
/// As `LAST_WORDS_MAX` of the deployment: settlements and events after the drain.
const LAST_WORDS: Duration = Duration::from_secs(3);

fn documents(path: &str) -> Vec<Value> {
    let full = format!("{}/{path}", env!("CARGO_MANIFEST_DIR"));
    let script = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1])))))";
    let output = Command::new(PYTHON).args(["-c", script, &full]).output().unwrap();
    assert!(output.status.success(), "{path}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The one document of this kind and name in all manifests.
fn object(kind: &str, name: &str) -> Value {
    let all = MANIFESTS.iter().flat_map(|path| documents(path));
    let mut found = all.filter(|document| document["kind"] == kind && document["metadata"]["name"] == name);
    let one = found.next().unwrap_or_else(|| panic!("no {kind} {name}"));
    assert!(found.next().is_none(), "{kind} {name} stands there twice");
    one
}

fn pod(document: &Value) -> &Value {
    &document["spec"]["template"]["spec"]
}

/// The configuration that the pods are given.
fn configuration() -> Config {
    let text = object("ConfigMap", "sluicegate")["data"]["sluicegate.toml"].as_str().unwrap().to_owned();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sluicegate.toml");
    std::fs::write(&path, text).unwrap();
    let token = [("SLUICEGATE_OPS__TOKEN".to_owned(), "0123456789abcdef0123456789abcdef".to_owned())];
    config::load(Some(&path), token, &[]).unwrap_or_else(|problems| panic!("{problems}"))
}

/// Below this a stop would be cut short.
fn stop_takes_at_most() -> Duration {
    let timeout = Duration::from_millis(ProviderRow::default().timeout_ms.try_into().unwrap());
    configuration().worker.drain_timeout + timeout + LAST_WORDS
}

#[test]
fn every_variable_in_deploy_exists() {
    let keys = keys();
    let mut named = BTreeSet::new();
    for path in MANIFESTS.into_iter().chain([UNIT]) {
        let text = Page::read(path).text;
        for word in text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')) {
            if word.starts_with("SLUICEGATE_") {
                assert_eq!(wrong(word, &keys), None, "{path}");
                named.insert(word.to_owned());
            }
        }
    }
    assert!(named.len() >= 4, "{named:?}");
}

#[test]
fn the_containers_run_what_exists_and_find_their_secrets() {
    for (kind, name) in [("Deployment", "sluicegate"), ("Job", "sluicegate-migrate")] {
        let document = object(kind, name);
        let pod = pod(&document);
        let container = &pod["containers"][0];
        let args = container["args"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap().into());
        Cli::from_arguments(std::iter::once("sluicegate".into()).chain(args)).unwrap();
        let volumes = pod["volumes"].as_array().unwrap();
        let secret = volumes.iter().find(|volume| volume["name"] == "secrets").unwrap()["secret"].clone();
        let held = object("Secret", secret["secretName"].as_str().unwrap());
        let mount =
            container["volumeMounts"].as_array().unwrap().iter().find(|mount| mount["name"] == "secrets").unwrap();
        for variable in container["env"].as_array().unwrap() {
            let (name, path) = (variable["name"].as_str().unwrap(), variable["value"].as_str().unwrap());
            let file = path.strip_prefix(mount["mountPath"].as_str().unwrap()).unwrap().trim_start_matches('/');
            assert!(held["stringData"][file].is_string(), "{name}: the secret has no {file}");
        }
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        assert_eq!(pod["automountServiceAccountToken"], false);
        let context = &container["securityContext"];
        assert_eq!(
            (&context["readOnlyRootFilesystem"], &context["allowPrivilegeEscalation"]),
            (&true.into(), &false.into())
        );
        assert_eq!(context["capabilities"]["drop"][0], "ALL");
    }
}

#[test]
fn probes_and_selectors_lead_somewhere() {
    let deployment = object("Deployment", "sluicegate");
    let container = &pod(&deployment)["containers"][0];
    let routes = Page::read("src/ops/mod.rs").text;
    for (probe, path) in [("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")] {
        assert_eq!(container[probe]["httpGet"]["path"], path, "{probe}");
        assert!(routes.contains(&format!("\"{path}\"")), "{path} is no route");
    }
    let listen = configuration().ops.listen.unwrap();
    assert!(!listen.ip().is_loopback(), "probes come from outside of the pod");
    assert_eq!(container["ports"][0]["containerPort"], listen.port());
    let labels = &deployment["spec"]["template"]["metadata"]["labels"];
    let service = object("Service", "sluicegate-ops");
    assert_eq!(&service["spec"]["selector"], labels);
    assert_eq!(service["spec"]["ports"][0]["targetPort"], container["ports"][0]["name"]);
    assert_eq!(&object("PodDisruptionBudget", "sluicegate")["spec"]["selector"]["matchLabels"], labels);
    assert_eq!(&deployment["spec"]["selector"]["matchLabels"], labels);
    assert!(deployment["spec"]["replicas"].as_u64() >= Some(2), "one could not go");
}

#[test]
fn nobody_is_killed_before_its_drain_is_over() {
    let grace = pod(&object("Deployment", "sluicegate"))["terminationGracePeriodSeconds"].as_u64().unwrap();
    assert!(Duration::from_secs(grace) > stop_takes_at_most(), "{grace} s against {:?}", stop_takes_at_most());
    let unit = Page::read(UNIT).text;
    let stop = unit.lines().find_map(|line| line.strip_prefix("TimeoutStopSec=")).unwrap().parse().unwrap();
    assert!(Duration::from_secs(stop) > stop_takes_at_most(), "{stop} s");
    let deployed = Page::read("src/worker/deployment.rs").text;
    assert!(deployed.contains(&format!("LAST_WORDS_MAX: Duration = Duration::from_secs({})", LAST_WORDS.as_secs())));
}

/// More pods do not beat a limit: the greatest number that is of use follows from the row.
#[test]
fn the_most_replicas_are_those_of_the_formula() {
    let text = Page::read("deploy/keda/scaledobject.yaml").text;
    let number = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("# {name}:"))).unwrap();
        line.trim().parse().unwrap()
    };
    assert!(text.contains("maxReplicas = ceil(limit_per_s × p95_latency_s ÷ in-flight per pod)"));
    let scaled = object("ScaledObject", "sluicegate");
    let most = (number("limit_per_s") * number("p95_latency_s") / number("in_flight_per_pod")).ceil();
    assert_eq!(scaled["spec"]["maxReplicaCount"].as_f64(), Some(most.max(2.0)));
    let row = ProviderRow::default();
    assert_eq!(number("in_flight_per_pod").to_string(), row.workers.to_string());
    let trigger = &scaled["spec"]["triggers"][0]["metadata"];
    assert_eq!(trigger["value"], row.bucket_capacity.to_string());
    let prefix = configuration().queue.prefix;
    assert!(trigger["queueName"].as_str().unwrap().starts_with(&format!("{prefix}.")));
    object("Deployment", scaled["spec"]["scaleTargetRef"]["name"].as_str().unwrap());
    let authentication = object("TriggerAuthentication", "sluicegate-queue");
    let target = &authentication["spec"]["secretTargetRef"][0];
    let secret = object("Secret", target["name"].as_str().unwrap());
    assert!(secret["stringData"][target["key"].as_str().unwrap()].is_string());
}

/// `systemd-analyze` knows every setting of the unit, and finds little that it could do beyond its work.
#[test]
fn the_unit_is_valid_and_hardened() {
    let text = Page::read(UNIT).text;
    let program = "/usr/local/bin/sluicegate";
    let line = text.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let args: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(args[0], program);
    Cli::from_arguments(args.iter().map(Into::into)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let unit = dir.path().join("sluicegate.service");
    // It wants to see the program, which is not installed here.
    std::fs::write(&unit, text.replace(program, env!("CARGO_BIN_EXE_sluicegate"))).unwrap();
    for rest in [&["verify", "--man=no"][..], &["security", "--offline=true", "--threshold=15", "--no-pager"]] {
        let output = Command::new("systemd-analyze").args(rest).arg(&unit).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && said.trim().is_empty(), "{rest:?}: {said}");
    }
    // What the program exits with when a restart would mend nothing.
    assert!(text.contains("RestartPreventExitStatus=2 78"));
}
