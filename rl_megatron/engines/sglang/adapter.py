"""The adapter for SGLang 0.5.21: its native generate endpoint, and weight updates by a loader of ours."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from typing_extensions import override

from rl_megatron.config.sections.rollout import RunningRequests
from rl_megatron.engines.adapter import (
    AdapterPlaces,
    Command,
    Description,
    EngineGauges,
    ForeignEngine,
    StartOptions,
    described_by,
    refused_option,
    value_given,
)
from rl_megatron.engines.answers import Judged, as_form, completion_seed
from rl_megatron.engines.http import AttemptFailed, Server, read_beside
from rl_megatron.engines.sglang import forms
from rl_megatron.engines.sglang.options import (
    KEYS,
    ON_CPU,
    REASONS,
    VARIABLES,
    cores,
    degrees,
    load_format,
    most_cached,
    outliving_pushes,
    priority_options,
    priority_problems,
    refuse_start,
    sglang_lora_options,
    sglang_lora_problem,
    sglang_lora_request,
)
from rl_megatron.errors import EngineError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Completion, GenerationRequest, LoadedAdapters, limits_of
from rl_megatron.weights.boxes import Box
from rl_megatron.weights.checks.reports import Report, of_one_rank
from rl_megatron.weights.layouts.recorded import Boxes

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
_OTHERS = 8  # behind the ports of the ranks' store and of dp attention
_BLACKWELL = 10.0  # compute capability
_MARGIN = 8  # tokens of its context that a request may not use
_IDLE_SECONDS = 60.0  # until a scheduler is idle without requests; SGLang looks for cancelled ones every 4 s


class SGLangAdapter(ForeignEngine):
    """SGLang's log-probs come from before top-p, top-k and min-p (sampler.py), so these are for evaluations alone."""

    name = "SGLang"
    module = "sglang"
    tested = "0.5.21"
    renormalises_top_p = False
    variables = VARIABLES

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self._counters = tuple(name for one in self.hooks for name in one.counters)

    @override
    def command(self, options: StartOptions) -> Command:
        refuse_start(options, self._shape)
        cached, folder = options.slots * (options.max_length + _MARGIN), str(options.model_folder)
        return Command(
            arguments=(
                str(options.python),
                *("-P", "-m", "rl_megatron.engines.sglang.server"),
                # The model's end-of-sequence tokens would end completions, although a request does not name them.
                *("--model-path", str(options.bare_folder), "--json-model-override-args", '{"eos_token_id": null}'),
                *("--load-format", load_format(options), "--custom-weight-loader", _LOADER),
                # Other nodes answer /health, always with 200, and may be on this machine.
                *("--host", options.host, "--port", str(options.port + (_OTHERS if options.node else 0))),
                *("--dtype", options.dtype, *degrees(options), *outliving_pushes(options, self._shape)),
                *("--context-length", str(options.max_length + _MARGIN), "--max-running-requests", str(options.slots)),
                *("--sleep-on-idle", *(("--tokenizer-path", folder) if options.stops else ("--skip-tokenizer-init",))),
                *(("--enable-memory-saver",) if options.colocated and options.device != "cpu" else ()),
                *((*ON_CPU, "--max-total-tokens", str(cached)) if options.device == "cpu" else ()),
                *(("--mem-fraction-static", str(options.memory_fraction)) if options.memory_fraction else ()),
                *(("--enable-deterministic-inference",) if options.batch_invariant else ()),
                *sglang_lora_options(options),
                *(word for one in self.hooks for word in one.arguments(options.features.get(one.name), options.device)),
                *priority_options(options.extra),
                *options.extra,
            ),
            environment={
                "HF_HUB_OFFLINE": "1",
                # Kernels for CPUs name the memory that a server's ranks share by them.
                "MASTER_ADDR": options.head,
                "MASTER_PORT": str(options.port),
                # Else each rank needs its own NUMA node.
                **(
                    {"SGLANG_CPU_OMP_THREADS_BIND": cores(options.ranks // options.nodes)}
                    if options.device == "cpu"
                    else {}
                ),
                "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # the margin may lie beyond the model's positions
            },
        )

    @override
    def options_problem(self, extra: Sequence[str]) -> str:
        return refused_option(extra, keys=KEYS, hooks=self.hooks, reasons=REASONS)

    @override
    def batch_problem(self, extra: Sequence[str]) -> str:
        known = _INVARIANT if self._shape.latent is None else _INVARIANT_LATENTS
        for option in _ATTENTION:
            given = value_given(extra, option)
            if given is not None and given not in known:
                return (
                    f"rollout.server.batch_invariant=true with {option} {given}: SGLang 0.5.21 has no kernel of it for "
                    f"model_type={self._shape.family!r} that does not depend on the batch, but of {', '.join(known)}; "
                    "set one of them, or leave it to SGLang"
                )
        return ""

    @override
    def gpu_problem(self, quantization: str, extra: Sequence[str], capability: float) -> str:
        if quantization != "fp8" or capability < _BLACKWELL or value_given(extra, "--fp8-gemm-backend") is not None:
            return ""
        return (
            "rollout.server.quantization=fp8: on Blackwell, SGLang 0.5.21 packs the scales of float8 for DeepGEMM and "
            "cannot load others (sglang#9855); set rollout.server.options='--fp8-gemm-backend triton', or rollout=vllm"
        )

    @override
    def adapter_problem(self, places: AdapterPlaces, device: str, dp: int) -> str:
        return sglang_lora_problem(places, self._shape, device, dp)

    @override
    async def describe(self, server: Server) -> Description:
        paths = (await server.get("/openapi.json"))["paths"]
        problems = [f"it lacks {path}; start it as docs/engines.md shows" for path in _NEEDED if path not in paths]
        if not problems and not await self.tokens(server):
            problems.append("its /v1/loads is empty; look for 'load snapshot writer' in its log")
        info, settings = await server.get("/model_info"), await server.get("/server_info")
        features, more = described_by(self.hooks, settings)
        return Description(
            version=str(settings["version"]),
            dtype=str(settings["dtype"]),
            architecture=",".join(info["architectures"] or ()),
            # Behind what its cache does not hold of a sequence, it ends a completion as if it had all tokens asked for.
            max_length=min(int(settings["context_length"] or _MARGIN) - _MARGIN, most_cached(settings)),
            problems=(*problems, *more, *priority_problems(settings)),
            features=features,
            priorities=bool(settings.get("enable_priority_scheduling")),
        )

    @override
    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        p = request.params
        limits = limits_of(p)
        if limits and request.exact_logprobs:
            raise EngineError(f"SGLang computes log-probs before {', '.join(limits)} is applied; set rollout.top_p=1")
        sampling = {
            "temperature": p.temperature,
            **limits,
            "max_new_tokens": p.max_new_tokens,
            "stop_token_ids": list(p.stop_token_ids),
            "ignore_eos": not p.stop_token_ids,  # it would ignore these too
            "skip_special_tokens": False,
            **({"stop": p.stop, "no_stop_trim": True} if p.stop else {}),
        }
        places = range(request.num_completions)
        body = {
            "rid": forms.names(request, request_id),
            "input_ids": [request.token_ids for _ in places],  # the radix cache shares the prompt
            # Read in its deterministic mode alone, where a seed that is not given is 42, and a group's answers are one.
            "sampling_params": [sampling | {"sampling_seed": completion_seed(p.seed, place)} for place in places],
            "return_logprob": True,
            "return_routed_experts": "routes" in request.columns,
            **forms.labels(server, request.birth or 0),
            **sglang_lora_request(request.adapters),
        }
        answers = await server.sampled("/generate", body, partial(forms.read_sampled, counters=self._counters))
        first = 0
        for hooks in self.hooks:
            last = first + len(hooks.counters)
            hooks.answered(server, [one.counts[first:last] for one in answers])
            first = last
        completions = []
        for answer in answers:
            count = len(answer.token_ids)
            if "routes" in request.columns and answer.routes is None and answer.finish_reason == "abort":
                count = 0  # it had lost its place in the cache, and its routes with it: its tokens are sampled again
            spans = ((span.start, self.labels.version(span.version)) for span in answer.spans[: count or 1])
            completions.append(self._completion(answer, request, spans, count, forms.read_routes))
        return completions

    @override
    async def _scored(self, server: Server, text: Sequence[int], adapters: LoadedAdapters | None) -> list[float]:
        body = forms.scoring(server, text) | sglang_lora_request(adapters)
        logprobs = await server.sampled("/generate", body, forms.read_scored)
        if len(logprobs) != len(text) - 1:
            raise AttemptFailed(f"{server.url}: it returned {len(logprobs)} log-probs for {len(text) - 1} tokens")
        return logprobs

    @override
    async def judge(self, server: Server, text: Sequence[int], top: int) -> Judged:
        body = {**forms.scoring(server, text), "top_logprobs_num": top}
        read = partial(forms.read_judged, length=len(text), top=top)
        return await server.sampled("/generate", body, read, beside=True)

    @override
    async def abort(self, server: Server, request: GenerationRequest, request_id: str) -> None:
        await server.post("/rl_megatron_abort", {"names": forms.names(request, request_id)})

    @override
    async def abort_all(
        self, server: Server, requests: Mapping[str, GenerationRequest], turn: Callable[[], Awaitable[None]]
    ) -> None:
        names = [each for name, request in requests.items() for each in forms.names(request, name)]
        await server.post("/rl_megatron_abort", {"names": names})

    @override
    async def tokens(self, server: Server) -> tuple[tuple[int, int], ...]:
        """Prompt tokens since the start and tokens in the cache, as each scheduler last recorded them."""
        loads = (await server.get("/v1/loads"))["loads"]
        return tuple((int(load["total_prefill_uncached_tokens"]), int(load["num_used_tokens"])) for load in loads)

    @override
    async def gauges(self, server: Server) -> EngineGauges:
        """As its schedulers last recorded them."""
        loads = (await server.get("/v1/loads"))["loads"]
        return EngineGauges(
            running=sum(int(load["num_running_reqs"]) for load in loads),
            waiting=sum(int(load["num_waiting_reqs"]) for load in loads),
            cache=sum(float(load["token_usage"]) for load in loads) / len(loads),
            tokens_per_second=sum(float(load["gen_throughput"]) for load in loads),
        )

    @override
    async def pause(self, server: Server, mode: RunningRequests) -> None:
        """Requests that wait lose their cache, unless it is kept."""
        theirs = {"recompute": "retract", "keep_cache": "in_place", "abort": "abort"}
        await server.post("/pause_generation", {"mode": theirs[mode]})

    @override
    async def resume(self, server: Server) -> None:
        await server.post("/continue_generation", {})

    @override
    async def load(
        self,
        server: Server,
        path: Path,
        version: int,
        *,
        private: Collection[str],
        straight: bool = False,
    ) -> list[Report]:
        order = {"do": "receive" if straight else "load", "version": version, "private": sorted(private)}
        return await self._reports(server, path, order, label=self.labels.candidate(version))

    @override
    async def boxes(self, server: Server, path: Path) -> list[Boxes]:
        return await self._order(server, path, {"do": "boxes"}, partial(as_form, form=dict[str, Box]))

    @override
    async def join(self, server: Server, path: Path, rendezvous: Mapping[str, object], first: int) -> None:
        order = {"do": "join", "place": rendezvous, "first": first}
        await self._order(server, path, order, partial(as_form, form=dict[str, object]))

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
        """The loader's answer on each rank by ``read``, in files of `Server.answers`: an error would end the server.

        Of the model, or with another ``runner`` of a feature's: an order to both would write each file twice.
        Not at a pause, SGLang would carry it out when all running requests have ended, and take none until then.
        """
        async with self._paused(server):
            ranks = int((await server.get("/server_info"))["tp_size"])
            answer = (server.answers or path.parent) / f"held-{uuid.uuid4().hex}"
            payload = forms.packed({**order, "path": str(path), "answer": str(answer), "runner": runner})
            flushes = order["do"] in ("load", "receive") and server.salt is None
            body = {"serialized_named_tensors": [payload] * ranks, "load_format": _LOADER, "flush_cache": flushes}
            async with forms.update(server, to := {"selector": runner}):
                await server.post("/update_weights_from_tensor", {**body, **to, "weight_version": label})
        said = await asyncio.to_thread(forms.loaders_answers, answer, ranks)
        return [
            await read_beside(partial(forms.read_loaders, read=read, rank=rank), one) for rank, one in enumerate(said)
        ]

    @override
    async def relabel(self, server: Server, version: int) -> None:
        await server.post(
            "/update_weight_version", {"new_version": self.labels.verified(version), "abort_all_requests": False}
        )

    @override
    async def release(self, server: Server) -> None:
        """SGLang's scheduler ends its server if it is not idle then. It becomes idle milliseconds after it has reported
        the last token, and seconds after a client has cancelled a request."""
        await server.told(f"/flush_cache?timeout={_IDLE_SECONDS:g}", None)
        await server.post("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})

    @override
    async def reclaim(self, server: Server, what: Literal["weights", "cache"]) -> None:
        tags = [{"weights": "weights", "cache": "kv_cache"}[what]]
        await server.post("/resume_memory_occupation", {"tags": tags})

    @override
    async def held(self, server: Server, path: Path, private: Collection[str] = ()) -> list[Report]:
        return await self._reports(server, path, {"do": "held", "private": sorted(private)})

    async def _reports(
        self, server: Server, path: Path, order: Mapping[str, object], label: str | None = None
    ) -> list[Report]:
        """Each rank's, on its models; the policy's is the last: a label says that a server has all."""
        order, read = {**order, "known": self._reader.known}, self._reader.read
        more = [model for one in self.hooks for model in one.models(server)]
        said = [await self._order(server, path, order, read, runner=model) for model in more]
        said.append(await self._order(server, path, order, read, label=label))
        return [of_one_rank(of_rank) for of_rank in zip(*said, strict=True)]

    @override
    async def load_adapters(self, server: Server, adapters: LoadedAdapters, folder: Path) -> None:
        await server.post("/load_lora_adapter", {"lora_name": adapters.name, "lora_path": str(folder)})

    @override
    async def unload_adapters(self, server: Server, adapters: LoadedAdapters) -> None:
        await server.post("/unload_lora_adapter", {"lora_name": adapters.name})
