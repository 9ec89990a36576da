"""The ``rollout`` section: the engine, how much it samples, and its servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rl_megatron.section import NonNegative, OwnCode, Positive, PositiveFloat, Section


class ServerSection(Section):
    """The servers of an engine that is no part of the learner's processes (docs/engines.md)."""

    moved: ClassVar[Mapping[str, str]] = {
        "transport": "weights.transport",
        "meeting_host": "weights.meeting_host",
        "weights_dir": "weights.folder",
    }
    addresses: str | None = None
    """Running servers to use, ``http://host:port``, several with commas between; null: servers are started here."""
    token_file: Path | None = None
    """File with the token that running servers require; servers started here get their own."""
    replicas: Positive = 1
    """Servers to start."""
    tp: Positive = 1
    """Tensor-parallel degree of each."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    """Share of a GPU's memory that a server takes, weights and cache, so that the learner fits beside it; null: the
    engine's default, nearly all."""
    options: str | None = None
    """More options for a server's command line, written as in a shell."""
    start_seconds: PositiveFloat = 600.0
    """Time limit for a server to become ready."""
    timeout_seconds: PositiveFloat = 600.0
    """How long a server that has requests may make no token, and one part of a weight update may take; then it counts
    as dead. A request as such has no limit."""
    health_seconds: PositiveFloat = 60.0
    """How long a server may not answer when it is asked for its health, thrice in that time, nor make a token; then it
    counts as dead."""
    restarts: NonNegative = 3
    """Most restarts of a dead server, or waits for a server by address to answer again."""
    retries: NonNegative = 3
    """Retries, on another replica if there is one, without a connection, without an answer, and on status 5xx."""
    backoff_seconds: PositiveFloat = 0.5
    """Wait before the first retry; it doubles each time."""
    concurrency: Positive = 256
    """Most requests in flight."""
    running_requests: Literal["keep", "abort"] = "keep"
    """What becomes of a request that new weights find running: it waits in the server and goes on with them; or it is
    ended there and asked again, what it has being the end of its prompt. Nothing that was sampled is lost either way.
    """
    colocated: bool = False
    """Whether servers and learner take turns on the same accelerators: the servers' memory is given back before
    anything trains or scores, and taken again at a push."""
    quantization: Literal["none", "fp8", "int8"] = "none"
    """Format of the linear layers' weights in servers, which each push quantises: learner.dtype's own, float8 with a
    scale for each block of 128 x 128, or int8 with one for each output channel (docs/engines.md)."""
    probes: Literal["auto", "always"] = "auto"
    """At which versions log-probs of fixed texts are compared. auto: of all at a server's first, after that of one
    where checksums cannot verify every tensor; always: of all at every version."""
    probe_tolerance: PositiveFloat | None = None
    """Largest difference of a probe's log-probs, in nats, at which new weights are served; null: 1e-3 in float32, 0.25
    in bfloat16, 1 where weights are quantised."""


class RolloutSection(Section):
    """How a step's completions are sampled."""

    engine: Literal["local", "vllm", "sglang"] | OwnCode = "local"
    """What samples: an engine inside the learner's processes, or servers. ``package.module:name`` is an Adapter of your
    own to servers (docs/engines.md). Its code is run."""
    python: Path | None = None
    """Interpreter that the engine is installed in; null: the trainer's."""
    prompts_per_step: Positive = 32
    """Prompts per step."""
    group_size: Positive = 8
    """Completions of each prompt."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling, and of the learner's log-probs."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    """Sample from the fewest tokens whose probabilities reach this."""
    max_prompt_tokens: Positive = 256
    """Longest prompt."""
    max_new_tokens: Positive = 32
    """Longest completion."""
    on_long_prompt: Literal["fail", "drop"] = "fail"
    """What to do with a longer prompt: end the run at its start, or drop the prompt."""
    ignore_eos: bool = False
    """Sample ``max_new_tokens`` whatever is sampled (for measurements)."""
    dynamic_sampling: Literal["off", "refill", "drop"] = "off"
    """Groups of equal rewards, as advantages take them, teach nothing: keep them, sample on until the batch is full, or
    train on the rest."""
    max_refills: Positive = 8
    """dynamic_sampling=refill, drop: most batches sampled for one step, which then trains on the groups that it has."""
    slots: Positive = 512
    """Sequences an engine replica decodes at once."""
    server: ServerSection = ServerSection()

    @property
    def served(self) -> bool:
        """Whether servers sample, so that the learner's processes hold no engine."""
        return self.engine != "local"
