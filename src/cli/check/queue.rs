//! The queue's part of `check`: whether the queue answers, and whether a lane could drop a message.
//!
//! The topology that it expects is in docs/topology.md.

use super::{Finding, PROBE_TIMEOUT, no_response};
use crate::cli::CommandError;
use crate::cli::connect::Services;
use crate::config::Config;
use crate::domain::provider::{Provider, ProviderName};
use crate::queue::{Queue, QueueError, TopologyProblem};

const FIX_NOT_RUNNING: &str = "Check that RabbitMQ runs and `queue.url` is right";
const FIX_NOT_DECLARED: &str = "Run `sluicegate provider apply FILE` or start `sluicegate run`: both declare it";
const FIX_DECLARED_OTHERWISE: &str = "Declaring it again fails while it exists. Delete it (empty a queue first), then run `sluicegate \
                      provider apply FILE`; or set another queue.prefix";
const FIX_QUEUE_LIMIT: &str =
    "Raise max-queues of the virtual host (rabbitmqctl set_vhost_limits), or delete unused queues";
const FIX_CHANNEL_LIMIT: &str = "Allow its user more channels, or stop other programs that use them";
const FIX_CONNECTION_LIMIT: &str = "Allow three connections for each worker (max-connections of the user or of the virtual host), or stop other programs that use them";
const FIX_USER_RIGHTS: &str = "Give the user of queue.url the rights that docs/topology.md names";

pub(super) async fn check_queue(config: &Config, services: &dyn Services, providers: &[&Provider]) -> Vec<Finding> {
    let subject = format!("queue {}", config.queue.url);
    let reached = async {
        let queue = services.queue(config).await?;
        let answered = queue.ping().await;
        Ok::<_, CommandError>((queue, answered))
    };
    match tokio::time::timeout(PROBE_TIMEOUT, reached).await {
        Err(_) => vec![no_response(subject)],
        // The embedded queue is in the database, which has its own finding.
        Ok(Err(CommandError::DatabaseMissing { .. })) => Vec::new(),
        Ok(Err(error)) => vec![Finding::error(subject, error.to_string(), FIX_NOT_RUNNING)],
        Ok(Ok((_, Err(error)))) => {
            vec![Finding::error(subject, error.to_string(), fix_for_error(&error, FIX_NOT_RUNNING))]
        }
        Ok(Ok((queue, Ok(_)))) => {
            let mut findings = vec![Finding::ok(subject, "answers".to_owned())];
            let mut declared = Vec::new();
            for provider in providers {
                let found = check_lane(queue.as_ref(), &provider.name).await;
                if found.is_none() {
                    declared.push(provider.name.clone());
                }
                findings.extend(found);
            }
            if !declared.is_empty() {
                findings.extend(check_topology(queue.as_ref(), &declared).await);
            }
            findings
        }
    }
}

/// A finding if the lane could drop a message. Lanes of disabled providers count too: they keep collecting.
async fn check_lane(queue: &dyn Queue, provider: &ProviderName) -> Option<Finding> {
    let subject = format!("lane {provider}");
    let (what, fix) = match tokio::time::timeout(PROBE_TIMEOUT, queue.depth(provider)).await {
        Err(_) => return Some(no_response(subject)),
        Ok(Ok(Some(_))) => return None,
        Ok(Ok(None)) => {
            ("has no queue: messages for it are returned to their producer, or dropped".to_owned(), FIX_NOT_DECLARED)
        }
        Ok(Err(error)) => (format!("cannot be checked: {error}"), fix_for_error(&error, FIX_NOT_DECLARED)),
    };
    Some(Finding::error(subject, what, fix))
}

/// Checks the other queues and exchanges, and the lanes' arguments: a lane without dead-lettering drops messages.
async fn check_topology(queue: &dyn Queue, lanes: &[ProviderName]) -> Vec<Finding> {
    let subject = || "queues and exchanges".to_owned();
    match tokio::time::timeout(PROBE_TIMEOUT, queue.topology_problems(lanes)).await {
        Err(_) => vec![no_response(subject())],
        Ok(Ok(problems)) => problems.into_iter().map(|problem| topology_finding(subject(), &problem)).collect(),
        Ok(Err(error)) => {
            vec![Finding::error(
                subject(),
                format!("cannot be checked: {error}"),
                fix_for_error(&error, FIX_NOT_DECLARED),
            )]
        }
    }
}

fn topology_finding(subject: String, problem: &TopologyProblem) -> Finding {
    let fix = match problem {
        TopologyProblem::Missing(_) => FIX_NOT_DECLARED,
        TopologyProblem::Mismatch(_) => FIX_DECLARED_OTHERWISE,
        TopologyProblem::Refused(text) => fix_for_text(text).unwrap_or(FIX_USER_RIGHTS),
    };
    Finding::error(subject, problem.to_string(), fix)
}

/// The fix for the broker's refusal, by its text; `otherwise` for another error.
fn fix_for_error(error: &QueueError, otherwise: &'static str) -> &'static str {
    let QueueError::Refused(text) = error else { return otherwise };
    fix_for_text(text).unwrap_or(otherwise)
}

fn fix_for_text(text: &str) -> Option<&'static str> {
    let known = [
        ("Login was refused", "Put the right user and password into queue.url"),
        ("queue limit", FIX_QUEUE_LIMIT),
        ("channel_max", FIX_CHANNEL_LIMIT),
        ("max-channels", FIX_CHANNEL_LIMIT),
        ("connection limit", FIX_CONNECTION_LIMIT),
        ("ACCESS_REFUSED", FIX_USER_RIGHTS),
        ("inequivalent arg", FIX_DECLARED_OTHERWISE),
        // Last: the broker names the virtual host in every refusal.
        ("vhost", "Create the virtual host that queue.url names, and give its user rights there"),
    ];
    known.iter().find(|(words, _)| text.contains(words)).map(|(_, fix)| *fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_has_its_fix() {
        for (refusal, fix) in [
            ("connect to b:5672: ACCESS_REFUSED - Login was refused using authentication mechanism PLAIN", "password"),
            ("connect to b:5672: NOT_ALLOWED - vhost nowhere not found", "virtual host"),
            (
                "look at queue `payments.acme`: ACCESS_REFUSED - access to queue 'payments.acme' in vhost 'x' refused for user 'y'",
                "rights",
            ),
            (
                "declare: PRECONDITION_FAILED - inequivalent arg 'type' for exchange 'payments' in vhost 'x': received 'direct'",
                "Delete it",
            ),
            (
                "connect to b:5672: NOT_ALLOWED - access to vhost 'x' refused for user 'y': connection limit (2) is reached",
                "three connections",
            ),
            (
                "declare queue `payments.acme`: PRECONDITION_FAILED - queue limit in vhost 'x' (1) is reached",
                "max-queues",
            ),
            ("open a channel: NOT_ALLOWED - ...: raise the user's limit max-channels", "more channels"),
            ("something new", "runs"),
        ] {
            let advised = fix_for_error(&QueueError::Refused(refusal.to_owned()), FIX_NOT_RUNNING);
            assert!(advised.contains(fix), "{refusal}: {advised}");
        }
        assert_eq!(
            fix_for_error(&QueueError::Unavailable("ACCESS_REFUSED".to_owned()), FIX_NOT_RUNNING),
            FIX_NOT_RUNNING
        );
        let different =
            topology_finding("exchange".to_owned(), &TopologyProblem::Mismatch("exists with another type".to_owned()));
        assert!(different.fix.as_deref().is_some_and(|fix| fix.contains("Delete it")), "{different:?}");
    }
}
