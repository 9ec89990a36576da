"""The adapter for vLLM 0.32.0: its token-in token-out endpoint and its weight update API."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

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
)
from rl_megatron.engines.answers import Judged, as_form
from rl_megatron.engines.http import AttemptFailed, Server
from rl_megatron.engines.vllm import forms
from rl_megatron.engines.vllm.options import (
    KEYS,
    REASONS,
    VARIABLES,
    attention_given,
    options_of_ranks,
    quantises,
    vllm_lora_options,
    vllm_lora_problem,
    vllm_lora_request,
)
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.types import Completion, GenerationRequest, LoadedAdapters, limits_of
from rl_megatron.weights.boxes import Box
from rl_megatron.weights.checks.reports import REPORT_FORM, Report
from rl_megatron.weights.layouts.recorded import Boxes

T = TypeVar("T")

_NEEDED = (
    *("/inference/v1/generate", "/start_weight_update", "/update_weight_version", "/collective_rpc", "/pause"),
    *("/sleep", "/wake_up"),
)
_INVARIANT = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "FLASH_ATTN_MLA", "TRITON_MLA")
"""Attention whose ``supports_batch_invariance`` is true in vLLM 0.32.0 (v1/attention/backends)."""
_TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:\{.*\})? (\S+)", re.MULTILINE)
_GAUGE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|generation_tokens_total)(?:\{.*\})? (\S+)",
    re.MULTILINE,
)


class VLLMAdapter(ForeignEngine):
    """Sends no seed: vLLM 0.32.0 crashes when a request with a seed resumes after a pause."""

    name = "vLLM"
    module = "vllm"
    tested = "0.32.0"
    renormalises_top_p = True
    temperatures = (0.01, 2.0)  # it raises lower ones to the first without an error
    variables = VARIABLES

    @override
    def command(self, options: StartOptions) -> Command:
        # Else a processor with AMX tiles uses kernels for latent attention that take bfloat16 alone.
        reference = options.device == "cpu" and self._shape.latent is not None and options.dtype != "bfloat16"
        return Command(
            arguments=(
                str(options.python),
                *("-P", "-m", "rl_megatron.engines.vllm.server"),
                *("--model", str(options.model_folder), "--served-model-name", "policy", "--load-format", "dummy"),
                *("--host", options.host, "--port", str(options.port)),
                *("--middleware", "rl_megatron.engines.engine_token.EngineToken"),
                *("--dtype", options.dtype, "--max-model-len", str(options.max_length)),
                *("--max-num-seqs", str(_slots_of_replica(options))),
                *options_of_ranks(options),
                *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
                *("--worker-extension-cls", "rl_megatron.engines.vllm.worker.WorkerExtension"),
                *("--weight-transfer-config", json.dumps({"backend": "rl_megatron_mirror"})),
                *("--enable-scale-out", "--disable-uvicorn-access-log", "--scheduling-policy", "priority"),
                *(("--enforce-eager",) if options.device == "cpu" else ()),  # CUDA graphs are for GPUs
                *(("--attention-backend", "CPU_MLA") if reference else ()),
                *("--shutdown-timeout", "5"),  # else its processes are killed, and leave shared memory behind
                *(("--enable-sleep-mode",) if options.colocated and options.device != "cpu" else ()),
                *(("--gpu-memory-utilization", str(options.memory_fraction)) if options.memory_fraction else ()),
                *vllm_lora_options(options.adapters),
                *(word for one in self.hooks for word in one.arguments(options.features.get(one.name), options.device)),
                *options.extra,
            ),
            environment={
                "VLLM_SERVER_DEV_MODE": "1",  # enables the weight update API
                "VLLM_API_KEY": "",  # overrides the user's: the middleware asks for our token at every path
                "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, where it runs on a CPU
                # Else every server binds its threads to the same cores, and each rank needs a NUMA node.
                **({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if options.device == "cpu" else {}),
                **({"VLLM_HOST_IP": options.host} if options.nodes > 1 else {}),
                **({"VLLM_BATCH_INVARIANT": "1"} if options.batch_invariant else {}),
                **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if options.adapters else {}),
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            },
        )

    @override
    def options_problem(self, extra: Sequence[str]) -> str:
        return refused_option(extra, keys=KEYS, hooks=self.hooks, reasons=REASONS) or quantises(extra)

    @override
    def batch_problem(self, extra: Sequence[str]) -> str:
        given = attention_given(extra)
        if given is None or given.upper() in _INVARIANT:
            return ""
        return (
            f"rollout.server.batch_invariant=true with --attention-backend {given}: vLLM 0.32.0 has no kernel of it "
            f"that does not depend on the batch, but of {', '.join(_INVARIANT)}; set one of them, or leave it to vLLM"
        )

    @override
    def adapter_problem(self, places: AdapterPlaces, device: str, dp: int) -> str:
        return vllm_lora_problem(places, self._shape, device)

    @override
    async def describe(self, server: Server) -> Description:
        paths = (await server.get("/openapi.json"))["paths"]
        problems = [f"it lacks {path}; start it as docs/engines.md shows" for path in _NEEDED if path not in paths]
        if not _TOKENS.search(await server.text("/metrics")):
            problems.append("it does not count its tokens; start it without --disable-log-stats")
        model = (await server.get("/v1/models"))["data"][0]
        found: dict[str, str] = {}
        if not problems:
            found = (await self._rpc(server, "rl_megatron_describe"))[0]
            if found["logprobs_mode"] != "processed_logprobs":
                problems.append(
                    f"its log-probs are {found['logprobs_mode']}; start it with --logprobs-mode processed_logprobs, "
                    "so that they belong to the distribution that it samples from"
                )
            if found.get("reports") != REPORT_FORM:
                problems.append("its rl_megatron reports weights in another form; start it with the trainer's version")
        return Description(
            version=(await server.get("/version"))["version"],
            dtype=found.get("dtype", "unknown"),
            architecture=found.get("architecture", "unknown"),
            max_length=int(model["max_model_len"]),
            problems=tuple(problems),
            priorities=found.get("policy") == "priority",
            features=described_by(self.hooks, found)[0],
        )

    @override
    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        p = request.params
        sampling = {
            "n": request.num_completions if p.temperature else 1,  # greedy completions are all equal
            "temperature": p.temperature,
            "top_p": p.top_p,
            **limits_of(p),
            "max_tokens": p.max_new_tokens,
            "stop_token_ids": list(p.stop_token_ids),
            "ignore_eos": True,  # the line above says what ends a completion
            "logprobs": 0,  # of the sampled token
            "detokenize": bool(p.stop),  # it looks for stop texts in the decoded text
            **({"stop": p.stop, "include_stop_str_in_output": True, "skip_special_tokens": False} if p.stop else {}),
        }
        body: dict[str, object] = {
            "request_id": request_id,
            "token_ids": request.token_ids,
            "sampling_params": sampling,
            **forms.salted(server),
            **vllm_lora_request(request.adapters),
        }
        if server.priorities:
            body["priority"] = request.birth or 0
        answers = await server.sampled("/inference/v1/generate", body, forms.read_sampled)
        completions = []
        for answer in answers:
            labelled = ((span.start, self.labels.version(span.version)) for span in answer.spans)
            count = len(answer.token_ids)  # without tokens it has no version
            completions.append(
                self._completion(answer, request, labelled if count else [(0, 0)], count, forms.read_routes)
            )
        return completions if p.temperature else completions * request.num_completions

    @override
    async def _scored(self, server: Server, text: Sequence[int], adapters: LoadedAdapters | None) -> list[float]:
        body = forms.scoring(server, text, 0) | vllm_lora_request(adapters)
        said = await server.sampled("/inference/v1/generate", body, forms.read_scored)
        if len(said) != len(text) - 1 or any(str(t) not in found for t, found in zip(text[1:], said, strict=True)):
            raise AttemptFailed(f"{server.url}: its prompt_logprobs do not belong to the given tokens")
        return [found[str(token)] for token, found in zip(text[1:], said, strict=True)]

    @override
    async def judge(self, server: Server, text: Sequence[int], top: int) -> Judged:
        read = partial(forms.read_judged, text=text, top=top)
        return await server.sampled("/inference/v1/generate", forms.scoring(server, text, top), read, beside=True)

    @override
    async def abort(self, server: Server, request: GenerationRequest, request_id: str) -> None:
        await server.post("/abort_requests", forms.aborting([request_id]))

    @override
    async def abort_all(
        self, server: Server, requests: Mapping[str, GenerationRequest], turn: Callable[[], Awaitable[None]]
    ) -> None:
        await server.post("/abort_requests", forms.aborting(requests))

    @override
    async def tokens(self, server: Server) -> float:
        """The number of prompt tokens and sampled tokens since the server started."""
        return sum(float(value) for value in _TOKENS.findall(await server.text("/metrics")))

    @override
    async def gauges(self, server: Server) -> EngineGauges:
        found = dict[str, list[float]]()
        for name, value in _GAUGE.findall(await server.text("/metrics")):
            found.setdefault(name, []).append(float(value))  # of each data-parallel rank
        return EngineGauges(
            running=int(sum(found["num_requests_running"])),
            waiting=int(sum(found["num_requests_waiting"])),
            cache=sum(found["kv_cache_usage_perc"]) / len(found["kv_cache_usage_perc"]),
            tokens=sum(found["generation_tokens_total"]),
        )

    @override
    async def pause(self, server: Server, mode: RunningRequests) -> None:
        """Drops cached prefixes, also those of requests that wait, unless they are kept."""
        ends, clears = mode == "abort", mode != "keep_cache"
        await server.post("/pause", params={"mode": "abort" if ends else "keep", "clear_cache": str(clears).lower()})

    @override
    async def resume(self, server: Server) -> None:
        await server.post("/resume")

    @override
    async def load(
        self, server: Server, path: Path, version: int, *, private: Collection[str], straight: bool = False
    ) -> list[Report]:
        info = {"path": str(path), "version": version, "straight": straight}
        for model in [name for one in self.hooks for name in one.models(server)]:  # labelled once it has all
            await self._update(server, f"/start_{model}_weight_update", info, {})
        await self._update(server, "/start_weight_update", info, {"weight_version": self.labels.candidate(version)})
        return await self.held(server, path, private)

    async def _update(self, server: Server, start: str, info: Mapping[str, object], label: Mapping[str, str]) -> None:
        await self._rpc(server, "rl_megatron_end_update")  # of a run that was killed; else no other update can begin
        await server.post(start)
        try:
            await server.post("/update_weights", {"update_info": info})
        except (AttemptFailed, EngineError):
            with contextlib.suppress(AttemptFailed, EngineError):
                await self._rpc(server, "rl_megatron_end_update")  # the kernels get their tensors back
            raise
        await server.post("/finish_weight_update", label)

    @override
    async def boxes(self, server: Server, path: Path) -> list[Boxes]:
        return await self._asked(server, partial(as_form, form=dict[str, Box]), "rl_megatron_boxes", str(path))

    @override
    async def join(self, server: Server, path: Path, rendezvous: Mapping[str, object], first: int) -> None:
        arguments = str(path), json.dumps(rendezvous), first
        await self._together(server, lambda: self._rpc(server, "rl_megatron_join", *arguments))

    @override
    async def relabel(self, server: Server, version: int) -> None:
        await server.post("/update_weight_version", {"new_version": self.labels.verified(version)})

    @override
    async def release(self, server: Server) -> None:
        await server.post("/sleep", params={"level": "2", "mode": "abort"})

    @override
    async def reclaim(self, server: Server, what: Literal["weights", "cache"]) -> None:
        await server.post("/wake_up", params={"tags": {"weights": "weights", "cache": "kv_cache"}[what]})

    @override
    async def held(self, server: Server, path: Path, private: Collection[str] = ()) -> list[Report]:
        given = str(path), sorted(private), self._reader.known
        return await self._asked(server, self._reader.read, "rl_megatron_held", *given)

    @override
    async def load_adapters(self, server: Server, adapters: LoadedAdapters, folder: Path) -> None:
        await server.told("/v1/load_lora_adapter", {"lora_name": adapters.name, "lora_path": str(folder)})

    @override
    async def unload_adapters(self, server: Server, adapters: LoadedAdapters) -> None:
        """Requests that it has go on; the memory goes to the next version that is loaded."""
        await server.told("/v1/unload_lora_adapter", {"lora_name": adapters.name})

    @override
    async def ping(self, server: Server) -> None:
        """Its /health is 200 as long as the first node's engine lives, whatever became of ranks on other nodes."""
        await self._rpc(server, "rl_megatron_ping")

    async def _asked(self, server: Server, read: Callable[[bytes], T], method: str, *given: object) -> list[T]:
        """The answer of each rank of the server, by ``read``.

        vLLM returns what one dp replica's ranks answer. So ranks gather the answers of all, and its first has them.
        """
        body, each = {"method": method, "args": list(given)}, partial(forms.read_gathered, read=read)
        return await self._together(server, lambda: server.reported("/collective_rpc", body, each))

    async def _together(self, server: Server, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Call a method in which ranks wait for each other, while none samples.

        Each dp replica calls it between two steps of its own, and a step of experts waits for the other replicas: one
        that still samples would wait for one that calls the method, which waits for it.
        """
        async with self._paused(server):
            return await call()

    async def _rpc(self, server: Server, method: str, *arguments: object) -> Any:
        """The answer of each rank of the first dp replica."""
        return (await server.post("/collective_rpc", {"method": method, "args": list(arguments)}))["results"]


def _slots_of_replica(options: StartOptions) -> int:
    """Sequences that each dp replica decodes at once. Raises ConfigError for fewer than a request has: vLLM 0.32.0 then
    refuses the request."""
    each = -(-options.slots // options.dp)
    if options.completions > each:
        raise ConfigError(
            f"rollout.slots={options.slots} with rollout.server.dp={options.dp} is {each} sequences at once, but a "
            f"request has up to {options.completions} (rollout.group_size, samples of eval.sets), which vLLM does not "
            f"divide; set rollout.slots={options.completions * options.dp} or more"
        )
    return each
