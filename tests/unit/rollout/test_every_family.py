"""The in-process engine samples each family's models: its own tensors, and log-probs as transformers' forward has them.

Prompts are ragged and completions long, so that rows end apart, others take their places and windows leave tokens out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_megatron.data.routes import decode_routes
from rl_megatron.models.named import NAMED
from rl_megatron.rollout.local.engine import LocalEngine
from rl_megatron.types import Completion, GenerationRequest, SamplingParams
from rl_megatron.weights.formats.hf_folder import is_draft
from rl_megatron.weights.layouts.families import FAMILIES, hf_layout, read_shape
from rl_megatron.weights.layouts.layout import float32_in_files
from tests.family_models import MODELS, SPARSE, save_model

LENGTHS = (1, 9, 2, 17, 5)
VOCABULARY = 61


@pytest.fixture(params=[name for name in MODELS if FAMILIES[MODELS[name][0]].serves])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Any, LocalEngine]:
    theirs = save_model(request.param, tmp_path)
    shape = read_shape(tmp_path)
    engine = LocalEngine(shape, slots=4, dtype=torch.float32, device="cpu", max_length=128)
    saved = load_file(tmp_path / "model.safetensors")
    checkpoint = {name: tensor for name, tensor in saved.items() if not is_draft(name, shape)}
    assert {n: t.shape for n, t in engine.tensors.items()} == {n: t.shape for n, t in checkpoint.items()}
    for name, tensor in checkpoint.items():
        engine.tensors[name].copy_(tensor)
    return request.param, theirs, engine


def requests(*, routes: bool) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(7)
    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=30, stop_token_ids=(), seed=5)
    return [
        GenerationRequest(
            id=str(length),
            token_ids=tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()),
            num_completions=2,
            params=replace(params, stop_token_ids=(3, 19, 42)) if length > 2 else params,
            routes=routes,
        )
        for length in LENGTHS
    ]


@torch.no_grad()
def expected(theirs: Any, asked: GenerationRequest, got: Completion) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """By one plain forward of the whole text: log-probs of the completion's tokens, and the experts [positions, k] that
    each layer with experts computes."""
    text = [*asked.token_ids, *got.token_ids.tolist()]
    chosen: list[torch.Tensor] = []
    experts = [module for name, module in theirs.named_modules() if name.endswith(".experts")]
    hooks = [one.register_forward_pre_hook(lambda _, given: chosen.append(given[1])) for one in experts]
    logits = theirs(torch.tensor([text[:-1]])).logits[0, len(asked.token_ids) - 1 :]
    for hook in hooks:
        hook.remove()
    return logits.log_softmax(-1).gather(1, torch.tensor(text[len(asked.token_ids) :])[:, None])[:, 0], chosen


def test_what_it_samples_has_the_log_probs_and_routes_of_transformers(served: tuple[str, Any, LocalEngine]) -> None:
    name, theirs, engine = served
    shape, asked, lengths = engine.model.shape, requests(routes=name in SPARSE), set()
    for request, group in zip(asked, engine.generate(asked), strict=True):
        for got in group:
            lengths.add(len(got.token_ids))
            logprobs, chosen = expected(theirs, request, got)
            assert (torch.tensor(got.logprobs) - logprobs).abs().max() < 1e-4
            assert len(chosen) == len(shape.moe_layers)
            assert (got.routes is not None) == bool(chosen) == (name in SPARSE)
            if got.routes is not None:
                own = torch.tensor(decode_routes(got.routes)).long()
                torch.testing.assert_close(own.sort(-1).values, torch.stack(chosen, 1).sort(-1).values)
    assert max(lengths) == 30 > max(shape.windows or (0,))
    assert min(lengths) < 30


def test_logits_of_whole_texts_are_those_of_transformers(served: tuple[str, Any, LocalEngine]) -> None:
    _, theirs, engine = served
    # Two of a delta net's chunks, whose rounding is 1.2e-4 on a Xeon; from 140 tokens on it is 1e-3.
    length, gap = (80, 5e-4) if engine.model.shape.delta else (40, 1e-4)
    ids = torch.randint(0, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(engine.model.logits(ids), theirs(ids).logits, rtol=1e-4, atol=gap)


def test_every_family_is_served() -> None:
    assert [kind for kind, family in FAMILIES.items() if not family.serves] == []


@pytest.mark.parametrize("name", ["deepseek-v3.2", "hunyuan-3"])
@pytest.mark.parametrize("drafts", [False, True])
def test_it_holds_in_float32_what_files_of_weights_in_bfloat16_do(name: str, drafts: bool) -> None:
    """So that its checksums are those of what it loads, and no export rounds."""
    shape = replace(NAMED[name], num_layers=4, drafts=drafts)
    if shape.indexer is not None:
        shape = replace(shape, indexer=replace(shape.indexer, layers=(0, 1, 2, 3, *range(4, 4 + shape.draft_layers))))
    engine = LocalEngine(shape, slots=1, dtype=torch.bfloat16, device="meta", max_length=8)
    found = {tensor for tensor, held in engine.tensors.items() if held.dtype == torch.float32}
    assert found == float32_in_files(hf_layout(shape))
    assert found
