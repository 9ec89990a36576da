"""A teacher of another size on ranks of its own: its log-probs and the advantages that they make are transformers'."""

from __future__ import annotations

import json

import numpy as np
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
DISTILL = (
    *("algorithm=distill", "reward.function=keeping:keeps", "rollout.dynamic_sampling=off", "eval.every=0"),
    *("learner.ep=1", "roles.reference=separate", "warm_start.steps=0", "train.steps=2"),
)


def test_each_token_of_a_student_is_judged_by_a_wider_and_deeper_teacher(place: Place) -> None:
    wide = TinyModelSection(hidden_size=96, num_layers=3, num_experts=4, expert_width=48)
    student, teacher = (make_tiny_model(one, place.cache, seed) for one, seed in ((TinyModelSection(), 0), (wide, 5)))
    (place.folder / "keeping.py").write_text(KEEPS)
    run = place.fork("distill", *DISTILL, f"model.path={student}", f"algorithm.kl.reference={teacher}")
    run.finish()
    rows = [row for row in run.rows() if row["step"]]
    sampled = [json.loads(line) for line in (place.folder / "sampled.jsonl").read_text().splitlines()]
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (student, teacher)]
    first = sampled[: len(sampled) // 2]
    means = [np.mean(np.subtract(*(logprobs(model, *one) for model in models))) for one in first]
    assert len(first) == 16
    np.testing.assert_allclose(rows[0]["kl/reference"], np.mean(means), rtol=1e-4)
    assert rows[0]["kl/reference"] > 0.1  # they differ
    tokens = np.concatenate([np.subtract(*(logprobs(model, *one) for model in models)) for one in first])
    np.testing.assert_allclose(rows[0]["advantage/mean"], -tokens.mean(), rtol=1e-4)
    np.testing.assert_allclose(rows[0]["advantage/std"], tokens.std(), rtol=1e-4)  # minus that of each token
    assert rows[0]["reward/mean"] == 0 < rows[0]["grad_norm"]


def logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> np.ndarray:
    """Log-probs [T] of a completion's tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(completion)), completion].double().numpy()
