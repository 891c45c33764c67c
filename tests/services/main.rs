//! Service tests: the program as operators run it, on real RabbitMQ, Redis and PostgreSQL, with pika as the producer.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[path = "../readouts/mod.rs"]
mod readout_oracle;
#[path = "../support/mod.rs"]
mod support;

mod account_rules;
mod billing_day;
mod costs;
mod deleted_queues;
mod descriptors;
mod drain;
mod evictions;
mod faults_of_backends;
mod fleet;
mod flood;
mod foreign_queue;
mod full_disk;
mod history;
mod hostile_files;
mod huge;
mod live_limits;
mod lookups;
mod metrics;
mod operator_actions;
mod program;
mod provider_pause;
mod readouts;
mod refused_outcomes;
mod refused_payment;
mod revoked_rights;
mod signals;
mod stalled_log;
mod stand;
mod start;
mod start_failures;
mod sweeper;
mod went_back;
mod without_broker;
