"""Problems, rewards and layers of the user's own, from the command line."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.documents import blocks
from tests.e2e.processes import Place

REPO = Path(__file__).resolve().parents[2]
PROBLEMS = [
    {
        "question": f"A baker has {a} loaves and bakes {b} more. How many loaves are there?",
        "answer": f"There are {a} + {b} = <<{a}+{b}={a + b}>>{a + b} loaves.\n#### {a + b}",
    }
    for a in range(1, 9)
    for b in (10, 20)
]


def test_the_quickstart_is_followed_to_its_resume(place: Place) -> None:
    """Its files as written, its commands in order; training is cut short by keys behind them."""
    page = REPO / "docs" / "quickstart.md"
    for block in blocks(page, "python", "yaml"):
        (place.folder / block.text.splitlines()[0].removeprefix("# ")).write_text(block.text)
    lines = [line for block in blocks(page, "sh") for line in block.text.replace("\\\n", " ").splitlines()]
    short = ("warm_start.steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4", "data.max_eval=8")
    small = (*short, "learner.ep=1", "learner.threads=1", f"model.cache_dir={place.cache}")
    steps = iter(("train.steps=1", "train.steps=2"))
    said = []
    for line in lines:
        words = shlex.split(line, comments=True)
        match words[:2]:
            case ["python", script]:
                subprocess.run([sys.executable, script], cwd=place.folder, check=True)
            case ["rl-megatron", "train"] if "--check" in words:
                said.append(place.call(*words[1:]))
            case ["rl-megatron", "train"] if "--resume" in words:
                said.append(place.call_in_fork(*words[1:], next(steps)))
            case ["rl-megatron", "train"]:
                said.append(place.call_in_fork(*words[1:], *small, next(steps)))
            case ["rl-megatron", "status" | "inspect"]:
                said.append(place.call_in_fork(*words[1:]))
    assert [(run.process.returncode, run.text()) for run in said if run.process.returncode != 0] == []
    assert len(said) == 5
    shown = next(block.text for block in blocks(page, "") if block.text.startswith("reward "))
    assert re.sub(r"in [\d.]+ s", "", said[0].text()) == re.sub(r"in [\d.]+ s", "", shown)
    assert "step 1" in said[2].text()
    assert "of step 1" in said[3].text()
    rows = [json.loads(line) for line in (place.folder / "runs/mine/samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2}
    for row in rows:
        assert int(row["answer"]) == int(row["prompt"].split()[1]) + 1


LAYERS = """
from pathlib import Path

from rl_megatron.learner.model.layers import torch_layer_spec


def spec(shape, layer):
    with Path(__file__).with_name("layers.txt").open("a") as file:
        file.write(f"{shape.family} {layer}\\n")
    return torch_layer_spec(shape, layer)
"""


def test_parquet_with_other_names_math_verify_and_layers_beside_the_command(place: Place) -> None:
    (place.folder / "own_layers.py").write_text(LAYERS)
    for name, problems in (("train", PROBLEMS[4:]), ("test", PROBLEMS[:4])):
        columns = {
            "problem": [p["question"] for p in problems],
            "solution": [p["answer"].rsplit("#### ")[1] for p in problems],
            "level": [1 for _ in problems],
        }
        pq.write_table(pa.table(columns), place.folder / f"{name}.parquet")
    run = place.fork(
        "parquet",
        *("data=gsm8k", "data.train=train.parquet", "data.eval=test.parquet", "data.prompt_field=problem"),
        *("data.answer_field=solution", "data.chat_template=true", "reward.function=math_verify", "learner.ep=1"),
        *("rollout.max_prompt_tokens=128", "rollout.max_new_tokens=8", "warm_start.steps=0", "train.steps=2"),
        "learner.layers=own_layers:spec",
    ).finish()
    assert (place.folder / "layers.txt").read_text().splitlines() == ["qwen3_moe 0", "qwen3_moe 1"]
    assert [row["reward/errors"] for row in run.rows() if row["step"]] == [0, 0]
    assert "user: A baker has" in (run.folder / "samples.jsonl").read_text()
