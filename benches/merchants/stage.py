"""Lanes of two workers on private servers, with the times of publishing and the strict providers' records beside each other.

A wait is measured from the moment before a message is published to the arrival of its request at the provider. Both are
brought to the machine's clock: a provider's own clock is compared with it once, by requests before the workers start.
"""

import collections
import contextlib
import json
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import amqp
import deployment
from deployment import Deployment, psql, servers

WORKERS = 2
# The providers' response time: the same for each request, so that the end of a permit's window is known.
LATENCY_MS = 50
PROBES = 50

ROW = """
[[provider]]
name = "{name}"
url = "{url}/charges"
idempotency_retention_s = 86400
{columns}
{limits}"""

LIMIT = """[[provider.limit]]
name = "{name}"
scope = "{scope}"
max_requests = {requests}
window_ms = 1000
"""


class Lane:
    """One provider with limits per second of its own; `account` limits each account."""

    def __init__(self, name, limit, account=None, columns="", rows="", more=()):
        self.name, self.limit, self.account = name, limit, account
        self.columns, self.rows, self.more = columns, rows, more
        self.url = self.offset_s = None
        self.published = {}

    def row(self):
        limits = LIMIT.format(name="all", scope="provider", requests=self.limit)
        if self.account:
            limits += LIMIT.format(name="per-account", scope="account", requests=self.account)
        return ROW.format(name=self.name, url=self.url, columns=self.columns, limits=limits) + self.rows

    def rate(self):
        """What the limit allows: a slot is free one window after the response."""
        return self.limit / (1 + LATENCY_MS / 1_000)

    def align_clocks(self):
        """Finds the provider's zero on the machine's clock, by the request with the shortest round trip."""
        best = None
        for number in range(PROBES):
            body = json.dumps({"id": f"probe-{number}", "amount": 1, "currency": "EUR"}).encode()
            before, began = len(self.arrivals_us()), time.time()
            # A charge is answered after its latency, a request of an unknown kind at once.
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(urllib.request.Request(f"{self.url}/", body, {}, method="DELETE"), timeout=10).close()
            took = time.time() - began
            at_us = self.arrivals_us()[before]
            if best is None or took < best:
                best, self.offset_s = took, began + took / 2 - at_us / 1e6
        # Its clock goes on.
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/_reset", b"", method="POST"), timeout=10).close()

    def arrivals_us(self):
        return json.loads(deployment.get(f"{self.url}/_arrivals"))

    def arrivals(self):
        """Times of all requests on the machine's clock, ascending, without that of the warm-up."""
        return [self.offset_s + at_us / 1e6 for at_us in self.arrivals_us()[1:]]

    def report(self):
        return deployment.provider_report(self.url)

    def charges(self):
        """Charged jobs with the time of their request: {id: (account, time)}."""
        effects = json.loads(deployment.get(f"{self.url}/_effects"))
        times = {effect["id"]: (effect["account"], self.offset_s + effect["first_us"] / 1e6) for effect in effects}
        return {job: charge for job, charge in times.items() if job in self.published}

    def waits(self, wanted=lambda account: True):
        """Seconds from publishing to the request, of the charged jobs of accounts that are wanted."""
        return [at - self.published[job] for job, (account, at) in self.charges().items() if wanted(account)]

    def sent(self, account):
        """Times of the account's requests, ascending."""
        return sorted(at for of, at in self.charges().values() if of == account)


class Stage:
    """The running deployment of a case."""

    def __init__(self, deployed, lanes):
        self.deployed, self.lanes, self.ports = deployed, lanes, []
        self.settings, self.database = deployed.settings, deployed.settings["DATABASE__URL"]

    def sql(self, *commands):
        return psql(self.database, *commands)

    def count(self, command):
        return int(self.sql(command) or 0)

    def queue(self, lane):
        return f"{self.settings['QUEUE__PREFIX']}.{lane.name}"

    def connected(self):
        return amqp.connected(self.settings["QUEUE__URL"])

    def publish(self, lane, jobs):
        """Publishes (id, fields) as fast as possible; returns when the broker has all."""
        with self.connected() as connection:
            connection.publish(self.queue(lane), stamped(lane, jobs))

    def publish_paced(self, schedule, stopped=lambda: False):
        """Publishes (seconds from now, lane, id, fields), which is sorted, at these times."""
        began = time.time()
        with self.connected() as connection:
            for at, lane, job, fields in schedule:
                time.sleep(max(0.0, began + at - time.time()))
                if stopped():
                    return
                connection.publish(self.queue(lane), stamped(lane, [(job, fields)]))

    def await_charges(self, lane, wanted, patience_s):
        """Returns once the provider has charged so many jobs, without that of the warm-up."""
        deadline = time.monotonic() + patience_s
        while (charged := lane.report()["charges"] - 1) < wanted:
            if time.monotonic() > deadline:
                states = self.sql(f"SELECT state, count(*) FROM jobs WHERE provider = '{lane.name}' GROUP BY 1")
                warned = "\n".join(self.warnings()[-10:])
                raise SystemExit(f"{lane.name}: {charged} of {wanted} charges within {patience_s:.0f} s; {states}\n{warned}")
            time.sleep(0.1)

    def await_delivered(self, lane, patience_s):
        """Returns once the lane's queue is empty."""
        deadline = time.monotonic() + patience_s
        with self.connected() as connection:
            while depth := connection.depth(self.queue(lane)):
                if time.monotonic() > deadline:
                    raise SystemExit(f"{lane.name}: {depth} messages are still queued after {patience_s:.0f} s")
                time.sleep(0.2)

    def await_recorded(self, lane, wanted, patience_s):
        """Returns once the ledger has so many jobs of the lane."""
        deadline = time.monotonic() + patience_s
        command = f"SELECT count(*) FROM jobs WHERE provider = '{lane.name}'"
        while (seen := self.count(command)) < wanted:
            if time.monotonic() > deadline:
                raise SystemExit(f"{lane.name}: {seen} of {wanted} jobs are recorded within {patience_s:.0f} s")
            time.sleep(0.2)

    def lateness(self, lane):
        """The lane's starts so far by lateness: {upper bound in seconds: starts up to it}, by the workers' metrics."""
        counts = collections.Counter()
        for port in self.ports:
            for labels, count in deployment.series(port, "sluicegate_start_lateness_seconds_bucket"):
                if labels["provider"] == lane.name:
                    counts[float(labels["le"])] += int(count)
        return counts

    def warnings(self):
        """Lines of the workers' logs above `info`."""
        logs = sorted(self.deployed.below.glob("worker-*.log"))
        lines = (line for log in logs for line in log.read_text().splitlines())
        return [line for line in lines if '"INFO"' not in line]

    def lane_pauses(self, lane):
        """Lines of the workers' logs that say that the lane pauses, without those about one account."""
        found = []
        for log in self.deployed.below.glob("worker-*.log"):
            for line in log.read_text().splitlines():
                if f'"{lane.name}"' in line and re.search("lane paused|circuit breaker opens", line):
                    found.append(line)
        return found

    def broker_counts(self):
        """Messages that the broker has received from publishers, delivered and got acknowledged, since its start."""
        directory = self.deployed.below.parent / "rabbitmq"
        environment = json.loads((directory / "environment.json").read_text())
        command = [f"{servers.RABBITMQ}/rabbitmqctl", "eval", "rabbit_global_counters:overview()."]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
        total = lambda name: sum(int(count) for count in re.findall(rf"\b{name} => (\d+)", said))  # noqa: E731
        names = ("messages_received_total", "messages_delivered_total", "messages_acknowledged_total")
        return {name.split("_")[1]: total(name) for name in names}


def stamped(lane, jobs):
    """Messages of jobs, (id, body); remembers when each is about to be published. An id is one job over all lanes."""
    for job, fields in jobs:
        identity = f"{lane.name}-{job}"
        lane.published[identity] = time.time()
        yield identity, deployment.message(identity, lane.name, **fields)


@contextlib.contextmanager
def stage(options, below, settings, name, lanes):
    """Runs two workers with these lanes, on a database, a prefix and providers of their own."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(deployment.named(settings, name))
        deployed = Deployment(options, below / name, own | {"LOG__FORMAT": "json"})
        for lane in lanes:
            limit, latency = f"{lane.limit}/1s", f"{LATENCY_MS}ms"
            provider = servers.provider(options.program, deployed.below, lane.name, limit, latency, *lane.more)
            lane.url = stack.enter_context(provider)
            lane.align_clocks()
        deployed.apply("".join(lane.row() for lane in lanes))
        ready = Stage(deployed, lanes)
        if options.logs:
            stack.callback(keep_records, options.logs / name, ready)
        # After the workers have stopped.
        stack.callback(delete_queues, ready)
        threads = options.threads or max(1, os.cpu_count() // WORKERS)
        for _ in range(WORKERS):
            ready.ports.append(stack.enter_context(deployed.worker(len(lanes), threads))[1])
        warm_up(ready)
        yield ready


def warm_up(ready):
    """Sends one job through each lane, because a limiter starts cold, and waits until the limits have forgotten it."""
    for lane in ready.lanes:
        ready.publish(lane, [("warm-up", {})])
    for lane in ready.lanes:
        ready.await_charges(lane, 0, 60)
    time.sleep(2)
    for lane in ready.lanes:
        lane.published.clear()


def keep_records(directory, ready):
    """Writes what a look at a miss needs: the workers' logs, each lane's times, and the ledger's."""
    directory.mkdir(parents=True, exist_ok=True)
    for log in ready.deployed.below.glob("worker-*.log"):
        (directory / log.name).write_bytes(log.read_bytes())
    for lane in ready.lanes:
        times = {"published": lane.published, "charges": lane.charges(), "arrivals": lane.arrivals()}
        (directory / f"{lane.name}.json").write_text(json.dumps(times))
    columns = "id, account, priority, extract(epoch FROM created_at), first_sent_at, state, attempts, fence"
    (directory / "jobs.txt").write_text(ready.sql(f"SELECT {columns} FROM jobs ORDER BY seq"))
    began = "job_id, number, extract(epoch FROM began_at), extract(epoch FROM ended_at), outcome"
    (directory / "attempts.txt").write_text(ready.sql(f"SELECT {began} FROM attempts ORDER BY began_at"))


def delete_queues(ready):
    with ready.connected() as connection:
        for lane in ready.lanes:
            connection.delete(ready.queue(lane))


def quantile(values, share):
    """By nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1_000) // 1_000) - 1)] if ordered else float("nan")


def p99(values):
    return quantile(values, 0.99)


def bucket_quantile(before, after, share):
    """Of what a histogram counted in between; interpolated within a bucket, as `histogram_quantile` does it."""
    bounds = sorted(after)
    counts = [after[bound] - before[bound] for bound in bounds]
    if not counts or not counts[-1]:
        return float("nan")
    rank, below = share * counts[-1], 0.0
    for place, (bound, count) in enumerate(zip(bounds, counts)):
        if count >= rank:
            lower = counts[place - 1] if place else 0
            width = 0.0 if bound == float("inf") else bound - below
            return below + width * ((rank - lower) / max(1, count - lower))
        below = bound
    raise AssertionError("the last bucket has all")


def row_file(deployed):
    return Path(deployed.below) / "providers.toml"
