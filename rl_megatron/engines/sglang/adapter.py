"""The adapter for SGLang 0.5.21: its native generate endpoint, and weight updates by our loader.

Its requests (srt/managers/io_struct.py), its responses (srt/managers/tokenizer_manager.py), its options, and orders to
the loader in its schedulers (`worker.load`) with the files that have the loader's answers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import pickle
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from rl_megatron.config.sections.rollout import RunningRequests
from rl_megatron.engines.adapter import (
    MOVES_EXPERTS,
    EngineGauges,
    ForeignEngine,
    ServerInfo,
    StartCommand,
    StartOptions,
    describe_settings,
    hook_variables,
    option_value,
    refused_option,
    version_fields,
)
from rl_megatron.engines.answers import (
    LabeledSpan,
    SampledColumns,
    TopLogprobs,
    check_routes,
    completion_seed,
    decode_as,
    logprob_column,
    read_kept,
    token_column,
)
from rl_megatron.engines.http import AttemptFailed, Server, ServerRefusal, decode_in_thread
from rl_megatron.errors import ConfigError, CorruptionError, EngineError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Completion, FinishReason, GenerationRequest, NamedVersion, token_limits
from rl_megatron.weights.boxes import Box
from rl_megatron.weights.checks.reports import ChecksumReport, merge_rank_reports
from rl_megatron.weights.layouts.recorded import Boxes

_LOW_FIRST = "schedule_low_priority_values_first"
_OVERFLOWS = (
    "--schedule-low-priority-values-first: SGLang 0.5.21 then gives /health the highest priority of 64 bits, to which "
    "its cache adds 1 where its scheduler overlaps, and ends; leave it out"
)


def priority_options(extra: Sequence[str]) -> tuple[str, ...]:
    """Returns the options for priorities, unless ``extra`` sets a policy. Raises ConfigError if ``extra`` puts lower
    priorities first, because servers then crash."""
    if option_value(extra, f"--{_LOW_FIRST.replace('_', '-')}") is not None:
        raise ConfigError(f"rollout.server.options has {_OVERFLOWS}")
    own = option_value(extra, "--schedule-policy") is not None
    return () if own else ("--enable-priority-scheduling", "--disable-priority-preemption")


KEYS = {
    **dict.fromkeys(("--tensor-parallel-size", "--tp-size", "--tp"), "tp"),
    **dict.fromkeys(("--pipeline-parallel-size", "--pp-size", "--pp"), "pp"),
    **dict.fromkeys(("--data-parallel-size", "--dp-size", "--dp", "--enable-dp-attention"), "dp"),
    **dict.fromkeys(("--expert-parallel-size", "--ep-size", "--ep"), "ep"),
    **dict.fromkeys(("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr"), "nodes"),
    **dict.fromkeys(("--modelopt-quant", "--quantize-and-serve", "--rl-quant-profile"), "quantization"),
    "--enable-deterministic-inference": "batch_invariant",
}
"""Option -> the key of ``rollout.server`` that sets it."""
REASONS = {
    "--tokenizer-worker-num": "its processes ask for no token, and have no path for aborts",
    "--json-model-override-args": "with those of the run no end-of-sequence token of the model's ends a completion",
    "--preferred-sampling-params": "requests would be sampled by what they do not say, as log-probs would not be",
    "--enable-eplb": MOVES_EXPERTS,
    "--elastic-ep-backend": "ranks leave and join while it serves, but pushes go to those of its start",
    "--ep-num-redundant-experts": "where a rank has an expert twice, pushes straight into ranks end the server",
    "--kt-weight-path": "experts on CPUs come from that folder, and no push reaches them",
}
"""Option -> the reason why servers cannot have it."""
VARIABLES = {
    "SGLANG_GRPC_PORT": "the server of gRPC that it opens asks for no token",
    "SGLANG_RUST_SERVER": "its server asks for no token",
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "log-probs would be those of temperature 1, not of what is sampled from",
    "SGLANG_MAX_NEW_TOKENS_LIMIT": "rollout.max_new_tokens is the limit; use that key",
    "SGLANG_SIMULATE_ACC_LEN": "it accepts proposed tokens that the model did not sample",
}
"""Variable -> the reason why servers cannot have it."""

_WATCHDOG_SECONDS = 300.0  # SGLang's default
_PARTS = 8
"""The parts of a pause, each with the limit ``timeout_seconds``: its begin, its end, and three requests for each load
(draft layer, model)."""

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
    """Returns the options for the server's ranks, and for this node of several."""
    out = ["--tp-size", str(options.tp * options.dp)]  # SGLang's tp-size counts all ranks of a stage
    if options.dp > 1:
        out += ["--dp-size", str(options.dp), "--enable-dp-attention"]
    if options.ep > 1:
        out += ["--ep-size", str(options.ep)]
    if options.num_nodes > 1:
        out += ["--nnodes", str(options.num_nodes), "--node-rank", str(options.node_rank)]
        out += ["--dist-init-addr", f"{options.head_address}:{options.port + 1}"]  # the ports after it too
    return tuple(out)


def push_safe_options(options: StartOptions, shape: ModelShape) -> tuple[str, ...]:
    """Returns options without which a push could end the server. ``options.extra`` follows and can override them.

    SGLang 0.5.21's watchdog takes a pause that keeps running requests for one step. On Blackwell it chooses experts'
    kernels for unquantized weights that keep these in blocks, and its loader cannot write to the blocks again. All
    other GPUs use Triton's kernels. gpt-oss has other kernels on each.
    """
    watchdog = ("--watchdog-timeout", str(max(_WATCHDOG_SECONDS, _PARTS * options.timeout_seconds)))
    written_over = options.device == "cpu" or options.quantization != "none" or shape.family == "gpt_oss"
    if written_over or not shape.num_experts or option_value(options.extra_options, "--moe-a2a-backend") is not None:
        return watchdog
    return (*watchdog, "--moe-runner-backend", "triton")


def cores(ranks: int) -> str:
    """Returns this machine's cores, divided among the ranks."""
    found = sorted(os.sched_getaffinity(0))
    each = max(1, len(found) // ranks)
    return "|".join(",".join(str(found[(rank * each + i) % len(found)]) for i in range(each)) for rank in range(ranks))


T = TypeVar("T")

_NEEDED = (
    *("/generate", "/begin_weight_update", "/update_weights_from_tensor", "/update_weight_version"),
    *("/pause_generation", "/server_info", "/release_memory_occupation", "/resume_memory_occupation"),
    *("/v1/loads", "/rl_megatron_abort"),
)
_INVARIANT_LATENTS = ("fa3", "fa4", "triton")
_INVARIANT = (*_INVARIANT_LATENTS, "flashinfer")
"""Attention on Nvidia's GPUs that SGLang 0.5.21 takes with --enable-deterministic-inference (arg_groups/choices.py)."""
_ATTENTION = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")
_LOADER = "rl_megatron.engines.sglang.worker.load"
_OTHERS = 8  # offset past the ports of the ranks' store and of dp attention
_BLACKWELL = 10.0  # compute capability
_MARGIN = 8  # tokens of its context that a request may not use
_IDLE_SECONDS = 60.0  # limit until a scheduler without requests is idle; SGLang checks for canceled ones every 4 s


class SGLangAdapter(ForeignEngine):
    """The adapter for SGLang. Its log-probs are from before top-p, top-k and min-p (sampler.py): for evaluations, and
    for requests with sampling masks, whose log-probs are over these."""

    name = "SGLang"
    module = "sglang"
    tested_version = "0.5.21"
    renormalizes_top_p = False
    variables = VARIABLES

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._counters = tuple(name for one in self.hooks for name in one.counters)

    @override
    def command(self, options: StartOptions) -> StartCommand:
        refuse_start(options, self._shape)
        cached, folder = options.max_num_seqs * (options.max_length + _MARGIN), str(options.model_folder)
        more = [word for one in self.hooks for word in one.arguments(options.features.get(one.name), options.device)]
        return StartCommand(
            arguments=(
                str(options.python),
                *("-P", "-m", "rl_megatron.engines.sglang.server"),
                # The model's end-of-sequence tokens would end completions, although a request does not name them.
                *("--model-path", str(options.config_folder), "--json-model-override-args", '{"eos_token_id": null}'),
                # A feature that needs another loader names it, and puts the loader's files into the bare folder.
                *(() if "--load-format" in more else ("--load-format", "dummy")),
                *("--custom-weight-loader", _LOADER),
                # Other nodes answer /health, always with 200, and may be on this machine.
                *("--host", options.host, "--port", str(options.port + (_OTHERS if options.node_rank else 0))),
                *("--dtype", options.dtype, *degrees(options), *push_safe_options(options, self._shape)),
                *(
                    "--context-length",
                    str(options.max_length + _MARGIN),
                    "--max-running-requests",
                    str(options.max_num_seqs),
                ),
                *("--sleep-on-idle", *(("--tokenizer-path", folder) if options.stops else ("--skip-tokenizer-init",))),
                *(("--enable-memory-saver",) if options.colocated and options.device != "cpu" else ()),
                *((*ON_CPU, "--max-total-tokens", str(cached)) if options.device == "cpu" else ()),
                *(("--mem-fraction-static", str(options.memory_fraction)) if options.memory_fraction else ()),
                *(("--enable-deterministic-inference",) if options.batch_invariant else ()),
                *more,
                *priority_options(options.extra_options),
                *options.extra_options,
            ),
            environment={
                "HF_HUB_OFFLINE": "1",
                # Kernels for CPUs use these in the name of the memory that a server's ranks share.
                "MASTER_ADDR": options.head_address,
                "MASTER_PORT": str(options.port),
                # Otherwise each rank needs its own NUMA node.
                **(
                    {"SGLANG_CPU_OMP_THREADS_BIND": cores(options.ranks // options.num_nodes)}
                    if options.device == "cpu"
                    else {}
                ),
                "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # the margin may lie beyond the model's positions
                **hook_variables(self.hooks, options),
            },
        )

    @override
    def options_problem(self, extra: Sequence[str]) -> str:
        return refused_option(extra, keys=KEYS, hooks=self.hooks, reasons=REASONS)

    @override
    def batch_problem(self, extra: Sequence[str]) -> str:
        known = _INVARIANT if self._shape.latent is None else _INVARIANT_LATENTS
        for option in _ATTENTION:
            given = option_value(extra, option)
            if given is not None and given not in known:
                return (
                    f"rollout.server.batch_invariant=true with {option} {given}: SGLang 0.5.21 has no kernel of it for "
                    f"model_type={self._shape.family!r} that does not depend on the batch, but of {', '.join(known)}; "
                    "set one of them, or leave it to SGLang"
                )
        return ""

    @override
    def gpu_problem(self, quantization: str, extra: Sequence[str], capability: float) -> str:
        if quantization != "fp8" or capability < _BLACKWELL or option_value(extra, "--fp8-gemm-backend") is not None:
            return ""
        return (
            "rollout.server.quantization=fp8: on Blackwell, SGLang 0.5.21 packs the scales of float8 for DeepGEMM and "
            "cannot load others (sglang#9855); set rollout.server.options='--fp8-gemm-backend triton', or rollout=vllm"
        )

    @override
    async def describe(self, server: Server) -> ServerInfo:
        paths = (await server.get("/openapi.json"))["paths"]
        problems = [f"it lacks {path}; start it as docs/engines.md shows" for path in _NEEDED if path not in paths]
        if not problems and not await self.tokens(server):
            problems.append("its /v1/loads is empty; look for 'load snapshot writer' in its log")
        info, settings = await server.get("/model_info"), await server.get("/server_info")
        features, more = describe_settings(self.hooks, settings)
        # It rounds a prompt up to whole pages, and leaves one page and a token free (`max_new_tokens_for_memory`).
        # If its cache is full, it ends a completion as if it had all requested tokens.
        most_cached = int(settings["max_total_num_tokens"]) - 2 * int(settings["page_size"])
        if settings.get(_LOW_FIRST):
            problems.append(f"it has {_OVERFLOWS}")
        return ServerInfo(
            version=str(settings["version"]),
            dtype=str(settings["dtype"]),
            architecture=",".join(info["architectures"] or ()),
            max_length=min(int(settings["context_length"] or _MARGIN) - _MARGIN, most_cached),
            problems=(*problems, *more),
            features=features,
            has_priorities=bool(settings.get("enable_priority_scheduling")),
        )

    @override
    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        p = request.params
        limits, masked = token_limits(p), "kept" in request.columns
        if limits and request.exact_logprobs and not masked:
            raise EngineError(f"SGLang computes log-probs before {', '.join(limits)} is applied; set rollout.top_p=1")
        sampling = {
            "temperature": p.temperature,
            **limits,
            "max_new_tokens": p.max_new_tokens,
            "stop_token_ids": list(p.stop_token_ids),
            "ignore_eos": not p.stop_token_ids,  # otherwise it would ignore these too
            "skip_special_tokens": False,
            **({"stop": p.stop, "no_stop_trim": True} if p.stop else {}),
        }
        places = range(request.num_completions)
        body = {
            "rid": names(request, request_id),
            "input_ids": [request.token_ids for _ in places],  # the radix cache shares the prompt
            # Read only in its deterministic mode, where a missing seed is 42 and a group's completions are equal.
            "sampling_params": [sampling | {"sampling_seed": completion_seed(p.seed, place)} for place in places],
            "return_logprob": True,
            "return_routed_experts": "routes" in request.columns,
            **({"return_sampling_mask": True} if masked else {}),
            **labels(server, request.start_version or 0),
            **version_fields(request.named),
        }
        answers = await server.post_sampling("/generate", body, partial(read_sampled, counters=self._counters))
        first = 0
        for hooks in self.hooks:
            last = first + len(hooks.counters)
            hooks.answered(server, [one.counts[first:last] for one in answers])
            first = last
        completions = []
        for answer in answers:
            count = len(answer.token_ids)
            if "routes" in request.columns and answer.routes is None and answer.finish_reason == "abort":
                count = 0  # it had lost its cache, and so its routes: its tokens are sampled again
            if masked and answer.finish_reason == "abort":
                count = min(count, len(answer.kept or ()))
            spans = ((span.start, self.labels.version(span.version)) for span in answer.spans[: count or 1])
            completions.append(self._completion(answer, request, spans, count, read_routes))
        return completions

    @override
    async def score(self, server: Server, text: Sequence[int], named: NamedVersion | None = None) -> list[float]:
        body = scoring(server, text) | version_fields(named)
        logprobs = await server.post_sampling("/generate", body, read_scored)
        if len(logprobs) != len(text) - 1:
            raise AttemptFailed(f"{server.url}: it returned {len(logprobs)} log-probs for {len(text) - 1} tokens")
        return logprobs

    @override
    async def score_top(self, server: Server, text: Sequence[int], top: int) -> TopLogprobs:
        body = {**scoring(server, text), "top_logprobs_num": top}
        read = partial(read_judged, length=len(text), top=top)
        return await server.post_sampling("/generate", body, read, is_extra=True)

    @override
    async def abort(self, server: Server, request: GenerationRequest, request_id: str) -> None:
        await server.post("/rl_megatron_abort", {"names": names(request, request_id)})

    @override
    async def abort_all(
        self, server: Server, requests: Mapping[str, GenerationRequest], turn: Callable[[], Awaitable[None]]
    ) -> None:
        named = [each for name, request in requests.items() for each in names(request, name)]
        await server.post("/rl_megatron_abort", {"names": named})

    @override
    async def tokens(self, server: Server) -> tuple[tuple[int, int], ...]:
        """Returns each scheduler's last record of (prompt tokens since the start, tokens in the cache)."""
        loads = (await server.get("/v1/loads"))["loads"]
        return tuple((int(load["total_prefill_uncached_tokens"]), int(load["num_used_tokens"])) for load in loads)

    @override
    async def gauges(self, server: Server) -> EngineGauges:
        """Returns the gauges that its schedulers last recorded."""
        loads = (await server.get("/v1/loads"))["loads"]
        return EngineGauges(
            running=sum(int(load["num_running_reqs"]) for load in loads),
            waiting=sum(int(load["num_waiting_reqs"]) for load in loads),
            cache=sum(float(load["token_usage"]) for load in loads) / len(loads),
            tokens_per_second=sum(float(load["gen_throughput"]) for load in loads),
        )

    @override
    async def pause(self, server: Server, mode: RunningRequests) -> None:
        """Pauses. Waiting requests lose their cache, unless ``mode`` keeps it."""
        theirs = {"recompute": "retract", "keep_cache": "in_place", "abort": "abort"}
        await server.post("/pause_generation", {"mode": theirs[mode]})

    @override
    async def resume(self, server: Server) -> None:
        await server.post("/continue_generation", {})

    @override
    async def load(
        self, server: Server, path: Path, version: int, *, private: Collection[str], straight: bool = False
    ) -> list[ChecksumReport]:
        order = {"do": "receive" if straight else "load", "version": version, "private": sorted(private)}
        return await self._reports(server, path, order, label=self.labels.candidate(version))

    @override
    async def boxes(self, server: Server, path: Path) -> list[Boxes]:
        return await self._order(server, path, {"do": "boxes"}, partial(decode_as, form=dict[str, Box]))

    @override
    async def join(self, server: Server, path: Path, rendezvous: Mapping[str, object], first: int) -> None:
        order = {"do": "join", "place": rendezvous, "first": first}
        await self._order(server, path, order, partial(decode_as, form=dict[str, object]))

    async def _order(
        self,
        server: Server,
        path: Path,
        order: Mapping[str, object],
        read: Callable[[bytes], T],
        *,
        runner: str = "target",
        label: str | None = None,
    ) -> list[T]:
        """Returns each rank's answer by ``read``, from files in `Server.answers`: an error would end the server.

        It is for the model, or a feature's model by ``runner``: an order to both would write each file twice. Without
        a pause, SGLang would execute it only when all running requests have ended, and accept none until then.
        """
        async with self._paused(server):
            ranks = int((await server.get("/server_info"))["tp_size"])
            answer = (server.answers or path.parent) / f"held-{uuid.uuid4().hex}"
            payload = encode_request({**order, "path": str(path), "answer": str(answer), "runner": runner})
            flushes = order["do"] in ("load", "receive") and server.salt is None
            body = {"serialized_named_tensors": [payload] * ranks, "load_format": _LOADER, "flush_cache": flushes}
            async with update(server, to := {"selector": runner}):
                await server.post("/update_weights_from_tensor", {**body, **to, "weight_version": label})
        said = await asyncio.to_thread(loaders_answers, answer, ranks)
        return [
            await decode_in_thread(partial(read_loaders, read=read, rank=rank), one) for rank, one in enumerate(said)
        ]

    @override
    async def relabel(self, server: Server, version: int) -> None:
        await server.post(
            "/update_weight_version", {"new_version": self.labels.verified(version), "abort_all_requests": False}
        )

    @override
    async def release_memory(self, server: Server) -> None:
        """Waits until the scheduler is idle, because a busy one ends the server. It becomes idle milliseconds after it
        has reported the last token, and seconds after a client has canceled a request."""
        await server.post_for_text(f"/flush_cache?timeout={_IDLE_SECONDS:g}", None)
        await server.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    @override
    async def resume_memory(self, server: Server, what: Literal["weights", "cache"]) -> None:
        tags = [{"weights": "weights", "cache": "kv_cache"}[what]]
        await server.post("/resume_memory_occupation", {"tags": tags})

    @override
    async def rank_reports(self, server: Server, path: Path, private: Collection[str] = ()) -> list[ChecksumReport]:
        return await self._reports(server, path, {"do": "held", "private": sorted(private)})

    async def _reports(
        self, server: Server, path: Path, order: Mapping[str, object], label: str | None = None
    ) -> list[ChecksumReport]:
        """Returns each rank's report on its models. The policy is last: its label shows that a server has all."""
        order, read = {**order, "known": self._reader.known}, self._reader.read
        more = [model for one in self.hooks for model in one.models(server)]
        said = [await self._order(server, path, order, read, runner=model) for model in more]
        said.append(await self._order(server, path, order, read, label=label))
        return [merge_rank_reports(of_rank) for of_rank in zip(*said, strict=True)]


def names(request: GenerationRequest, request_id: str) -> list[str]:
    """Returns the name of each of the request's completions."""
    return [f"{request_id} {number}" for number in range(request.num_completions)]


def scoring(server: Server, text: Sequence[int]) -> dict[str, object]:
    """Returns a request for the log-probs of a text. It samples one token."""
    sampling = {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True}
    given = {"input_ids": list(text), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    return {**given, **labels(server, 0)}


def labels(server: Server, birth: int) -> dict[str, object]:
    """Returns the priority and the cache key. Higher priorities, and so older requests, go first. The key hides
    prefixes that other weights cached."""
    first = {"priority": -birth} if server.priorities else {}
    return {**first, **({} if server.salt is None else {"extra_key": server.salt})}


def encode_request(order: Mapping[str, object]) -> str:
    """Encodes an order as the name of an empty tensor, in the form of /update_weights_from_tensor for one rank."""
    return base64.b64encode(pickle.dumps([(json.dumps(order), torch.empty(0))])).decode()


@asynccontextmanager
async def update(server: Server, to: Mapping[str, str]) -> AsyncIterator[None]:
    """Context of an update of the weights that ``to`` selects. It first ends a killed run's: SGLang allows one."""
    try:
        await server.post("/begin_weight_update", to)
    except ServerRefusal:
        with contextlib.suppress(ServerRefusal):
            await server.post("/end_weight_update", {})
        await server.post("/begin_weight_update", to)
    try:
        yield
    finally:
        await server.post("/end_weight_update", {})


def loaders_answers(path: Path, ranks: int) -> list[bytes]:
    """Reads and removes the answer file of each rank's loader: ``path``, a dot and the rank's number.

    Raises EngineError if one is missing.
    """
    files = [path.with_name(f"{path.name}.{rank}") for rank in range(ranks)]
    try:
        said = [file.read_bytes() for file in files]
    except FileNotFoundError as error:
        raise EngineError(
            f"a loader's answer is not here: {error.filename}; each node of the server must see {path.parent}, and be "
            "able to write there: set weights.folder to a folder that this machine and the server see"
        ) from error
    for file in files:
        file.unlink()
    return said


class _Token(msgspec.Struct, array_like=True, gc=False):
    """[log-prob, token id, text]."""

    logprob: float
    token: int


class _ScoredToken(msgspec.Struct, array_like=True, gc=False):
    logprob: float | None  # None for the first token


class _Finish(msgspec.Struct):
    type: FinishReason


class _Meta(msgspec.Struct):
    output_token_logprobs: list[_Token]
    finish_reason: _Finish
    weight_version: Any = None
    weight_versions: list[LabeledSpan] | None = None
    routed_experts: str | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None


class _ScoredMeta(msgspec.Struct):
    input_token_logprobs: list[_ScoredToken]


class _Scored(msgspec.Struct):
    meta_info: _ScoredMeta


class _TopMeta(_ScoredMeta):
    input_top_logprobs: list[list[_Token] | None] = []  # the first is None; without ``top`` there is no list


class _TopScored(msgspec.Struct):
    meta_info: _TopMeta


class _Refused(msgspec.Struct):
    error: str | None = None


def read_loaders(text: bytes, *, read: Callable[[bytes], T], rank: int) -> T:
    """Decodes the answer of a rank's loader with ``read``. Raises CorruptionError with its error, and EngineError."""
    try:
        if (error := decode_as(text, _Refused).error) is not None:
            raise CorruptionError(f"rank {rank}: {error}")
        return read(text)
    except ValueError as error:
        raise EngineError(f"rank {rank}: its loader's answer has another form: {error!s:.300}") from error


@cache
def _sampled_form(counters: tuple[str, ...]) -> Any:
    meta = msgspec.defstruct("_CountedMeta", [(name, int, 0) for name in counters], bases=(_Meta,))
    return list[msgspec.defstruct("_Sampled", [("meta_info", meta)])]  # type: ignore[misc]


def read_sampled(text: bytes, counters: tuple[str, ...] = ()) -> list[SampledColumns]:
    """Returns the completions, in the requested order, with additional integer fields (``counters``). Raises ValueError
    like `decode_as`."""
    said = [one.meta_info for one in decode_as(text, _sampled_form(counters))]
    return [_answer(one, tuple(getattr(one, name) for name in counters)) for one in said]


def read_scored(text: bytes) -> list[float]:
    """Returns log-probs of the tokens after the first that have one. Raises ValueError like `decode_as`."""
    said = decode_as(text, _Scored).meta_info.input_token_logprobs[1:]
    return [one.logprob for one in said if one.logprob is not None]


def read_judged(answer: bytes, *, length: int, top: int) -> TopLogprobs:
    """Returns the scores of a text of ``length`` tokens. Raises ValueError like `decode_as`, and if a position has
    fewer than ``top`` probable tokens, as with a smaller vocabulary."""
    said = decode_as(answer, _TopScored).meta_info
    logprobs = [one.logprob for one in said.input_token_logprobs[1:] if one.logprob is not None]
    places = [place or [] for place in said.input_top_logprobs[1:]] if top else [[] for _ in logprobs]
    if len(logprobs) != length - 1 or len(places) != length - 1:
        raise ValueError(f"{len(logprobs)} log-probs and {len(places)} places of {length - 1}")
    if any(len(place) != top for place in places):
        raise ValueError(f"a place has {min(map(len, places))} probable tokens, {top} were asked for")
    shape = len(places), top
    return TopLogprobs(
        logprobs=logprob_column(logprobs),
        top_ids=np.array([one.token for place in places for one in place], np.int32).reshape(shape),
        top_logprobs=np.array([one.logprob for place in places for one in place], np.float32).reshape(shape),
    )


def read_routes(given: str | None, positions: int, shape: ModelShape) -> NDArray[Any]:
    """Decodes routes: little-endian int32 in base64, without a shape."""
    try:
        experts = np.frombuffer(base64.b64decode(given or ""), "<i4")
    except ValueError as error:
        raise EngineError(f"its routes are not an array: {error!s:.200}") from error
    return check_routes(experts, positions=positions, shape=shape)


def _answer(meta: _Meta, counts: tuple[int, ...]) -> SampledColumns:
    tokens, masks = meta.output_token_logprobs, meta.output_token_sampling_mask
    token_ids, logprobs = token_column([one.token for one in tokens]), [one.logprob for one in tokens]
    if masks is not None:
        logprobs = meta.output_token_sampling_logprobs or []
        if len(logprobs) != len(masks):
            raise ValueError(f"{len(logprobs)} log-probs over {len(masks)} sampling masks")
    return SampledColumns(
        token_ids=token_ids,
        logprobs=logprob_column(logprobs),
        kept=None if masks is None else read_kept(masks, token_ids),
        finish_reason=meta.finish_reason.type,
        spans=meta.weight_versions or [LabeledSpan(start=0, version=meta.weight_version)],
        routes=meta.routed_experts,
        counts=counts,
    )
