"""The ``environment`` section: what the model talks to over several turns, and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from rl_megatron.section import MAX_INTEGER, EntryName, Finite, Positive, PositiveFloat, Section

Whole = Annotated[int, Field(ge=-MAX_INTEGER, le=MAX_INTEGER)]


class EnvironmentSection(Section):
    """An environment or agent that completions are part of (docs/environments.md); without one each prompt gets one."""

    function: str | None = None
    """calculator, guess, verifiers, or package.module:name of your own class of environments or async function; null:
    there is none."""
    options: Mapping[EntryName, bool | Whole | Finite | str] = Field(default_factory=dict)
    """Keyword argument of the function."""
    template: Literal["chat", "plain"] = "chat"
    """How messages become tokens: by the tokenizer's chat template, or their texts as they are."""
    thinking: Literal["template", "keep"] = "template"
    """Whether a row may go on where the chat template drops the thinking of earlier turns. template: a new row begins,
    as the template writes it; keep: it goes on with the thinking in it, which is one row, but no context that the
    template would make."""
    tool_parser: Literal["hermes", "llama3_json", "deepseek", "glm", "harmony"] | None = None
    """Format in which the model writes reasoning and calls of tools, which become ``reasoning_content`` and
    ``tool_calls`` of its messages; null: its text is the content, and a client that sends tools is refused."""
    concurrency: Positive = 1024
    """Most trajectories under way at once, of training or of an evaluation; others wait for one to end. Each has a
    thread and three open files, and more if it opens some."""
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
    """What to do if an environment raises, is late or answers what is no answer: end the run (fail), drop the group, or
    give the trajectory a number as its reward."""
