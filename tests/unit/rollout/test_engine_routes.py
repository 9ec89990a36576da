"""Routes in servers' answers: their numbers, cut to layers with experts, and answers that do not fit; and noise."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_megatron.columns import Ragged
from rl_megatron.engines.adapter import StartOptions
from rl_megatron.engines.local.engine import LocalEngine, uniform_to_normal
from rl_megatron.engines.sglang.adapter import SGLangAdapter
from rl_megatron.engines.vllm.adapter import VLLMAdapter
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import LatentAttention, ModelShape
from rl_megatron.types import Completion, GenerationRequest, SamplingParams
from rl_megatron.weights.layouts.families import read_shape

EXPERTS = np.arange(4 * 3 * 2).reshape(4, 3, 2) % 8  # 3 prompt and 2 sampled tokens, less one
ASKED = GenerationRequest(
    id="a",
    token_ids=(1, 2, 3),
    num_completions=1,
    params=SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=2, stop_token_ids=(), seed=0),
    columns=("routes",),
)
PLACES: Any = {"python": Path("python"), "model_folder": Path("model"), "config_folder": Path("bare")}
NUMBERS: Any = {"memory_fraction": None, "timeout_seconds": 600.0, "dtype": "float32", "quantization": "none"}
OPTIONS = StartOptions(
    **PLACES,
    **NUMBERS,
    **dict.fromkeys(("host", "head_address"), "127.0.0.1"),
    **dict.fromkeys(("port", "max_num_seqs", "tp", "pp", "dp", "ep"), 1),
    device="cuda",
    max_length=8,
    features={"replay": "algorithm.routing_replay=r3"},
    colocated=False,
    batch_invariant=False,
    extra_options=(),
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

    async def post_sampling(self, path: str, body: dict[str, Any], read: Callable[[bytes], object]) -> object:
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
    assert server.asked["return_routed_experts"] == ("routes" in asked.columns)
    return completion


def by_vllm(experts: np.ndarray | None, shape: ModelShape, asked: GenerationRequest = ASKED) -> Completion:
    adapter = VLLMAdapter(shape)
    choice = {"index": 0, "token_ids": [5, 6], "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}}
    choice |= {"weight_versions": [{"version": adapter.labels.verified(1), "start": 0}], "finish_reason": "length"}
    if experts is not None:
        with io.BytesIO() as file:
            np.save(file, experts.astype(np.uint8))
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    (completion,) = asyncio.run(adapter.generate(Answering({"choices": [choice]}), asked, "x"))
    return completion


BOTH = pytest.mark.parametrize("ask", [by_sglang, by_vllm])


@BOTH
def test_routes_are_of_the_layers_with_experts(ask: Any, shape: ModelShape) -> None:
    assert ask(EXPERTS, shape).columns["routes"].tolist() == EXPERTS[:, 1:].tolist()
    assert ask(None, shape, replace(ASKED, columns=())).columns == {}


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
    assert (len(found.token_ids), len(found.logprobs), found.finish_reason, found.columns) == (0, 0, "abort", {})
    assert by_sglang(EXPERTS, shape, end="abort").columns["routes"].tolist() == EXPERTS[:, 1:].tolist()
    assert len(by_sglang(None, shape, replace(ASKED, columns=()), end="abort").token_ids) == 2


MASKED = replace(ASKED, columns=("kept",), params=replace(ASKED.params, top_p=0.9, top_k=8))


def masked_by_sglang(shape: ModelShape, masks: list[list[int]] | None, end: str = "length") -> Completion:
    """Two tokens, 5 and 6, with log-probs of the whole vocabulary, and of ``masks``."""
    adapter = SGLangAdapter(shape)
    said: dict[str, Any] = {"output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]]}
    said |= {"weight_version": adapter.labels.verified(1), "finish_reason": {"type": end}}
    if masks is not None:
        said |= {"output_token_sampling_mask": masks, "output_token_sampling_logprobs": [-0.5, -0.25][: len(masks)]}
    server = Answering([{"meta_info": said}])
    (completion,) = asyncio.run(adapter.generate(server, MASKED, "x"))
    assert server.asked["return_sampling_mask"]
    assert server.asked["sampling_params"][0]["top_k"] == 8
    return completion


def test_sglangs_log_probs_are_over_its_masks(shape: ModelShape) -> None:
    found = masked_by_sglang(shape, [[7, 5], [6, 1, 2]])
    kept = found.columns["kept"]
    assert isinstance(kept, Ragged)
    assert (kept.values.tolist(), kept.counts.tolist()) == ([7, 5, 6, 1, 2], [2, 3])
    assert found.logprobs.tolist() == [-0.5, -0.25]
    ended = masked_by_sglang(shape, [[7, 5]], "abort")
    assert (len(ended.token_ids), len(ended.logprobs), len(ended.columns["kept"])) == (1, 1, 1)
    lost = masked_by_sglang(shape, None, "abort")
    assert (len(lost.token_ids), lost.columns) == (0, {})


@pytest.mark.parametrize(
    ("masks", "why"),
    [
        (None, "it returned 0 sampling masks of 2 tokens"),
        ([[7, 5]], "it returned 1 sampling masks of 2 tokens"),
        ([[6], [5]], "2 sampling masks are not those of its 2 tokens"),
        ([[5], [6], [7]], "2 log-probs over 3 sampling masks"),
    ],
)
def test_masks_of_other_tokens_are_refused(shape: ModelShape, masks: list[list[int]] | None, why: str) -> None:
    with pytest.raises((EngineError, ValueError), match=why):
        masked_by_sglang(shape, masks)


@pytest.mark.parametrize("adapter", [SGLangAdapter, VLLMAdapter])
def test_a_server_is_started_to_return_them_only_where_they_are_asked_for(adapter: Any, shape: ModelShape) -> None:
    flag = "--enable-return-routed-experts"
    assert flag in adapter(shape).command(OPTIONS).arguments
    assert flag not in adapter(shape).command(replace(OPTIONS, features={})).arguments


def test_vllm_captures_cuda_graphs_on_gpus(shape: ModelShape) -> None:
    for device, eager in (("cuda", False), ("cpu", True)):
        command = VLLMAdapter(shape).command(replace(OPTIONS, device=device, features={}))
        assert ("--enforce-eager" in command.arguments) is eager


def test_vllm_has_latent_attention_without_amx_kernels_where_they_cannot_take_the_dtype(shape: ModelShape) -> None:
    latent = replace(
        shape, latent=LatentAttention(query_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    )
    found = [
        "CPU_MLA" in VLLMAdapter(model).command(replace(OPTIONS, device=device, dtype=dtype, features={})).arguments
        for model, device, dtype in (
            (latent, "cpu", "float32"),
            (latent, "cpu", "bfloat16"),
            (latent, "cuda", "float32"),
            (replace(shape, latent=None), "cpu", "float32"),
        )
    ]
    assert found == [True, False, False, False]


def test_vllm_on_a_cpu_is_refused_with_the_reason(shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match=r"replay=r3 needs .*: vLLM 0\.32\.0 .* does not run on CPUs; set rollout"):
        VLLMAdapter(shape).command(replace(OPTIONS, device="cpu"))


def test_sglang_refuses_int8_with_the_reason(shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match=r"quantization=int8: SGLang 0\.5\.21 .* use fp8, or rollout=vllm"):
        SGLangAdapter(shape).command(replace(OPTIONS, quantization="int8"))
    assert SGLangAdapter(shape).command(replace(OPTIONS, quantization="fp8")).arguments


# Noise on the engine's routers: flips as often as the closed form says, repeatably, and only where it is asked for.
MakeEngine = Callable[[int], LocalEngine]
SIGMA = 0.5


def request(seed: int, prompt: tuple[int, ...], num: int, noise: float, new: int = 12) -> GenerationRequest:
    params = SamplingParams(
        temperature=1.0, top_p=1.0, max_new_tokens=new, stop_token_ids=(), seed=seed, router_noise=noise
    )
    return GenerationRequest(id=f"r{seed}", token_ids=prompt, num_completions=num, params=params, columns=("routes",))


def said(completion: Completion) -> tuple[list[int], bytes]:
    return completion.token_ids.tolist(), completion.columns["routes"].tobytes()


def test_the_ends_of_the_uniform_numbers_are_finite_and_of_one_size() -> None:
    """2**-24 of them are the largest: some thousand tokens of a large model meet it."""
    low, middle, high = uniform_to_normal(torch.tensor([0.0, 0.5, 1 - 2.0**-24])).tolist()
    assert low == -high
    assert high == pytest.approx(NormalDist().inv_cdf(1 - 2.0**-25), rel=1e-3)
    assert 0 < middle < 1e-6


def test_routes_flip_as_often_as_two_normal_numbers_change_order(tmp_path: Path) -> None:
    """One layer of two experts, one a token: a gap g of the clean logits changes its sign with P = Phi(-g/(s sqrt 2)).
    The gaps are transformers'; a first layer's router sees nothing of the noise before it."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    sizes |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "norm_topk_prob": True}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 41, "max_position_embeddings": 64}
    config = Qwen3MoeConfig(**sizes, output_router_logits=True)
    torch.manual_seed(3)
    theirs = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    theirs.save_pretrained(tmp_path)
    engine = LocalEngine(read_shape(tmp_path), slots=64, dtype=torch.float32, device="cpu", max_length=64)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        engine.tensors[name].copy_(tensor)

    prompts = [
        tuple(torch.randint(0, 41, (12,), generator=torch.Generator().manual_seed(i)).tolist()) for i in range(24)
    ]
    requests = [request(i, prompt, 16, SIGMA, new=24) for i, prompt in enumerate(prompts)]
    expected, variance, flips = 0.0, 0.0, 0
    for asked, group in zip(requests, engine.generate(requests), strict=True):
        for number, got in enumerate(group):
            ids = torch.tensor([[*asked.token_ids, *got.token_ids[:-1].tolist()]])
            with torch.no_grad():
                logits = theirs(ids).router_logits[0].view(-1, 2).double()
            first = 0 if number == 0 else len(asked.token_ids) - 1  # completions share the prompt's others
            gap = (logits[:, 0] - logits[:, 1])[first:]
            routes = torch.from_numpy(got.columns["routes"].astype("int64"))[first:, 0, 0]
            flips += int((routes != logits.argmax(-1)[first:]).sum())
            chance = 0.5 * torch.erfc(gap.abs() / (SIGMA * math.sqrt(2)) / math.sqrt(2))
            expected += float(chance.sum())
            variance += float((chance * (1 - chance)).sum())
    assert expected > 1000
    assert abs(flips - expected) < 3.5 * math.sqrt(variance), (flips, expected)


def test_a_noisy_completion_is_a_function_of_its_request_alone(make_engine: MakeEngine) -> None:
    """The same beside others, in few rows and again; unlike in each completion, and with another seed."""
    asked, other = request(5, (3, 1, 4, 1, 5), 3, 0.8), request(9, (2, 7, 1), 4, 0.3)
    alone = [said(one) for one in make_engine(64).generate([asked])[0]]
    for slots in (64, 3):
        beside = make_engine(slots).generate([other, asked, replace(other, id="again")])
        assert [said(one) for one in beside[1]] == alone
    routes = {routes for _, routes in alone}
    assert len(routes) == 3
    ((again, *_),) = make_engine(64).generate([request(6, (3, 1, 4, 1, 5), 1, 0.8)])
    assert said(again)[1][: 4 * 2 * 2] != alone[0][1][: 4 * 2 * 2]  # of the prompt, by another seed


def test_a_request_without_noise_has_none_beside_one_that_has(make_engine: MakeEngine) -> None:
    clean, noisy = request(5, (3, 1, 4, 1, 5), 2, 0.0), request(5, (3, 1, 4, 1, 5), 2, 0.8)
    alone = [said(one) for one in make_engine(64).generate([clean])[0]]
    together = make_engine(64).generate([noisy, clean])
    assert [said(one) for one in together[1]] == alone
    assert [said(one)[1] for one in together[0]] != [routes for _, routes in alone]
