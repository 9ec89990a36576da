"""The ``data`` section: generated problems, your own files, or a mixture of several such sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from rl_megatron.config.sections.reward import EnvironmentSection, RewardSection, reward_key
from rl_megatron.rules import set_leaves
from rl_megatron.section import NUMBER, EntryName, Positive, PositiveFloat, PositiveFraction, Section

TURNS_IN_TEXT = (
    "Texts of several turns, as HH-RLHF's, are conversations for data.fields.messages: split them into messages "
    "at '\\n\\nHuman: ' and '\\n\\nAssistant: ' (docs/data.md)"
)


class ArithmeticData(Section):
    """Generated sums such as ``37+08=`` with the answer ``540``, lowest digit first, or products such as ``37*08=``,
    with the answer ``296``; no problem is in both splits."""

    instead: ClassVar[str] = "data.type=arithmetic makes its own problems; add data=gsm8k to read files"
    type: Literal["arithmetic"] = "arithmetic"
    digits: Annotated[int, Field(ge=1, le=6), NUMBER] = 2
    """Digits of the largest number in a problem."""
    operation: Literal["sum", "product"] = "sum"
    """Operation on the two numbers."""
    num_eval: Positive = 256
    """Held-out problems."""

    @property
    def sample_note(self) -> str:
        """A sentence for readers of samples; empty for products."""
        return "Sums are written lowest digit first: 37+08=540 is right." if self.operation == "sum" else ""


FieldName = Literal["prompt", "answer", "rejected", "margin", "messages", "tools", "context", "system", "demonstration"]
FIELDS: Mapping[FieldName, str | None] = {
    "prompt": "question",
    "answer": "answer",
    **dict.fromkeys(("rejected", "margin", "messages", "tools", "context", "system", "demonstration")),
}
"""The defaults of ``data.fields``."""


def _all_fields(given: Mapping[FieldName, str | None]) -> Mapping[FieldName, str | None]:
    """Returns all fields, with the defaults of missing ones."""
    for name in (name for name in ("prompt", "answer") if name in given and given[name] is None):
        raise ValueError(f"fields.{name}=null: a row has a problem and its answer; give the name of the field")
    return {**FIELDS, **given}


class FileKeys(Section):
    """Keys of problems in files, wherever these are; ``fields`` names their parts."""

    type: str
    train: Path
    """Problems to train on."""
    eval: Path
    """Held-out problems."""
    fields: Annotated[Mapping[FieldName, str | None], AfterValidator(_all_fields)] = FIELDS
    """Names of the fields of a row; ``a.b`` is field b of the object in field a, null: a row has none.
    prompt: The problem, as text, or with ``chat_template`` as a list of messages that the model answers, or the JSON
    text of one; not null.
    answer: The correct answer; not null.
    rejected: A worse answer (or the conversation that ends worse than that of messages), for job=dpo and
    job=reward_model.
    margin: The number that job=reward_model puts between the scores of a row's two answers, for example how much better
    raters find one of them; null: 0.
    messages: A conversation, a list of messages, for jobs on written text: they train on the assistant's, except those
    with a ``weight`` of 0 or ``train`` false, which are context alone (docs/sft.md), and of pairs on what follows the
    messages that both conversations begin with; null: a row is a problem and its answer.
    tools: The list of functions that a conversation's chat template shows.
    context: The messages before those of messages and rejected, as ``prompt`` of TRL's pairs and completions: context
    alone, whatever their role.
    system: The text of the system's message, which comes first where it is not empty: in a conversation, or in front of
    the user turn of ``chat_template``.
    demonstration: The text that ``algorithm.demonstration_gamma`` trains on besides completions, and that the reward
    scores, too; held-out rows need none; null: the answer."""
    prompt_template: str = "{prompt}"
    """Text of a prompt, in which the problem, or the text of its last message, replaces {prompt}."""
    chat_template: bool = False
    """Render the prompt by the tokenizer's chat template: a text as a user turn, a list of messages as it is."""
    max_eval: Positive | None = None
    """Number of held-out problems to use, the first of the file; null uses all."""

    @property
    def check_held_out(self) -> Self:
        """The keys of held-out rows, which are not trained on."""
        return self.model_copy(update={"fields": {**self.fields, "demonstration": None}})

    @property
    def prompt_field(self) -> str:
        """The field of the problem."""
        return str(self.fields["prompt"])

    @property
    def answer_field(self) -> str:
        """The field of the correct answer."""
        return str(self.fields["answer"])

    @model_validator(mode="after")
    def _rows_have_one_form(self) -> Self:
        talks, its = self.fields["messages"], dict(set_leaves("", self))
        unread = ["fields.prompt", "fields.answer", "prompt_template", "chat_template"]
        if talks is None:
            unread = ["fields.tools", "fields.context"]
            if self.fields["system"] is not None and not self.chat_template:
                raise ValueError(
                    f"fields.system={self.fields['system']!r} does nothing without chat_template=true or "
                    "fields.messages; set one of them, or leave it out"
                )
        for name in (name for name in unread if name in its):
            of = "without fields.messages" if talks is None else f"with fields.messages={talks!r}"
            raise ValueError(f"{name}={its[name].value!r} does nothing {of}; leave one of the two out")
        return self


class FileData(FileKeys):
    """Your own problems: .jsonl or .parquet files with one problem a row, in the fields that these keys name."""

    instead: ClassVar[str] = "data.type=files reads problems from files; add data=arithmetic to generate sums"
    type: Literal["files"]


class HubData(FileKeys):
    """Problems of a data set on the Hugging Face hub: ``train`` and ``eval`` are files in it, as of one commit."""

    instead: ClassVar[str] = "data.type=hub reads files of data.repo; add data=arithmetic to generate sums"
    type: Literal["hub"]
    repo: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$", max_length=200)]
    """The data set, as owner/name."""
    revision: str
    """Commit of the data set: 40 hexadecimal digits."""

    @field_validator("revision")
    @classmethod
    def _is_pinned(cls, revision: str) -> str:
        if not re.fullmatch("[0-9a-f]{40}", revision):
            raise ValueError(
                f"revision={revision!r:.60}: a branch or a tag can move before a run is resumed or repeated; give the "
                "commit that it is at now, 40 hexadecimal digits, which the hub shows above the data set's files"
            )
        return revision


class SourceKeys(Section):
    """Keys of a source of a mixture besides its problems."""

    weight: PositiveFloat = 1.0
    """Its share of the prompts is this over the sum of all sources' weights; may change on a resume."""
    reward: RewardSection | None = None
    """Reward of its completions, with the keys of reward; null: the run's reward."""
    environment: EnvironmentSection | None = None
    """Environment or agent that its completions are part of, with the keys of environment; null: what the run has."""


class ArithmeticSource(SourceKeys, ArithmeticData):
    """A source of a mixture: generated sums."""

    instead: ClassVar[str] = "a source with type=arithmetic makes its own problems; set its type to files to read some"


class FileSource(SourceKeys, FileData):
    """A source of a mixture: your own files."""

    instead: ClassVar[str] = "a source with type=files reads problems; set its type to arithmetic to generate sums"


class CurriculumSection(Section):
    """Draws prompts by their pass rates: the shares of completions with at least eval.success_reward (docs/data.md)."""

    retire_above: PositiveFraction | None = None
    """Pass rate from which on a prompt is no longer drawn; null: no prompt retires."""
    explore: PositiveFraction | None = None
    """Draw a prompt of pass rate p in an epoch with the probability (sqrt(p (1 - p)) + this) / (1/2 + this), so most
    often those that are solved half the time (SPO: 0.05); null: pass rates do not matter so."""
    min_seen: Positive = 1
    """Times that a prompt must be sampled before its pass rate counts."""

    @property
    def is_on(self) -> bool:
        """True if pass rates decide anything."""
        return self.retire_above is not None or self.explore is not None


class HubSource(SourceKeys, HubData):
    """A source of a mixture: files of a data set on the hub."""

    instead: ClassVar[str] = (
        "a source with type=hub reads files of its repo; set its type to arithmetic to generate sums"
    )


class RunKeys(Section):
    """Keys of a run's data besides its problems."""

    on_leak: Literal["fail", "drop", "keep"] = "fail"
    """What to do with a training problem that is held out too, in any white space: end the run before it starts and
    name file and line (fail), not train on it (drop), or train on it (keep)."""
    curriculum: CurriculumSection = CurriculumSection()


class ArithmeticRunData(RunKeys, ArithmeticData):
    """Generated sums such as ``37+08=`` with the answer ``540``, lowest digit first; no problem is in both splits."""


class FileRunData(RunKeys, FileData):
    """Your own problems: .jsonl or .parquet files with one problem a row, in the fields that these keys name."""


class HubRunData(RunKeys, HubData):
    """Problems of a data set on the Hugging Face hub: ``train`` and ``eval`` are files in it, as of one commit."""


class MixtureData(RunKeys):
    """Prompts of several sources in fixed shares (docs/data.md)."""

    instead: ClassVar[str] = "data.type=mixture has these keys in each of data.sources: data.sources.<name>.<key>"
    type: Literal["mixture"]
    sources: Annotated[
        Mapping[EntryName, Annotated[ArithmeticSource | FileSource | HubSource, Field(discriminator="type")]],
        Field(min_length=1),
    ]


OneSource = ArithmeticData | FileData | HubData
DataSection = OneSource | MixtureData


def data_sources(data: DataSection) -> Mapping[str, OneSource]:
    """Returns each source by the key of its section: ``data``, or ``data.sources.<name>`` in a mixture."""
    if not isinstance(data, MixtureData):
        return {"data": data}
    return {f"data.sources.{name}": source for name, source in data.sources.items()}


def sample_note(data: DataSection) -> str:
    """Returns a sentence for readers of samples, if a source needs one."""
    notes = (one.sample_note for one in data_sources(data).values() if isinstance(one, ArithmeticData))
    return next((note for note in notes if note), "")


def source_environments(data: DataSection) -> dict[str, EnvironmentSection]:
    """Returns each source's own environment that names a function, by the key of its section."""
    sources = data.sources if isinstance(data, MixtureData) else {}
    own = {f"data.sources.{name}.environment": source.environment for name, source in sources.items()}
    return {key: one for key, one in own.items() if one is not None and one.function is not None}


def source_rewards(
    data: DataSection, reward: RewardSection, environment: EnvironmentSection
) -> dict[str, RewardSection]:
    """Returns the rewards of training's completions, by the key of their section: sources' own, and the run's if some
    completions have neither these nor an environment."""
    sources = data.sources if isinstance(data, MixtureData) else {}
    own = {reward_key(name): one.reward for name, one in sources.items() if one.reward is not None}
    apart = sources and all(one.reward or one.environment for one in sources.values())
    return own if apart or environment.function else {**own, "reward": reward}


def source_name(key: str) -> str:
    """Returns a source's name from the key of its section; empty if it is the only one."""
    return key.removeprefix("data").removeprefix(".sources.")


def source_weights(data: DataSection) -> dict[str, float]:
    """Returns each source's weight by its name; empty for a single source."""
    return {name: one.weight for name, one in data.sources.items()} if isinstance(data, MixtureData) else {}
