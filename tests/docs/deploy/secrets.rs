//! Credentials of providers: on every platform they are in the files that the shipped rows name.

use std::collections::BTreeSet;
use std::process::Command;

use super::{UNIT, object, pod};
use crate::page::Page;

const TMPFILES: &str = "deploy/systemd/sluicegate.tmpfiles.conf";

/// Folders of the files that the rows of `config/providers` refer to.
fn referred() -> BTreeSet<String> {
    let folder = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/config/providers")).unwrap();
    let mut found = BTreeSet::new();
    for entry in folder {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        for reference in text.split("${file:").skip(1) {
            let path = reference.split('}').next().unwrap();
            found.insert(path.rsplit_once('/').unwrap().0.to_owned());
        }
    }
    found
}

#[test]
fn rows_use_the_mounted_secret_folder() {
    let referred = referred();
    let [folder] = referred.iter().collect::<Vec<_>>()[..] else { panic!("{referred:?}") };
    let deployment = object("Deployment", "sluicegate");
    let mounts = pod(&deployment)["containers"][0]["volumeMounts"].as_array().unwrap().clone();
    let secrets = mounts.iter().find(|mount| mount["name"] == "secrets").unwrap();
    assert_eq!(secrets["mountPath"], folder.as_str());
    // The example's key is one that a shipped row refers to.
    let row = Page::read("config/providers/stripe.toml").text;
    assert!(row.contains(&format!("${{file:{folder}/stripe}}")));
    assert!(object("Secret", "sluicegate")["stringData"]["stripe"].is_string());
}

/// The example's configuration grants a shipped row the secret that the example's Secret holds for it.
#[test]
fn example_grants_its_mounted_secrets() {
    let config = object("ConfigMap", "sluicegate")["data"]["sluicegate.toml"].as_str().unwrap().to_owned();
    let config: toml::Table = config.parse().unwrap();
    let [entry] = config["outbound"]["secrets"].as_array().unwrap().as_slice() else { panic!("{config}") };
    assert!(Page::read("config/providers/stripe.toml").text.contains(&entry.to_string()), "{entry}");
}

/// The unit's credentials are in the unit's own folder, and a link leads there.
#[test]
fn unit_links_the_secret_folder() {
    let root = tempfile::tempdir().unwrap();
    let file = format!("{}/{TMPFILES}", env!("CARGO_MANIFEST_DIR"));
    let at = format!("--root={}", root.path().display());
    // A second run changes nothing.
    for _ in 0..2 {
        let output = Command::new("systemd-tmpfiles").args([&at, "--create", &file]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let link = referred().into_iter().next().unwrap();
    let leads = std::fs::read_link(root.path().join(link.trim_start_matches('/'))).unwrap();
    let leads = leads.to_str().unwrap();
    let leads = leads.strip_prefix(root.path().to_str().unwrap()).unwrap_or(leads);
    let unit = UNIT.rsplit('/').next().unwrap();
    // https://www.freedesktop.org/software/systemd/man/latest/systemd.exec.html#LoadCredential=ID:PATH
    assert_eq!(leads, format!("/run/credentials/{unit}"));
    let text = Page::read(UNIT).text;
    assert!(text.contains("LoadCredential=stripe:") && text.contains("sluicegate.tmpfiles.conf"));
}
