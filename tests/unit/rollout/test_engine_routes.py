"""Routes in servers' answers: their numbers, cut to the layers with experts, and answers that do not fit."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_megatron.data.routes import decode_routes
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import LatentAttention, ModelShape
from rl_megatron.rollout.servers.adapter import StartOptions
from rl_megatron.rollout.servers.sglang.adapter import SGLangAdapter
from rl_megatron.rollout.servers.vllm.adapter import VLLMAdapter
from rl_megatron.types import Completion, GenerationRequest, SamplingParams

EXPERTS = np.arange(4 * 3 * 2).reshape(4, 3, 2) % 8  # 3 prompt and 2 sampled tokens, less one
ASKED = GenerationRequest(
    id="a",
    token_ids=(1, 2, 3),
    num_completions=1,
    params=SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=2, stop_token_ids=(), seed=0),
    routes=True,
)
OPTIONS = StartOptions(
    python=Path("python"),
    model_folder=Path("model"),
    bare_folder=Path("bare"),
    host="127.0.0.1",
    port=1,
    head="127.0.0.1",
    device="cuda",
    dtype="float32",
    quantization="none",
    max_length=8,
    slots=1,
    tp=1,
    pp=1,
    dp=1,
    ep=1,
    memory_fraction=None,
    timeout_seconds=600.0,
    colocated=False,
    routes=True,
    batch_invariant=False,
    extra=(),
)


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    """Three layers, the first of them dense, of 8 experts and 2 a token."""
    return replace(NAMED["deepseek-v3"], num_layers=3, dense_layers=1, num_experts=8, experts_per_token=2)


class Answering:
    """A server that gives one answer to all it is asked."""

    salt, priorities = None, False

    def __init__(self, answer: object) -> None:
        self.answer, self.asked = answer, {}

    async def sampled(self, path: str, body: dict[str, Any], read: Callable[[bytes], object]) -> object:
        self.asked = body
        return read(json.dumps(self.answer).encode())


def by_sglang(
    experts: np.ndarray | None, shape: ModelShape, asked: GenerationRequest = ASKED, end: str = "length"
) -> Completion:
    adapter = SGLangAdapter(shape)
    said = {
        "output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]],
        "weight_version": adapter.labels.verified(1),
        "finish_reason": {"type": end},
    }
    if experts is not None:
        said["routed_experts"] = base64.b64encode(experts.astype("<i4").tobytes()).decode()
    server = Answering([{"meta_info": said}])
    (completion,) = asyncio.run(adapter.generate(server, asked, "x"))
    assert server.asked["return_routed_experts"] == asked.routes
    return completion


def by_vllm(experts: np.ndarray | None, shape: ModelShape, asked: GenerationRequest = ASKED) -> Completion:
    adapter = VLLMAdapter(shape)
    choice = {
        "index": 0,
        "token_ids": [5, 6],
        "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]},
        "weight_versions": [{"version": adapter.labels.verified(1), "start": 0}],
        "finish_reason": "length",
    }
    if experts is not None:
        with io.BytesIO() as file:
            np.save(file, experts.astype(np.uint8))
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    (completion,) = asyncio.run(adapter.generate(Answering({"choices": [choice]}), asked, "x"))
    return completion


BOTH = pytest.mark.parametrize("ask", [by_sglang, by_vllm])


@BOTH
def test_routes_are_of_the_layers_with_experts(ask: Any, shape: ModelShape) -> None:
    found = ask(EXPERTS, shape).routes
    assert decode_routes(found).tolist() == EXPERTS[:, 1:].tolist()
    assert ask(None, shape, replace(ASKED, routes=False)).routes is None


@BOTH
@pytest.mark.parametrize("experts", [EXPERTS[:3], EXPERTS[:, 1:], np.concatenate([EXPERTS, EXPERTS[:1]])])
def test_routes_of_other_positions_or_layers_are_refused(ask: Any, shape: ModelShape, experts: np.ndarray) -> None:
    with pytest.raises(EngineError, match=r"\(positions, layers, experts a token\) must be \(4, 3, 2\)"):
        ask(experts, shape)


@BOTH
def test_an_expert_that_the_model_has_not_is_refused(ask: Any, shape: ModelShape) -> None:
    with pytest.raises(EngineError, match="name experts 0 to 8, but the model has 8"):
        ask(np.where(EXPERTS == 7, 8, EXPERTS), shape)


@BOTH
def test_an_answer_without_routes_is_refused(ask: Any, shape: ModelShape) -> None:
    with pytest.raises(EngineError, match="routes"):
        ask(None, shape)


def test_what_sglang_aborts_outside_its_cache_begins_again(shape: ModelShape) -> None:
    """Its ``abort_request`` answers a request that it has put back into its queue with tokens, but without routes."""
    found = by_sglang(None, shape, end="abort")
    assert (len(found.token_ids), len(found.logprobs), found.finish_reason, found.routes) == (0, 0, "abort", None)
    assert decode_routes(by_sglang(EXPERTS, shape, end="abort").routes).tolist() == EXPERTS[:, 1:].tolist()
    assert len(by_sglang(None, shape, replace(ASKED, routes=False), end="abort").token_ids) == 2


@pytest.mark.parametrize("adapter", [SGLangAdapter, VLLMAdapter])
def test_a_server_is_started_to_return_them_only_where_they_are_asked_for(adapter: Any, shape: ModelShape) -> None:
    flag = "--enable-return-routed-experts"
    assert flag in adapter(shape).command(OPTIONS).arguments
    assert flag not in adapter(shape).command(replace(OPTIONS, routes=False)).arguments


def test_vllm_captures_cuda_graphs_on_gpus(shape: ModelShape) -> None:
    for device, eager in (("cuda", False), ("cpu", True)):
        command = VLLMAdapter(shape).command(replace(OPTIONS, device=device, routes=False))
        assert ("--enforce-eager" in command.arguments) is eager


def test_vllm_has_latent_attention_without_amx_kernels_where_they_cannot_take_the_dtype(shape: ModelShape) -> None:
    latent = replace(
        shape, latent=LatentAttention(query_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    )
    found = [
        "CPU_MLA" in VLLMAdapter(model).command(replace(OPTIONS, device=device, dtype=dtype, routes=False)).arguments
        for model, device, dtype in (
            (latent, "cpu", "float32"),
            (latent, "cpu", "bfloat16"),
            (latent, "cuda", "float32"),
            (replace(shape, latent=None), "cpu", "float32"),
        )
    ]
    assert found == [True, False, False, False]


def test_vllm_on_a_cpu_is_refused_with_the_reason(shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match=r"replay=r3 and .*: vLLM 0\.32\.0 .* does not run on CPUs; set rollout"):
        VLLMAdapter(shape).command(replace(OPTIONS, device="cpu"))


def test_sglang_refuses_int8_with_the_reason(shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match=r"quantization=int8: SGLang 0\.5\.21 .* use fp8, or rollout=vllm"):
        SGLangAdapter(shape).command(replace(OPTIONS, quantization="int8"))
    assert SGLangAdapter(shape).command(replace(OPTIONS, quantization="fp8")).arguments
