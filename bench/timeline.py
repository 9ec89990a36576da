"""Measure what the timeline, which is always on, costs: nanoseconds of CPU a span, and spans a step.

    python -m bench.timeline [--run runs/x] [--ranks 384] [--micro-batches 16] [--completions 5000] [--seconds 60]

*keep*: one span kept, as phases and generations are. *part*: one part of a call of a rank, with its share of the
answer's pickle. *answer*: one of a rank's spans read from an answer and kept by the controller. *write*: one span
written to trace.json, in the controller's thread for it. *question*: a server's load asked over HTTP, and its lines
kept and written; 35 kB of Prometheus's text, as vLLM's. Then the share of a step: of a run that was made (its trace and
its rows), and of a step of the given size. The bar is 0.5 % of the step, for the controller and for a rank.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.server
import itertools
import json
import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from typing_extensions import override

from bench.results import parse, write
from rl_megatron.engines.adapter import EngineGauges
from rl_megatron.engines.engine import PERIOD_SECONDS, GaugePoller
from rl_megatron.engines.http import Server
from rl_megatron.engines.replicas import ReplicaSet
from rl_megatron.engines.vllm.adapter import VLLMAdapter
from rl_megatron.models.named import NAMED
from rl_megatron.observability import activity, timeline
from rl_megatron.observability.timeline import TraceFile, read_trace

BAR, COUNT, TRIES = 0.005, 20_000, 7
QUESTIONS = 100
PARTS = 2  # of a micro-batch: its forward, and what is after it
CALLS = 8  # of a step, of a rank: scores, backward, step, stage, commit, sums and two more
CALL_SPANS = 2  # of a call: the rank's, and the controller's wait for it


def cost(work: Callable[[], None]) -> float:
    """Nanoseconds of CPU of one of ``COUNT`` spans, at best of ``TRIES``: other processes only make it longer."""
    taken = []
    for _ in range(TRIES):
        timeline.taken()
        began = time.process_time_ns()
        work()
        taken.append(time.process_time_ns() - began)
    return min(taken) / COUNT


def keep() -> None:
    """Spans of a phase."""
    for _ in range(COUNT):
        with timeline.during(timeline.PHASES, "train"):
            pass


def part() -> None:
    """Calls of 16 micro-batches, whose spans go into answers."""
    names = [f"micro-batch {number} of 16" for number in range(1, 17)]
    for call in range(COUNT // 32):
        activity.begin("backward", call)
        for name in names:
            activity.part("forward", name)
            activity.part("after its forward", name)
        activity.rest()
        pickle.dumps(timeline.timed(0))


def answers() -> Callable[[], None]:
    """What the controller does for answers of 32 spans."""
    timeline.taken()
    for number in range(31):
        timeline.keep(timeline.CALLS, "forward", number, number + 1, {"of": "micro-batch 1 of 16"})
    packed = pickle.dumps(timeline.timed(0))

    def work() -> None:
        rank = timeline.RankTimes("rank 0 (here)")
        for _ in range(COUNT // 32):
            rank.on_call("backward")
            rank.answered(pickle.loads(packed))

    return work


def writing(folder: Path) -> Callable[[], None]:
    """Spans of a rank into a file in ``folder``."""
    lane = timeline.Lane("rank 0 (here)", "calls")
    kept: list[timeline.KeptSpan] = [
        (lane, "forward", number, number + 1, {"of": "micro-batch 1 of 16"}) for number in range(COUNT)
    ]
    file = TraceFile(folder)
    return lambda: file.append(kept)


class Metrics(http.server.BaseHTTPRequestHandler):
    """Answers every request with the text of a vLLM server's metrics."""

    protocol_version = "HTTP/1.1"
    told = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "generation_tokens_total")
    others = "".join(
        f'vllm:other_bucket{{engine="0",le="{n}.0",model_name="/models/qwen3"}} {n}.0\n' for n in range(600)
    )
    text = (others + "".join(f'vllm:{name}{{engine="0",model_name="/models/qwen3"}} 0.5\n' for name in told)).encode()

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.text)))
        self.end_headers()
        self.wfile.write(self.text)

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Counted(VLLMAdapter):
    """Counts questions."""

    asked = 0

    @override
    async def gauges(self, server: Server) -> EngineGauges:
        self.asked += 1
        return await super().gauges(server)


class Quiet(http.server.ThreadingHTTPServer):
    """Says nothing of clients that go while they ask, as the last one of a try does."""

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing."""


def serve(port: Connection) -> None:
    """Serve in a process of its own, whose CPU is not counted."""
    with Quiet(("127.0.0.1", 0), Metrics) as server:
        port.send(server.server_port)
        server.serve_forever()


@contextlib.contextmanager
def server_that_tells() -> Iterator[str]:
    """The URL of one."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


def question(folder: Path) -> float:
    """Nanoseconds of CPU of a question and what it writes, at best of ``TRIES``."""
    adapter, file = Counted(NAMED["qwen3-30b-a3b"]), TraceFile(folder)

    async def asked(url: str) -> None:
        server = Server(url, token=None, timeout_seconds=60)
        try:
            async with GaugePoller(adapter, ReplicaSet("vLLM", [server]), 0.0).polling():
                while adapter.asked < QUESTIONS:
                    await asyncio.sleep(0.01)
        finally:
            await server.close()

    taken = []
    with server_that_tells() as url:
        for _ in range(TRIES):
            timeline.taken()
            adapter.asked, began = 0, time.process_time_ns()
            asyncio.run(asked(url))
            file.append(timeline.taken()[0])
            taken.append((time.process_time_ns() - began) / adapter.asked)
    return min(taken)


def of_run(folder: Path, kept: float, written: float) -> dict[str, object]:
    """The spans of a step of a run that was made, and their share of its seconds."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    seconds = [row["seconds/step"] for row in map(json.loads, lines) if row["phase"] == "rl" and "seconds/step" in row]
    events = read_trace(folder)
    steps = [e for e in events if e.thread == "steps" and e.name.startswith("step")][-len(seconds) :]
    inside = [e for e in events if steps[0].begin <= e.begin < steps[-1].end]
    mean = sum(seconds) / len(seconds)
    share = len(inside) / len(steps) * (kept + written) / 1e9 / mean
    return {"what": str(folder), "seconds": mean, "spans": round(len(inside) / len(steps)), "share": share}


def main() -> None:
    """Measure, and print each share beside the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="the folder of a run")
    for name, default in (("ranks", 384), ("micro-batches", 16), ("completions", 5000), ("seconds", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parse(parser)
    with tempfile.TemporaryDirectory() as folder:
        measured = {"keep": keep, "part": part, "answer": answers(), "write": writing(Path(folder))}
        found = {name: cost(work) for name, work in measured.items()} | {"question": question(Path(folder))}
    for name, nanoseconds in found.items():
        print(f"{name:8} {nanoseconds:7,.0f} ns a span")
    of_rank = CALLS + 2 * args.micro_batches * PARTS  # scores and backward pass over all
    of_ranks = args.ranks * (of_rank + CALLS * (CALL_SPANS - 1))
    of_controller = 2 * args.completions + 20  # a generation and its reward; phases, pushes, saves
    shares = {
        "a rank": (of_rank, of_rank * found["part"]),
        "the controller": (
            of_ranks + of_controller,
            of_ranks * (found["answer"] + found["write"]) + of_controller * (found["keep"] + found["write"]),
        ),
    }
    rows: list[dict[str, object]] = [{"what": name, "nanoseconds": value} for name, value in found.items()]
    questions = round(args.seconds / PERIOD_SECONDS)
    shares["questions to servers, however many"] = 2 * questions, questions * found["question"]
    rows += [
        {"what": who, "seconds": args.seconds, "spans": count, "share": total / 1e9 / args.seconds}
        for who, (count, total) in shares.items()
    ]
    if args.run is not None:
        rows.append(of_run(args.run, max(found["keep"], found["part"] + found["answer"]), found["write"]))
    for row in itertools.islice(rows, len(found), None):
        verdict = "within" if float(str(row["share"])) <= BAR else "OVER"
        print(
            f"{row['what']}: {row['spans']:,} spans in a step of {row['seconds']:.3g} s: {row['share']:.4%} of it, "
            f"{verdict} the bar of {BAR:.1%}"
        )
    write(args, rows)


if __name__ == "__main__":
    main()
