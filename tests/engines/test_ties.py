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


@pytest.mark.parametrize(
    ("seed", "layer", "tokens", "rounding"), [(44, 0, [191], 1e-4), (232, 1, [139], 1e-4), (307, 0, [84, 336], 2e-4)]
)
def test_near_ties_fall_so(
    models: tuple[Path, Path], seed: int, layer: int, tokens: list[int], rounding: float
) -> None:
    """The texts have one, or two: 2e-7 to 2e-5 between the router's second and third logit. An engine's rounding is
    played by a router that multiplies one expert's logits by a little more than 1."""
    text = torch.randint(3, 259, (420,), generator=torch.Generator().manual_seed(seed))
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    plain, routers = outputs_of(model, text)
    best = routers[layer][tokens].topk(3)
    assert (best.values[:, 1] - best.values[:, 2] < 2e-5).all()
    (third,) = set(best.indices[:, 2].tolist())
    with torch.no_grad():
        model.model.layers[layer].mlp.gate.weight[third] *= 1 + rounding * best.values[0, 2].sign()
    said, routers = outputs_of(model, text)
    assert (routers[layer][tokens].topk(2).indices == third).any(1).all()
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
