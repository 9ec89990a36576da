"""The ``rollout`` section: the engine, how much it samples, and its servers."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from rl_megatron.feature import with_features
from rl_megatron.http.urls import is_plain_address
from rl_megatron.section import (
    NUMBER,
    NonNegative,
    NonNegativeFloat,
    OwnCode,
    Positive,
    PositiveFloat,
    PositiveFraction,
    Section,
    Temperature,
)

RunningRequests = Literal["recompute", "keep_cache", "abort"]
"""The effect of a push on running requests."""
_LETS_IN = (
    "the run gives each server its address, its port and a token that is on no command line; leave it out",
    (
        *("--host", "--port", "--api-key", "--admin-api-key", "--uds"),
        *("--grpc", "--grpc-port", "--grpc-mode", "--smg-grpc-mode", "--sidecar"),  # these do not ask for the token
    ),
)
_LENGTHS = "rollout.max_prompt_tokens and max_new_tokens set it; use those keys"
_NOT_OPTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    _LETS_IN,
    ("a file of options would replace what the run starts a server with; write each option here", ("--config",)),
    (
        "it runs code that a model's folder brings; leave it out, or install the code for rollout.python and name it "
        "in rollout.engine=package.module:name",
        ("--trust-remote-code",),
    ),
    ("requests could bring code, which the server would run; leave it out", ("--enable-custom-logit-processor",)),
    (
        "the run gives each server its model, what loads it, and what asks for the token; leave it out",
        (
            "--model",
            "--model-path",
            "--load-format",
            "--custom-weight-loader",
            "--weight-transfer-config",
            "--middleware",
        ),
    ),
    ("rollout.slots sets it; use that key", ("--max-num-seqs", "--max-running-requests")),
    (_LENGTHS, ("--max-model-len", "--context-length")),
    ("learner.dtype sets it; use that key", ("--dtype",)),
    ("rollout.server.quantization sets it; use that key", ("--quantization",)),
    ("rollout.server.memory_fraction sets it; use that key", ("--gpu-memory-utilization", "--mem-fraction-static")),
)
"""Options of engines that are refused, each with the reason and what to do."""
MAX_STOPS = 32
"""Most texts of ``rollout.stop``: SGLang takes no more."""
MAX_STOP_LENGTH = 256  # characters: how far the in-process engine looks back at each token
_ABBREVIATED = 4  # characters with which engines may know an option: --ho
_NOT_OFFERED = {"nvfp4", "mxfp4", "mxfp8", "int4", "awq", "gptq", "fp4"}


def same_option(word: str, option: str) -> bool:
    """True if engines may read ``word`` of a command line as ``option``: by its name, by the name's first letters, or
    with a value directly after one letter (-n2). A key of the value may follow the name (--option.key)."""
    name = _name_of(word)
    if name.startswith("--"):
        return name == option or (len(name) >= _ABBREVIATED and option.startswith(name))
    letter = len(option) == 2 and name.startswith(option)
    return letter or (len(name) > 1 and option.startswith(name) and not option.startswith("--"))


def _name_of(word: str) -> str:
    return re.split("[=.]", word, maxsplit=1)[0].replace("_", "-")


@with_features("rollout.server")
class ServerSection(Section):
    """Engine servers, which are processes apart from the learner's (docs/engines.md)."""

    addresses: str | None = None
    """Addresses of running servers to use, as ``http://host:port``, separated by commas; null: the run starts its own.
    """
    token_file: Path | None = None
    """File that holds the bearer token of the running servers, read for each request, as it may rotate; the run makes a
    token for servers that it starts."""
    replicas: Positive | None = None
    """Number of servers to start; null: one. With ``rollout.engine=local``, processes of their own on this machine's
    CPUs, which sample while the learner trains; null: the learner's processes sample."""
    nodes: Positive | None = None
    """Nodes of each server; null: as few as its GPUs fill, with every tensor-parallel group inside one."""
    tp: Positive = 1
    """Tensor-parallel degree of each server's attention and dense layers."""
    pp: Positive = 1
    """Pipeline stages of each server."""
    dp: Positive = 1
    """Replicas of the attention inside each server, which share one set of experts; a model without experts takes more
    ``replicas`` instead."""
    ep: Positive = 1
    """Expert-parallel degree of each server: tp * dp keeps each expert whole on one of a stage's GPUs, 1 cuts each over
    all of them."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False), NUMBER] | None = None
    """Share of a GPU's memory that a server takes for weights and cache, which leaves the rest to the learner; null:
    the engine's default, nearly all."""
    options: str | None = None
    """More options for the servers' command line, quoted as in a shell."""
    start_seconds: PositiveFloat = 600.0
    """Time limit for a server to become ready."""
    timeout_seconds: PositiveFloat = 600.0
    """Time limit for a server with requests to generate its next token, and for each part of a weight update; a server
    that exceeds it counts as dead. A whole request has no limit."""
    restarts: NonNegative = 3
    """Most restarts of a dead server; with ``addresses``, most waits for a dead server to answer again. Once one
    has run for an hour they count from 0 again."""
    max_concurrent_groups: Positive = 256
    """Most groups in flight at servers: of ``group_size`` completions, whether they are one request each, as with
    train.max_staleness or in an environment, or one in all. More wait in the controller, a trajectory's turns within
    its environment.seconds."""
    running_requests: RunningRequests = "recompute"
    """Effect of a push of weights on running requests (docs/engines.md). recompute: the server pauses them, and
    continues them with keys and values recomputed by the new weights; keep_cache: it continues them with those of the
    old weights, which costs nothing; abort: it aborts them, and the trainer sends each again with its tokens so far
    appended to the prompt. No sampled token is lost in any of them."""
    colocated: bool = False
    """Whether servers and learner take turns on the same accelerators: servers release their memory before the learner
    trains or scores, and take it again at a push. On GPUs memory_fraction is needed too."""
    quantization: Literal["none", "fp8", "int8"] = "none"
    """Format to which each push quantizes the servers' linear layers: none (learner.dtype), float8 with a scale for
    each block of 128 x 128, or int8 with a scale for each output channel (docs/engines.md). Over any transport."""
    batch_invariant: bool = False
    """Whether servers use kernels alone for which a token's log-prob does not depend on the other requests of a batch,
    on GPUs: vLLM's VLLM_BATCH_INVARIANT, SGLang's --enable-deterministic-inference. Slower; by how much is not measured
    here (docs/troubleshooting.md)."""
    probes: Literal["auto", "always"] = "auto"
    """When to compare servers' log-probs of fixed texts with the learner's. always: all texts at every weight version;
    auto: all texts at a server's first version, then one text if checksums cannot verify every tensor."""
    probe_tolerance: PositiveFloat | None = None
    """Largest difference of log-probs, in nats, at which ``probes`` accept new weights; null: 1e-3 in float32, 0.25 in
    bfloat16, 1 with quantized weights."""

    @field_validator("options")
    @classmethod
    def _leave_the_runs_own(cls, options: str | None) -> str | None:
        """Refuses keys, which would be on a command line, addresses, which would be open to others, foreign code, and
        options that would replace those that the run gives a server."""
        try:
            words = shlex.split(options or "")
        except ValueError as error:
            raise PydanticCustomError(
                "words", "Input should be options as in a shell: {why}", {"why": str(error).lower()}
            ) from error
        for word in words:
            for reason, refused in _NOT_OPTIONS:
                if any(same_option(word, option) for option in refused):
                    given = {"name": _name_of(word), "reason": reason}
                    raise PydanticCustomError("of_the_run", "Input should be without {name}: {reason}", given)
        return options

    @field_validator("addresses")
    @classmethod
    def _check_addresses(cls, addresses: str | None) -> str | None:
        if addresses is not None and not all(is_plain_address(one.strip()) for one in addresses.split(",")):
            raise PydanticCustomError(
                "servers",
                "Input should be http://host:port of each server, separated by commas, without user or path; "
                "rollout.server.token_file is for their token",
            )
        return addresses

    @field_validator("running_requests", mode="before")
    @classmethod
    def _convert_keep(cls, value: object) -> object:
        if value == "keep":
            raise PydanticCustomError(
                "renamed_value",
                "Input should be 'recompute', 'keep_cache' or 'abort': what 'keep' did is called recompute",
            )
        return value

    @property
    def count(self) -> int:
        """Servers to start."""
        return self.replicas or 1

    @property
    def ranks(self) -> int:
        """Processes of each server, one on each of its GPUs."""
        return self.tp * self.pp * self.dp

    def span(self, gpus_per_node: int) -> int:
        """Returns the nodes of each server, with ``gpus_per_node`` GPUs a node; 0: it runs on CPUs."""
        return self.nodes or (-(-self.ranks // gpus_per_node) if gpus_per_node else 1)

    @field_validator("quantization", mode="before")
    @classmethod
    def _check_bits(cls, value: object) -> object:
        if str(value).lower() in _NOT_OFFERED:
            raise PydanticCustomError(
                "not_offered",
                "Input should be 'none', 'fp8' (128 x 128 blocks) or 'int8': {name} cannot be quantized at a push",
                {"name": str(value).upper()},
            )
        return value


@with_features("rollout")
class RolloutSection(Section):
    """The engine, and how it samples a step's completions."""

    engine: Literal["local", "vllm", "sglang"] | OwnCode = "local"
    """The engine that samples, inside the learner's processes or in servers. ``package.module:name`` is an Adapter of
    your own for servers (docs/engines.md). Its code is run."""
    python: Path | None = None
    """Python interpreter that has the engine installed; null: the trainer's."""
    prompts_per_step: Positive = 32
    """Prompts per step."""
    group_size: Positive = 8
    """Completions of each prompt."""
    temperature: Temperature = 1.0
    """Temperature of sampling, and of the learner's log-probs."""
    top_p: PositiveFraction = 1.0
    """Sample from the fewest most likely tokens whose probabilities add up to at least this (nucleus sampling)."""
    top_k: NonNegative = 0
    """Sample from this many most likely tokens; 0: from all. Applied before top_p."""
    max_prompt_tokens: Positive = 256
    """Longest prompt, in tokens."""
    max_new_tokens: Positive = 32
    """Longest completion, in tokens, stop token included."""
    completion_timeout_seconds: PositiveFloat | None = None
    """Longest time that a completion to train on may run in a server, its wait for a slot and pauses of pushes
    included; one that runs longer ends there and counts as truncated. One without a token by then gets twice as long.
    Time between servers does not count, nor what was lost with a server. Needs servers; null: no limit."""
    max_in_flight: Positive | None = None
    """Most completions in sampling and scoring together, in whole groups: further prompts are not drawn. Needs servers,
    and group_size at least. null: as many as train.max_staleness allows (docs/asynchronous.md)."""
    on_long_prompt: Literal["fail", "drop"] = "fail"
    """What to do with a longer prompt: end the run at its start, or drop the prompt."""
    ignore_eos: bool = False
    """Sample ``max_new_tokens`` tokens even after a stop token (for measurements)."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)], ...], Field(max_length=MAX_STOPS)
    ] = ()
    """Texts that end a completion or a turn, as stop tokens do: the token that completes one is the last, and is
    trained on. On a command line one text, or several as JSON: ``["</answer>", "\\n\\n"]``."""
    dynamic_sampling: Literal["off", "refill", "drop"] = "off"
    """What to do with groups of equal rewards, before the overlong penalty or after all shaping, or with groups to
    which your own function gives advantages of 0 alone: keep them (off), drop them and draw another prompt for each,
    until the batch is full (refill), or drop them and train on the rest (drop). They give no gradient, or that of
    lengths alone, unless there is no baseline (REINFORCE-Rej)."""
    router_noise: NonNegativeFloat = 0.0
    """Standard deviation, in logits, of Gaussian noise on the routers of the in-process engine while it samples the
    completions to train on, so that its routes differ from the learner's by a known level (docs/algorithms.md). It is
    a function of the request's seed, the completion, position, layer and expert; evaluations have none. For studies."""
    slots: Positive = 512
    """Most sequences that an engine replica decodes together."""
    server: ServerSection = ServerSection()

    @property
    def limits(self) -> str:
        """Returns the keys, with their values, that leave tokens out of sampling; empty if all can be sampled."""
        found = {"top_p": self.top_p < 1, "top_k": self.top_k > 0}
        return " and ".join(f"rollout.{name}={getattr(self, name):g}" for name, limits in found.items() if limits)

    @field_validator("stop", mode="before")
    @classmethod
    def _as_texts(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        if not (given.startswith("[") and given.endswith("]")):
            return [given]
        try:
            return json.loads(given)
        except ValueError as error:
            raise PydanticCustomError(
                "texts", 'Input should be one text or a JSON list, as ["</a>", "</b>"]'
            ) from error

    @property
    def embedded(self) -> bool:
        """True if the built-in engine samples, in the learner's processes or in servers."""
        return self.engine == "local"

    @property
    def served(self) -> bool:
        """True if servers sample, so that the learner's processes hold no engine."""
        return not self.embedded or self.server.replicas is not None
