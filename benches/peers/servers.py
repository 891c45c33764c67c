"""Private servers from Debian's packages: each on a free port of loopback, in a directory of its own, gone with `with`."""

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

RABBITMQ = "/usr/lib/rabbitmq/bin"
START_MAX_S = 90


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def await_port(port, process, log):
    deadline = time.monotonic() + START_MAX_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise SystemExit(f"a server does not listen on {port}:\n{Path(log).read_text(errors='replace')[-2000:]}")


@contextlib.contextmanager
def process(command, log, environment=None, ending=signal.SIGTERM):
    """Runs a server in a process group of its own, and ends that group."""
    with open(log, "ab") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, ending)
        try:
            child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@contextlib.contextmanager
def redis(directory, persistent=False):
    """Redis in memory alone, or with a log of all writes on disk that is synced every second."""
    directory.mkdir()
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
    command += ["--appendonly", "yes" if persistent else "no", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction", "--daemonize", "no"]
    with process(command, directory / "log") as child:
        await_port(port, child, directory / "log")
        yield port


@contextlib.contextmanager
def rabbitmq(directory):
    """RabbitMQ as in production except for its guest user: quorum queues on disk, all schedulers."""
    directory.mkdir()
    port = free_port()
    cookie = directory / ".erlang.cookie"
    cookie.write_text(f"PEERS{port}")
    cookie.chmod(0o400)
    (directory / "plugins").write_text("[].")
    settings = [
        f"listeners.tcp.1 = 127.0.0.1:{port}",
        "disk_free_limit.absolute = 1MB",
        "vm_memory_high_watermark.absolute = 1GB",
        "log.console.level = warning",
    ]
    (directory / "rabbitmq.conf").write_text("\n".join(settings) + "\n")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(directory),
        "RABBITMQ_NODENAME": f"peers{port}@localhost",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "ERL_EPMD_PORT": str(free_port()),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_MNESIA_BASE": str(directory / "data"),
        "RABBITMQ_LOG_BASE": str(directory / "log-files"),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
        "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
        "RABBITMQ_CONF_ENV_FILE": str(directory / "no-env.conf"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    # For rabbitmqctl.
    (directory / "environment.json").write_text(json.dumps(environment))
    try:
        with process([f"{RABBITMQ}/rabbitmq-server"], directory / "log", environment, signal.SIGKILL) as child:
            await_port(port, child, directory / "log")
            yield f"amqp://guest:guest@127.0.0.1:{port}/%2f"
    finally:
        # epmd runs apart from the node, and does not end while it still knows a node.
        for _ in range(20):
            ended = subprocess.run(["epmd", "-kill"], env=environment, capture_output=True, check=False)
            if ended.returncode == 0:
                break
            time.sleep(0.1)


@contextlib.contextmanager
def postgres(directory):
    """Durable PostgreSQL: fsync and synchronous_commit stay on."""
    directory.mkdir()
    home = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1]
    prefix = []
    if os.geteuid() == 0:
        # PostgreSQL does not run as root.
        owner = pwd.getpwnam("postgres")
        os.chown(directory, owner.pw_uid, owner.pw_gid)
        prefix = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    data, port = directory / "data", free_port()
    made = prefix + [f"{home}/initdb", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-locale"]
    subprocess.run(made + [f"--pgdata={data}"], check=True, capture_output=True, cwd="/")
    command = prefix + [f"{home}/postgres", "-D", str(data), "-p", str(port), "-k", str(directory)]
    command += ["-c", "listen_addresses=127.0.0.1", "-c", "shared_buffers=128MB"]
    with process(command, directory / "log", ending=signal.SIGINT) as child:
        await_port(port, child, directory / "log")
        ready = prefix + [f"{home}/pg_isready", "-q", "-h", str(directory), "-p", str(port)]
        while subprocess.run(ready, check=False, cwd="/").returncode != 0:
            time.sleep(0.05)
        make = prefix + [f"{home}/createdb", "-h", str(directory), "-p", str(port), "-U", "postgres", "bench"]
        subprocess.run(make, check=True, cwd="/")
        yield f"postgres://postgres@127.0.0.1:{port}/bench"


@contextlib.contextmanager
def provider(program, directory, name, limit, latency, *more):
    """A strict provider that counts every window and refuses nothing, because not every peer handles a refusal."""
    log = directory / f"provider-{name}.log"
    command = [str(program), "fake-provider", "--listen", "127.0.0.1:0", "--latency", latency]
    command += ["--limit", limit, "--on-limit", "count", *more]
    with process(command, log) as child:
        deadline = time.monotonic() + START_MAX_S
        mark = "listening on "
        while mark not in (text := log.read_text()):
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the fake provider does not start:\n{text}")
            time.sleep(0.02)
        url = text.split(mark)[1].split()[0]
        urllib.request.urlopen(f"{url}/_report", timeout=10).close()
        yield url


def versions():
    """Versions of the packages that the servers come from."""
    found = {}
    for name, command in {
        "redis": ["redis-server", "--version"],
        "rabbitmq": ["dpkg-query", "-W", "-f", "${Version}", "rabbitmq-server"],
        "node": ["node", "--version"],
    }.items():
        if shutil.which(command[0]):
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            found[name] = ended.stdout.strip()
    return found
