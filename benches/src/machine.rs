//! A description of the machine: processor, system, build and date.
//!
//! It reads no clock: the date is that of the measured server.

use sluicegate::domain::format::count;

/// Processor, cores and system, as far as the system reports them.
pub fn describe() -> String {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    let cpus = read("/proc/cpuinfo");
    let models = || cpus.lines().filter_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = models().next().map_or(std::env::consts::ARCH, |(_, model)| model.trim()).to_owned();
    let cores = cpus.lines().filter(|line| line.starts_with("processor")).count();
    let release = read("/etc/os-release");
    let system = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    let system = system.map_or(std::env::consts::OS, |name| name.trim_matches('"')).to_owned();
    format!("{model}, {} · {system}", count(cores.max(1) as u64, "core"))
}

/// Load average of the last minute; figures of a busy machine are less reliable.
pub fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

/// Version and profile of this program.
pub fn build() -> String {
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    format!("{} ({profile} build)", env!("CARGO_PKG_VERSION"))
}

/// The date of an instant in µs since the Unix epoch.
pub fn date(at_us: u64) -> String {
    let instant = i64::try_from(at_us).ok().and_then(|at_us| jiff::Timestamp::from_microsecond(at_us).ok());
    instant.map_or_else(String::new, |instant| instant.strftime("%Y-%m-%d").to_string())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_date_is_a_day() {
        assert_eq!(super::date(1_800_000_000_000_000), "2027-01-15");
    }
}
