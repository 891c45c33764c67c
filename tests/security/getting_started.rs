//! The steps of docs/getting-started.md "In production", word for word, on backends with TLS and the roles of
//! docs/security.md.

use std::process::Command;

use crate::deployment::{Deployment, PROVIDER_KEY, text};
use crate::page::Page;

const PLACE: &str = "/etc/sluicegate";
/// The page's file of the database URL for each role.
const DATABASES: [(&str, &str); 3] = [
    ("owner_database_url", "sluicegate_owner"),
    ("operator_database_url", "sluicegate_operator"),
    ("database_url", "sluicegate_worker"),
];

/// The shell commands of the section without the last one, `sluicegate run`, which does not end.
fn steps() -> String {
    let text = Page::read("docs/getting-started.md").text;
    let section = text.split("\n## In production").nth(1).unwrap();
    let mut steps = String::new();
    let mut lines = section.lines();
    while lines.any(|line| line.trim() == "```sh") {
        steps.extend(lines.by_ref().take_while(|line| line.trim() != "```").map(|line| format!("{}\n", line.trim())));
    }
    let (steps, run) = steps.trim_end().rsplit_once('\n').unwrap();
    assert!(run.ends_with("database_url sluicegate run"), "{run}");
    format!("{steps}\n")
}

#[test]
fn production_steps_work_with_their_roles() {
    let deployment = Deployment::shared();
    let dir = tempfile::tempdir().unwrap();
    let secrets = dir.path().join("secrets");
    std::fs::create_dir(&secrets).unwrap();
    let write = |name: &str, text: &str| std::fs::write(secrets.join(name), text).unwrap();
    let mut environment = deployment.environment("sluicegate_worker", "none");
    for (name, variable) in [("queue_url", "SLUICEGATE_QUEUE__URL"), ("limiter_url", "SLUICEGATE_LIMITER__URL")] {
        let at = environment.iter().position(|(known, _)| known == variable).unwrap();
        write(name, &environment.swap_remove(at).1);
    }
    write("ops_token", "0123456789abcdef0123456789abcdef");
    for (name, role) in DATABASES {
        let of_role = deployment.environment(role, "none");
        let (_, file) = of_role.iter().find(|(known, _)| known == "SLUICEGATE_DATABASE__URL_FILE").unwrap();
        write(name, &std::fs::read_to_string(file).unwrap());
    }
    let secrets =
        ["env:CANARY_PROVIDER_KEY".to_owned(), format!("file:{}", deployment.dir.join("provider-secret").display())];
    // The example itself, with values of this machine: authority, target, port, and the secrets of its rows.
    let example = Page::read("config/example.production.toml").text;
    let example = example
        .replace("# [tls]", "[tls]")
        .replace(
            "# ca_file = \"/etc/ssl/internal-authority.pem\"",
            &format!("ca_file = {:?}", deployment.authority.file()),
        )
        .replace("allow = []", &format!("allow = [\"localhost:{}\"]", deployment.provider.port))
        .replace(
            "# secrets = [\"file:/run/secrets/sluicegate/stripe@api.stripe.com\"]",
            &format!("secrets = {:?}", secrets.map(|secret| format!("{secret}@localhost"))),
        );
    for line in ["\n[tls]\n", "\nca_file = ", "\nsecrets = "] {
        assert!(example.contains(line), "{line}: {example}");
    }
    std::fs::write(dir.path().join("sluicegate.toml"), example).unwrap();
    let row = format!(
        "[[provider]]\nname = \"walked\"\nurl = \"https://localhost:{}/charges\"\nidempotency_retention_s = 86400\n\
         [[provider.limit]]\nname = \"per-second\"\nmax_requests = 1\nwindow_ms = 1000\n",
        deployment.provider.port
    );
    write("acme.toml", &row);

    let steps = steps().replace(PLACE, dir.path().to_str().unwrap());
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_sluicegate")).parent().unwrap().to_owned();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("bash");
    shell.args(["-euxc", &steps]).env("PATH", path).env("CANARY_PROVIDER_KEY", PROVIDER_KEY);
    let output = shell.output().unwrap();
    let printed = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{printed}");
    assert!(printed.contains("walked: created") && printed.contains("errors: 0"), "{printed}");
    let applied = deployment.sql("SELECT count(*) FROM settings_audit WHERE because = 'go-live'");
    assert_ne!(applied.trim(), "0");
}
