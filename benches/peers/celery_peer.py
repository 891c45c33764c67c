"""Celery with rate_limit: publishes tasks, lets workers run them, and prints what the provider saw as JSON.

The counterpart of `sluicegate-bench path` and `bench fidelity`. It has no ledger and guarantees no window (README.md). Runs
under the interpreter of the environment in which Celery is installed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--broker", required=True, help="amqp://…")
    parser.add_argument("--provider", required=True, help="http://127.0.0.1:PORT")
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="most time from the first call")
    parser.add_argument("--max", type=int, required=True, help="calls per window, of all workers together")
    parser.add_argument("--window", type=float, required=True, help="ms")
    parser.add_argument("--limited", action="store_true", help="use rate_limit; otherwise there is no limit")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=8, help="processes of each worker")
    return parser.parse_args()


def provider_report(provider):
    with urllib.request.urlopen(f"{provider}/_report", timeout=10) as answer:
        return json.load(answer)


def publish(jobs):
    from celery_tasks import app, charge

    with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:
        for number in range(jobs):
            charge.apply_async((number,), producer=producer)


def start(number, concurrency):
    command = [sys.executable, "-m", "celery", "-A", "celery_tasks", "worker", "-n", f"peer{number}@localhost"]
    command += ["-P", "prefork", "-c", str(concurrency), "-l", "ERROR"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    return subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL)


def wait(options, workers):
    """Waits until all calls are made, or the time is over. The time begins with the first call, so start-up does not count."""
    began, started = None, time.monotonic()
    while True:
        report = provider_report(options.provider)
        now = time.monotonic()
        if began is None and report["requests"] > 0:
            began = now
        if report["requests"] >= options.jobs or (began and now - began >= options.seconds):
            return report
        if any(worker.poll() is not None for worker in workers) or (not began and now - started > 60):
            raise SystemExit("a Celery worker ended by itself, or makes no call")
        time.sleep(0.25)


def main():
    options = arguments()
    per_second = options.max / (options.window / 1000) / options.workers
    os.environ["PEER_BROKER"] = options.broker
    os.environ["PEER_QUEUE"] = f"peer-{os.getpid()}"
    os.environ["PEER_PROVIDER"] = options.provider
    os.environ["PEER_RATE"] = f"{per_second}/s" if options.limited else ""
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # Celery warns about root, but a measurement in a container may run as root.
    os.environ["PYTHONWARNINGS"] = "ignore"
    sys.dont_write_bytecode = True
    publish(options.jobs)
    workers = []
    try:
        for number in range(options.workers):
            workers.append(start(number, options.concurrency))
        report = wait(options, workers)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            try:
                worker.wait(timeout=20)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
    import celery

    span = (report["last_arrival_us"] - report["first_arrival_us"]) / 1e6
    limit = (report["limits"] or [{"largest": 0, "breaches": 0}])[0]
    result = {
        "peer": "celery",
        "version": celery.__version__,
        "requests": report["requests"],
        "jobs_per_second": report["requests"] / span if span > 0 else 0,
        "largest_in_any_window": limit["largest"],
        "breaches": limit["breaches"],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
