"""Cases in which one account floods its lane, and what `simulate` says of the same arrivals."""

import json
import time

from stage import LATENCY_MS, WORKERS, Lane, p99, row_file, stage

OTHERS = 60
# A simulation may differ by this share, or by so many seconds where the wait itself is short.
OFF_MAX, OFF_SHORT_S = 0.05, 0.02

ACCOUNT = """[[provider.account]]
account = "{account}"
weight = {weight}
"""


def others(jobs, prefix="other"):
    """Jobs of many accounts by turns."""
    return [(f"{prefix}-{number:06}", {"account": f"shop-{number % OTHERS:02}"}) for number in range(jobs)]


def of(account, jobs):
    return [(f"{account}-{number:06}", {"account": account}) for number in range(jobs)]


def is_other(account):
    return account is not None and account.startswith("shop-")


def bar(case, what, figure, wanted, met):
    return {"case": case, "what": what, "figure": figure, "bar": wanted, "met": met}


def own_limit(lane, account, since=0.0):
    """The account's requests as a share of what its own limit allows while it has jobs to send, from a moment on."""
    sent = [at for at in lane.sent(account) if at >= since]
    allowed = lane.account / (1 + lane.report()["answer_ms"]["mean"] / 1_000)
    return (len(sent) - lane.account) / (sent[-1] - sent[0]) / allowed


def flood_rows(case, alone, flooded, account, since=0.0):
    """The bars of a flood with an account limit. `since`: from then on the lane's own limit leaves it room."""
    base, with_flood = p99(alone.waits(is_other)), p99(flooded.waits(is_other))
    used = own_limit(flooded, account, since)
    return [
        bar(case, "others' p99", f"{with_flood:.2f} s (alone {base:.2f} s)", "≤ 1.5 × alone + 2 s", with_flood <= 1.5 * base + 2),
        bar(case, "the flooding account's use of its own limit", f"{used:.1%}", "≥ 98 %", used >= 0.98),
    ]


def flood(options, below, settings):
    """Row 1: 600 jobs of one account at 5/1s, then 300 of 60 others on a lane at 100/1s."""
    jobs, rest = options.flood, options.flood // 2
    alone, flooded = Lane("alone", 100, 5), Lane("flooded", 100, 5)
    with stage(options, below, settings, "flood", [alone, flooded]) as ready:
        ready.publish(alone, others(rest))
        ready.await_charges(alone, rest, 60 + rest / 50)
        ready.publish(flooded, of("big", jobs) + others(rest))
        ready.await_charges(flooded, jobs + rest, 60 + jobs / 4)
        # While the others use the lane's limit, the account's fair share of it is less than its own limit.
        since = max(flooded.sent(f"shop-{number:02}")[-1] for number in range(OTHERS))
        rows = flood_rows("flood", alone, flooded, "big", since)
        return rows + simulated(ready, flooded, "flood")


def steady(options, below, settings):
    """Row 2: an account at 5/1s sends 9/s, others 81/s, on a lane at 100/1s."""
    alone, flooded = Lane("alone", 100, 5), Lane("flooded", 100, 5)
    rest, big = 81 * options.span, 9 * options.span
    with stage(options, below, settings, "steady", [alone, flooded]) as ready:
        ready.publish_paced((number / 81, alone, *job) for number, job in enumerate(others(rest)))
        ready.await_charges(alone, rest, 60)
        merged = [(number / 81, flooded, *job) for number, job in enumerate(others(rest))]
        merged += [(number / 9, flooded, *job) for number, job in enumerate(of("big", big))]
        ready.publish_paced(sorted(merged, key=lambda planned: planned[0]))
        ready.await_charges(flooded, rest + big, 60 + big / 4)
        rows = flood_rows("steady flood", alone, flooded, "big")
        return rows + simulated(ready, flooded, "steady flood")


def share(options, below, settings):
    """Two accounts flood a lane at 50/1s without an account limit, then a third sends 50."""
    lane = Lane("shared", 50)
    jobs, few = options.shared, 50
    with stage(options, below, settings, "share", [lane]) as ready:
        ready.publish(lane, of("big-1", jobs) + of("big-2", jobs))
        third = [(job, fields | {"account": "shop-00"}) for job, fields in others(few)]
        ready.publish(lane, third)
        ready.await_charges(lane, 2 * jobs + few, 60 + 2 * jobs / 40)
        sent = lane.sent("shop-00")
        took, fair = sent[-1] - lane.published[f"{lane.name}-{third[0][0]}"], few / (lane.rate() / 3)
        # Both have jobs from the moment when the third is done until the first of them has sent its last one.
        until = min(lane.sent("big-1")[-1], lane.sent("big-2")[-1])
        counts = [sum(sent[-1] < at <= until for at in lane.sent(account)) for account in ("big-1", "big-2")]
        jain = sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))
        rows = [
            bar("two floods", "50 jobs of a third account are sent", f"{took:.1f} s (fair share {fair:.1f} s)", "≤ 3 × fair share", took <= 3 * fair),
            bar("two floods", f"Jain's index of the floods ({counts[0]:,} and {counts[1]:,} jobs)", f"{jain:.3f}", "≥ 0.95", jain >= 0.95),
        ]
        return rows + simulated(ready, lane, "two floods")


def weights(options, below, settings):
    """Four accounts of weights 1 to 4 flood a lane at 100/1s."""
    heavy = {f"weight-{weight}": weight for weight in range(1, 5)}
    rows = "".join(ACCOUNT.format(account=account, weight=weight) for account, weight in heavy.items() if weight > 1)
    lane = Lane("weighted", 100, rows=rows)
    total = sum(heavy.values())
    # Each has jobs until the end of the span and of what is sent before it.
    jobs = {account: round(lane.rate() * (options.span + 30) * weight / total) for account, weight in heavy.items()}
    with stage(options, below, settings, "weights", [lane]) as ready:
        ready.publish(lane, [job for account, count in jobs.items() for job in of(account, count)])
        ready.await_recorded(lane, sum(jobs.values()) * 9 // 10, 120)
        ready.await_delivered(lane, 120)
        # What was claimed before all were recorded is sent first.
        began = time.time() + 2
        time.sleep(options.span + 2)
        ended = time.time()
        sent = {account: lane.sent(account) for account in heavy}
    counts = {account: sum(began <= at < ended for at in times) for account, times in sent.items()}
    off = {account: counts[account] / (sum(counts.values()) * weight / total) - 1 for account, weight in heavy.items()}
    worst = max(abs(value) for value in off.values())
    text = ", ".join(f"{counts[account]:,}" for account in heavy)
    return [bar("weights 1, 2, 3, 4", f"share of each ({text} jobs in {options.span} s)", f"within {worst:.1%}", "within 5 %", worst <= 0.05)]


def simulated(ready, lane, case):
    """Clear time and the others' p99 of the real run beside those of a simulation of the same arrivals."""
    charges = lane.charges()
    accounts = {job: account for job, (account, _) in charges.items()}
    last = ready.sql(f"SELECT extract(epoch FROM max(updated_at)) FROM jobs WHERE provider = '{lane.name}'")
    first = min(lane.published.values())
    clear = float(last) - first
    jobs = sorted((at - first, accounts[job]) for job, at in lane.published.items())

    def run(deadline_s):
        """A simulation in which others that wait for longer than this miss their deadline."""
        lines = ["at_ms,account,expires_at_ms"]
        for at, account in jobs:
            expires = f"{(at + deadline_s) * 1e3:.0f}" if deadline_s is not None and is_other(account) else ""
            lines.append(f"{at * 1e3:.0f},{account},{expires}")
        trace = ready.deployed.below / "trace.csv"
        trace.write_text("\n".join(lines) + "\n")
        words = ["simulate", "--providers", row_file(ready.deployed), "--provider", lane.name, "--trace", trace, "--json"]
        said = ready.deployed.command(*words, "--processes", WORKERS, "--latency", f"{LATENCY_MS}ms", seconds=120)
        return json.loads(said)["variants"][0]["figures"]

    simulated_clear = run(None)["clears_in_ms"] / 1e3
    off = simulated_clear / clear - 1
    rows = [compared(case, "clear time", clear, simulated_clear, abs(off) <= OFF_MAX)]
    # The simulation prints the waits of all jobs alone. So the others' p99 is the deadline that one in a hundred misses.
    real, few = p99(lane.waits(is_other)), sum(map(is_other, accounts.values())) // 100
    low, high = 0.0, 2 * real + 1
    while high - low > max(0.001, 0.005 * real):
        middle = (low + high) / 2
        low, high = (low, middle) if run(middle)["deadlines_missed"] <= few else (middle, high)
    met = abs(high - real) <= max(OFF_MAX * real, OFF_SHORT_S)
    return [*rows, compared(case, "others' p99", real, high, met)]


def compared(case, what, real, simulation, met):
    off = simulation / real - 1
    text = f"{real:.2f} s, simulated {simulation:.2f} s ({off:+.1%})"
    return bar("simulate", f"{case}: {what}", text, "within 5 %, or 20 ms", met)
