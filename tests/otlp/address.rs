//! Collector addresses: accepted ones, and invalid ones that stop the start with an error.

use sluicegate::config;

fn with(sets: &[&str]) -> Result<Option<String>, String> {
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
    config::load(None, [], &sets).map(|config| config.otlp_endpoint).map_err(|problems| problems.to_string())
}

#[test]
fn collector_addresses_are_accepted() {
    assert_eq!(with(&[]), Ok(None));
    for (address, host) in [
        ("http://127.0.0.1:4318", ""),
        ("http://[::1]:4318/", ""),
        ("https://collector.example.com/tenant", ""),
        ("http://otel:4318", "otel"),
    ] {
        let sets = [format!("telemetry.otlp_endpoint={address}"), format!("tls.plaintext_hosts={host}")];
        let sets: Vec<&str> = sets.iter().take(if host.is_empty() { 1 } else { 2 }).map(String::as_str).collect();
        assert_eq!(with(&sets), Ok(Some(address.to_owned())));
    }
}

#[test]
fn unsafe_collector_addresses_prevent_the_start() {
    for (address, part) in [
        ("http://collector.example.com:4318", "plain text"),
        ("http://10.1.2.3:4318", "plain text"),
        ("https://name:canary@collector.example.com", "not the address of a collector"),
        ("https://collector.example.com?token=canary", "not the address of a collector"),
        ("grpc://127.0.0.1:4317", "not the address of a collector"),
        ("127.0.0.1:4318", "not the address of a collector"),
        ("", "not the address of a collector"),
    ] {
        let text = with(&[&format!("telemetry.otlp_endpoint={address}")]).unwrap_err();
        assert!(text.contains("telemetry.otlp_endpoint (") && text.contains(part), "{address}: {text}");
        assert!(!text.contains("canary"), "{text}");
    }
}
