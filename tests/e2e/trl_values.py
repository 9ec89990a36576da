"""Loss and gradient norm of each step of TRL's trainers, on the weights and rows of this folder's tests, in trl.json.

    python -m tests.e2e.trl_values [--python PYTHON]     writes that again; PYTHON has TRL (bench/requirements-trl.txt)

What a student samples is part of its rows, so that file has the tokens too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

STORED = Path(__file__).with_name("trl.json")
STEPS, REL = 3, 1e-5
ROOT = Path(__file__).parents[2]


def stored(job: str) -> dict[str, Any]:
    """What the file has of a job."""
    found: dict[str, Any] = json.loads(STORED.read_text())["values"][job]
    return found


def assert_as_trl(job: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Of a run's ``rows`` from its first step on."""
    wanted = stored(job)
    for name in ("loss", "grad_norm"):
        assert [row[name] for row in rows] == pytest.approx(wanted[name], rel=REL), name


def main() -> None:
    """Run what is sampled, then TRL's trainers, and write the file."""
    from bench.end_to_end import trl_environment
    from tests.e2e.processes import Place

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="of an environment with TRL; by default .venv-trl, which it makes")
    python = parser.parse_args().python or trl_environment(ROOT / ".venv-trl")
    with tempfile.TemporaryDirectory() as name:
        jobs: dict[str, dict[str, Any]] = {}
        for made in (fine_tuned, preferred, distilled):
            place = Place(folder=Path(name, made.__name__), cache=Path(name, "models"))
            place.folder.mkdir()
            try:
                jobs |= made(place)
            finally:
                place.clear()
        spec, out = Path(name, "spec.json"), Path(name, "trl.json")
        spec.write_text(json.dumps({"jobs": jobs, "out": str(out)}))
        subprocess.run([python, ROOT / "tests" / "e2e" / "trl_trainers.py", spec], check=True)
        found = json.loads(out.read_text())
    found["values"]["gkd"]["sampled"] = jobs["gkd"]["sampled"]
    STORED.write_text(json.dumps(found, indent=1) + "\n")


def optimizer(rate: float, decay: str, **more: float) -> dict[str, Any]:
    return {"learning_rate": rate, "lr_scheduler_type": decay, "adam_beta2": 0.99, **more}


def fine_tuned(place: Any) -> dict[str, Any]:
    from tests.e2e import test_sft as of

    model = of.prepared(place)
    train, rows = of.read(place.folder / "train.jsonl"), []
    for n in of.order()[: of.SIZE * of.STEPS]:
        tokens, is_answer = of.tokens_of(model, train[n])
        rows.append({"input_ids": tokens, "assistant_masks": [int(x) for x in is_answer]})
    given = optimizer(of.RATE, "linear", weight_decay=0.1, max_grad_norm=0.5)
    return {"sft": job("sft", model, rows, of.SIZE, of.STEPS, given)}


def preferred(place: Any) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from tests.e2e import test_pairs as of

    model = of.prepared(place)
    train, tokenizer = of.read(place.folder / "train.jsonl"), AutoTokenizer.from_pretrained(model)
    pairs, judged = [], []

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    for n in of.order():
        good, bad = train[n]["good"], train[n]["bad"]
        assert isinstance(good, list)
        assert isinstance(bad, list)
        ends = [ids(whole[-1]["content"] + "<eos>") for whole in (good, bad)]
        asked = ids(of.text(good[:-1]) + "assistant:")
        pairs.append({"prompt_ids": asked, "chosen_ids": ends[0], "rejected_ids": ends[1]})
        apart = {"margin": train[n]["apart"]}
        judged.append({"chosen_ids": ids(of.text(good)), "rejected_ids": ids(of.text(bad)), **apart})
    given = optimizer(of.RATE, "constant", weight_decay=0.1, max_grad_norm=0.5)
    return {
        "dpo": job("dpo", model, pairs, of.SIZE, of.STEPS, given, beta=of.BETA),
        "reward_model": job(
            "reward_model", model, judged, of.SIZE, of.STEPS, given, center_rewards_coefficient=of.CENTRING
        ),
    }


def distilled(place: Any) -> dict[str, Any]:
    from tests.e2e import test_teacher as of

    student, teacher = of.models_of(place)
    of.begin_to_keep(place)
    of.distil(place, "whole").finish()
    sampled, rows = of.kept(place), []
    size = len(sampled) // STEPS
    steps = [sorted(sampled[i * size : (i + 1) * size]) for i in range(STEPS)]
    for prompt, completion in (one for step in steps for one in step):
        mask = [0] * len(prompt) + [1] * len(completion)
        rows.append({"input_ids": prompt + completion, "completion_mask": mask, "prompt": ""})
    made = job("gkd", student, rows, size, STEPS, optimizer(1e-3, "constant"), beta=0.5, remove_unused_columns=False)
    return {"gkd": made | {"teacher": str(teacher), "sampled": steps}}


def job(
    name: str, model: Path, rows: Sequence[Mapping[str, Any]], size: int, steps: int, given: dict[str, Any], **own: Any
) -> dict[str, Any]:
    """The spec of one trainer."""
    common = {"job": name, "model": str(model), "rows": rows, "batch_size": size, "steps": steps}
    return {**common, "optimizer": given, "own": own}


if __name__ == "__main__":
    main()
