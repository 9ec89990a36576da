"""Renders and tokenizes problems into Prompts, bounds their length, and streams them shuffled without end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rl_megatron.config.sections.data import ArithmeticData, FileData
from rl_megatron.data.arithmetic import split_sums
from rl_megatron.data.files import read_records
from rl_megatron.errors import CheckpointError, ConfigError, DataError
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
    rejected: Sequence[str] = ()  # a worse answer, in data of pairs
    meta: Mapping[str, Any] = field(default_factory=dict)


def load_prompts(
    data: ArithmeticData | FileData,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    on_long_prompt: OnLongPrompt,
    seed: int,
) -> tuple[list[Prompt], list[Prompt]]:
    """(train, held-out) prompts, in an order that depends on ``data`` and ``seed`` alone.

    ``Prompt.answer`` is the correct answer, as in the data: rewards compare with it and the warm start trains on it.
    A prompt of more than ``max_prompt_tokens`` raises or is dropped, with a warning that counts these.
    Raises DataError that names files and lines.
    """
    splits = _arithmetic_problems(data, seed) if isinstance(data, ArithmeticData) else _file_problems(data, tokenizer)
    bos = not (isinstance(data, FileData) and data.chat_template)  # a chat template writes its own special tokens
    train, held_out = (_tokenize(split, tokenizer, bos, max_prompt_tokens, on_long_prompt) for split in splits)
    return train, held_out


def fields_of(data: FileData, path: Path) -> tuple[str, ...]:
    """The fields that a row of ``path``, one of the data's two files, must have."""
    pairs = (data.rejected_field,) if data.rejected_field is not None and path == data.train else ()
    return data.prompt_field, data.answer_field, *pairs


def check_template(data: FileData) -> None:
    """Raises ConfigError if the template has no place for the problem."""
    if "{prompt}" not in data.prompt_template:
        raise ConfigError(
            f"data.prompt_template={data.prompt_template!r:.200} has no '{{prompt}}'; write it where the problem goes"
        )


def first_problem(data: ArithmeticData | FileData) -> tuple[str, str, Mapping[str, Any]]:
    """Text, without a chat template, answer and other fields of the first training problem. Raises DataError."""
    if isinstance(data, ArithmeticData):
        made = _sum(1, 1, data.digits)
        return made.text, made.answer, {}
    (record,) = read_records(data.train, fields_of(data, data.train), key="data.train", limit=1)
    question, answer, *_ = record.texts
    return data.prompt_template.replace("{prompt}", question), answer, record.others


def _sum(a: int, b: int, digits: int) -> _Problem:
    text = f"{a:0{digits}}+{b:0{digits}}"  # digits are in the same columns in every problem
    return _Problem(id=text, place=text, text=f"{text}=", answer=f"{a + b:0{digits + 1}}"[::-1])


def _arithmetic_problems(data: ArithmeticData, seed: int) -> tuple[list[_Problem], list[_Problem]]:
    train, held_out = split_sums(digits=data.digits, num_eval=data.num_eval, seed=seed)
    return [_sum(a, b, data.digits) for a, b in train], [_sum(a, b, data.digits) for a, b in held_out]


def _file_problems(data: FileData, tokenizer: PreTrainedTokenizerBase) -> tuple[list[_Problem], list[_Problem]]:
    check_template(data)
    if data.chat_template and not tokenizer.chat_template:
        raise ConfigError("data.chat_template=true, but the model's tokenizer has no chat template; set it to false")
    train = _records_to_problems(data.train, "data.train", data, tokenizer)
    return train, _records_to_problems(data.eval, "data.eval", data, tokenizer)[: data.max_eval]


def _records_to_problems(path: Path, key: str, data: FileData, tokenizer: PreTrainedTokenizerBase) -> list[_Problem]:
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


class PromptStream:
    """Endless epochs over ``prompts``, each shuffled by (seed, epoch), so that a position determines the order.

    ``left_out`` are the rows of ``prompts`` that are drawn no more.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int) -> None:
        if not prompts:
            raise DataError("no prompts to train on")
        self._prompts = prompts
        self._seed = seed
        self.left_out = frozenset[int]()
        self._epoch, self._position = 0, 0
        self._order = self._shuffled()

    def take(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts, across the end of an epoch if need be."""
        taken: list[Prompt] = []
        while len(taken) < n:
            if self._position == len(self._prompts):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled()
            stop = min(self._position + n - len(taken), len(self._prompts))
            taken += [self._prompts[i] for i in self._order[self._position : stop] if i not in self.left_out]
            self._position = stop
        return taken

    def leave_out(self, prompt: Prompt) -> None:
        """Draw ``prompt`` no more. Raises DataError if no other is left."""
        self.left_out |= {row for row, one in enumerate(self._prompts) if one.id == prompt.id}
        if len(self.left_out) == len(self._prompts):
            raise DataError(f"no prompts are left to train on: none of {len(self._prompts)} can be sampled")

    def state(self) -> dict[str, int]:
        """The position in the stream; ``restore`` of it and ``left_out`` continues with the same prompts."""
        return {"epoch": self._epoch, "position": self._position, "num_prompts": len(self._prompts)}

    def restore(self, state: Mapping[str, int], left_out: Sequence[int] = ()) -> None:
        """Continue from ``state``. Raises CheckpointError if it belongs to another data set."""
        if state["num_prompts"] != len(self._prompts):
            raise CheckpointError(
                f"the checkpoint was made with {state['num_prompts']} training prompts, but the data has "
                f"{len(self._prompts)}; resume with the same data and limits"
            )
        self._epoch, self._position, self.left_out = state["epoch"], state["position"], frozenset(left_out)
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order: list[int] = np.random.default_rng([self._seed, self._epoch]).permutation(len(self._prompts)).tolist()
        return order
