//! The pods' files, mounted into folders of a test: every command line exists, every configuration loads, and the
//! migration runs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use sluicegate::cli::Cli;
use sluicegate::config::{self, Config, DatabaseUrl};

use super::{documents, object_of, pod};
use crate::support::postgres::Postgres;

const OPS_TOKEN: &str = "0123456789abcdef0123456789abcdef";

const PODS: [(&str, &str); 3] =
    [("Deployment", "sluicegate"), ("Job", "sluicegate-migrate"), ("Pod", "sluicegate-operator")];

/// A container as its node starts it, with its volumes in a folder of the test.
pub struct Container {
    pub env: BTreeMap<String, String>,
    pub args: Vec<String>,
    /// Mounted folders by mount path, including the secret's folder.
    mounted: BTreeMap<String, PathBuf>,
    _dir: tempfile::TempDir,
}

impl Container {
    /// The container of this pod among these objects, which include what it mounts.
    pub fn of(objects: &[Value], kind: &str, name: &str) -> Self {
        let document = object_of(objects, kind, name);
        let pod = pod(&document);
        let container = &pod["containers"][0];
        let dir = tempfile::tempdir().unwrap();
        let mut mounted = BTreeMap::new();
        for mount in container["volumeMounts"].as_array().unwrap() {
            let volumes = pod["volumes"].as_array().unwrap();
            let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]);
            let volume = volume.unwrap_or_else(|| panic!("{kind} {name}: no volume {}", mount["name"]));
            let files = files(objects, volume);
            let folder = dir.path().join(mount["name"].as_str().unwrap());
            std::fs::create_dir(&folder).unwrap();
            for (file, text) in files {
                // The placeholder is replaced, as the example requires.
                let text = text.replace("AT-LEAST-32-RANDOM-CHARACTERS-HERE", OPS_TOKEN);
                std::fs::write(folder.join(file), text).unwrap();
            }
            mounted.insert(mount["mountPath"].as_str().unwrap().to_owned(), folder);
        }
        let here = |path: &str| {
            if !path.starts_with('/') {
                return path.to_owned();
            }
            let place = mounted.iter().find_map(|(at, folder)| Some((path.strip_prefix(at)?, folder)));
            let (file, folder) = place.unwrap_or_else(|| panic!("{kind} {name}: nothing is mounted for {path}"));
            folder.join(file.trim_start_matches('/')).display().to_string()
        };
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let env = container["env"].as_array().unwrap().iter();
        let env = env.map(|variable| (text(&variable["name"]), here(variable["value"].as_str().unwrap()))).collect();
        let args = container["args"].as_array().into_iter().flatten().map(text).collect();
        Self { env, args, mounted, _dir: dir }
    }

    pub fn secret(&self, file: &str) -> PathBuf {
        self.mounted["/run/secrets/sluicegate"].join(file)
    }

    pub fn configuration(&self) -> Config {
        config::load(None, self.env.clone(), &[]).unwrap_or_else(|problems| panic!("{problems}"))
    }
}

/// The files of a volume. Of a projected one, later sources replace files of earlier ones.
fn files(objects: &[Value], volume: &Value) -> BTreeMap<String, String> {
    let texts = |kind: &str, source: &Value, field: &str| {
        let data = &object_of(objects, kind, source["name"].as_str().unwrap())[field];
        let text = |key: &Value| {
            data[key.as_str().unwrap()].as_str().unwrap_or_else(|| panic!("no {key}: {source}")).to_owned()
        };
        match source["items"].as_array() {
            Some(items) => {
                items.iter().map(|item| (item["path"].as_str().unwrap().to_owned(), text(&item["key"]))).collect()
            }
            None => data.as_object().unwrap().keys().map(|key| (key.clone(), text(&key.as_str().into()))).collect(),
        }
    };
    let Value::Array(sources) = &volume["projected"]["sources"] else {
        return texts("ConfigMap", &volume["configMap"], "data");
    };
    assert_eq!(volume["projected"]["defaultMode"], 0o440, "{volume}");
    let sources = sources.iter().map(|source| texts("Secret", &source["secret"], "stringData"));
    sources.flat_map(BTreeMap::into_iter).collect()
}

/// A pod without rights beyond its needs.
pub fn assert_unprivileged(pod: &Value) {
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(pod["automountServiceAccountToken"], false);
    let context = &pod["containers"][0]["securityContext"];
    assert_eq!(
        (&context["readOnlyRootFilesystem"], &context["allowPrivilegeEscalation"]),
        (&true.into(), &false.into())
    );
    assert_eq!(context["capabilities"]["drop"][0], "ALL");
}

#[test]
fn containers_run_existing_commands_unprivileged() {
    for (kind, name) in PODS {
        let container = Container::of(documents(), kind, name);
        if kind != "Pod" {
            let line = ["sluicegate"].into_iter().chain(container.args.iter().map(String::as_str));
            Cli::from_arguments(line.map(Into::into)).unwrap();
        }
        for path in container.env.values() {
            assert!(Path::new(path).is_file(), "{kind} {name}: no {path}");
        }
        assert_unprivileged(pod(&object_of(documents(), kind, name)));
    }
}

/// The environments of worker and operator are configurations that `run` and the commands start with, each with its own
/// role of the database.
#[test]
fn the_environments_load() {
    for ((kind, name), role) in [(PODS[0], "sluicegate_worker"), (PODS[2], "sluicegate_operator")] {
        let container = Container::of(documents(), kind, name);
        let DatabaseUrl::Postgres(_) = container.configuration().database.url else { panic!("{name}") };
        let url = std::fs::read_to_string(container.secret("database_url")).unwrap();
        assert!(url.starts_with(&format!("postgres://{role}:")), "{name}");
    }
}

/// The job's own environment, on a real database.
#[test]
fn migration_job_runs_with_its_environment() {
    let job = Container::of(documents(), "Job", "sluicegate-migrate");
    let written = std::fs::read_to_string(job.secret("database_url")).unwrap();
    assert!(written.starts_with("postgres://sluicegate_owner:"), "workers may not change the schema");
    // The example's host does not exist; everything else is as in the manifest.
    std::fs::write(job.secret("database_url"), Postgres::shared().create_database("migrated_by_job")).unwrap();
    let migrate = || {
        let mut program = Command::new(env!("CARGO_BIN_EXE_sluicegate"));
        let output = program.args(&job.args).envs(&job.env).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{}: {stderr}", output.status);
        stderr
    };
    assert!(migrate().contains("is up to date now"));
    assert!(migrate().contains("was already up to date"));
}
