"""The ``reward`` section: a reward function, or a weighted sum of several, and their options.

The ``sandbox`` section: where code that a model wrote runs, and its limits.

The ``environment`` section: what the model talks to over several turns, and its limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rl_megatron.http.urls import find_secret, is_loopback
from rl_megatron.section import MAX_INTEGER, EntryName, Finite, NonNegative, Positive, PositiveFloat, Section

_DEFAULT = "exact_match"


class RewardPart(Section):
    """One part of a weighted sum, under a name of yours. A plain number is the weight of the function of that name."""

    function: str | None = None
    """The part's function, with the choices of reward.function; null: the function with the part's name."""
    weight: Finite = 1.0
    """Weight of the part in the sum; 0 only records the part's reward."""
    when: Mapping[EntryName, Finite] = Field(default_factory=dict)
    """Other parts, by name, and the least that each must be, as its function gave it: else this part is 0."""

    @model_validator(mode="before")
    @classmethod
    def _number_is_weight(cls, given: object) -> object:
        return {"weight": given} if isinstance(given, int | float) and not isinstance(given, bool) else given


class FormatSection(Section):
    """Options of ``format``: 1 where the whole completion matches the pattern, else 0."""

    pattern: str | None = None
    """Python regular expression; (?s) in front lets a dot match line ends too."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"reward.format.pattern={pattern!r}: not a regular expression: {error}") from error
        return pattern


class LengthSection(Section):
    """Options of ``length``: 1 from ``min_tokens`` to ``max_tokens``, 0 outside."""

    min_tokens: NonNegative = 0
    """Shortest completion that gets 1, stop token included."""
    max_tokens: Positive | None = None
    """Longest completion that gets 1; null: no limit."""


class HttpSection(Section):
    """Options of a reward served at a URL (docs/data.md); ``reward.timeout_seconds`` bounds all its attempts."""

    timeout_seconds: PositiveFloat = 10.0
    """Time limit of one attempt."""


class RewardModelSection(Section):
    """Options of a Hugging Face sequence classifier (``hf:<folder>``, ``ranks:<name>``) as a reward (docs/data.md).

    On ranks ``learner`` says the rest: only ``chat_template`` and ``max_tokens`` are read.
    """

    label: str | None = None
    """Label whose probability is the reward; null: the logit of the only label."""
    chat_template: bool = False
    """Whether prompt and completion are put into the classifier's chat template, as user and assistant."""
    max_tokens: Positive | None = None
    """The classifier reads at most this many tokens, the last ones; null: as many as it has positions for."""


RANKS = "ranks:"
"""Begins the name of a reward model on ranks, as in ranks:judge."""
REWARD = "reward_"
"""The prefix of reward models' roles."""


class RankedModelSection(Section):
    """A reward model on ranks of its own, in the learner's layout or that of ``roles.layouts.reward_<name>``, which
    ``reward.function=ranks:<name>`` asks (docs/data.md)."""

    path: Path
    """Hugging Face folder of a sequence classifier with one label and its tokenizer, as job=reward_model exports it."""


class TestsSection(Section):
    """Options of ``tests``: runs the Python of a completion against its problem's tests, in the sandbox."""

    field: str = "tests"
    """The field of a problem's row that holds its tests (docs/data.md)."""
    score: Literal["all", "fraction"] = "all"
    """all: 1 if every test passes, else 0; fraction: the share of tests that pass."""


def reward_key(source: str) -> str:
    """The key of the reward of prompts of a ``source``: of data.sources, or a set's section."""
    return f"{source}.reward" if source.startswith("eval.sets.") else f"data.sources.{source}.reward"


class RewardSection(Section):
    """Scores completions (docs/data.md) by one ``function``, or by the weighted sum of ``parts``."""

    function: str = _DEFAULT
    """exact_match, final_number, math_verify, format, length, tests, an http(s) URL, hf:<folder>, ranks:<name> of
    reward_models, or module:function."""
    parts: Mapping[EntryName, RewardPart] = Field(default_factory=dict)
    steps: bool = False
    """Whether ``function``, of your own, may return rewards of a completion's steps with their ends, which
    algorithm.credit=turn compares (docs/data.md)."""
    on_error: Literal["fail", "drop"] | Finite = "fail"
    """What to do if a reward raises, times out or is not finite: end the run (fail), drop the group, or score the
    completion with a number."""
    timeout_seconds: PositiveFloat = 60.0
    """Time limit of one call of the function. Its waits for resources that other groups use do not count: for a slot of
    a sandbox or of the requests to a URL, math-verify's processes, a thread, a reward model."""
    format: FormatSection = FormatSection()
    length: LengthSection = LengthSection()
    tests: TestsSection = TestsSection()
    http: HttpSection = HttpSection()
    model: RewardModelSection = RewardModelSection()

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        for url in self.functions.values():
            if "://" in url and (secret := find_secret(url)):
                raise ValueError(
                    f"reward.function: the address has {secret}, and the configuration is in a file that others may "
                    "read, and in logs; leave it out, and name a function of yours (module:function), which reads its "
                    "secret from a file of mode 0600"
                )
        return self

    @model_validator(mode="after")
    def _one_or_parts(self) -> Self:
        if self.parts and self.function != _DEFAULT:
            raise ValueError(
                f"reward.function={self.function!r} and reward.parts ({', '.join(self.parts)}) are both given; "
                "make the function one of the parts, or leave one of the two out"
            )
        if self.parts and self.steps:
            raise ValueError(
                f"reward.steps=true with reward.parts ({', '.join(self.parts)}): a sum of parts has no steps; add "
                "up in a function of your own, or set reward.steps=false"
            )
        for name, part in self.parts.items():
            for other in part.when:
                if other == name or other not in self.parts:
                    others = ", ".join(one for one in self.parts if one != name) or "none"
                    raise ValueError(
                        f"reward.parts.{name}.when.{other}: {other!r} is not another part; the others are {others}"
                    )
        return self

    @property
    def only_records(self) -> bool:
        """True if every part has weight 0, so that all rewards are 0."""
        return bool(self.parts) and all(part.weight == 0 for part in self.parts.values())

    @property
    def functions(self) -> Mapping[str, str]:
        """Each part's function by the part's name; without parts, ``function`` by its own name."""
        return {name: part.function or name for name, part in self.parts.items()} or {self.function: self.function}


class SandboxSection(Section):
    """Where code that a model wrote runs, for reward.function=tests and environments that ask for it
    (docs/data.md)."""

    type: Literal["subprocess", "remote"] = "subprocess"
    """subprocess: a process of this machine that bubblewrap fences; remote: a server of yours at ``url``."""
    seconds: PositiveFloat = 10.0
    """Time limit of a program, and limit of the processor time of its processes; then it is killed with all that it
    started."""
    memory_mb: Positive = 1024
    """Limit of a program's memory, in MiB: of all its processes, and of what each may ask for."""
    allow_unfenced: bool = False
    """type=subprocess: whether programs run as your own user, with your files and your network, where there is no
    bubblewrap, or the kernel allows no namespaces; else that is refused."""
    url: str | None = None
    """type=remote: where programs are posted to; https, or this machine."""
    token_file: Path | None = None
    """type=remote: a file with the server's token, which only you can read; read for each attempt, as the token may
    rotate."""

    @model_validator(mode="after")
    def _has_a_safe_address(self) -> Self:
        if self.url is not None:
            parts = urlsplit(self.url)
            if secret := find_secret(self.url):
                raise ValueError(
                    f"sandbox.url: the address has {secret}, and the configuration is in a file that others may read; "
                    "leave it out, and give the server's token by sandbox.token_file"
                )
            if not parts.hostname or parts.scheme not in ("http", "https"):
                raise ValueError(f"sandbox.url={self.url!r:.200}: write it as https://host:port/path")
            if parts.scheme == "http" and not is_loopback(parts.hostname):
                raise ValueError(
                    f"sandbox.url={self.url!r:.200}: programs and the token would cross the network in the clear; use "
                    "https, or an address of this machine (localhost, 127.0.0.1, ::1)"
                )
        return self


Whole = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]


class EnvironmentSection(Section):
    """An environment or agent that completions are part of (docs/environments.md); without one each prompt gets one."""

    function: str | None = None
    """calculator, guess, or package.module:name of your own class of environments or async function; null:
    there is none."""
    options: Mapping[EntryName, bool | Whole | Finite | str] = Field(default_factory=dict)
    """Keyword argument of the function."""
    template: Literal["chat", "plain"] = "chat"
    """How messages become tokens: by the tokenizer's chat template, or their texts as they are."""
    thinking: Literal["template", "keep"] = "template"
    """Whether a row may continue where the chat template drops the thinking of earlier turns. template: a new row
    begins, as the template writes it; keep: it continues with the thinking in it, which is one row, but no context that
    the template would make."""
    tool_parser: Literal["hermes", "llama3_json", "deepseek", "glm", "harmony"] | None = None
    """Format in which the model writes reasoning and calls of tools, which become ``reasoning_content`` and
    ``tool_calls`` of its messages; null: its text is the content, and a client that sends tools is refused."""
    concurrency: Positive = 1024
    """Most running trajectories, of training or of an evaluation; others wait for one to end. Each has a thread and
    three open files, and more if it opens some."""
    max_turns: Positive = 8
    """Most turns of a trajectory."""
    max_tokens: Positive = 4096
    """Most tokens of a trajectory after its first prompt, sampled and observed, in all its rows: what a row has in
    common with the beginning of an earlier one is not counted again."""
    min_turn_tokens: Positive = 16
    """A trajectory that has room for fewer sampled tokens ends before its next turn."""
    max_observation_tokens: Positive = 1024
    """A longer message of an environment is cut in its middle, with a mark that says so."""
    seconds: PositiveFloat = 300.0
    """Time limit of a trajectory, sampling included: what was sampled by then is scored and trained on. Servers end a
    turn there, with its tokens; a first one has twice as long, and again, until it has a token. A call that has begun
    by then keeps its own limit."""
    step_seconds: PositiveFloat = 30.0
    """Time limit of each call of an environment's start, step and score; and how long after ``seconds`` a function that
    leads its trajectory may still return its reward."""
    on_error: Literal["fail", "drop"] | Finite = "fail"
    """What to do if an environment raises, is late or gives an invalid answer: end the run (fail), drop the group, or
    give the trajectory a number as its reward."""
