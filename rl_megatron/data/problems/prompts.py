"""Renders and tokenizes problems into Prompts, and bounds their length."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_megatron.config.sections.data import (
    ArithmeticData,
    DataSection,
    FileKeys,
    MixtureData,
    OneSource,
    data_sources,
    name_of,
)
from rl_megatron.data.problems.arithmetic import split_sums
from rl_megatron.data.problems.files import local_files, read_records
from rl_megatron.data.problems.leaks import OnLeak, hashes_of, problem_hash, rows_to_keep
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_AT_ONCE = 1000  # prompts that a tokenizer gets in one call
_MOST_CHARACTERS = 100  # per token, on average over a prompt

OnLongPrompt = Literal["fail", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """A prompt before tokenization. ``place`` says in errors where it comes from."""

    id: str
    place: str
    text: str
    answer: str
    raw: str  # as the data has it, without templates
    rejected: Sequence[str] = ()  # a worse answer, in data of pairs
    meta: Mapping[str, Any] = field(default_factory=dict)


def load_prompts(
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    on_long_prompt: OnLongPrompt,
    seed: int,
    on_leak: OnLeak | None = None,
    sets: Mapping[str, OneSource] | None = None,
) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held-out) prompts, in an order that depends on ``data`` and ``seed`` alone; of a mixture each source's
    follow each other, and their ids begin with its name.

    ``Prompt.answer`` is the correct answer, as in the data: rewards compare with it and the warm start trains on it.
    A prompt of more than ``max_prompt_tokens`` raises or is dropped, with a warning that counts these. ``on_leak`` says
    what to do with a problem to train on that is held out here or in ``sets`` (by the key of their section), and of
    equal ones the first alone is trained on then; None: nobody trains on them.
    Raises DataError that names files and lines.
    """
    sources = data_sources(data)
    splits = {key: _problems(key, source, tokenizer, seed) for key, source in sources.items()}
    if on_leak is not None:
        held = {key: held_out for key, (_, held_out) in splits.items()}
        held |= {key: _problems(key, source, tokenizer, seed)[1] for key, source in (sets or {}).items()}
        kept = _without_leaks([one for train, _ in splits.values() for one in train], held, on_leak)
        for key, (ours, held_out) in splits.items():
            splits[key] = [one for one in ours if id(one) in kept], held_out
            if not splits[key][0]:
                raise DataError(f"{key}: all {len(ours)} problems to train on are held out, or in sources above it")
    both = list[Prompt](), list[Prompt]()
    for key, source in sources.items():
        bos = not (isinstance(source, FileKeys) and source.chat_template)  # a chat template writes its own
        for prompts, problems in zip(both, splits[key], strict=True):
            found = _tokenize(problems, tokenizer, bos, max_prompt_tokens, on_long_prompt)
            prompts += _named(found, name_of(key)) if isinstance(data, MixtureData) else found
    return both


def _without_leaks(
    train: Sequence[_Problem], held_out: Mapping[str, Sequence[_Problem]], on_leak: OnLeak
) -> frozenset[int]:
    """The problems to train on, by Python's ``id``: each once, and without leaks where they are dropped."""
    places = {problem_hash(one.raw): f"{one.place} ({key})" for key, problems in held_out.items() for one in problems}
    hashes = hashes_of(problem_hash(one.raw) for one in train)
    pairs = any(one.rejected for one in train)  # a problem may be in several
    wholes = hashes_of(problem_hash(one.raw, one.answer, *one.rejected) for one in train) if pairs else hashes
    rows = rows_to_keep([one.place for one in train], hashes, wholes, places, on_leak)
    return frozenset(id(train[row]) for row in rows.tolist())


def _named(prompts: Sequence[Prompt], source: str) -> list[Prompt]:
    return [replace(prompt, id=f"{source}/{prompt.id}", source=source) for prompt in prompts]


def _problems(
    key: str, source: OneSource, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[list[_Problem], list[_Problem]]:
    """Both splits of a source; ``key``: of its section."""
    return (
        _arithmetic_problems(key, source, seed)
        if isinstance(source, ArithmeticData)
        else _file_problems(key, source, tokenizer)
    )


def fields_of(data: FileKeys, path: Path) -> tuple[str, ...]:
    """The fields that a row of ``path``, one of the data's two files, must have."""
    pairs = (data.rejected_field,) if data.rejected_field is not None and path == data.train else ()
    return data.prompt_field, data.answer_field, *pairs


def check_template(data: FileKeys, key: str) -> None:
    """Raises ConfigError if the template has no place for the problem; ``key``: of the section."""
    if "{prompt}" not in data.prompt_template:
        raise ConfigError(
            f"{key}.prompt_template={data.prompt_template!r:.200} has no '{{prompt}}'; write it where the problem goes"
        )


def first_problem(data: OneSource, key: str) -> tuple[str, str, Mapping[str, Any]]:
    """Text, without a chat template, answer and other fields of the first training problem; ``key``: of the section.

    Raises DataError.
    """
    if isinstance(data, ArithmeticData):
        made = _arithmetic(1, 1, data)
        return made.text, made.answer, {}
    files = local_files(data, key)
    (record,) = read_records(files.train, fields_of(files, files.train), key=f"{key}.train", limit=1)
    question, answer, *_ = record.texts
    return files.prompt_template.replace("{prompt}", question), answer, record.others


def _arithmetic(a: int, b: int, data: ArithmeticData) -> _Problem:
    digits, sign = data.digits, "+" if data.operation == "sum" else "*"
    text = f"{a:0{digits}}{sign}{b:0{digits}}"  # digits are in the same columns in every problem
    answer = f"{a + b:0{digits + 1}}"[::-1] if data.operation == "sum" else str(a * b)
    return _Problem(id=text, place=text, text=f"{text}=", raw=text, answer=answer)


def _arithmetic_problems(key: str, data: ArithmeticData, seed: int) -> tuple[list[_Problem], list[_Problem]]:
    train, held_out = split_sums(digits=data.digits, num_eval=data.num_eval, seed=seed, key=key)
    return [_arithmetic(a, b, data) for a, b in train], [_arithmetic(a, b, data) for a, b in held_out]


def _file_problems(
    key: str, data: FileKeys, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[_Problem], list[_Problem]]:
    check_template(data, key)
    if data.chat_template and not tokenizer.chat_template:
        raise ConfigError(f"{key}.chat_template=true, but the model's tokenizer has no chat template; set it to false")
    data = local_files(data, key)
    train = _records_to_problems(data.train, f"{key}.train", data, tokenizer)
    return train, _records_to_problems(data.eval, f"{key}.eval", data, tokenizer)[: data.max_eval]


def _records_to_problems(path: Path, key: str, data: FileKeys, tokenizer: PreTrainedTokenizerBase) -> list[_Problem]:
    records = read_records(path, fields_of(data, path), key=key)
    problems = []
    for line, record in enumerate(records, 1):
        question, answer, *rejected = record.texts
        text = data.prompt_template.replace("{prompt}", question)
        if data.chat_template:
            chat = [{"role": "user", "content": text}]
            text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        problem = _Problem(
            id=f"{path.stem}:{line}",
            place=f"{path}:{line}",
            text=text,
            raw=question,
            answer=answer,
            rejected=rejected,
            meta=record.others,
        )
        problems.append(problem)
    return problems


def _tokenize(
    problems: Sequence[_Problem],
    tokenizer: PreTrainedTokenizerBase,
    add_special_tokens: bool,
    max_prompt_tokens: int,
    on_long_prompt: OnLongPrompt,
) -> list[Prompt]:
    prompts: list[Prompt] = []
    long: list[tuple[_Problem, str]] = []
    for problem, ids in _encoded(problems, tokenizer, add_special_tokens, max_prompt_tokens * _MOST_CHARACTERS):
        if ids is None or len(ids) > max_prompt_tokens:
            long.append((problem, f"{len(problem.text)} characters" if ids is None else f"{len(ids)} tokens"))
            continue
        rejected = tuple(problem.rejected)
        prompts.append(
            Prompt(
                id=problem.id,
                text=problem.text,
                token_ids=tuple(ids),
                answer=problem.answer,
                rejected=rejected,
                meta=problem.meta,
            )
        )
    if long and (on_long_prompt == "fail" or not prompts):
        problem, length = long[0]
        raise DataError(
            f"{problem.place}: the prompt has {length}, rollout.max_prompt_tokens={max_prompt_tokens} "
            f"({len(long)} of {len(problems)} prompts are too long); raise it"
            + (" or set rollout.on_long_prompt=drop" if prompts else "")
        )
    if long:
        logger.warning(
            "dropped %d of %d prompts with more than rollout.max_prompt_tokens=%d tokens; the first is %s with %s",
            *(len(long), len(problems), max_prompt_tokens, long[0][0].place, long[0][1]),
        )
    return prompts


def _encoded(
    problems: Sequence[_Problem], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool, most_characters: int
) -> Iterator[tuple[_Problem, list[int] | None]]:
    """Each problem with its tokens, or with None if it has too many characters to fit. Encodes few at a time, because
    a tokenizer's own records take 100 bytes a token while they exist."""
    for start in range(0, len(problems), _AT_ONCE):
        part = problems[start : start + _AT_ONCE]
        texts = [p.text for p in part if len(p.text) <= most_characters]
        encoded = iter(tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"] if texts else [])
        for problem in part:
            yield problem, next(encoded) if len(problem.text) <= most_characters else None
