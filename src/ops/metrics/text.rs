//! The conversion from OpenMetrics to the older text format of Prometheus.
//!
//! The formats differ in how counters are announced and in the last line. Lines with values are the same in both.

/// Turns OpenMetrics text into the text format 0.0.4.
pub fn from_open_metrics(open_metrics: &str) -> String {
    let counters = open_metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"));
    counters.fold(open_metrics.replace("# EOF\n", ""), |text, name| {
        ["# HELP", "# TYPE"].iter().fold(text, |text, announcement| {
            text.replace(&format!("{announcement} {name} "), &format!("{announcement} {name}_total "))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counter_types_have_the_full_name() {
        let new = "# HELP a_jobs Jobs.\n# TYPE a_jobs counter\na_jobs_total{p=\"x\"} 1\n# HELP b Bees.\n# TYPE b gauge\n\
                   b 2.0\n# EOF\n";
        let old = "# HELP a_jobs_total Jobs.\n# TYPE a_jobs_total counter\na_jobs_total{p=\"x\"} 1\n# HELP b Bees.\n\
                   # TYPE b gauge\nb 2.0\n";
        assert_eq!(from_open_metrics(new), old);
    }
}
