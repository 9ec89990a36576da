"""The entries of ``algorithm.kl.teachers``: models that score the policy's completions, on ranks or in servers."""

from __future__ import annotations

from pathlib import Path
from string import Formatter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, model_validator
from pydantic_core import PydanticCustomError

from rl_megatron.http.urls import is_plain_address
from rl_megatron.section import LISTED, OwnCode, Positive, PositiveFloat, Section


def _check_address(text: str) -> str:
    if not is_plain_address(text):
        raise PydanticCustomError("server", "Input should be http://host:port, without user or path")
    return text


_BRACES = "{NAME} is a field of the row, and braces of the text are written twice, as in \\boxed{{}}"
OTHER_COMPLETION_FIELD = "right_completion"
"""A prompt's field for another completion of the group, which is right."""
OTHER_COMPLETION_TOKEN = -1
"""Placeholder among the tokens of a prompt for the tokens of that completion."""
TEACHER = "teacher_"
"""The prefix of teachers' roles."""


def teacher_role(name: str) -> str:
    """Returns the role of a teacher among a run's models, and of its ranks."""
    return f"{TEACHER}{name}"


def prompt_parts(prompt: str) -> list[tuple[str, str | None]]:
    """Returns the texts of a teacher's prompt, each with the name of the field that follows it, or None. {NAME} is a
    field, and {{ and }} are braces, as in ``str.format``. Raises ValueError for other braces."""
    try:
        parts = list(Formatter().parse(prompt))
    except ValueError as error:
        raise ValueError(f"prompt={prompt!r:.80}: {error}; {_BRACES}") from error
    for _, name, form, converted in parts:
        if name is not None and (not name or form or converted):
            shown = "".join(("{", name, f"!{converted}" * bool(converted), f":{form}" * bool(form), "}"))
            raise ValueError(f"prompt={prompt!r:.80}: {shown:.40} names no field; {_BRACES}")
    return [(text, name) for text, name, _, _ in parts]


class TeacherSection(Section):
    """A model that scores the policy's completions (docs/sft.md), on ranks of its own or in a server of an engine; or
    the policy itself, which reads another prompt."""

    server: Annotated[str, AfterValidator(_check_address)] | None = None
    """http(s)://host:port of a server that runs already; null: ranks of the run's own hold it, in the learner's layout
    or that of ``roles.layouts.teacher_<name>``."""
    engine: Literal["vllm", "sglang"] | OwnCode | None = None
    """The server's engine: vllm, sglang, or ``package.module:Class``, an engine of your own; null without a server."""
    path: Path | None = None
    """Hugging Face folder of the teacher; of one in a server, config.json and tokenizer.json are read here. null:
    the policy itself, with the weights that a step begins with, or a reference that follows it, by ``prompt``."""
    prompt: str | None = None
    """Text that it reads in place of data.prompt_template: {prompt} is the problem, {answer} its right answer, {NAME}
    field NAME of its row, as in data.fields.prompt; {right_completion} is another completion of the same group, whose
    reward is at least eval.success_reward; {{ and }} are braces. null: the policy's own prompt."""
    max_prompt_tokens: Positive | None = None
    """Most tokens of such a prompt; ``rollout.on_long_prompt`` says what is done with a longer one."""
    weight: PositiveFloat = 1.0
    """Weight of its log-probs among those of all teachers of a prompt, which add up to 1."""
    sources: Annotated[tuple[str, ...], LISTED] = ()
    """The sources of ``data.sources`` with prompts that it scores; none: all."""
    token_file: Path | None = None
    """File with the bearer token of the server, read for each attempt, as it may rotate."""
    timeout_seconds: PositiveFloat = 600.0
    """Time limit of one attempt at a sequence; five more follow, after 1, 2, 4, ... seconds, and then the run ends."""

    @property
    def reads_another(self) -> bool:
        """True if it reads another completion of the group."""
        return OTHER_COMPLETION_FIELD in self._named

    @property
    def _named(self) -> list[str | None]:
        """The fields in the prompt."""
        return [] if self.prompt is None else [name for _, name in prompt_parts(self.prompt)]

    @model_validator(mode="after")
    def _check_one_place(self) -> Self:
        if self.path is None and (self.server is not None or self.prompt is None):
            raise ValueError(
                "no path: without one it is the policy itself, which judges by another prompt on its own ranks; give "
                f"{'path' if self.server is not None else 'path, or prompt and max_prompt_tokens'}"
            )
        return self

    @model_validator(mode="after")
    def _prompt_is_whole(self) -> Self:
        if (self.prompt is None) != (self.max_prompt_tokens is None):
            given, missing = ("prompt", "max_prompt_tokens")[:: 1 if self.max_prompt_tokens is None else -1]
            raise ValueError(
                f"{given}={getattr(self, given)!r:.80} without {missing}: a prompt of its own has both; give "
                f"{missing}, or leave {given} out"
            )
        if self.prompt is not None and "prompt" not in self._named:
            raise ValueError(f"prompt={self.prompt!r:.80} has no {{prompt}}; write it where the problem goes")
        if (times := self._named.count(OTHER_COMPLETION_FIELD)) > 1:
            raise ValueError(
                f"prompt={self.prompt!r:.80} has {{{OTHER_COMPLETION_FIELD}}} {times} times, and one completion is "
                "shown; write "
                "it once"
            )
        return self
