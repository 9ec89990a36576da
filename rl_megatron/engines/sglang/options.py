"""SGLang 0.5.21's options: of a server's ranks, on CPUs, for the order of requests, and for adapters (srt/lora)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.engines.adapter import MOVES_EXPERTS, AdapterPlaces, StartOptions, value_given
from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import LoadedAdapters

_LOW_FIRST = "schedule_low_priority_values_first"
_OVERFLOWS = (
    "--schedule-low-priority-values-first: SGLang 0.5.21 then gives /health the highest priority of 64 bits, to which "
    "its cache adds 1 where its scheduler overlaps, and ends; leave it out"
)


def priority_options(extra: Sequence[str]) -> tuple[str, ...]:
    """The options for it, unless ``extra`` has a policy of its own. Raises ConfigError if by ``extra`` lower priorities
    go first, with which a server ends."""
    if value_given(extra, f"--{_LOW_FIRST.replace('_', '-')}") is not None:
        raise ConfigError(f"rollout.server.options has {_OVERFLOWS}")
    own = value_given(extra, "--schedule-policy") is not None
    return () if own else ("--enable-priority-scheduling", "--disable-priority-preemption")


def priority_problems(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What keeps a run from using a server with these settings, of its /server_info."""
    return (f"it has {_OVERFLOWS}",) if settings.get(_LOW_FIRST) else ()


KEYS = {
    **dict.fromkeys(("--tensor-parallel-size", "--tp-size", "--tp"), "tp"),
    **dict.fromkeys(("--pipeline-parallel-size", "--pp-size", "--pp"), "pp"),
    **dict.fromkeys(("--data-parallel-size", "--dp-size", "--dp", "--enable-dp-attention"), "dp"),
    **dict.fromkeys(("--expert-parallel-size", "--ep-size", "--ep"), "ep"),
    **dict.fromkeys(("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr"), "nodes"),
    **dict.fromkeys(("--modelopt-quant", "--quantize-and-serve", "--rl-quant-profile"), "quantization"),
    "--enable-deterministic-inference": "batch_invariant",
}
"""By option, the key of ``rollout.server`` that sets it."""
REASONS = {
    "--tokenizer-worker-num": "its processes ask for no token, and have no path for aborts",
    "--json-model-override-args": "with those of the run no end-of-sequence token of the model's ends a completion",
    "--preferred-sampling-params": "requests would be sampled by what they do not say, as log-probs would not be",
    "--enable-eplb": MOVES_EXPERTS,
    "--elastic-ep-backend": "ranks leave and join while it serves, but pushes go to those of its start",
    "--ep-num-redundant-experts": "where a rank has an expert twice, pushes straight into ranks end the server",
    "--kt-weight-path": "experts on CPUs come from that folder, and no push reaches them",
}
"""By option, why servers cannot have it."""
VARIABLES = {
    "SGLANG_GRPC_PORT": "the server of gRPC that it opens asks for no token",
    "SGLANG_RUST_SERVER": "its server asks for no token",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "log-probs would be those of temperature 1, not of what is sampled from",
    "SGLANG_MAX_NEW_TOKENS_LIMIT": "rollout.max_new_tokens is the limit; use that key",
    "SGLANG_SIMULATE_ACC_LEN": "it accepts proposed tokens that the model did not sample",
}
"""By variable, why servers cannot have it."""

_WATCHDOG_SECONDS = 300.0  # SGLang's own
_PARTS = 8
"""Of a pause, each with the limit ``timeout_seconds``: its begin and end, and the three requests of a load, of a
layer that proposes tokens and of the model."""

ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule", "--mem-fraction-static", "0.5"),
)


def refuse_start(options: StartOptions, shape: ModelShape) -> None:
    """Raises ConfigError for a model or an option with which SGLang fails at its start, a request or a push."""
    if options.device == "cpu" and shape.latent is not None:
        raise ConfigError(
            f"model_type={shape.family!r}: without AMX, SGLang's attention on CPUs takes the cached latents "
            "for keys, and crashes at the first request; use rollout=vllm, or a GPU"
        )
    if shape.family == "olmoe" and options.tp > 1:
        raise ConfigError(
            "model_type='olmoe': SGLang 0.5.21 has norms over all heads on each rank, which has its own alone; set "
            "rollout.server.tp=1, or use rollout=vllm"
        )
    if options.pp > 1:
        raise ConfigError(
            f"rollout.server.pp={options.pp}: a stage of SGLang 0.5.21 hands a push on to the next after its own "
            "part, so stages cannot receive together; raise rollout.server.tp, dp and ep, or use rollout=vllm"
        )
    if options.quantization == "int8":
        raise ConfigError(
            "rollout.server.quantization=int8: SGLang 0.5.21 has compressed-tensors' int8 experts for NPUs only, "
            "and its int8 linear layers can load weights only once; use fp8, or rollout=vllm"
        )


def degrees(options: StartOptions) -> tuple[str, ...]:
    """The options for the server's ranks, and for this node of several."""
    out = ["--tp-size", str(options.tp * options.dp)]  # SGLang's counts all ranks of a stage
    if options.dp > 1:
        out += ["--dp-size", str(options.dp), "--enable-dp-attention"]
    if options.ep > 1:
        out += ["--ep-size", str(options.ep)]
    if options.nodes > 1:
        out += ["--nnodes", str(options.nodes), "--node-rank", str(options.node)]
        out += ["--dist-init-addr", f"{options.head}:{options.port + 1}"]  # and the ports behind it
    return tuple(out)


def outliving_pushes(options: StartOptions, shape: ModelShape) -> tuple[str, ...]:
    """The options without which a push could end the server; ``options.extra`` behind them may have others.

    SGLang 0.5.21's watchdog takes a pause that keeps running requests for one step. The experts' kernels that it
    chooses on Blackwell for weights that are not quantised keep these in blocks, which its loader cannot write to
    again; Triton's are those of all other GPUs. gpt-oss has others on each.
    """
    watchdog = ("--watchdog-timeout", str(max(_WATCHDOG_SECONDS, _PARTS * options.timeout_seconds)))
    written_over = options.device == "cpu" or options.quantization != "none" or shape.family == "gpt_oss"
    if written_over or not shape.num_experts or value_given(options.extra, "--moe-a2a-backend") is not None:
        return watchdog
    return (*watchdog, "--moe-runner-backend", "triton")


def cores(ranks: int) -> str:
    """This machine's cores, divided among the ranks."""
    found = sorted(os.sched_getaffinity(0))
    each = max(1, len(found) // ranks)
    return "|".join(",".join(str(found[(rank * each + i) % len(found)]) for i in range(each)) for rank in range(ranks))


def most_cached(settings: Mapping[str, Any]) -> int:
    """The longest sequence that the cache of a server with these settings, of its /server_info, holds: SGLang 0.5.21
    rounds a prompt up to whole pages, and leaves one page and a token free (`max_new_tokens_for_memory`)."""
    return int(settings["max_total_num_tokens"]) - 2 * int(settings["page_size"])


_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *_OF_EXPERTS,
)
"""Of SUPPORTED_LORA_TARGET_MODULES (srt/utils/common.py)."""


def sglang_lora_options(options: StartOptions) -> tuple[str, ...]:
    """The options for the places of adapters. Its scheduler samples with all of them in one batch, and without any."""
    places = options.adapters
    if places is None:
        return ()
    return (
        *("--enable-lora", "--max-lora-rank", str(max(places.ranks)), "--max-loras-per-batch", str(places.count + 1)),
        *("--lora-target-modules", *places.modules),
        *(("--lora-backend", "torch_native") if options.device == "cpu" else ()),  # the others are Triton's
    )


def load_format(options: StartOptions) -> str:
    """Of the model's first weights, which a push replaces: random, or what memory held, for an empty file.

    SGLang reads adapters by the loader of this format, and the one of random weights reads nothing.
    """
    return "dummy" if options.adapters is None else "safetensors"


def sglang_lora_problem(places: AdapterPlaces, shape: ModelShape, device: str, dp: int) -> str:
    """Why it cannot hold them; or empty."""
    if strange := sorted(set(places.modules) - set(_LINEARS)):
        return (
            f"learner.lora.targets: SGLang 0.5.21 has no adapters of {', '.join(strange)}; leave attention out of "
            "learner.lora.targets, or set rollout=vllm"
        )
    if len(places.ranks) > 1:
        return (
            "learner.lora: SGLang 0.5.21 computes with one rank and one scale for all of an adapter's matrices, and "
            f"given are {', '.join(map(str, sorted(places.ranks)))}; make learner.lora.expert_rank equal to rank, or "
            "leave experts out of learner.lora.targets"
        )
    if shape.num_experts and device == "cpu" and set(places.modules) & set(_OF_EXPERTS):
        return (
            "learner.lora.targets has experts, or linears that are called as theirs: SGLang 0.5.21 has only Triton's "
            "kernels for adapters of experts, which need a GPU; set learner.lora.targets=attention"
        )
    if dp > 1:
        return (
            f"rollout.server.dp={dp}: with attention's replicas SGLang 0.5.21 holds adapters only where they "
            "are pinned, and never gives their places to others; set rollout.server.dp=1"
        )
    return ""


def sglang_lora_request(adapters: LoadedAdapters | None) -> dict[str, str]:
    """The part of a request that says with which adapters it is computed. An unknown name is refused."""
    return {} if adapters is None else {"lora_path": adapters.name}
