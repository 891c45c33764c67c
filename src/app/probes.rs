//! What `check` looks at in the engines beyond their answering: settings of theirs that would undo a promise.
//!
//! Refuses to change anything.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;

use crate::cli::check::Finding;
use crate::cli::connect::Probe;
use crate::config::{Config, LimiterUrl};
use crate::limiter::LimiterError;
use crate::limiter::redis::client::{RedisLimiter, StoreFacts};

/// Clocks further apart than this make waits in logs and pages misleading; limits do not depend on it.
const CLOCK_SKEW_MAX: Duration = Duration::from_secs(5);

pub fn of(config: &Config) -> Vec<Box<dyn Probe>> {
    match &config.limiter.url {
        LimiterUrl::Redis(url) => vec![Box::new(RedisProbe {
            shown: url.to_string(),
            limiter: RedisLimiter::new(url.expose(), &config.limiter.prefix),
        })],
        LimiterUrl::Embedded | LimiterUrl::RedisCluster(_) => Vec::new(),
    }
}

struct RedisProbe {
    shown: String,
    limiter: Result<RedisLimiter, LimiterError>,
}

#[async_trait]
impl Probe for RedisProbe {
    fn subject(&self) -> String {
        format!("limiter {}", self.shown)
    }

    async fn look(&self) -> Vec<Finding> {
        let facts = match &self.limiter {
            Ok(limiter) => limiter.facts().await.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match facts {
            Err(error) => vec![Finding::error(self.subject(), error, "Check that it runs and limiter.url")],
            Ok(facts) => self.judge(&facts, SystemTime::now()),
        }
    }
}

impl RedisProbe {
    fn judge(&self, facts: &StoreFacts, now: SystemTime) -> Vec<Finding> {
        let mut findings = vec![Finding::ok(self.subject(), "answers, and may run scripts".to_owned())];
        if facts.eviction_policy != "noeviction" {
            let what = format!("evicts keys when memory is short (maxmemory-policy {})", facts.eviction_policy);
            let mend = "CONFIG SET maxmemory-policy noeviction: an evicted log means a cold start";
            findings.push(Finding::error(self.subject(), what, mend));
        }
        let ours = now.duration_since(UNIX_EPOCH).unwrap_or_default();
        let skew = ours.abs_diff(Duration::from_micros(facts.now.0));
        if skew > CLOCK_SKEW_MAX {
            let what = format!("its clock and ours are {} s apart", skew.as_secs());
            findings.push(Finding::warning(self.subject(), what, "Run a time service on both machines"));
        }
        findings
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::check::Level;
    use crate::domain::time::Micros;

    #[test]
    fn an_evicting_store_is_an_error_and_a_skewed_clock_a_warning() {
        let probe = RedisProbe {
            shown: "redis://127.0.0.1/".to_owned(),
            limiter: RedisLimiter::new("redis://127.0.0.1/", "sluicegate"),
        };
        let now = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let levels = |policy: &str, seconds: u64| -> Vec<Level> {
            let facts = StoreFacts { eviction_policy: policy.to_owned(), now: Micros(seconds * 1_000_000) };
            probe.judge(&facts, now).into_iter().map(|finding| finding.level).collect()
        };
        assert_eq!(levels("noeviction", 1_800_000_000), [Level::Ok]);
        assert_eq!(levels("allkeys-lru", 1_800_000_000), [Level::Ok, Level::Error]);
        assert_eq!(levels("noeviction", 1_800_000_100), [Level::Ok, Level::Warning]);
    }
}
