//! The snippets for producers: pages show the files unchanged, and the Python one publishes through a real RabbitMQ.

use std::process::{Command, Output};

use serde_json::Value;
use sluicegate::domain::provider::ProviderName;
use sluicegate::queue::message::{CardNumbers, decode};

use crate::page::Page;
use crate::support::process::private_dir;
use crate::support::rabbitmq::RabbitNode;

/// Debian's own interpreter, which finds Debian's python3-pika.
const PYTHON: &str = "/usr/bin/python3";
const VHOST: &str = "docs";

#[test]
fn the_page_shows_the_files() {
    let page = Page::read("docs/message.md");
    for (language, path) in [("python", "docs/producers/publish.py"), ("js", "docs/producers/publish.mjs")] {
        let file = Page::read(path).text;
        assert_eq!(page.blocks_of(language), [file.trim_end()], "{path}");
        for needed in ["onfirm", "mandatory", "ersistent", "AMQP_URL"] {
            assert!(file.contains(needed), "{path}: {needed}");
        }
    }
}

fn python(script: &str, url: &str) -> Output {
    Command::new(PYTHON).args(["-c", script]).env("AMQP_URL", url).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn the_python_snippet_publishes_a_job() {
    let node = RabbitNode::shared();
    let url = node.create_vhost(VHOST);
    let dir = private_dir("docs");
    let file = dir.join("acme.toml");
    std::fs::write(&file, &Page::read("README.md").blocks_of("toml")[0]).unwrap();
    let applied = Command::new(env!("CARGO_BIN_EXE_sluicegate"))
        .args(["provider", "apply", file.to_str().unwrap()])
        .env("SLUICEGATE_DATABASE__URL", format!("sqlite://{}", dir.join("s.db").display()))
        .env("SLUICEGATE_QUEUE__URL", &url)
        .output()
        .unwrap();
    assert!(applied.status.success(), "{}", stderr(&applied));

    let script = Page::read("docs/producers/publish.py").text;
    let published = python(&script, &url);
    assert!(published.status.success(), "{}", stderr(&published));
    let nowhere = python(&script.replace(r#"routing_key="acme""#, r#"routing_key="nobody""#), &url);
    assert!(stderr(&nowhere).contains("UnroutableError"), "{}", stderr(&nowhere));

    let take = "import json, os, pika\n\
                channel = pika.BlockingConnection(pika.URLParameters(os.environ['AMQP_URL'])).channel()\n\
                _, properties, body = channel.basic_get('payments.acme', auto_ack=True)\n\
                nothing = channel.basic_get('payments.acme')[0] is None\n\
                print(json.dumps([properties.delivery_mode, properties.message_id, body.decode(), nothing]))";
    let taken = python(take, &url);
    let taken: Value = serde_json::from_slice(&taken.stdout).unwrap_or_else(|_| panic!("{}", stderr(&taken)));
    let acme = ProviderName::new("acme").unwrap();
    let job = decode(taken[2].as_str().unwrap().as_bytes(), &acme, CardNumbers::Refuse).unwrap().job;
    assert_eq!((&taken[0], taken[1].as_str()), (&Value::from(2), Some(job.id.as_str())));
    assert_eq!(taken[3], true, "one job, once");
    std::fs::remove_dir_all(dir).unwrap();
}
