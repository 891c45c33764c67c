//! Parser for a number of jobs on the command line: `5000`, `300_000` or `300k`.
//!
//! Fractions, signs and numbers beyond `usize` are errors.

/// Reads a number of jobs.
pub(super) fn job_count(text: &str) -> Result<usize, String> {
    let times = [("k", 1_000), ("K", 1_000), ("M", 1_000_000)];
    let suffixed = times.iter().find_map(|(suffix, times)| Some((text.strip_suffix(suffix)?, *times)));
    let (digits, times) = suffixed.unwrap_or((text, 1));
    let grouped = digits.split('_').all(|group| !group.is_empty() && group.bytes().all(|byte| byte.is_ascii_digit()));
    let number = grouped.then(|| digits.replace('_', "").parse::<usize>().ok()?.checked_mul(times)).flatten();
    number.ok_or_else(|| format!("`{text}` is not a number of jobs: write 5000, 300_000 or 300k"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn job_counts_accept_separators_and_suffixes() {
        for (text, jobs) in [
            ("0", 0),
            ("5000", 5_000),
            ("300_000", 300_000),
            ("300k", 300_000),
            ("300K", 300_000),
            ("2M", 2_000_000),
            ("1_000k", 1_000_000),
        ] {
            assert_eq!(job_count(text).unwrap(), jobs, "{text}");
        }
        for bad in
            ["", "k", "_", "_5", "5_", "5__0", "-5", "+5", "1.5k", "300,000", "5 k", "5kk", "18446744073709551615k"]
        {
            let problem = job_count(bad).unwrap_err();
            assert_eq!(problem, format!("`{bad}` is not a number of jobs: write 5000, 300_000 or 300k"));
        }
    }
}
