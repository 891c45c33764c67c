//! The conversion from OpenMetrics to the older text format of Prometheus.
//!
//! The formats differ in how counters are announced and in the last line. Lines with values are the same in both, so
//! they are not parsed.

/// Turns OpenMetrics text into the text format 0.0.4.
pub fn from_open_metrics(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let lines: Vec<&str> = open_metrics.lines().filter(|line| *line != "# EOF").collect();
    for (at, line) in lines.iter().enumerate() {
        let next_is_counter = || lines.get(at + 1).is_some_and(|next| is_counter(next));
        if line.starts_with("# TYPE ") && is_counter(line) {
            text.push_str(line.trim_end_matches(" counter"));
            text.push_str("_total counter");
        } else if let Some(help) = line.strip_prefix("# HELP ").filter(|_| next_is_counter()) {
            let (name, words) = help.split_once(' ').unwrap_or((help, ""));
            text.push_str(&format!("# HELP {name}_total {words}"));
        } else {
            text.push_str(line);
        }
        text.push('\n');
    }
    text
}

fn is_counter(line: &str) -> bool {
    line.starts_with("# TYPE ") && line.ends_with(" counter")
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
