"""Loads the problems of a run: training problems as a pool, without duplicates, and held-out problems.

Additions are generated: ``37+08=`` with answer ``540``, lowest digit first. No held-out sum is in the training split.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rl_megatron.config.sections.data import (
    ArithmeticData,
    DataSection,
    FileKeys,
    MixtureData,
    OneSource,
    data_sources,
    source_name,
)
from rl_megatron.config.sections.jobs import RowsOf
from rl_megatron.config.sections.reward import RANKS, EnvironmentSection, RewardSection
from rl_megatron.config.sections.teachers import TeacherSection
from rl_megatron.data.problems.leaks import (
    ANSWERED,
    ASKED,
    OnLeak,
    ProblemKey,
    ProblemTexts,
    joined_texts,
    listed_texts,
    rows_to_keep,
    texts_for,
)
from rl_megatron.data.problems.parquet import FileRows, read_records
from rl_megatron.data.problems.pool import FilePool, JoinedPool, ListPool, PromptPool
from rl_megatron.data.problems.rendering import (
    LABEL,
    Example,
    RowForm,
    conversation,
    prompt_fields,
    read_messages,
    rendered_rows,
    tokenize,
    unrendered,
)
from rl_megatron.data.problems.rows import find_data_files, listed, local_files
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_TRAIN_SUMS = 20_000  # unordered; beyond it (3 digits and more) problems are sampled without replacement

Sum = tuple[int, int]


def split_sums(*, digits: int, num_eval: int, seed: int, key: str = "data") -> tuple[list[Sum], list[Sum]]:
    """Returns (train, held-out) pairs of addends below ``10**digits``; ``key``: of the section, for errors.

    ``num_eval`` unordered pairs are held out, each in one order; train has both orders of the other pairs. Raises
    ConfigError if nothing would be left to train on.
    """
    limit = 10**digits
    num_sums = limit * (limit + 1) // 2
    if num_eval >= num_sums:
        raise ConfigError(
            f"{key}.num_eval={num_eval} leaves nothing to train on: {key}.digits={digits} has {num_sums} different "
            f"sums; lower {key}.num_eval below {num_sums} or raise {key}.digits"
        )
    rng = np.random.default_rng([seed, digits])
    chosen = rng.choice(num_sums, size=min(num_sums, num_eval + MAX_TRAIN_SUMS), replace=False)
    large, small = _unrank(chosen)
    flip = rng.random(num_eval) < 0.5
    first = np.where(flip, large[:num_eval], small[:num_eval])
    second = np.where(flip, small[:num_eval], large[:num_eval])
    a, b = large[num_eval:], small[num_eval:]
    both = a != b
    train = [*zip(a.tolist(), b.tolist(), strict=True), *zip(b[both].tolist(), a[both].tolist(), strict=True)]
    return train, list(zip(first.tolist(), second.tolist(), strict=True))


def _unrank(index: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the ``index``-th pairs (large, small) with large >= small, in the order (0,0), (1,0), (1,1), (2,0) ..."""
    large = np.fromiter(((math.isqrt(8 * k + 1) - 1) // 2 for k in index.tolist()), np.int64, len(index))
    return large, index - large * (large + 1) // 2


def load_prompts(
    data: DataSection,
    form: RowForm,
    *,
    seed: int,
    rows: RowsOf = "answers",
    samples: bool = True,
    on_leak: OnLeak | None = None,
    sets: Mapping[str, OneSource] | None = None,
    environments: Mapping[str, EnvironmentSection] | None = None,
    rewards: Mapping[str, RewardSection] | None = None,
    message_prompt_keys: Collection[str] = (),
    teachers: Mapping[str, TeacherSection] | None = None,
) -> tuple[PromptPool, list[Prompt]]:
    """Returns (train, held-out) prompts, in an order that depends on ``data`` and ``seed`` alone. The prompts of a
    mixture follow each other by source, and their ids begin with its name.

    ``Prompt.answer`` is the correct answer, as in the data: rewards compare with it and the warm start trains on it.
    With ``rows`` of pairs generated problems have a wrong answer, too, as files have with ``fields.rejected``. A prompt
    that is too long for ``form`` raises or is dropped, with a warning that counts these. Where nothing ``samples``, the
    long ones of parquet files stay. The caller that draws one drops its row, so that an epoch has each row once.
    ``on_leak`` says what to do with a problem to train on that is held out here or in ``sets`` (by the key of their
    section). Of equal problems the first alone is trained on then; None: they are not for training. Problems are equal
    if the policy is asked the same and their judges read the same. Judges read the answer, and the fields of
    ``environments`` and ``rewards`` (by the source's key). Problems of other judges are never equal. Where nothing
    ``samples``, nor are those with different answers or labels, for training alone. ``message_prompt_keys``: as of the
    function of this name. Training prompts have the prompts that their ``teachers`` (by name) read in their place.
    Raises DataError that names files and lines.
    """
    sources = data_sources(data)
    given = {key: (key, source, form.tokenizer, seed) for key, source in {**sources, **(sets or {})}.items()}
    splits = {key: _problems(*given[key], rows=rows, lists=key in message_prompt_keys) for key in sources}
    kept: dict[str, NDArray[np.bool_] | None] = dict.fromkeys(sources)
    if on_leak is not None:
        held = {key: held_out for key, (_, held_out) in splits.items()}
        held |= {key: _held_out(*given[key], lists=key in message_prompt_keys) for key in sets or {}}
        trained = {key: train for key, (train, _) in splits.items()}
        written = key_of_written(samples, rows)
        kept |= drop_leaks(trained, held, on_leak, environments or {}, rewards or {}, written=written)
    pools, held_out = list[PromptPool](), list[Prompt]()
    of_drawn = form if samples else replace(form, max_tokens=sys.maxsize)
    for key, source in sources.items():
        name = source_name(key) if isinstance(data, MixtureData) else ""
        train, theirs = splits[key]
        taught = source_teachers(name, teachers)
        mask = kept[key]
        if isinstance(train, FileRows):
            numbers = np.arange(len(train)) if mask is None else np.flatnonzero(mask)
            for one, teacher in taught.items():
                train.check_read(prompt_fields(teacher.prompt or ""), numbers, f"algorithm.kl.teachers.{one}.prompt")
            pools.append(FilePool(train, mask, replace(of_drawn, teachers=taught), source=name))
        else:
            ours = train if mask is None else [train[row] for row in np.flatnonzero(mask).tolist()]
            made = _named(formed(ours, source, replace(form, teachers=taught)), name)
            pools.append(ListPool(made, len(ours) - len(made)))
        held_out += _named(formed(theirs, source, form), name)
    return pools[0] if len(pools) == 1 else JoinedPool(pools), held_out


def load_held_out(
    data: OneSource, form: RowForm, *, seed: int, rows: RowsOf = "answers", lists: bool = False
) -> list[Prompt]:
    """Returns the held-out prompts of `load_prompts`, without a look at training data; ``lists``: they may be ones,
    with which an environment begins."""
    return formed(_held_out("data", data, form.tokenizer, seed, rows=rows, lists=lists), data, form)


def source_teachers(source: str, teachers: Mapping[str, TeacherSection] | None) -> dict[str, TeacherSection]:
    """Returns the ``teachers``, by name, that read the prompts of a source of a mixture; empty for the only source."""
    return {name: one for name, one in (teachers or {}).items() if source in (one.sources or (source,))}


def formed(problems: Sequence[Example], source: OneSource | FileKeys, form: RowForm) -> list[Prompt]:
    """Returns prompts of a source's problems: conversations without tokens, others with them. Raises as `tokenize`."""
    if isinstance(source, FileKeys) and source.fields["messages"] is not None:
        return unrendered(problems)
    return tokenize(problems, form, chat=isinstance(source, FileKeys) and source.chat_template)


def _compared_by(environment: EnvironmentSection | None, reward: RewardSection | None) -> ProblemKey:
    """Returns the key that compares problems of this environment or reward. It has the fields that are read, or all
    fields where custom code or a server reads them."""
    if environment is not None:
        return ProblemKey(fields=() if environment.function in ("calculator", "guess") else None)
    functions = [] if reward is None else list(reward.functions.values())
    if any(":" in one and not one.startswith(("hf:", RANKS)) for one in functions):
        return ProblemKey(fields=None)
    return ProblemKey(fields=(reward.tests.field,) if reward is not None and "tests" in functions else ())


def _judged_by(environment: EnvironmentSection | None, reward: RewardSection | None) -> str:
    """Names the environment or the reward. The same problem with another one is a different problem."""
    if environment is not None:
        return json.dumps([environment.function, dict(environment.options)], sort_keys=True)
    return "" if reward is None else reward.model_dump_json()


def key_of_written(samples: bool, rows: RowsOf) -> ProblemKey | None:
    """Returns the fields by which written rows are equal; None where the job ``samples`` answers."""
    return None if samples else ANSWERED._replace(fields=(LABEL,) if rows == "labels" else ())


def drop_leaks(
    train: Mapping[str, Sequence[Example] | FileRows],
    held_out: Mapping[str, Sequence[Example]],
    on_leak: OnLeak,
    environments: Mapping[str, EnvironmentSection],
    rewards: Mapping[str, RewardSection],
    *,
    written: ProblemKey | None,
) -> dict[str, NDArray[np.bool_]]:
    """Returns a mask of each source's problems to train on: each once for each of the ``environments`` or ``rewards``
    (by source). ``written`` compares rows that are not sampled instead. Leaks are left out where they are dropped.
    Raises like `rows_to_keep`, and for a source that has no problem left."""
    judges = {key: (environments.get(key), rewards.get(key)) for key in train}
    wholes = {key: written or _compared_by(*of) for key, of in judges.items()}
    # an environment of the user's may ask what any field of a row has
    ways = {key: (by if by.fields is None and judges[key][0] else ASKED, by) for key, by in wholes.items()}
    both = {
        key: one.compared(*ways[key]) if isinstance(one, FileRows) else [_texts(one, by) for by in ways[key]]
        for key, one in train.items()
    }
    texts = joined_texts([asked for asked, _ in both.values()])
    own = [texts_for(whole, "" if written else _judged_by(*judges[key])) for key, (_, whole) in both.items()]
    every = dict.fromkeys(asked for asked, _ in ways.values())
    held = {key: joined_texts([_texts(problems, by) for by in every]) for key, problems in held_out.items()}
    mask = rows_to_keep(texts, joined_texts(own), held, on_leak)
    kept = dict(zip(train, np.split(mask, np.cumsum([asked.size for asked, _ in both.values()])[:-1]), strict=True))
    for key, rows in kept.items():
        if not rows.any():
            raise DataError(f"{key}: all {len(rows)} problems to train on are held out, or in sources above it")
    return kept


def _texts(problems: Sequence[Example], by: ProblemKey) -> ProblemTexts:
    texts, hashed = (one.compared(by) for one in problems), (one.hashed(by.hashed) for one in problems)
    return listed_texts([one.place for one in problems], texts, hashed)


def _named(prompts: Sequence[Prompt], source: str) -> list[Prompt]:
    """Returns the prompts with the source in their ids, if it is one of a mixture."""
    return [replace(one, id=f"{source}/{one.id}", source=source) for one in prompts] if source else list(prompts)


def _problems(
    key: str, source: OneSource, tokenizer: PreTrainedTokenizerBase, seed: int, *, rows: RowsOf = "answers", lists: bool
) -> tuple[list[Example] | FileRows, list[Example]]:
    """Returns both splits of a source; ``key``: of its section."""
    if isinstance(source, ArithmeticData):
        return _arithmetic_problems(key, source, seed, pairs=rows == "pairs")
    _check_templates(source, tokenizer, key)
    data = local_files(source, key, ("train",))
    files = find_data_files(data.train, f"{key}.train")
    train = (
        FileRows(files, data, f"{key}.train", lists=lists or data.chat_template)
        if files[0].suffix == ".parquet"
        else read_problems(data.train, f"{key}.train", data, tokenizer, lists=lists)
    )
    return train, _held_out(key, source, tokenizer, seed, lists=lists)


def _held_out(
    key: str, source: OneSource, tokenizer: PreTrainedTokenizerBase, seed: int, *, rows: RowsOf = "answers", lists: bool
) -> list[Example]:
    """Returns the held-out split of a source alone."""
    if isinstance(source, ArithmeticData):
        return _arithmetic_problems(key, source, seed, pairs=rows == "pairs")[1]
    _check_templates(source, tokenizer, key)
    data = local_files(source, key, ("eval",)).check_held_out
    return read_problems(data.eval, f"{key}.eval", data, tokenizer, data.max_eval, lists=lists)


def check_template(data: FileKeys, key: str) -> None:
    """Raises ConfigError if the template has no place for the problem; ``key``: of the section."""
    if "{prompt}" not in data.prompt_template:
        raise ConfigError(
            f"{key}.prompt_template={data.prompt_template!r:.200} has no '{{prompt}}'; write it where the problem goes"
        )


def _check_templates(data: FileKeys, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    """Raises as `check_template`, and ConfigError if a chat template is asked for and the tokenizer has none."""
    check_template(data, key)
    if data.chat_template and not tokenizer.chat_template:
        raise ConfigError(f"{key}.chat_template=true, but the model's tokenizer has no chat template; set it to false")


def first_problem(data: OneSource, key: str) -> Prompt:
    """Returns the first training problem, its text without a chat template; id and tokens are made up.

    ``key``: of the section. Raises DataError.
    """
    made_up = Prompt(id="made-up", text="", token_ids=(0, 1), answer="")
    if isinstance(data, ArithmeticData):
        made = _arithmetic(1, 1, data)
        return replace(made_up, text=made.text, question=made.raw, answer=made.answer)
    files = local_files(data, key, ("train",))
    file, *_ = find_data_files(files.train, f"{key}.train")
    (record,) = read_records(file, files, key=f"{key}.train", limit=1, lists=True)
    question, answer, *_ = record.texts
    asked = read_messages(record, f"{file}:1", files, in_structs=file.suffix == ".parquet")[-1]["content"]
    text = files.prompt_template.replace("{prompt}", asked)
    return replace(made_up, text=text, question=question, answer=answer, meta=record.others)


def _arithmetic(a: int, b: int, data: ArithmeticData) -> Example:
    digits, sign = data.digits, "+" if data.operation == "sum" else "*"
    text = f"{a:0{digits}}{sign}{b:0{digits}}"  # digits are in the same columns in every problem
    answer = f"{a + b:0{digits + 1}}"[::-1] if data.operation == "sum" else str(a * b)
    return Example(id=text, place=text, text=f"{text}=", raw=text, answer=answer, form="{prompt}=")


def _arithmetic_problems(
    key: str, data: ArithmeticData, seed: int, *, pairs: bool
) -> tuple[list[Example], list[Example]]:
    train, held_out = (
        [_arithmetic(a, b, data) for a, b in split]
        for split in split_sums(digits=data.digits, num_eval=data.num_eval, seed=seed, key=key)
    )
    if pairs:
        train, held_out = (
            [replace(one, rejected=(wrong_answer(one),)) for one in split] for split in (train, held_out)
        )
    return train, held_out


def wrong_answer(problem: Example) -> str:
    """Returns another number of as many digits as the answer: with equal chance one digit differs, or any number may be
    it. It depends on the problem alone."""
    source, right = random.Random(problem.id), problem.answer
    if source.random() < 0.5:
        at = source.randrange(len(right))
        return right[:at] + str((int(right[at]) + source.randrange(1, 10)) % 10) + right[at + 1 :]
    other = source.randrange(10 ** len(right) - 1)
    return f"{other + (other >= int(right)):0{len(right)}}"


def read_problems(
    path: Path,
    key: str,
    data: FileKeys,
    tokenizer: PreTrainedTokenizerBase | None,
    limit: int | None = None,
    *,
    lists: bool,
) -> list[Example]:
    """Returns the problems of the files' first ``limit`` rows; no others are read. Only ``chat_template`` needs the
    tokenizer. Raises DataError that names all bad rows."""
    found, bad = list[Example](), list[str]()
    for file in find_data_files(path, key):
        left = None if limit is None else limit - len(found)
        if left == 0:
            break
        records = read_records(file, data, key=key, limit=left, lists=lists or data.chat_template)
        if data.fields["messages"] is None:
            for problem in rendered_rows(records, file, 1, data, tokenizer):
                if isinstance(problem, DataError):
                    bad.append(str(problem))
                else:
                    found.append(problem)
            continue
        for line, record in enumerate(records, 1):
            try:
                found.append(conversation(record, file, line, data))
            except DataError as error:
                bad.append(str(error))
    if bad:
        raise DataError(listed(bad))
    return found
