"""Checks that the files of problems exist, and that the run can read, tokenize and learn their first rows. Checks that
no held-out problem is trained on."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from launcher.preflight.subject import Finding, PreflightContext, fact, note, problem, unchecked
from rl_megatron.agents.conversation.forms import make_form_check
from rl_megatron.agents.conversation.messages import UnsupportedMessages, normalize_messages
from rl_megatron.config.beside import message_prompt_keys, teachers_with_prompt
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import FileKeys, data_sources, source_name
from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.data.problems.parquet import FileRows
from rl_megatron.data.problems.prompts import (
    check_template,
    drop_leaks,
    formed,
    key_of_written,
    read_problems,
    source_teachers,
)
from rl_megatron.data.problems.rendering import Example, RowForm, unrendered
from rl_megatron.data.problems.rows import find_data_files, listed, local_files
from rl_megatron.errors import DataError, RLMegatronError
from rl_megatron.files import parse
from rl_megatron.interfaces import RewardFunction
from rl_megatron.rewards.registry import REWARDS
from rl_megatron.rewards.rules import final_number, is_formula
from rl_megatron.types import Prompt

if TYPE_CHECKING:
    from launcher.build.jobs import LearnedRows

ROWS = 1000
_SHOWN = 10_000  # squares of a row's messages that a chat template shows, each turn after all before it: some 2 s
_OF_SYSTEM = "name it in {key}.fields.system"
_MEDIA = re.compile(r"(decoded_)?(image|picture|photo|video|audio|pixel_value)s?(_(urls?|paths?|bytes|files?))?", re.I)
_TEXT_ALONE = "a run reads text alone, so leave out the rows that need it"
_OF_ROWS: Mapping[str, str] = {
    "system": f"{_OF_SYSTEM}, with {{key}}.chat_template=true",
    "system_prompt": f"{_OF_SYSTEM}, with {{key}}.chat_template=true",
    "input": "write it into the question",
}
_OF_CONVERSATIONS: Mapping[str, str] = {
    **dict.fromkeys(("system", "system_prompt"), _OF_SYSTEM),
    **dict.fromkeys(("tools", "functions"), "name it in {key}.fields.tools"),
    **dict.fromkeys(("chat_template_kwargs", "enable_thinking"), "all rows have those of model.template_variables"),
}
"""The advice for fields of these names that no key reads: published data sets have parts of prompts there."""


def check(subject: PreflightContext) -> Iterator[Finding]:
    """Reads the first rows of ``train`` and ``eval`` of each source, and of ``eval`` of each set, like the run does.
    Yields why a row is refused, which rows are trained on and held out, and what the run would log."""
    logger, kept = logging.getLogger("rl_megatron"), _Kept()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(kept)
    try:
        yield from _check(subject)
    finally:
        logger.removeHandler(kept)
        logger.propagate = propagate
    yield from map(fact, dict.fromkeys(kept.texts))


class _Kept(logging.Handler):
    """Keeps the texts of warnings, which the run logs again."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts = list[str]()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _check(subject: PreflightContext) -> Iterator[Finding]:
    config, reader = subject.config, _Reader(subject.config)
    sources = {key: one for key, one in data_sources(config.data).items() if isinstance(one, FileKeys)}
    sets = {key: one for key, one in config.eval.data_of_sets.items() if isinstance(one, FileKeys)}
    if sources or sets:
        yield from reader.prepare(subject)
    trained, held_out = dict[str, list[Example]](), dict[str, list[Example]]()
    for key, data in sources.items():
        trained[key] = yield from reader.split(key, data, "train")
        held_out[key] = yield from reader.split(key, data, "eval")
    for key, data in sets.items():
        held_out[key] = yield from reader.split(key, data, "eval")
    if sources or sets:
        yield from reader.unread()
    read, on_leak = {key: problems for key, problems in trained.items() if problems}, config.data.on_leak
    if read and (on_leak == "fail" or not reader.longer):
        judges = config.environments_of_sources, config.rewards_of_sources
        try:
            drop_leaks(read, held_out, on_leak, *judges, written=key_of_written(config.kind.samples, config.kind.rows))
        except DataError as error:
            yield problem(str(error))


class _Reader:
    """Reads the first rows of files by the functions of the run of ``config``."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._rows: LearnedRows | None = None  # None: the tokenizer cannot be read here
        self.longer = list[str]()  # files with more rows than are read
        self._unshown = list[str]()  # files with rows that the chat template is not asked to show
        self._empty: dict[str, list[str]] = {"train": [], "eval": []}  # reasons, one a file: no row left, or ""

    def prepare(self, subject: PreflightContext) -> Iterator[Finding]:
        """Reads the tokenizer, and yields why that fails, unless another check does."""
        try:
            tokenizer = subject.tokenizer
        except (RLMegatronError, OSError):  # the check of the model's files tells it
            return
        if tokenizer is None:
            yield unchecked("the tokens of rows, because the tokenizer or torch is missing here")
            return
        from launcher.build.data import end_tokens
        from launcher.build.jobs import LearnedRows

        try:
            stops, size = subject.stop_token_ids, subject.shape.vocab_size
        except (RLMegatronError, OSError):  # the check of the model's files tells it
            stops, size = (), sys.maxsize
        ends = end_tokens(self._config.data, tokenizer, stops)
        self._rows = LearnedRows(tokenizer=tokenizer, stop_token_ids=stops, end_token_ids=ends, vocab_size=size)

    def unread(self) -> Iterator[Finding]:
        """Yields which rows were not read, or not in full, and the files with no row left."""
        if self.longer:
            yield unchecked(f"rows of {' and '.join(self.longer)} after the first {ROWS}")
        if self._unshown:
            yield unchecked(f"how the chat template shows {' and '.join(self._unshown)}")
        for each in self._empty.values():
            yield from map(problem if all(each) else note, filter(None, each))

    def split(self, section: str, data: FileKeys, name: str) -> Generator[Finding, None, list[Example]]:
        """Yields the problems in the file ``name`` of ``data``, and notes on doubtful rows. Returns its problems."""
        config, key = self._config, f"{section}.{name}"
        try:
            data = local_files(data, section, (name,))
            problems = self._problems(section, data, name)
        except RLMegatronError as error:
            yield problem(str(error))
            return []
        path, learns = getattr(data, name), not config.kind.samples and section in data_sources(config.data)
        is_whole = len(problems) < ROWS or len(problems) == data.max_eval
        if not is_whole:
            self.longer.append(str(path))
        compared = _compared(config, config.own_rewards.get(source_name(section).removesuffix(".data")))
        for odd in _odd_answers(problems, data, compared, learns):
            yield note(odd.replace("{key}", section))
        for unread in _unread(problems, data, learns) if name == "train" else ():
            yield note(f"{path}: {unread.replace('{key}', section)}")
        if data.fields["messages"] is not None and path.suffix == ".jsonl":
            yield from _null_arguments(problems)
        try:
            prompts = self._prompts(section, data, name, problems)
        except RLMegatronError as error:
            is_refused = is_whole or config.on_long_prompt == "fail"
            yield (problem if is_refused else note)(str(error))
        else:
            yield from self._learned(key, prompts, is_whole)
        return problems

    def _problems(self, section: str, data: FileKeys, name: str) -> list[Example]:
        """Returns the problems of the first rows. Raises ConfigError, and DataError that names all bad rows."""
        check_template(data, section)
        path, key, most = getattr(data, name), f"{section}.{name}", ROWS
        lists = data.chat_template or section in message_prompt_keys(self._config)
        if name == "eval":
            data, most = data.check_held_out, min(ROWS, data.max_eval or ROWS)
        elif (files := find_data_files(path, key))[0].suffix == ".parquet":
            FileRows(files, data, key, lists=lists)
        tokenizer = None if self._rows is None else self._rows.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            data = data.model_copy(update={"chat_template": False})
        return read_problems(path, key, data, tokenizer, most, lists=lists)

    def _prompts(self, section: str, data: FileKeys, name: str, problems: Sequence[Example]) -> list[Prompt]:
        """Returns problems' prompts, with tokens if the tokenizer is here, named by their places. Raises DataError."""
        named, source, config = [replace(one, id=one.place) for one in problems], source_name(section), self._config
        if self._rows is None:
            return [] if data.fields["messages"] is None else unrendered(named)
        drawn = name == "train" and data.train.suffix != ".jsonl"  # a job drops long parquet rows when it draws them
        form = RowForm(
            tokenizer=self._rows.tokenizer,
            max_tokens=sys.maxsize if drawn and not config.kind.samples else config.longest_prompt,
            on_long_prompt=config.on_long_prompt,
            keys=config.prompt_limit_keys,
            vocab_size=self._rows.vocab_size,
            teachers=source_teachers(source, teachers_with_prompt(config)) if name == "train" else {},
        )
        return [replace(one, source=source) for one in formed(named, data, form)]

    def _learned(self, key: str, prompts: Sequence[Prompt], is_whole: bool) -> Iterator[Finding]:
        """Yields why the run cannot learn one of the prompts of the file of ``key``."""
        config, rows = self._config, self._rows
        if config.kind.samples:
            if rows is not None:
                yield from _check_first_prompts(prompts, rows)
            if rows is not None and key.startswith("data") and key.endswith(".train"):
                yield from self._taught(prompts, rows)
            return
        if config.written.on_refused == "fail" and (check := make_form_check(config)) is not None:
            try:
                check([one for one in prompts if not one.token_ids])
            except DataError as error:
                yield problem(str(error))
                return
        if rows is None:
            return
        from rl_megatron.training.jobs.written import drop_advice, fit_rows, make_units

        shown, units_of = _some(prompts), rows.units(config)
        if len(shown) < len(prompts):
            self._unshown.append(f"rows of {key} after the first {len(shown)}")
        try:
            units, without = make_units(shown, units_of, config)
            fit = fit_rows(units, config).units
        except DataError as error:
            refused = _refused(shown, units_of)
            yield problem("\n".join([listed(refused), drop_advice(config)]) if refused else str(error))
            return
        told = without.describe(f"the first {len(shown)} rows of {key}", config)
        is_empty = is_whole and shown and len(shown) == len(prompts) and not fit
        why = f"{key}: no row remains: {'; '.join(told) or 'all are too long'}" if is_empty else ""
        self._empty[key.rpartition(".")[2]].append(why)
        yield from map(note, () if is_empty else told)

    def _taught(self, prompts: Sequence[Prompt], rows: LearnedRows) -> Iterator[Finding]:
        """Yields why the answers of prompts cannot be learned in a warm start, or their demonstrations."""
        config = self._config
        learns_answers = config.warm_start.steps > 0 and config.environment.function is None
        if learns_answers and (refused := _refused(prompts, rows.units(config))):
            yield problem(f"{listed(refused)}\nor set warm_start.steps=0")
        if config.algorithm.demonstration_gamma is not None:
            from launcher.build.sampler import make_demonstrations

            show = make_demonstrations(config, rows, rows.vocab_size)
            if refused := _refused(prompts, lambda some: [show(one) for one in some]):
                yield problem(listed(refused))


def _check_first_prompts(prompts: Sequence[Prompt], rows: LearnedRows) -> Iterator[Finding]:
    """Yields which prompts an environment cannot begin with as they are."""
    from rl_megatron.agents.conversation.rendering import ChatRenderer  # transformers takes half a second to import

    refused, begun = list[str](), [prompt for prompt in prompts if prompt.messages]
    if not begun or not rows.tokenizer.chat_template:
        return
    template = ChatRenderer(rows.tokenizer)
    for prompt in begun:
        try:
            template.render(normalize_messages(prompt.messages), ())
        except UnsupportedMessages as error:
            refused.append(f"{prompt.id}: {error}")
    if refused:
        yield note(f"{refused[0]}; an environment cannot start from {len(refused)} of {len(prompts)} rows")


def _refused(prompts: Sequence[Prompt], units_of: Callable[[Sequence[Prompt]], list[Any]]) -> list[str]:
    """Returns the reason for each prompt that is refused."""
    from rl_megatron.training.jobs.written import units_of_each

    return [why for _, why in units_of_each(prompts, units_of)[1]]


def _some(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Returns the first prompts, as many as a chat template shows in a few seconds."""
    size = 0
    for at, prompt in enumerate(prompts):
        size += 0 if prompt.token_ids else prompt.text.count('"role"') ** 2
        if size > _SHOWN:
            return prompts[: max(at, 1)]
    return prompts


def _compared(config: RunConfig, own: RewardSection | None) -> set[RewardFunction]:
    """Returns the built-in rewards, of ``own`` or the run's, that compare completions with answers."""
    if not config.kind.samples or config.environments:
        return set()
    return {REWARDS[name] for name in (own or config.reward).functions.values() if name in REWARDS}


def _odd_answers(
    problems: Sequence[Example], data: FileKeys, compared: Collection[RewardFunction], learns: bool
) -> Iterator[str]:
    """Yields notes on questions and answers that the run may read differently than their file means them. A note has
    the first row of its kind, and the number of rows."""
    if data.fields["messages"] is not None:
        return
    asked, answer = data.prompt_field, data.answer_field
    field, counts = f"{{key}}.fields.answer={answer!r}", f"of the first {len(problems)} rows"
    end = "completions are compared with its JSON" if compared else "its JSON is learned"

    def first(is_odd: Callable[[Example], bool], text: str) -> Iterator[str]:
        if odd := [one for one in problems if is_odd(one)]:
            yield f"{odd[0].place}: {text} ({len(odd)} {counts})"

    def value(one: Example) -> object:
        return one.meta.get(answer)

    yield from first(
        lambda one: (
            not (data.chat_template or asked in one.meta) and isinstance(next(iter(_list_in(one.raw)), None), dict)
        ),
        f"{{key}}.fields.prompt={asked!r} is the JSON text of a list, and the policy reads it as text; set "
        "{key}.chat_template=true to render it as messages",
    )
    if compared:
        yield from first(
            lambda one: answer not in one.meta and bool(_list_in(one.answer)),
            f"{field} is the JSON text of a list, and completions are compared with it; write one answer as text",
        )
        yield from first(
            lambda one: isinstance(value(one), bool), f"{field} is true or false, and {end}; write the answer as text"
        )
    if compared or learns:
        yield from first(
            lambda one: isinstance(value(one), dict),
            f"{field} is an object, and {end}; name a field in it with {{key}}.fields.answer={answer}.<field>",
        )
        yield from first(
            lambda one: isinstance(value(one), list), f"{field} is a list, and {end}; write one answer as text"
        )
    if final_number in compared:
        yield from first(
            lambda one: not isinstance(value(one), dict | list) and is_formula(one.answer),
            "the answer is a formula, and final_number compares only its last number (2 for \\frac{1}{2}); "
            "set reward.function=math_verify to compare all of it",
        )


def _list_in(text: str) -> list[object]:
    """Returns the list that a JSON text encodes; empty if the text encodes no list."""
    try:
        found = parse(text) if text.startswith("[") else None
    except ValueError:
        return []
    return found if isinstance(found, list) else []


def _unread(problems: Sequence[Example], data: FileKeys, learns: bool) -> Iterator[str]:
    """Yields fields of training rows that look like a part of the prompt and that no key reads, with advice for each.
    The ``input`` of Alpaca's rows counts only if the run ``learns`` answers: where completions are sampled, a reward
    may read it."""
    given = _OF_ROWS if data.fields["messages"] is None else _OF_CONVERSATIONS
    known = {name: f"{advice}, if it should" for name, advice in given.items()}
    for one in problems:
        known |= {name: _TEXT_ALONE for name, value in one.meta.items() if _MEDIA.fullmatch(name) or _is_media(value)}
    named = {str(field).partition(".")[0] for field in data.fields.values()}
    for name, advice in known.items():
        if name in named or (name == "input" and not learns):
            continue
        if count := sum(one.meta.get(name) not in (None, "", [], {}, "[]") for one in problems):
            yield (
                f"{count} of the first {len(problems)} rows have a field {name!r}, but no key of {{key}} names it, so "
                f"the policy does not read it; {advice}"
            )


def _is_media(value: object) -> bool:
    """True for a picture or sound of Hugging Face's data sets, or a list of them."""
    first = value[0] if isinstance(value, list) and value else value
    return isinstance(first, dict) and (first.keys() == {"bytes", "path"} or first.keys() >= {"array", "sampling_rate"})


def _null_arguments(problems: Sequence[Example]) -> Iterator[Finding]:
    """Yields which conversations have a call of a tool with null for an argument."""
    if nulls := [one.place for one in problems if _has_null_argument(one.text)]:
        yield note(
            f"{nulls[0]}: a tool call has null as an argument, as in {len(nulls)} of the first {len(problems)} rows, "
            "and the run keeps it. If the file comes from an Arrow table, where each call gets the keys of the other "
            "functions, remove these keys or train on the parquet file"
        )


def _has_null_argument(text: str) -> bool:
    """True if a tool call in the messages has null as the value of an argument itself."""
    said = json.loads(text)
    for message in (*said["messages"], *said.get("rejected", ())):
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            match call:
                case {"function": {"arguments": dict(values)}} if None in values.values():
                    return True
    return False
