"""Options of vLLM 0.32.0's command line that are made of a server's degrees, that keys set, or that adapters need
(vllm/lora, config/lora.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rl_megatron.engines.adapter import MOVES_EXPERTS, AdapterPlaces, StartOptions, value_given, values_given
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import LoadedAdapters

KEYS = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), "tp"),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), "pp"),
    **dict.fromkeys(("--data-parallel-size", "-dp"), "dp"),
    **dict.fromkeys(("--data-parallel-size-local", "-dpl", "--data-parallel-start-rank", "-dpr"), "nodes"),
    **dict.fromkeys(("--enable-expert-parallel", "-ep"), "ep"),
    **dict.fromkeys(("--nnodes", "-n", "--node-rank", "-r", "--headless"), "nodes"),
    **dict.fromkeys(("-q", "--quantization-config"), "quantization"),
}
"""By option, the key of ``rollout.server`` that sets it."""
REASONS = {
    **dict.fromkeys(("--api-server-count", "-asc"), "an abort reaches one process, and its request may be in another"),
    **dict.fromkeys(
        (
            *("--data-parallel-rank", "-dpn", "--data-parallel-hybrid-lb", "-dph"),
            *("--data-parallel-external-lb", "-dpe", "--data-parallel-multi-port-external-lb", "-dpm"),
        ),
        "the server would answer for some of its replicas, and the run knows of no other that answers for the rest",
    ),
    **dict.fromkeys(("--enable-eplb", "--enable-elastic-ep"), MOVES_EXPERTS),
}
"""By option, why servers cannot have it."""
VARIABLES = {
    "VLLM_USE_RUST_FRONTEND": "its server asks for no token",
    "VLLM_DP_SIZE": "rollout.server.dp sets it; use that key",
    "VLLM_BATCH_INVARIANT": "rollout.server.batch_invariant sets it; use that key",
}
"""By variable, why servers cannot have it."""


def quantises(extra: Sequence[str]) -> str:
    """Why options cannot have --hf-overrides of the model's quantization_config; or empty."""
    for name, value in values_given(extra, "--hf-overrides"):
        if "quantization_config" in f"{name} {_unescaped(value)}":
            return (
                f"rollout.server.options has {name} of quantization_config, which rollout.server.quantization sets; "
                "use that key"
            )
    return ""


def _unescaped(value: str) -> str:
    """JSON without escapes of characters, so that its keys are found as text."""
    try:
        return json.dumps(json.loads(value), ensure_ascii=False)
    except ValueError:
        return value  # which vLLM refuses


def attention_given(extra: Sequence[str]) -> str | None:
    """The attention that options name: by --attention-backend, or by the key ``backend`` of --attention-config, which
    is -ac, in its JSON or behind its name. None: they leave it to vLLM."""
    if (named := value_given(extra, "--attention-backend")) is not None:
        return named
    for name, value in values_given(extra, "--attention-config", "-ac"):  # of several the last, as vLLM reads them
        one = value if name.endswith(".backend") else None if "." in name else _backend_of(value)
        named = named if one is None else one
    return named


def _backend_of(attention: str) -> str | None:
    try:
        config = json.loads(attention)
    except ValueError:
        return None  # which vLLM refuses
    return str(config["backend"]) if isinstance(config, dict) and config.get("backend") else None


def options_of_ranks(options: StartOptions) -> tuple[str, ...]:
    """The options for the server's ranks, and for this node of several."""
    out = ["--tensor-parallel-size", str(options.tp), "--pipeline-parallel-size", str(options.pp)]
    if options.dp > 1:  # one process answers requests for all
        out += ["--data-parallel-size", str(options.dp)]
    if options.ep > 1:
        out += ["--enable-expert-parallel"]
    one = options.tp * options.pp == 1  # then the engine's process is the rank's
    out += ["--distributed-executor-backend", "uni" if one else "mp"]
    if options.nodes > 1:
        out += ["--nnodes", str(options.nodes), "--node-rank", str(options.node)]
        out += ["--master-addr", options.head, "--master-port", str(options.port + 1)]
        out += ["--data-parallel-address", options.head, "--data-parallel-rpc-port", str(options.port + 2)]
    return (*out, *(("--headless",) if options.node else ("--api-server-count", "1")))


_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of --max-lora-rank


def vllm_lora_options(places: AdapterPlaces | None) -> tuple[str, ...]:
    """The options for the places of adapters. Its scheduler samples with all of them in one batch."""
    if places is None:
        return ()
    rank, count = next(rank for rank in _RANKS if rank >= max(places.ranks)), str(places.count)
    out = ("--enable-lora", "--max-lora-rank", str(rank), "--max-loras", count, "--max-cpu-loras", count)
    return out if places.experts else (*out, "--lora-target-modules", *places.modules)  # experts are one module there


def vllm_lora_problem(places: AdapterPlaces, shape: ModelShape, device: str) -> str:
    """Why it cannot hold them; or empty."""
    if (most := max(places.ranks)) > _RANKS[-1]:
        return f"learner.lora.rank={most}: vLLM 0.32.0 holds adapters of rank {_RANKS[-1]} at most; lower it"
    if shape.num_experts and device == "cpu":
        return (
            f"model_type={shape.family!r} has experts: wherever adapters are on, vLLM 0.32.0 computes experts by "
            "Triton's kernels, which need a GPU; use a dense model, or rollout=sglang with "
            "learner.lora.targets=attention"
        )
    return ""


def vllm_lora_request(adapters: LoadedAdapters | None) -> dict[str, str]:
    """The part of a request that says with which adapters it is computed. An unknown name is refused (404)."""
    return {} if adapters is None else {"model": adapters.name}
