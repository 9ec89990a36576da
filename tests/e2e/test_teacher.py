"""A teacher of another size, on ranks of its own or behind a server: its log-probs and what they make of a loss are
transformers'."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_megatron.config.run import TinyModelSection
from rl_megatron.models.tiny import make_tiny_model
from tests.e2e.processes import Place

KEEPS = '''
import json

def keeps(prompt, completions, texts):
    """Nothing is rewarded; what is sampled to train on is kept."""
    if len(completions) > 1 and prompt.id != "made-up":
        with open("sampled.jsonl", "a") as file:
            for one in completions:
                file.write(json.dumps([list(map(int, prompt.token_ids)), one.token_ids.tolist()]) + "\\n")
    return [0.0] * len(completions)
'''
GIVEN = (
    *("reward.function=keeping:keeps", "rollout.dynamic_sampling=off", "eval.every=0"),
    *("learner.ep=1", "warm_start.steps=0"),
)
OF_RANKS = ("roles.reference=separate", "roles.layouts.reference.tp=2", "algorithm.kl.reference={teacher}")
OF_SERVER = (
    *("algorithm.kl.teachers.wide.server=service:wide", "algorithm.kl.teachers.wide.path={teacher}"),
    "algorithm.kl.teachers.wide.engine=tests.e2e.served_teacher:Transformers",
    f"services.wide.command={sys.executable} -m tests.e2e.served_teacher {{teacher}}",
)
PLACES = pytest.mark.parametrize("of", [OF_RANKS, OF_SERVER], ids=["on ranks of its own", "behind a server"])


def trained(
    place: Place, name: str, of: tuple[str, ...], *keys: str
) -> tuple[list[dict[str, Any]], list[list[list[int]]], list[torch.nn.Module]]:
    """Rows of a student's run with a teacher of other sizes, what it sampled in the first step, and both models."""
    wide = TinyModelSection(hidden_size=96, num_layers=3, num_experts=4, expert_width=48)
    student, teacher = (make_tiny_model(one, place.cache, seed) for one, seed in ((TinyModelSection(), 0), (wide, 5)))
    (place.folder / "keeping.py").write_text(KEEPS)
    (place.folder / "sampled.jsonl").unlink(missing_ok=True)
    judged = (key.format(teacher=teacher) for key in of)
    run = place.fork(f"{name}-{len(of)}", *GIVEN, f"algorithm={name}", *keys, f"model.path={student}", *judged)
    run.finish()
    sampled = [json.loads(line) for line in (place.folder / "sampled.jsonl").read_text().splitlines()]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (student, teacher)]
    assert len(sampled) >= 16
    return [row for row in run.rows() if row["step"]], sampled[:16], models


@PLACES
def test_each_token_of_a_student_is_judged_by_a_wider_and_deeper_teacher(place: Place, of: tuple[str, ...]) -> None:
    rows, first, models = trained(place, "distill", of, "train.steps=2")
    means = [np.mean(np.subtract(*(logprobs(model, *one) for model in models))) for one in first]
    np.testing.assert_allclose(rows[0]["kl/reference"], np.mean(means), rtol=1e-4)
    assert rows[0]["kl/reference"] > 0.1  # they differ
    tokens = np.concatenate([np.subtract(*(logprobs(model, *one) for model in models)) for one in first])
    np.testing.assert_allclose(rows[0]["advantage/mean"], -tokens.mean(), rtol=1e-4)
    np.testing.assert_allclose(rows[0]["advantage/std"], tokens.std(), rtol=1e-4)  # minus that of each token
    assert rows[0]["reward/mean"] == 0 < rows[0]["grad_norm"]


@PLACES
def test_the_tokens_that_a_teacher_names_are_learnt_from(place: Place, of: tuple[str, ...]) -> None:
    """Of three tokens and a bucket, KL(student‖teacher), of a teacher on ranks at a temperature."""
    temperature = 0.8 if of is OF_RANKS else 1.0
    keys = ("algorithm.kl.top_k=3", "algorithm.kl.beta=1", f"rollout.temperature={temperature}", "train.minibatches=1")
    rows, first, models = trained(place, "gkd", of, *keys, "train.steps=1")
    found: list[float] = []
    for one in first:
        student, teacher = (distribution(model, *one, temperature=temperature) for model in models)
        for pi, ref in zip(student, teacher, strict=True):
            named = np.argsort(-ref)[:3]
            p, q = (np.append(x[named], 1 - x[named].sum()) for x in (pi, ref))
            found.append(float((p * np.log(p / q)).sum()))
    np.testing.assert_allclose(rows[0]["loss/kl"], np.mean(found), rtol=1e-4)
    assert rows[0]["reward/mean"] == 0 < rows[0]["grad_norm"]


def distribution(model: torch.nn.Module, prompt: list[int], completion: list[int], temperature: float) -> np.ndarray:
    """Probabilities [T, V] where a completion's tokens were sampled."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).softmax(-1).numpy()


def logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> np.ndarray:
    """Log-probs [T] of a completion's tokens."""
    return np.log(distribution(model, prompt, completion, 1.0)[range(len(completion)), completion])
