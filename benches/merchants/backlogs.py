"""Cases with a large backlog: a blocked account, urgent jobs behind bulk jobs, the drain of a queue, the cost of a claim."""

import json
import os
import subprocess
import threading
import time

import deployment
from deployment import psql
from floods import bar, of, others
from stage import LATENCY_MS, Lane, bucket_quantile, p99, quantile, stage

REPOSITORY = deployment.HERE.parent
BULK_ACCOUNTS = 100
URGENT_EVERY_S, URGENT_SPAN_S = 0.2, 40
URGENT_MAX_S = (LATENCY_MS + 100) / 1e3
# Below this, a difference of waits is that of the machine.
NOISE_S = 0.01

BLOCKED = """[[provider.account]]
account = "blocked"
rule = "blocked"
"""

# Each update of a job of the blocked account, counted by the database itself.
CHANGES = """
CREATE TABLE bench_changes (job_id text);
CREATE FUNCTION bench_count() RETURNS trigger LANGUAGE plpgsql AS
    $$BEGIN INSERT INTO bench_changes VALUES (NEW.id); RETURN NULL; END$$;
CREATE TRIGGER bench_count AFTER UPDATE ON jobs FOR EACH ROW WHEN (NEW.account = 'blocked') EXECUTE FUNCTION bench_count()"""


def blocked(options, below, settings):
    """Others at 50/s on a lane at 100/1s: alone, and beside 100,000 recorded jobs of a blocked account."""
    lane, jobs = Lane("lane", 100, rows=BLOCKED), options.bulk
    with stage(options, below, settings, "blocked", [lane]) as ready:
        ready.sql(CHANGES)
        alone, alone_counts = others_alone(options, ready, lane, "before")
        began = time.time()
        ready.publish(lane, of("blocked", jobs))
        ready.await_recorded(lane, jobs + 1 + 50 * options.span, 120 + jobs / 200)
        recorded = time.time() - began
        with_blocked, with_counts = others_alone(options, ready, lane, "after")
        changes = ready.count("SELECT count(*) FROM bench_changes")
        waiting = ready.count("SELECT count(*) FROM jobs WHERE account = 'blocked' AND backlog AND attempts = 0")
    base, beside = p99(alone), p99(with_blocked)
    per_job = {name: count / (50 * options.span) for name, count in alone_counts.items()}
    more = sum(with_counts.values()) - sum(alone_counts.values())
    counts = ", ".join(f"{with_counts[name] / (50 * options.span):.2f} {name} (alone {value:.2f})" for name, value in per_job.items())
    case = f"{jobs:,} jobs of a blocked account"
    return [
        bar(case, "others' p99", f"{base * 1e3:.1f} → {beside * 1e3:.1f} ms", "≤ 1.5 × without them, or + 10 ms", beside <= max(1.5 * base, base + NOISE_S)),
        bar(case, "all wait in the ledger, without an attempt", f"{waiting:,} of {jobs:,}", "all", waiting == jobs),
        bar(case, "updates of a blocked job's row", f"{changes / jobs:.3f}", "≤ 1", changes <= jobs),
        # The others' own messages vary by a few, for example by a job that is requeued.
        bar(case, "messages of the broker per job of the others, once all are recorded", counts, "no more", more <= 0.001 * jobs),
        bar(case, "published and recorded", f"{jobs / recorded:,.0f}/s", "", None),
    ]


def others_alone(options, ready, lane, name):
    """Waits of others at 50/s, and what the broker has counted for them."""
    before = ready.broker_counts()
    jobs = others(50 * options.span, name)
    ready.publish_paced((number / 50, lane, *job) for number, job in enumerate(jobs))
    identities = {f"{lane.name}-{job}" for job, _ in jobs}
    charged = lambda: {job: at for job, (_, at) in lane.charges().items() if job in identities}  # noqa: E731
    deadline = time.monotonic() + 60
    while len(sent := charged()) < len(jobs):
        if time.monotonic() > deadline:
            raise SystemExit(f"{len(sent)} of {len(jobs)} jobs of the others are sent")
        time.sleep(0.2)
    # Outcome events, and the last acknowledgements.
    time.sleep(2)
    after = ready.broker_counts()
    return [at - lane.published[job] for job, at in sent.items()], {key: after[key] - before[key] for key in after}


def urgent(options, below, settings):
    """100,000 bulk jobs in the queue of a lane at 100/1s: the rate at which they are recorded, lateness, urgent jobs."""
    # The second lane spreads its starts over the window: there no urgent job waits for the next window's burst.
    lane, even, jobs = Lane("lane", 100), Lane("even", 100, columns='pacing = "even"'), options.bulk
    with stage(options, below, settings, "urgent", [lane, even]) as ready:
        ready.deployed.command("provider", "pause", lane.name)
        time.sleep(3)
        ready.publish(lane, bulk_jobs(jobs))
        # RabbitMQ writes for a while after it got many messages at once.
        time.sleep(min(30, jobs / 5_000))
        drain = Drain(ready, lane, jobs)
        ready.deployed.command("provider", "resume", lane.name)
        drained_from, drained_to = drain.run()
        quiet_from, quiet = time.time(), ready.lateness(lane)
        calm = send_urgent(ready, lane)
        quiet_to, quiet_end = time.time(), ready.lateness(lane)
        ready.publish(even, bulk_jobs(round(2 * even.limit * URGENT_SPAN_S)))
        # The lanes have as much to do as before.
        time.sleep(10)
        even_calm = send_urgent(ready, even)
        arrivals, sent = lane.arrivals(), {job: at for job, (_, at) in lane.charges().items()}
        waits = {name: named_waits(of, "calm") for name, of in (("", lane), (", pacing = even", even))}
    returns = after_return(arrivals, lane.limit)
    during = [value for at, value in returns if drained_from + 2 <= at < drained_to]
    after = [value for at, value in returns if quiet_from <= at < quiet_to]
    rows = drain.rows(sent, arrivals)
    for name, expected in (("", calm), (", pacing = even", even_calm)):
        rows.append(calm_row(f"urgent behind recorded bulk jobs{name}", waits[name], expected))
    return rows + late_rows(drain.lateness, [quiet, quiet_end]) + late_arrivals(during, after)


def bulk_jobs(jobs):
    return [(f"bulk-{number:07}", {"account": f"bulk-{number % BULK_ACCOUNTS:03}"}) for number in range(jobs)]


def named_waits(lane, name):
    return [at - lane.published[job] for job, (_, at) in lane.charges().items() if f"-{name}-" in job]


def send_urgent(ready, lane):
    """Sends urgent jobs one after another; returns their number."""
    jobs = urgent_jobs("calm", round(URGENT_SPAN_S / URGENT_EVERY_S))
    ready.publish_paced((number * URGENT_EVERY_S, lane, *job) for number, job in enumerate(jobs))
    time.sleep(3)
    return len(jobs)


def urgent_jobs(name, count):
    return [(f"{name}-{number:05}", {"account": "shop-00", "priority": 9}) for number in range(count)]


def calm_row(case, waits, wanted):
    worst = p99(waits)
    text = f"{worst * 1e3:.0f} ms (p50 {quantile(waits, 0.5) * 1e3:.0f}, p90 {quantile(waits, 0.9) * 1e3:.0f}; {len(waits)} of {wanted} jobs)"
    met = len(waits) == wanted and worst < URGENT_MAX_S
    return bar(case, "p99 until sent", text, f"< {URGENT_MAX_S * 1e3:.0f} ms (hold + 100 ms)", met)


def late_rows(during, after):
    """Lateness of the starts beside the drain and after it, against the starts that their permits name."""
    (busy, busy_p50), (quiet, quiet_p50) = ([bucket_quantile(*pair, share) for share in (0.99, 0.5)] for pair in (during, after))
    text = f"{busy * 1e3:.1f} ms, without {quiet * 1e3:.1f} ms (p50 {busy_p50 * 1e3:.1f} and {quiet_p50 * 1e3:.1f} ms)"
    return [bar("drain", "p99 lateness of starts", text, "within 1 ms", busy <= quiet + 0.001)]


def late_arrivals(during, after):
    """When the provider gets the request that takes a slot, after the first instant at which the slot is free."""
    busy, quiet = p99(during), p99(after)
    middle = f"p50 {quantile(during, 0.5) * 1e3:.1f} and {quantile(after, 0.5) * 1e3:.1f} ms"
    text = f"{busy * 1e3:.1f} ms, without {quiet * 1e3:.1f} ms ({middle}; {len(during):,} and {len(after):,} starts)"
    return [bar("drain", "p99 from a slot's return to its next arrival", text, "", None)]


def after_return(arrivals, limit):
    """(time, seconds) of each start beyond the first possible one: a window after the response to the start that had the slot."""
    least = 1 + LATENCY_MS / 1e3
    return [(at, at - before - least) for before, at in zip(arrivals, arrivals[limit:])]


class Drain:
    """Watches how the queue is recorded, and sends urgent jobs meanwhile."""

    def __init__(self, ready, lane, jobs):
        self.ready, self.lane, self.jobs = ready, lane, jobs
        self.recorded_at, self.lateness, self.ended = {}, [], threading.Event()

    def run(self):
        """Returns the times of the first and the last record of a bulk job."""
        schedule = ((number * 0.5, self.lane, *job) for number, job in enumerate(urgent_jobs("drain", 2_000)))
        urgent_ones = threading.Thread(target=self.ready.publish_paced, args=(schedule, self.ended.is_set))
        urgent_ones.start()
        try:
            # The lane opens again.
            time.sleep(2)
            self.lateness.append(self.ready.lateness(self.lane))
            # The broker knows how far it is without a look at each row, which would itself make starts late.
            self.ready.await_delivered(self.lane, 300 + self.jobs / 100)
            self.ready.await_recorded(self.lane, self.jobs + 1, 60)
            self.lateness.append(self.ready.lateness(self.lane))
        finally:
            self.ended.set()
            urgent_ones.join()
        time.sleep(5)
        at = "SELECT id || ' ' || extract(epoch FROM created_at) FROM jobs WHERE id LIKE 'lane-drain-%'"
        self.recorded_at = {job: float(seconds) for job, seconds in (line.split() for line in self.ready.sql(at).splitlines())}
        ends = self.ready.sql(
            "SELECT extract(epoch FROM min(created_at)) || ' ' || extract(epoch FROM max(created_at)) FROM jobs WHERE id LIKE 'lane-bulk-%'"
        )
        self.begins, self.ends = map(float, ends.split())
        return self.begins, self.ends

    def bounds(self, sent, arrivals):
        """Until when each of these jobs is to be sent, of which this says when each was.

        From its record on, a job is as any other urgent one: before that, it waits for those ahead of it in the queue. The
        last ones are recorded together when the queue is empty, and each has its turn with the lane's starts from then on.
        Those of one commit may take these turns in any order.
        """
        turns = [at for at in arrivals if at >= self.ends]
        in_turn = sorted(sent, key=lambda job: (self.recorded_at[job], sent[job]))
        return {job: turn + URGENT_MAX_S for job, turn in zip(in_turn, turns)}

    def rows(self, sent, arrivals):
        rate = self.jobs / (self.ends - self.begins)
        drained = [job for job in self.recorded_at if self.lane.published[job] < self.ends and job in sent]
        bounds = self.bounds({job: sent[job] for job in drained}, arrivals)
        took = [sent[job] - self.lane.published[job] for job in drained]
        within = sum(sent[job] <= bounds[job] for job in drained if job in bounds)
        after = p99([sent[job] - self.recorded_at[job] for job in drained])
        text = f"{within} of {len(drained)} within it; longest {max(took):.1f} s; p99 from its record {after * 1e3:.0f} ms"
        return [
            bar("drain", f"jobs recorded per second, of {self.jobs:,} in the queue", f"{rate:,.0f}/s", "≥ 5,000/s", rate >= 5_000),
            bar("urgent while the queue is drained", "until sent, by the rest of the drain", text, "rest of the drain + its turn among them + hold + 100 ms", within >= 0.99 * len(drained)),
        ]


def claim(options, below, settings):
    """`cargo bench -p sluicegate-bench --bench backlog`: the claim of 100 jobs, and the plan that PostgreSQL logs for it."""
    cargo = [os.environ.get("CARGO", "cargo"), "bench", "--quiet", "-p", "sluicegate-bench", "--bench", "backlog", "--"]
    with deployment.named(settings, "claim") as own:
        url = own["DATABASE__URL"]
        run = lambda *words: subprocess.run(  # noqa: E731
            [*cargo, url, *words], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True, timeout=3_600
        ).stdout
        times = json.loads(run("--json", "--jobs", str(options.waiting)))
        database = url.rsplit("/", 1)[1]
        explain = {"log_format": "json", "log_analyze": "on", "log_timing": "off", "log_min_duration": "0"}
        changes = [f"ALTER DATABASE {database} SET auto_explain.{name} = '{value}'" for name, value in explain.items()]
        psql(url, *changes, f"ALTER DATABASE {database} SET session_preload_libraries = 'auto_explain'")
        log = below / "postgres" / "log"
        before = log.stat().st_size
        run("--filled")
        found = scans(log.read_bytes()[before:].decode(errors="replace"))
    case = f"claim of 100 jobs from 10,000 flows, 5,000 blocked, {options.waiting:,} jobs"
    middle = times["median_ms"]
    text = f"{middle:.1f} ms ({times['fastest_ms']:.1f} to {times['slowest_ms']:.1f})"
    sequential = [scan for scan in found if "Seq Scan" in scan]
    return [
        bar(case, "median", text, "≤ 10 ms", middle <= 10),
        bar(case, "plan", "; ".join(found), "by index", bool(found) and not sequential),
    ]


def scans(log):
    """How the last claim in the log reads its tables: index, and rows of all loops."""
    plans = [plan for plan in json_objects(log) if "flow_turns" in plan.get("Query Text", "") and "picked" in plan.get("Query Text", "")]
    found = {}

    def walk(node):
        name = node.get("Index Name") or node.get("Relation Name")
        if "Scan" in node["Node Type"] and name and node.get("Relation Name", name) in (*TABLES, name):
            rows = round(node["Actual Rows"] * node["Actual Loops"])
            label = node["Node Type"] + (f" {node['Index Name']}" if "Index Name" in node else f" on {name}")
            found[label] = found.get(label, 0) + rows
        for child in node.get("Plans", ()):
            walk(child)

    if plans:
        walk(plans[-1]["Plan"])
    return [f"{label}: {rows:,} rows" for label, rows in found.items()]


TABLES = ("jobs", "flows", "flow_turns", "flow_clocks")


def json_objects(log):
    """The JSON of each `plan:` in a log of PostgreSQL, whose lines go on with a tab."""
    for text in log.split("plan:\n")[1:]:
        lines = text.split("\n")
        end = next((number for number, line in enumerate(lines) if not line.startswith("\t")), len(lines))
        yield json.loads("".join(line[1:] for line in lines[:end]))
