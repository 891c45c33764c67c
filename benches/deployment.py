"""A deployment of the program for a measurement: private servers, a strict provider, worker processes as in production."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
import servers  # noqa: E402

PATIENCE_S = 300


def say(text):
    print(text, file=sys.stderr, flush=True)


def add_program(parser):
    shipped = HERE.parent / "target/dist/sluicegate"
    parser.add_argument("--program", type=Path, default=shipped, help="sluicegate (default: target/dist)")


def program(options):
    path = options.program.resolve()
    if not path.exists():
        raise SystemExit(f"{path} does not exist: run cargo build --profile dist, or use --program")
    return path


def conditions(options, words):
    """The line above a table: command, version, machine, day and load."""
    ended = subprocess.run([options.program, "--version"], capture_output=True, text=True, check=True, timeout=60)
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    load = os.getloadavg()[0]
    machine = f"{model.group(1) if model else 'unknown processor'}, {os.cpu_count()} cores"
    return f"- `{words}` · {ended.stdout.strip()} · {machine} · {time.strftime('%F')} · load average {load:.2f}\n"


@contextlib.contextmanager
def directory(name):
    """A temporary directory. Other users (PostgreSQL's) can reach their own directories below it."""
    with tempfile.TemporaryDirectory(prefix=f"sluicegate-{name}-", ignore_cleanup_errors=True) as path:
        os.chmod(path, 0o711)
        yield Path(path)


@contextlib.contextmanager
def engines(below):
    """Starts PostgreSQL, RabbitMQ and Redis; yields the settings that name them."""
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(servers.redis(below / "redis"))
        yield {
            "LIMITER__URL": f"redis://127.0.0.1:{redis}",
            "QUEUE__URL": stack.enter_context(servers.rabbitmq(below / "rabbitmq")),
            "DATABASE__URL": stack.enter_context(servers.postgres(below / "postgres")),
        }


def psql(url, *commands):
    found = shutil.which("psql") or str(sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1] / "psql")
    words = [found, "-XqAt", "-v", "ON_ERROR_STOP=1", url]
    for command in commands:
        words += ["-c", command]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=1_800).stdout.strip()


@contextlib.contextmanager
def named(settings, name):
    """Settings with a database of its own on the servers, and with own names on broker and limiter."""
    server, database = settings["DATABASE__URL"], name.replace("-", "_")
    psql(server, f"CREATE DATABASE {database}")
    url = server.rsplit("/", 1)[0] + "/" + database
    try:
        yield settings | {"DATABASE__URL": url, "QUEUE__PREFIX": name, "LIMITER__PREFIX": name}
    finally:
        psql(server, f"DROP DATABASE {database} WITH (FORCE)")


def status(pid):
    """Resident memory in MB (1,000,000 bytes): now, and its peak."""
    text = Path(f"/proc/{pid}/status").read_text()
    kib = {name: int(value) for name, value in re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", text)}
    return {"rss_mb": kib["VmRSS"] * 1.024e-3, "peak_mb": kib["VmHWM"] * 1.024e-3}


class Deployment:
    """`settings` are configuration keys as environment variables write them, without their prefix."""

    def __init__(self, options, below, settings):
        self.options, self.below = options, below
        self.below.mkdir(exist_ok=True)
        self.settings = settings
        self.ports = []

    def environment(self, more):
        ours = {name: value for name, value in os.environ.items() if not name.startswith("SLUICEGATE_")}
        return ours | {f"SLUICEGATE_{name}": value for name, value in (self.settings | more).items()}

    def command(self, *words, seconds=1_800):
        command = [str(self.options.program), *map(str, words)]
        environment = self.environment({})
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
        if ended.returncode != 0:
            raise SystemExit(f"sluicegate {words[0]}: {ended.stderr[-2000:]}")
        return ended.stdout

    def apply(self, rows):
        self.command("migrate")
        file = self.below / "providers.toml"
        file.write_text(rows)
        self.command("provider", "apply", file)

    def enqueue(self, jobs):
        """Publishes jobs, given as (id, lane)."""
        lines = self.below / "jobs.jsonl"
        with open(lines, "w", encoding="ascii") as file:
            file.writelines(message(*job) + "\n" for job in jobs)
        self.command("enqueue", "--file", lines)
        lines.unlink()

    @contextlib.contextmanager
    def worker(self, lanes=1, threads=os.cpu_count()):
        """Starts a `run` and waits until its lanes are open; yields its process id and the port of its ops server."""
        port = servers.free_port()
        log = self.below / f"worker-{port}.log"
        environment = self.environment({"OPS__LISTEN": f"127.0.0.1:{port}"}) | {"TOKIO_WORKER_THREADS": str(threads)}
        with servers.process([str(self.options.program), "run"], log, environment) as child:
            deadline = time.monotonic() + PATIENCE_S
            while log.read_text().count("lane open") < lanes:
                if child.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the lanes do not open:\n{log.read_text()[-2000:]}")
                time.sleep(0.05)
            yield child.pid, port


def message(identity, lane, **fields):
    return json.dumps({"id": identity, "provider": lane, "amount": 100, "currency": "EUR", "v": 1} | fields)


def get(url):
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def provider_report(url):
    return json.loads(get(f"{url}/_report"))


def metric(port, name):
    """The sum of a metric over its labels."""
    return sum(value for _, value in series(port, name))


def series(port, name):
    """The series of a metric, as (labels, value)."""
    text = get(f"http://127.0.0.1:{port}/metrics")
    found = re.findall(rf"^{name}(?:\{{([^}}]*)\}})? (\S+)$", text, re.M)
    return [(dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)) for labels, value in found]
