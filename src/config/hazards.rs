//! Combinations of keys that are each valid and together lose payments or show them to strangers.
//!
//! Refuses to warn where it can refuse: what stands here stops the start.

use super::address::{DatabaseUrl, QueueUrl, is_local, scheme_and_host};
use super::meant::{Complaints, Config};

/// Adds a complaint per hazard.
pub fn find(config: &Config, complaints: &mut Complaints) {
    if config.queue.url == QueueUrl::Embedded && matches!(config.database.url, DatabaseUrl::Postgres(_)) {
        let what = "the embedded queue lives in a SQLite database, and database.url is PostgreSQL";
        complaints.add("queue.url", what, "Set queue.url to a broker (amqps://…), or database.url to sqlite://PATH");
    }
    if let (Some(listen), None) = (config.ops.listen, &config.ops.token)
        && !listen.ip().is_loopback()
    {
        let what = format!("{listen} is reachable from other machines, and ops.token is not set");
        complaints.add("ops.listen", what, "Set ops.token (SLUICEGATE_OPS__TOKEN_FILE), or listen on 127.0.0.1");
    }
    find_plaintext(config, complaints);
}

fn find_plaintext(config: &Config, complaints: &mut Complaints) {
    let permitted = |host: &str| {
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        is_local(host) || config.plaintext_hosts.iter().any(|name| name.eq_ignore_ascii_case(bare))
    };
    if !config.database.url.is_verified() {
        for host in config.database.url.hosts().iter().filter(|host| !permitted(host)) {
            let mend = mend(host, "Add ?sslmode=verify-full");
            complaints.add("database.url", format!("the connection to {host} would not be verified by TLS"), mend);
        }
    }
    if let QueueUrl::Amqp(queue) = &config.queue.url
        && let Some((scheme, host)) = scheme_and_host(queue)
        && scheme == "amqp"
        && !permitted(&host)
    {
        complaints.add(
            "queue.url",
            format!("the connection to {host} would be plain text"),
            mend(&host, "Use amqps://"),
        );
    }
    for (scheme, host) in config.limiter.url.nodes().iter().filter_map(scheme_and_host) {
        if scheme == "redis" && !permitted(&host) {
            let what = format!("the connection to {host} would be plain text");
            complaints.add("limiter.url", what, mend(&host, "Use rediss:// or rediss+cluster://"));
        }
    }
}

fn mend(host: &str, tls: &str) -> String {
    format!("{tls}; or, at your own risk in a private network, add \"{host}\" to tls.plaintext_hosts")
}
