"""Cases in which the provider refuses one merchant: its credential with 403, or each of its payments with 422."""

import threading
import time

from floods import bar, is_other, others
from stage import Lane, p99, stage

# The first pauses of an account end after 30 s and 60 s.
STEADY_S, STEADY_RATE = 100, 25
# Below this, a difference of waits is that of the machine.
NOISE_S = 0.01
OTHERS = 400


def refused(options, below, settings):
    """400 jobs of 60 others on a lane at 100/1s: alone, with 20 jobs that get 403, and behind 1,000 that get 422."""
    alone = Lane("alone", 100)
    forbidden = Lane("forbidden", 100, more=("--account-status", "wrong-key=403"))
    rejected = Lane("rejected", 100, more=("--account-status", "wrong-data=422"))
    lanes = [alone, forbidden, rejected]
    with stage(options, below, settings, "refused", lanes) as ready:
        with Watch(ready) as watch:
            bursts = [burst(ready, lane, options.rejects) for lane in lanes]
            # All lanes at once, over the ends of the account's first pauses.
            span = min(STEADY_S, 2 * options.span)
            steady_waits, gaps = zip(*side_by_side(ready, lanes, span))
            time.sleep(4)
        reports = [lane.report()["statuses"] for lane in lanes]
        pauses = [watch.of(lane) for lane in lanes]
        waiting = [ready.count(f"SELECT count(*) FROM jobs WHERE provider = '{lane.name}' AND backlog") for lane in lanes]
    rows = []
    cases = [(1, "20 jobs of one merchant get 403", "403"), (2, f"{options.rejects:,} jobs of one merchant get 422", "422")]
    for place, case, status in cases:
        base, beside = bursts[0], bursts[place]
        rows.append(bar(case, "p99 of 400 others at once", f"{base:.2f} → {beside:.2f} s", "≤ 1.5 × without", beside <= 1.5 * base))
        base, beside = p99(steady_waits[0]), p99(steady_waits[place])
        text = f"{base * 1e3:.1f} → {beside * 1e3:.1f} ms"
        met = beside <= max(1.5 * base, base + NOISE_S)
        rows.append(bar(case, f"p99 of others at {STEADY_RATE}/s, {span} s", text, "≤ 1.5 × without, or + 10 ms", met))
        asked = reports[place].get(status, 0)
        text = f"{len(pauses[place])}; longest gap between the others' requests {gaps[0]:.2f} → {gaps[place]:.2f} s"
        rows.append(bar(case, f"pauses of the lane ({asked} of the account's requests were refused, {waiting[place]:,} jobs wait)", text, "0", not pauses[place]))
    return rows


def burst(ready, lane, rejects):
    jobs = others(OTHERS)
    if lane.name == "forbidden":
        for number in range(20):
            jobs.insert(number * 21, (f"wrong-{number:03}", {"account": "wrong-key"}))
    if lane.name == "rejected":
        jobs = [(f"wrong-{number:05}", {"account": "wrong-data"}) for number in range(rejects)] + jobs
    ready.publish(lane, jobs)
    ready.await_charges(lane, OTHERS, 300)
    return p99(lane.waits(is_other))


def side_by_side(ready, lanes, span):
    """Waits of the others at a steady rate, and the longest time between two of their requests."""
    jobs = others(STEADY_RATE * span, "steady")
    schedule = [(number / STEADY_RATE, *job) for number, job in enumerate(jobs)]
    threads = []
    for lane in lanes:
        planned = [(at, lane, job, fields) for at, job, fields in schedule]
        threads.append(threading.Thread(target=ready.publish_paced, args=(planned,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lane in lanes:
        ready.await_charges(lane, OTHERS + len(jobs), 60)
        charges = {job: at for job, (_, at) in lane.charges().items() if "-steady-" in job}
        times = sorted(charges.values())
        gap = max(later - earlier for earlier, later in zip(times, times[1:]))
        yield [at - lane.published[job] for job, at in charges.items()], gap


class Watch:
    """Pauses of lanes by the workers' reports, which each worker writes every two seconds: a pause takes 30 s."""

    def __init__(self, ready):
        self.ready, self.seen, self.ended = ready, set(), threading.Event()
        self.thread = threading.Thread(target=self.run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def run(self):
        reported = (
            "SELECT lane.key || ' ' || (lane.value->'pause'->>'words') FROM worker_reports, jsonb_each(report->'lanes') AS lane "
            "WHERE lane.value->'pause'->>'by' IN ('setup', 'breaker', 'provider')"
        )
        while not self.ended.wait(2):
            self.seen.update(self.ready.sql(reported).splitlines())

    def of(self, lane):
        return [line for line in self.seen if line.startswith(f"{lane.name} ")] + self.ready.lane_pauses(lane)
