"""The oracle of log-probs takes an engine's side of a near tie between experts, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl_megatron.types import Completion, Span
from tests.engines.benches import logprobs_of


@torch.no_grad()
def outputs_of(model: Any, text: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Log-probs of a text's tokens after the 20th, and the router logits of each layer."""
    out = model(text[None], output_router_logits=True)
    return out.logits[0, 19:-1].log_softmax(-1).gather(1, text[20:, None])[:, 0], out.router_logits


@pytest.mark.parametrize(("seed", "layer", "token"), [(44, 0, 191), (232, 1, 139)])
def test_a_near_tie_falls_as_the_engine_says(models: tuple[Path, Path], seed: int, layer: int, token: int) -> None:
    """The text has one: 2e-6 and 2e-7 between the router's second and third logit. An engine's rounding is played by a
    router that multiplies one expert's logits by 1.0001."""
    text = torch.randint(3, 259, (420,), generator=torch.Generator().manual_seed(seed))
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    plain, routers = outputs_of(model, text)
    best = routers[layer][token].topk(3)
    assert best.values[1] - best.values[2] < 5e-6
    with torch.no_grad():
        scale = 1.0001 if best.values[2] > 0 else 0.9999
        model.model.layers[layer].mlp.gate.weight[best.indices[2]] *= scale
    said, _ = outputs_of(model, text)
    assert (said - plain).abs().max() > 1e-3

    def gap(folder: Path, off: float = 0.0) -> float:
        """The largest distance from the oracle to what was said, whose last log-prob is ``off`` more."""
        told = said + off * (torch.arange(len(said)) == len(said) - 1)
        completion = Completion(
            token_ids=text[20:].numpy().astype(np.int32),
            logprobs=told.numpy(),
            finish_reason="length",
            spans=(Span(0, 1),),
        )
        return float((logprobs_of(folder, text[:20].tolist(), completion, 1.0) - told).abs().max())

    assert gap(models[0]) < 1e-4
    assert gap(models[0], off=1e-3) == pytest.approx(1e-3, rel=0.2)
    assert gap(models[1]) > 0.1
