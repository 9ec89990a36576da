"""Measure seconds to the first draw, draws a second and memory of a parquet file, beside pyarrow's read of its texts.

    python -m bench.data [--rows 10000000] [--draws 200000] [--kind problems]

A row is a question of 130 characters and its answer: as two fields, as a conversation, or as two of these, of which the
second ends worse, and which are looked at as before the first step of job=dpo. 1 % of the rows repeat another with
other white space, and 100 are held out too and dropped. Each measurement has a process of its own; its memory is the
peak of its resident pages less those after its imports. The file was just written, so it is read from the page cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.results import parse, write

BAR_SECONDS, BAR_BYTES = 300.0, 1 << 30
GROUP, HELD_OUT, REPEATED = 100_000, 100, 100  # rows of a row group; held out; one in this many is there twice
COLUMNS = {"problems": ["question", "answer"], "conversations": ["messages"], "pairs": ["messages", "rejected"]}


def questions(numbers: np.ndarray, blank: str) -> pa.Array:
    """Texts that are different for different numbers; ``blank`` is between two words of each."""
    item = pc.cast(pa.array(numbers), pa.string())
    price = pc.cast(pa.array(numbers % 9973), pa.string())
    parts = [f"A shop has{blank}", item, " pens in boxes of 12 and sells each for ", price]
    tail = " coins, but every fifth one is given to a school. How many coins does it get in all?"
    return pc.binary_join_element_wise(*parts, tail, "")


def conversations(asked: pa.Array, answered: pa.Array) -> pa.Array:
    """A list of two messages a row."""
    turns = np.arange(2 * len(asked))
    texts = pa.concat_arrays([asked, answered]).take(pa.array(turns // 2 + turns % 2 * len(asked)))
    roles = pa.array(["user", "assistant"]).take(pa.array(turns % 2))
    messages = pa.StructArray.from_arrays([roles, texts], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array(np.arange(0, len(turns) + 1, 2, dtype=np.int32)), messages)


def table(asked: pa.Array, numbers: np.ndarray, kind: str) -> pa.Table:
    """Rows of these questions, and of answers that the numbers say."""
    answers = [pc.cast(pa.array(numbers * 7 + more), pa.string()) for more in (0, 1)]
    if kind == "problems":
        return pa.table({"question": asked, "answer": answers[0]})
    sides = {"messages": conversations(asked, answers[0]), "rejected": conversations(asked, answers[1])}
    return pa.table({name: sides[name] for name in COLUMNS[kind]})


def make(path: Path, rows: int, kind: str) -> None:
    """Write the file, a row group at a time."""
    writer = None
    for start in range(0, rows, GROUP):
        numbers = np.arange(start, min(rows, start + GROUP))
        again = numbers % REPEATED == REPEATED - 1
        texts = pc.if_else(pa.array(again), questions(numbers - 1, "  "), questions(numbers, " "))
        part = table(texts, np.where(again, numbers - 1, numbers), kind)
        writer = writer or pq.ParquetWriter(path, part.schema)
        writer.write_table(part, GROUP)
    assert writer is not None
    writer.close()


def resident(name: str) -> int:
    """Bytes of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024


def floor(path: Path, kind: str) -> dict[str, float]:
    """Read the columns as pyarrow does, batch by batch, and keep nothing."""
    before, start = resident("VmRSS"), time.perf_counter()
    rows = sum(len(batch) for batch in pq.ParquetFile(path).iter_batches(columns=COLUMNS[kind]))
    return {"rows": rows, "seconds": time.perf_counter() - start, "bytes": resident("VmHWM") - before}


def ours(path: Path, draws: int, kind: str) -> dict[str, float]:
    """Load the data of a run and draw."""
    from rl_megatron.agents.conversation.forms import check_answers
    from rl_megatron.config.sections.data import FileRunData
    from rl_megatron.data.problems.pool import PromptStream
    from rl_megatron.data.problems.prompts import load_prompts
    from rl_megatron.data.problems.rendering import RowForm
    from rl_megatron.models.tiny import byte_tokenizer

    fields = {} if kind == "problems" else dict(zip(("messages", "rejected"), COLUMNS[kind], strict=False))
    keys = {"type": "files", "train": path, "eval": path.with_name("held_out.parquet"), "on_leak": "drop"}
    data = FileRunData.model_validate(keys | {"fields": fields})
    form = RowForm(tokenizer=byte_tokenizer(), max_tokens=256, on_long_prompt="fail")
    before, start = resident("VmRSS"), time.perf_counter()
    train, _ = load_prompts(data, form, seed=0, on_leak=data.on_leak)
    loaded = time.perf_counter() - start
    if kind == "pairs":
        check_answers(train.conversations())
    stream = PromptStream(train, seed=0)
    stream.next_prompts(1)
    first = time.perf_counter() - start
    state_at = time.perf_counter()
    stream.state()
    state = time.perf_counter() - state_at
    at = time.perf_counter()
    waits = []
    for _ in range(draws):
        one = time.perf_counter()
        stream.next_prompts(1)
        waits.append(time.perf_counter() - one)
    rate = draws / (time.perf_counter() - at)
    found = {"rows": len(train), "loaded_seconds": loaded, "seconds": first, "checksum_seconds": state}
    return found | {"draws_a_second": rate, "longest_draw_seconds": max(waits), "bytes": resident("VmHWM") - before}


def main() -> None:
    """Make the file, measure each in a process of its own, and print figures beside bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--draws", type=int, default=200_000)
    parser.add_argument("--kind", choices=list(COLUMNS), default="problems")
    parser.add_argument("--measure", choices=["floor", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    if "--measure" in sys.argv:
        args = parser.parse_args()
        what = floor(args.file, args.kind) if args.measure == "floor" else ours(args.file, args.draws, args.kind)
        print(json.dumps(what))
        return
    args = parse(parser)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.parquet"
        make(path, args.rows, args.kind)
        held = np.arange(0, HELD_OUT * 10, 10)
        pq.write_table(table(questions(held, "  "), held, args.kind), path.with_name("held_out.parquet"))
        size = path.stat().st_size
        print(f"{args.rows} {args.kind}, {size / 2**20:.0f} MiB", flush=True)
        rows = []
        for which in ("floor", "ours"):
            command = [sys.executable, "-m", "bench.data", "--measure", which, "--file", str(path), "--kind", args.kind]
            done = subprocess.run([*command, "--draws", str(args.draws)], check=True, stdout=subprocess.PIPE, text=True)
            rows.append({"what": which, "kind": args.kind, "file_bytes": size, **json.loads(done.stdout)})
            shown = {name: round(value, 3) for name, value in rows[-1].items() if isinstance(value, float)}
            print(f"{which}: {rows[-1]['rows']} rows, {rows[-1]['bytes'] / 2**20:.0f} MiB, {shown}", flush=True)
    wanted = args.rows - len([n for n in range(0, HELD_OUT * 10, 10) if n < args.rows]) - args.rows // REPEATED
    assert rows[1]["rows"] == wanted, (rows[1]["rows"], wanted)
    for name, got, bar in (("seconds", rows[1]["seconds"], BAR_SECONDS), ("bytes", rows[1]["bytes"], BAR_BYTES)):
        print(f"{name} to the first draw {got:.6g}, bar {bar:.6g}: {'met' if got <= bar else 'NOT MET'}")
    write(args, rows)


if __name__ == "__main__":
    main()
