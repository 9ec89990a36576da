"""The adapter for vLLM 0.32.0: its token-in token-out endpoint (entrypoints/scale_out/token_in_token_out/protocol.py),
its weight update API, and the options of its command line that degrees and keys set.
"""

from __future__ import annotations

import base64
import contextlib
import heapq
import io
import json
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from rl_megatron.columns import TokenIds, freeze
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
    option_values,
    refused_option,
    version_fields,
)
from rl_megatron.engines.answers import (
    LabeledSpan,
    SampledColumns,
    TopLogprobs,
    check_routes,
    decode_as,
    decode_raw,
    logprob_column,
    token_column,
    whole_numbers,
)
from rl_megatron.engines.http import AttemptFailed, Server
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Completion, FinishReason, GenerationRequest, NamedVersion, token_limits
from rl_megatron.weights.boxes import Box
from rl_megatron.weights.checks.reports import REPORT_FORM, ChecksumReport
from rl_megatron.weights.layouts.recorded import Boxes

KEYS = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), "tp"),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), "pp"),
    **dict.fromkeys(("--data-parallel-size", "-dp"), "dp"),
    **dict.fromkeys(("--data-parallel-size-local", "-dpl", "--data-parallel-start-rank", "-dpr"), "nodes"),
    **dict.fromkeys(("--enable-expert-parallel", "-ep"), "ep"),
    **dict.fromkeys(("--nnodes", "-n", "--node-rank", "-r", "--headless"), "nodes"),
    **dict.fromkeys(("-q", "--quantization-config"), "quantization"),
}
"""Option -> the key of ``rollout.server`` that sets it."""
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
"""Option -> the reason why servers cannot have it."""
VARIABLES = {
    "VLLM_USE_RUST_FRONTEND": "its server asks for no token",
    "VLLM_DP_SIZE": "rollout.server.dp sets it; use that key",
    "VLLM_BATCH_INVARIANT": "rollout.server.batch_invariant sets it; use that key",
}
"""Variable -> the reason why servers cannot have it."""


def quantizes(extra: Sequence[str]) -> str:
    """Returns why options cannot have --hf-overrides of the model's quantization_config, or an empty string."""
    for name, value in option_values(extra, "--hf-overrides"):
        if "quantization_config" in f"{name} {_unescaped(value)}":
            return (
                f"rollout.server.options has {name} of quantization_config, which rollout.server.quantization sets; "
                "use that key"
            )
    return ""


def _unescaped(value: str) -> str:
    """Returns JSON without escaped characters, so that its keys can be found as text."""
    try:
        return json.dumps(json.loads(value), ensure_ascii=False)
    except ValueError:
        return value  # vLLM refuses it


def attention_given(extra: Sequence[str]) -> str | None:
    """Returns the attention that options name: by --attention-backend, or by the key ``backend`` of
    --attention-config (-ac), in its JSON or after its name. None: they leave it to vLLM."""
    if (named := option_value(extra, "--attention-backend")) is not None:
        return named
    for name, value in option_values(extra, "--attention-config", "-ac"):  # the last of several, like vLLM
        one = value if name.endswith(".backend") else None if "." in name else _backend_of(value)
        named = named if one is None else one
    return named


def _backend_of(attention: str) -> str | None:
    try:
        config = json.loads(attention)
    except ValueError:
        return None  # vLLM refuses it
    return str(config["backend"]) if isinstance(config, dict) and config.get("backend") else None


def options_of_ranks(options: StartOptions) -> tuple[str, ...]:
    """Returns the options for the server's ranks, and for this node of several."""
    out = ["--tensor-parallel-size", str(options.tp), "--pipeline-parallel-size", str(options.pp)]
    if options.dp > 1:  # one process answers requests for all replicas
        out += ["--data-parallel-size", str(options.dp)]
    if options.ep > 1:
        out += ["--enable-expert-parallel"]
    one = options.tp * options.pp == 1  # then the engine's process is the rank's
    out += ["--distributed-executor-backend", "uni" if one else "mp"]
    if options.num_nodes > 1:
        out += ["--nnodes", str(options.num_nodes), "--node-rank", str(options.node_rank)]
        out += ["--master-addr", options.head_address, "--master-port", str(options.port + 1)]
        out += ["--data-parallel-address", options.head_address, "--data-parallel-rpc-port", str(options.port + 2)]
    return (*out, *(("--headless",) if options.node_rank else ("--api-server-count", "1")))


T = TypeVar("T")

_NEEDED = (
    *("/inference/v1/generate", "/start_weight_update", "/update_weight_version", "/collective_rpc", "/pause"),
    *("/sleep", "/wake_up"),
)
_INVARIANT = ("FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "FLASH_ATTN_MLA", "TRITON_MLA")
"""Attention with a true ``supports_batch_invariance`` in vLLM 0.32.0 (v1/attention/backends)."""
_TOKENS = re.compile(r"^vllm:(?:prompt|generation)_tokens_total(?:\{.*\})? (\S+)", re.MULTILINE)
_GAUGE = re.compile(
    r"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|generation_tokens_total)(?:\{.*\})? (\S+)",
    re.MULTILINE,
)


class VLLMAdapter(ForeignEngine):
    """The adapter for vLLM. It sends no seed: vLLM 0.32.0 crashes if a request with a seed resumes after a pause."""

    name = "vLLM"
    module = "vllm"
    tested_version = "0.32.0"
    renormalizes_top_p = True
    temperatures = (0.01, 2.0)  # vLLM raises lower ones to the first without an error
    variables = VARIABLES

    @override
    def command(self, options: StartOptions) -> StartCommand:
        # Otherwise a processor with AMX tiles uses kernels for latent attention that take only bfloat16.
        reference = options.device == "cpu" and self._shape.latent is not None and options.dtype != "bfloat16"
        return StartCommand(
            arguments=(
                str(options.python),
                *("-P", "-m", "rl_megatron.engines.vllm.server"),
                *("--model", str(options.model_folder), "--served-model-name", "policy", "--load-format", "dummy"),
                *("--host", options.host, "--port", str(options.port)),
                *("--middleware", "rl_megatron.engines.engine_token.AuthMiddleware"),
                *("--dtype", options.dtype, "--max-model-len", str(options.max_length)),
                *("--max-num-seqs", str(_slots_of_replica(options))),
                *options_of_ranks(options),
                *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
                *("--worker-extension-cls", "rl_megatron.engines.vllm.worker.WorkerExtension"),
                *("--weight-transfer-config", json.dumps({"backend": "rl_megatron_mirror"})),
                *("--enable-scale-out", "--disable-uvicorn-access-log", "--scheduling-policy", "priority"),
                *(("--enforce-eager",) if options.device == "cpu" else ()),  # CUDA graphs are for GPUs
                *(("--attention-backend", "CPU_MLA") if reference else ()),
                *("--shutdown-timeout", "5"),  # else its processes are killed, and shared memory remains
                *(("--enable-sleep-mode",) if options.colocated and options.device != "cpu" else ()),
                *(("--gpu-memory-utilization", str(options.memory_fraction)) if options.memory_fraction else ()),
                *(word for one in self.hooks for word in one.arguments(options.features.get(one.name), options.device)),
                *options.extra_options,
            ),
            environment={
                "VLLM_SERVER_DEV_MODE": "1",  # enables the weight update API
                "VLLM_API_KEY": "",  # overrides the user's: the middleware requires our token at every path
                "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, if it runs on a CPU
                # Otherwise every server binds its threads to the same cores, and each rank needs a NUMA node.
                **({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if options.device == "cpu" else {}),
                **({"VLLM_HOST_IP": options.host} if options.num_nodes > 1 else {}),
                **({"VLLM_BATCH_INVARIANT": "1"} if options.batch_invariant else {}),
                **hook_variables(self.hooks, options),
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            },
        )

    @override
    def options_problem(self, extra: Sequence[str]) -> str:
        return refused_option(extra, keys=KEYS, hooks=self.hooks, reasons=REASONS) or quantizes(extra)

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
    async def describe(self, server: Server) -> ServerInfo:
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
        return ServerInfo(
            version=(await server.get("/version"))["version"],
            dtype=found.get("dtype", "unknown"),
            architecture=found.get("architecture", "unknown"),
            max_length=int(model["max_model_len"]),
            problems=tuple(problems),
            has_priorities=found.get("policy") == "priority",
            features=describe_settings(self.hooks, found)[0],
        )

    @override
    async def generate(self, server: Server, request: GenerationRequest, request_id: str) -> list[Completion]:
        p = request.params
        sampling = {
            "n": request.num_completions if p.temperature else 1,  # greedy completions are all equal
            "temperature": p.temperature,
            "top_p": p.top_p,
            **token_limits(p),
            "max_tokens": p.max_new_tokens,
            "stop_token_ids": list(p.stop_token_ids),
            "ignore_eos": True,  # the line above names the tokens that end a completion
            "logprobs": 0,  # only the sampled token's
            "detokenize": bool(p.stop),  # it looks for stop texts in the decoded text
            **({"stop": p.stop, "include_stop_str_in_output": True, "skip_special_tokens": False} if p.stop else {}),
        }
        body: dict[str, object] = {
            "request_id": request_id,
            "token_ids": request.token_ids,
            "sampling_params": sampling,
            **cache_salt(server),
            **version_fields(request.named),
        }
        if server.priorities:
            body["priority"] = request.start_version or 0
        answers = await server.post_sampling("/inference/v1/generate", body, read_sampled)
        completions = []
        for answer in answers:
            labeled = ((span.start, self.labels.version(span.version)) for span in answer.spans)
            count = len(answer.token_ids)  # an answer without tokens has no version
            completions.append(self._completion(answer, request, labeled if count else [(0, 0)], count, read_routes))
        return completions if p.temperature else completions * request.num_completions

    @override
    async def score(self, server: Server, text: Sequence[int], named: NamedVersion | None = None) -> list[float]:
        body = scoring(server, text, 0) | version_fields(named)
        said = await server.post_sampling("/inference/v1/generate", body, read_scored)
        if len(said) != len(text) - 1 or any(str(t) not in found for t, found in zip(text[1:], said, strict=True)):
            raise AttemptFailed(f"{server.url}: its prompt_logprobs do not belong to the given tokens")
        return [found[str(token)] for token, found in zip(text[1:], said, strict=True)]

    @override
    async def score_top(self, server: Server, text: Sequence[int], top: int) -> TopLogprobs:
        read = partial(read_judged, text=text, top=top)
        return await server.post_sampling("/inference/v1/generate", scoring(server, text, top), read, is_extra=True)

    @override
    async def abort(self, server: Server, request: GenerationRequest, request_id: str) -> None:
        await server.post("/abort_requests", aborting([request_id]))

    @override
    async def abort_all(
        self, server: Server, requests: Mapping[str, GenerationRequest], turn: Callable[[], Awaitable[None]]
    ) -> None:
        await server.post("/abort_requests", aborting(requests))

    @override
    async def tokens(self, server: Server) -> float:
        """Returns the number of prompt tokens and sampled tokens since the server started."""
        return sum(float(value) for value in _TOKENS.findall(await server.text("/metrics")))

    @override
    async def gauges(self, server: Server) -> EngineGauges:
        found = dict[str, list[float]]()
        for name, value in _GAUGE.findall(await server.text("/metrics")):
            found.setdefault(name, []).append(float(value))  # one for each data-parallel rank
        return EngineGauges(
            running=int(sum(found["num_requests_running"])),
            waiting=int(sum(found["num_requests_waiting"])),
            cache=sum(found["kv_cache_usage_perc"]) / len(found["kv_cache_usage_perc"]),
            tokens=sum(found["generation_tokens_total"]),
        )

    @override
    async def pause(self, server: Server, mode: RunningRequests) -> None:
        """Drops cached prefixes, including those of waiting requests, unless ``mode`` keeps them."""
        ends, clears = mode == "abort", mode != "keep_cache"
        await server.post("/pause", params={"mode": "abort" if ends else "keep", "clear_cache": str(clears).lower()})

    @override
    async def resume(self, server: Server) -> None:
        await server.post("/resume")

    @override
    async def load(
        self, server: Server, path: Path, version: int, *, private: Collection[str], straight: bool = False
    ) -> list[ChecksumReport]:
        info = {"path": str(path), "version": version, "straight": straight}
        for model in [name for one in self.hooks for name in one.models(server)]:  # the last model gets the label
            await self._update(server, f"/start_{model}_weight_update", info, {})
        await self._update(server, "/start_weight_update", info, {"weight_version": self.labels.candidate(version)})
        return await self.rank_reports(server, path, private)

    async def _update(self, server: Server, start: str, info: Mapping[str, object], label: Mapping[str, str]) -> None:
        await self._rpc(server, "rl_megatron_end_update")  # ends a killed run's update, or no other can begin
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
        return await self._ask_ranks(server, partial(decode_as, form=dict[str, Box]), "rl_megatron_boxes", str(path))

    @override
    async def join(self, server: Server, path: Path, rendezvous: Mapping[str, object], first: int) -> None:
        arguments = str(path), json.dumps(rendezvous), first
        await self._run_collective(server, lambda: self._rpc(server, "rl_megatron_join", *arguments))

    @override
    async def relabel(self, server: Server, version: int) -> None:
        await server.post("/update_weight_version", {"new_version": self.labels.verified(version)})

    @override
    async def release_memory(self, server: Server) -> None:
        await server.post("/sleep", params={"level": "2", "mode": "abort"})

    @override
    async def resume_memory(self, server: Server, what: Literal["weights", "cache"]) -> None:
        await server.post("/wake_up", params={"tags": {"weights": "weights", "cache": "kv_cache"}[what]})

    @override
    async def rank_reports(self, server: Server, path: Path, private: Collection[str] = ()) -> list[ChecksumReport]:
        given = str(path), sorted(private), self._reader.known
        return await self._ask_ranks(server, self._reader.read, "rl_megatron_held", *given)

    @override
    async def ping(self, server: Server) -> None:
        """Asks every rank. /health is 200 while the first node's engine lives, even if ranks on other nodes died."""
        await self._rpc(server, "rl_megatron_ping")

    async def _ask_ranks(self, server: Server, read: Callable[[bytes], T], method: str, *given: object) -> list[T]:
        """Returns the answer of each rank of the server, decoded by ``read``.

        vLLM returns answers of only one dp replica's ranks. So each replica's first rank gathers the answers of all.
        """
        body, each = {"method": method, "args": list(given)}, partial(read_gathered, read=read)
        return await self._run_collective(server, lambda: server.post_report("/collective_rpc", body, each))

    async def _run_collective(self, server: Server, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Calls a method in which ranks wait for each other, while none samples.

        Each dp replica calls it between two of its steps, and a step with experts waits for the other replicas. A
        replica that still samples would wait for one that calls the method, which waits for it.
        """
        async with self._paused(server):
            return await call()

    async def _rpc(self, server: Server, method: str, *arguments: object) -> Any:
        """Returns the answer of each rank of the first dp replica."""
        return (await server.post("/collective_rpc", {"method": method, "args": list(arguments)}))["results"]


def _slots_of_replica(options: StartOptions) -> int:
    """Returns the number of sequences that each dp replica decodes together. Raises ConfigError if it is smaller than
    a request's number of completions: vLLM 0.32.0 then refuses the request."""
    each = -(-options.max_num_seqs // options.dp)
    if options.max_completions > each:
        raise ConfigError(
            f"rollout.slots={options.max_num_seqs} with rollout.server.dp={options.dp} is {each} sequences per "
            f"copy of the model, but a request has up to {options.max_completions} (rollout.group_size, samples of "
            f"eval.sets), which vLLM does not divide; set rollout.slots={options.max_completions * options.dp} or more"
        )
    return each


def scoring(server: Server, text: Sequence[int], top: int) -> dict[str, object]:
    """Returns a request for log-probs of a text and of the ``top`` most probable tokens. It samples one token."""
    sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": top, "ignore_eos": True, "detokenize": False}
    return {"token_ids": list(text), "sampling_params": sampling, **cache_salt(server)}


def aborting(names: Collection[str]) -> dict[str, list[str]]:
    """Returns a request to abort requests by their names."""
    assert names, "vLLM takes an empty list for all requests, those of others too"
    return {"request_ids": [f"generate-tokens-{name}" for name in names]}


def cache_salt(server: Server) -> dict[str, str]:
    """Returns the key that hides prefixes that other weights cached."""
    return {} if server.salt is None else {"cache_salt": server.salt}


class _LogProb(msgspec.Struct, gc=False):
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None


class _Choice(msgspec.Struct):
    index: int
    token_ids: list[int] | None
    logprobs: _LogProbs | None
    finish_reason: FinishReason
    weight_versions: list[LabeledSpan] | None
    routed_experts: str | None = None


class _Sampled(msgspec.Struct):
    choices: list[_Choice]


class _RawChoice(_Choice):
    token_ids: msgspec.Raw  # type: ignore[assignment]  # as they are written: number objects take a tenth of the time


class _RawSampled(msgspec.Struct):
    choices: list[_RawChoice]


class _Scored(msgspec.Struct):
    prompt_logprobs: list[dict[str, _LogProb] | None]


class _Called(msgspec.Struct):
    results: Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1)]


def read_gathered(text: bytes, read: Callable[[bytes], T]) -> list[T]:
    """Decodes each rank's answer with ``read``. The first rank has gathered all answers. Other threads may run between
    two of them. Raises ValueError like `decode_as`."""
    gathered = bytes(decode_as(text, _Called).results[0])
    return [read(bytes(one)) for one in decode_as(gathered, list[msgspec.Raw])]


def read_sampled(text: bytes) -> list[SampledColumns]:
    """Returns the choices, in order. Raises ValueError like `decode_as`."""
    raw = decode_raw(text, _RawSampled)
    of_raw = [] if raw is None else [(choice, whole_numbers(choice.token_ids)) for choice in raw.choices]
    plain: list[tuple[_Choice, TokenIds]] = [(choice, ids) for choice, ids in of_raw if ids is not None]
    if raw is None or len(plain) < len(of_raw):  # unusual text, such as NaN, null and errors
        plain = [(choice, token_column(choice.token_ids or [])) for choice in decode_as(text, _Sampled).choices]
    return [_answer(choice, ids) for choice, ids in sorted(plain, key=lambda one: one[0].index)]


def read_scored(text: bytes) -> Sequence[Mapping[str, float]]:
    """Returns token id -> log-prob for each token after the first. Raises ValueError like `decode_as`."""
    said = decode_as(text, _Scored).prompt_logprobs[1:]
    return [{token: one.logprob for token, one in (found or {}).items()} for found in said]


def read_judged(answer: bytes, *, text: Sequence[int], top: int) -> TopLogprobs:
    """Returns the scores of ``text``. Raises ValueError like `decode_as`, and if a token has no log-prob or a position
    has fewer than ``top`` probable tokens, as with a smaller vocabulary."""
    said = read_scored(answer)
    if len(said) != len(text) - 1:
        raise ValueError(f"log-probs of {len(said) + 1} tokens, and {len(text)} were sent")
    logprobs = np.empty(len(said), np.float32)
    ids, of_ids = np.empty((len(said), top), np.int32), np.empty((len(said), top), np.float32)
    for place, (token, found) in enumerate(zip(text[1:], said, strict=True)):
        if str(token) not in found or len(found) < top:
            raise ValueError(f"token {place + 1} of the text has {len(found)} log-probs, {top} were asked for")
        logprobs[place] = found[str(token)]
        best = heapq.nlargest(top, found.items(), key=itemgetter(1))
        ids[place], of_ids[place] = [int(name) for name, _ in best], [logprob for _, logprob in best]
    freeze(logprobs)
    return TopLogprobs(logprobs=logprobs, top_ids=ids, top_logprobs=of_ids)


def read_routes(given: str | None, positions: int, shape: ModelShape) -> NDArray[Any]:
    """Decodes routes: a .npy file in base64."""
    if not given:
        raise EngineError("it returned no routes; start it with --enable-return-routed-experts")
    try:
        experts = np.load(io.BytesIO(base64.b64decode(given)), allow_pickle=False)
    except (ValueError, EOFError, MemoryError) as error:  # MemoryError: its header declares too much memory
        raise EngineError(f"its routes are not an array: {error!s:.200}") from error
    return check_routes(experts, positions=positions, shape=shape)


def _answer(choice: _Choice, token_ids: TokenIds) -> SampledColumns:
    content = (choice.logprobs.content if choice.logprobs else None) or []
    return SampledColumns(
        token_ids=token_ids,
        logprobs=logprob_column([one.logprob for one in content]),
        finish_reason=choice.finish_reason,
        spans=choice.weight_versions or [LabeledSpan(start=0, version=None)],
        routes=choice.routed_experts,
    )
