"""The command line: errors are refused all at once; the quickstart, data and layers of one's own; and the notebook."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.documents import blocks
from tests.e2e.conftest import Refused, Told
from tests.e2e.processes import Place
from tests.notebook import executed, shown
from tests.proof.run import stale


def test_every_bad_key_is_told_at_once_with_its_near_miss_before_torch_is_imported(place: Place) -> None:
    keys = ["algoritm=gspo", "algorithm=gsop", "learner.tpp=2", "train.steps=-1", "seed=x", "run.dir=r"]
    code = (
        "import sys\nfrom launcher.__main__ import main\ntry:\n    main(['train', *sys.argv[1:]])\n"
        "except SystemExit as end:\n    print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *keys]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=place.folder)
    assert ended.stdout.strip() == "1 False False"
    assert "Traceback" not in ended.stderr
    assert "algoritm='gspo': no such key (did you mean 'algorithm'?)" in ended.stderr
    assert "no such file (did you mean 'gspo'?)" in ended.stderr
    assert "learner.tpp=2: no such key (did you mean 'learner.tp'?)" in ended.stderr
    assert "train.steps=-1: must be greater than or equal to 0" in ended.stderr
    assert "seed='x'" in ended.stderr
    assert not (place.folder / "r").exists()


def test_rules_between_keys_name_both_numbers(refused: Refused) -> None:
    said = refused("train", "learner.ep=2", "learner.tp=3", "learner.etp=2", "learner.vpp=2", "run.dir=r")
    assert "learner.vpp=2 with learner.pp=1: chunks need a pipeline" in said


def test_an_unknown_command_or_option_is_a_usage_error(refused: Refused) -> None:
    assert "No such command" in refused("trian", status=2)
    assert "No such option" in refused("train", "--resum", status=2)


def test_a_bad_reward_function_is_told_before_a_folder_is_made(place: Place, refused: Refused) -> None:
    expected = {
        "exact_mach": "reward.function='exact_mach' is unknown; did you mean 'exact_match'?",
        "my_reward:even": "no module 'my_reward'; install it or put its folder on PYTHONPATH",
        "my_rewards:evn": "'evn' of my_rewards is not there; did you mean 'even'?",
    }
    for function, text in expected.items():
        assert text in refused("train", f"reward.function={function}", "run.dir=r")
    assert not (place.folder / "r").exists()


def test_names_of_runs(place: Place, refused: Refused) -> None:
    old = place.folder / "runs/old"
    old.mkdir(parents=True)
    said = refused("train", "run.name=old")
    assert "runs/old exists; add --resume to continue it, from its start if it has no checkpoint, or take" in said
    assert "--resume: runs/nothing does not exist" in refused("train", "run.name=nothing", "--resume")
    assert "--resume: there is no run 'tiny_cpu' in empty" in refused("train", "run.dir=empty", "--resume")
    assert "run.name='../up'" in refused("train", "run.name=../up")
    assert list(old.iterdir()) == []


# Problems, rewards and layers of the user's own, from the command line.
REPO = Path(__file__).resolve().parents[2]
SUMS = [(a, b) for a in range(1, 9) for b in (10, 20)]
LAYERS = """
from pathlib import Path

from rl_megatron.learner.model.layers import torch_layer_spec


def spec(shape, layer):
    with Path(__file__).with_name("layers.txt").open("a") as file:
        file.write(f"{shape.family} {layer}\\n")
    return torch_layer_spec(shape, layer)
"""
FULL = """
import torch
from dataclasses import replace
from megatron.core.transformer.transformer_layer import TransformerLayer
from rl_megatron.learner.model.layers import torch_layer_spec

class Full(TransformerLayer):
    def {where}(self, *_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

def full(shape, layer):
    return replace(torch_layer_spec(shape, layer), module=Full)
"""


def test_the_quickstart_is_followed_to_its_resume(place: Place, told: Told) -> None:
    """Its files as written, its commands in order; training is cut short by keys behind them."""
    page = REPO / "docs" / "quickstart.md"
    for block in blocks(page, "python", "yaml"):
        (place.folder / block.text.splitlines()[0].removeprefix("# ")).write_text(block.text)
    lines = [line for block in blocks(page, "sh") for line in block.text.replace("\\\n", " ").splitlines()]
    short = ("warm_start.steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4", "data.max_eval=8")
    small = (*short, "learner.ep=1", "learner.threads=1", f"model.cache_dir={place.cache}")
    steps, said = iter(("train.steps=1", "train.steps=2")), []
    for line in lines:
        words = shlex.split(line, comments=True)
        match words[:2]:
            case ["python", script]:
                subprocess.run([sys.executable, script], cwd=place.folder, check=True)
            case ["rl-megatron", "train"] if "--check" not in words:
                run = place.call_in_fork(*words[1:], *(() if "--resume" in words else small), next(steps))
                assert run.end() == 0, run.text()
                said.append(run.text())
            case ["rl-megatron", "train" | "status" | "convert"]:
                said.append(told(*words[1:]))
    assert len(said) == 5
    shown = next(block.text for block in blocks(page, "") if block.text.startswith("reward "))
    assert re.sub(r"in [\d.]+ s", "", said[0]) == re.sub(r"in [\d.]+ s", "", shown)
    assert "step 1" in said[2]
    assert "of step 1" in said[3]
    rows = [json.loads(line) for line in (place.folder / "runs/mine/samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2}
    for row in rows:
        assert int(row["answer"]) == int(row["prompt"].split()[1]) + 1


def test_parquet_with_other_names_math_verify_and_layers_beside_the_command(place: Place) -> None:
    (place.folder / "own_layers.py").write_text(LAYERS)
    for name, sums in (("train", SUMS[4:]), ("test", SUMS[:4])):
        columns = {
            "problem": [f"A baker has {a} loaves and bakes {b} more. How many loaves are there?" for a, b in sums],
            "solution": [str(a + b) for a, b in sums],
            "level": [1 for _ in sums],
        }
        pq.write_table(pa.table(columns), place.folder / f"{name}.parquet")
    run = place.fork(
        "parquet",
        *("data=gsm8k", "data.train=train.parquet", "data.eval=test.parquet", "data.fields.prompt=problem"),
        *("data.fields.answer=solution", "data.chat_template=true", "reward.function=math_verify", "learner.ep=1"),
        *("rollout.max_prompt_tokens=128", "rollout.max_new_tokens=8", "warm_start.steps=0", "train.steps=2"),
        "learner.layers=own_layers:spec",
    ).finish()
    assert (place.folder / "layers.txt").read_text().splitlines() == ["qwen3_moe 0", "qwen3_moe 1"]
    assert [row["reward/errors"] for row in run.rows() if row["step"]] == [0, 0]
    assert "user: A baker has" in (run.folder / "samples.jsonl").read_text()


@pytest.mark.parametrize("where", ["__init__", "forward"])
def test_a_rank_whose_memory_is_full_says_the_plan_of_it(place: Place, where: str) -> None:
    (place.folder / f"full_{where}.py").write_text(FULL.replace("{where}", where))
    run = place.fork(f"full{where}", "learner.ep=1", f"learner.layers=full_{where}:full")
    assert run.end() == 1
    text = " ".join(run.text().split())
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." in text
    assert re.search(r"the plan of its GPU, 0\.\d+ GB: parameters 0\.000\d+, gradients 0\.000\d+, optimizer", text)
    assert "the largest, weight push: lower weights.bucket_mb" in text
    assert "profile.memory=true writes a snapshot of what was allocated where" in text


# The notebook of the Python API prints what is stored in it.
NOTEBOOK = Path(__file__).parents[2] / "docs" / "examples" / "python_api.ipynb"


def test_each_cell_prints_what_the_notebook_shows(tmp_path: Path) -> None:
    stored, printed = shown(NOTEBOOK), executed(NOTEBOOK, tmp_path)
    assert len(stored) == len(printed) == 10
    assert all(stored)
    assert [why for known, now in zip(stored, printed, strict=True) if (why := stale(known, now))] == []
