"""The doctor on real servers: first nothing is wrong, then a server's options, then the weights that it loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from rl_megatron.engines.http import Server
from rl_megatron.types import Batch, ParallelDims, Prompt, Samples, Scores, Want
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, checksums
from rl_megatron.weights.push.sync import ServedWeights
from rl_megatron.weights.push.trust import Probe, PushVerifier
from rl_megatron.weights.routes.mirror import dtypes, shapes
from tests.engines.benches import Change, ServedBench
from tools.lab.mismatch.causes import Finding, Setting, TokenizerCheck, WeightCheck, judge
from tools.lab.mismatch.experiments import Bench, Parameters, run_experiments

SETTING = Setting(learner_dtype="float32", engine_dtype="float32", configured=Parameters(), served=True)
EXPERTS = [f"model.layers.1.mlp.experts.{expert}" for expert in range(8)]
PROMPTS = [
    Prompt(id=str(i), text="", token_ids=tuple((7 * i + j) % 256 for j in range(1 + 4 * i)), answer="")
    for i in range(8)
]


class Learner:
    """Transformers' forward of a folder, all sequences at once: padding behind one is seen by none of its positions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    async def score(self, batch: Batch, want: frozenset[Want]) -> dict[Want, Scores]:
        of: dict[Want, Callable[[Samples], Tensor]] = {
            "logprobs": lambda m: self._forward(m).log_softmax(-1).gather(1, m.targets[:, None])[:, 0],
            "logits": lambda m: self._forward(m)[m.mask],
        }
        return {name: [[of[name](m) for m in row] for row in batch.micro_batches] for name in want}

    @torch.no_grad()
    def _forward(self, samples: Samples) -> Tensor:
        sequences = samples.input_ids.split(samples.cu_seqlens.diff().tolist())
        logits = self._model(pad_sequence(list(sequences), batch_first=True)).logits.float()
        return torch.cat([row[: len(ids)] for row, ids in zip(logits, sequences, strict=True)])


@pytest.fixture
def looked_at(server: ServedBench) -> Iterator[ServedBench]:
    """A server that serves whatever it is given."""
    before, tolerant = server.weights, float("inf")
    probe = Probe.make(vocab_size=259, max_length=512, temperature=1.0, tolerance=tolerant)
    servers = server.engine.weights
    trust = PushVerifier(path=server.path, servers=servers, learner=server.sync, dims=ParallelDims(), probe=probe)
    delivery = server.file(server.engine)
    server.weights = ServedWeights(learner=server.sync, delivery=delivery, trust=trust, servers=servers)
    yield server
    server.weights = before


def diagnose(server: ServedBench, learner: Learner) -> dict[str, Finding]:
    bench = Bench(
        learner=learner,
        engine=server.engine,
        dims=ParallelDims(),
        max_tokens=4096,
        vocab_size=259,
        temperature=1.0,
        top_p=1.0,
        max_prompt_tokens=32,
        max_new_tokens=12,
        special_token_ids={"bos_token": 258},
    )

    outcomes = server.run(run_experiments(bench, PROMPTS, completions=2, worth=SETTING.noise))
    expected = checksums(HFFolder(learner.folder), shapes(server.path), dtypes(server.path))
    ((compared, differing),) = server.run(server.engine.weights.comparable(server.path, expected)).values()
    how = f"with {learner.folder}"
    weights = WeightCheck(compared=compared, total=len(expected), differing=tuple(differing), how=how)
    assert server.run(server.engine.tokenized("a+b", add_special_tokens=True)) in (None, tuple(b"a+b"))
    tokenizer = TokenizerCheck(compared=1, differing=(), how="the same ids")
    return {f.cause: f for f in judge(outcomes, SETTING, weights, tokenizer)}


def guilty(found: dict[str, Finding]) -> list[str]:
    return [f.cause for f in found.values() if f.verdict == "guilty"]


def swap_gates_and_ups(tensors: dict[str, Tensor]) -> None:
    """Of every expert of a layer: what an engine does that stacks them in the other order."""
    for at in EXPERTS:
        gate, up = f"{at}.gate_proj.weight", f"{at}.up_proj.weight"
        tensors[gate], tensors[up] = tensors[up], tensors[gate]


def test_plants_are_named(looked_at: ServedBench, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    server, learner = looked_at, Learner(models[0])
    server.push(models[0], 1)
    found = diagnose(server, learner)
    assert guilty(found) == [], found
    assert found["dtype or kernels"].verdict == "noise"

    sampled = Server.post_sampling

    async def penalizing(self: Server, path: str, body: Any, form: Any) -> Any:
        if isinstance(body, dict) and "sampling_params" in body:
            given, more = body["sampling_params"], {"repetition_penalty": 1.4}
            changed = [one | more for one in given] if isinstance(given, list) else given | more
            body = {**body, "sampling_params": changed}
        return await sampled(self, path, body, form)

    with monkeypatch.context() as planted:
        planted.setattr(Server, "post_sampling", penalizing)
        found = diagnose(server, learner)
    assert guilty(found) == ["sampling parameters"], found
    name = {"vllm": "repetition_penalty", "sglang": "sampled_repetition_penalty"}[server.name]
    assert f" {name} 1.4 (the learner: 1)" in found["sampling parameters"].evidence

    change: Change = swap_gates_and_ups
    server.push(models[0], 2, change)
    found = diagnose(server, learner)
    assert guilty(found) == ["weights"], found
    if server.name == "sglang":  # which keeps experts as they were loaded
        named = re.search("the engine holds others in (.*) and 8 more", found["weights"].evidence)
        assert named is not None, found
        assert set(named[1].split(", ")) <= {f"{at}.{x}_proj.weight" for at in EXPERTS for x in ("gate", "up")}
    server.push(models[0], 3)
