//! A private PgBouncer in front of a PostgreSQL cluster, in one pooling mode, on a port of its own.

use std::process::Command;

use super::process::{Server, free_port, private_dir};

const PROGRAM: &str = "/usr/sbin/pgbouncer";

pub struct PgBouncer {
    port: u16,
    _server: Server,
}

impl PgBouncer {
    /// Starts one with Debian's defaults except `pool_mode`, in front of the server of this URL.
    pub fn start(mode: &str, server: &str) -> Self {
        let (dir, port, server) = (private_dir("pgbouncer"), free_port(), url::Url::parse(server).unwrap());
        let config = format!(
            "[databases]\n* = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = {mode}\n",
            server.port().unwrap()
        );
        let path = dir.join("pgbouncer.ini");
        std::fs::write(&path, config).unwrap();
        let path = path.to_str().unwrap();
        // PgBouncer refuses to run as root.
        let is_root = Command::new("id").arg("-u").output().unwrap().stdout == b"0\n";
        let other_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"];
        let mut command: Vec<&str> = if is_root { other_user.to_vec() } else { Vec::new() };
        command.extend([PROGRAM, path]);
        if is_root {
            assert!(Command::new("chown").args(["-R", "postgres:"]).arg(&dir).status().unwrap().success());
        }
        let server = Server::start(&command, &[], &dir.join("log"), Some(&dir), "");
        server.await_port(port);
        Self { port, _server: server }
    }

    /// The same database through this pooler.
    pub fn url(&self, direct: &str) -> String {
        let mut url = url::Url::parse(direct).unwrap();
        url.set_port(Some(self.port)).unwrap();
        url.to_string()
    }
}
