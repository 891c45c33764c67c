//! A parsed scrape: metric families with their type, samples and labels, and look-up of values.

use std::collections::{BTreeMap, BTreeSet};

pub struct Scrape {
    pub text: String,
    pub families: BTreeMap<String, Family>,
}

#[derive(Default)]
pub struct Family {
    pub kind: String,
    pub help: String,
    pub samples: Vec<Sample>,
}

pub struct Sample {
    /// Includes `_bucket`, `_sum` or `_count`.
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

impl Family {
    /// Label names of all samples, without those that a histogram adds.
    pub fn labels(&self) -> BTreeSet<&str> {
        self.samples
            .iter()
            .flat_map(|sample| sample.labels.keys().map(String::as_str))
            .filter(|name| *name != "le")
            .collect()
    }
}

impl Scrape {
    pub fn parse(text: &str) -> Self {
        let mut families: BTreeMap<String, Family> = BTreeMap::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').unwrap();
                families.entry(name.to_owned()).or_default().help = help.to_owned();
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                let family = families.entry(name.to_owned()).or_default();
                assert!(family.kind.is_empty(), "{name} has two TYPE lines");
                family.kind = kind.to_owned();
            } else {
                let sample = sample(line);
                let family = family_of(&sample.name, &families).unwrap_or_else(|| panic!("{line} has no TYPE line"));
                families.get_mut(&family).unwrap().samples.push(sample);
            }
        }
        Self { text: text.to_owned(), families }
    }

    /// Sum of the samples with this name and these labels.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let values = self.values(name, labels);
        assert!(!values.is_empty(), "no {name} with {labels:?} in:\n{}", self.text);
        values.iter().sum()
    }

    /// Whether a sample has this name and these labels.
    pub fn has(&self, name: &str, labels: &[(&str, &str)]) -> bool {
        !self.values(name, labels).is_empty()
    }

    fn values(&self, name: &str, labels: &[(&str, &str)]) -> Vec<f64> {
        let samples = self.families.values().flat_map(|family| &family.samples);
        let of = samples.filter(|sample| {
            let has = |(name, value): &(&str, &str)| sample.labels.get(*name).is_some_and(|known| known == value);
            sample.name == name && labels.iter().all(has)
        });
        of.map(|sample| sample.value).collect()
    }
}

fn family_of(sample: &str, families: &BTreeMap<String, Family>) -> Option<String> {
    let suffixes = ["", "_bucket", "_sum", "_count"];
    let mut names = suffixes.iter().filter_map(|suffix| sample.strip_suffix(suffix));
    names.find(|name| families.contains_key(*name)).map(str::to_owned)
}

fn sample(line: &str) -> Sample {
    let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no sample: {line}"));
    let (name, labels) = name.split_once('{').unwrap_or((name, "}"));
    let labels = labels.strip_suffix('}').unwrap().split_terminator("\",");
    let label = |label: &str| {
        let (name, value) = label.split_once("=\"").unwrap();
        (name.to_owned(), value.trim_end_matches('"').to_owned())
    };
    let value = if value == "+Inf" { f64::INFINITY } else { value.parse().unwrap() };
    Sample { name: name.to_owned(), labels: labels.map(label).collect(), value }
}

#[test]
fn scrape_is_parsed() {
    let text = "# HELP a_seconds Help me.\n# TYPE a_seconds histogram\na_seconds_bucket{p=\"x\",le=\"0.1\"} 2\n\
                a_seconds_bucket{p=\"x\",le=\"+Inf\"} 3\na_seconds_sum{p=\"x\"} 1.5\na_seconds_count{p=\"x\"} 3\n\
                # HELP b Bees.\n# TYPE b gauge\nb 2.0\n";
    let scrape = Scrape::parse(text);
    assert_eq!(scrape.families["a_seconds"].labels(), ["p"].into());
    assert_eq!(scrape.value("a_seconds_bucket", &[("le", "+Inf")]).to_string(), "3");
    assert_eq!((scrape.value("b", &[]), scrape.families["b"].help.as_str()), (2.0, "Bees."));
}
