"""Loads the tokenizer and both splits of the data."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rl_megatron.agents.conversation.forms import make_form_check
from rl_megatron.agents.conversation.written import end_of_turns
from rl_megatron.chat_templates import setting
from rl_megatron.config.beside import message_prompt_keys, teachers_with_prompt
from rl_megatron.config.run import RunConfig, TemplateVariable
from rl_megatron.config.sections.data import DataSection, FileKeys, data_sources, source_name
from rl_megatron.config.sections.eval import EvalSetSection, RunData
from rl_megatron.config.sections.teachers import TeacherSection
from rl_megatron.data.problems.pool import PromptPool
from rl_megatron.data.problems.prompts import load_held_out, load_prompts
from rl_megatron.data.problems.rendering import RowForm
from rl_megatron.data.samples import EndTokens, answer_end_token
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.evaluation.sets import EvalSet
from rl_megatron.models.families.fields import GenerationFields
from rl_megatron.models.json_files import read_json
from rl_megatron.training.jobs.written import drop_advice
from rl_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_SAVED = (
    "code of a model's folder is never run: save its tokenizer as tokenizer.json, and leave auto_map out of "
    "tokenizer_config.json (docs/checkpoints.md, Kimi-K2's tokenizer)"
)


def read_tokenizer(folder: Path, variables: Mapping[str, TemplateVariable]) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a Hugging Face folder, whose chat template has the ``variables`` wherever it is applied.

    Raises ConfigError if transformers cannot read it without code of the folder, or the template does not read a
    variable.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the tokenizer's threads would take the learners' cores
    from transformers import AutoTokenizer

    if (folder / "tiktoken.model").is_file() and not (folder / "tokenizer.json").is_file():
        # transformers would split texts by another model's pattern
        raise ConfigError(f"{folder}: tiktoken.model lacks the rule that splits texts; {_SAVED}")
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # its Rust part raises bare Exceptions for torn files
        said = str(error).strip().splitlines()[:1] or [type(error).__name__]
        advice = f"; {_SAVED}" if "trust_remote_code" in str(error) else ""
        raise ConfigError(f"{folder}: transformers cannot read its tokenizer: {said[0][:500]}{advice}") from error
    if not variables:
        return tokenizer
    template = tokenizer.chat_template
    if not isinstance(template, str):
        has = f"several chat templates ({', '.join(sorted(template))})" if template else "no chat template"
        advice = "give it one, as chat_template.jinja, or leave it out" if template else "leave it out"
        raise ConfigError(f"model.template_variables: the tokenizer of {folder} has {has}; {advice}")
    for name, value in variables.items():
        if not re.search(rf"\b{name}\b", template):
            raise ConfigError(
                f"model.template_variables.{name}={json.dumps(value)}: the chat template of {folder} does not read "
                f"{name}; leave it out, or write it as the template does"
            )
    tokenizer.chat_template = setting(variables, template)
    return tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The tokenizer, the tokens that end a completion, those of them after answers that are learned, both splits, and
    the sets to evaluate."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    end_token_ids: EndTokens
    train: PromptPool
    held_out: Sequence[Prompt]
    sets: Sequence[EvalSet]  # one or more; without ``eval.sets`` it is the held-out prompts


def load_data(
    config: RunConfig,
    model_folder: Path,
    teachers: Mapping[str, TeacherSection] | None = None,
    *,
    vocab_size: int = sys.maxsize,
) -> Data:
    """Reads tokenizer and data, and the texts that ``teachers`` (by name) read in place of training prompts. The model
    has ``vocab_size`` tokens. Raises ConfigError, and DataError that names the row."""
    tokenizer = read_tokenizer(model_folder, config.model.template_variables)
    form = RowForm(
        tokenizer=tokenizer,
        max_tokens=config.longest_prompt,
        on_long_prompt=config.on_long_prompt,
        keys=config.prompt_limit_keys,
        vocab_size=vocab_size,
    )
    train, held_out = load_prompts(
        config.data,
        form,
        seed=config.seed,
        rows=config.kind.rows,
        samples=config.kind.samples,
        on_leak=config.data.on_leak,
        sets=config.eval.data_of_sets,
        environments=config.environments_of_sources,
        rewards=config.rewards_of_sources,
        message_prompt_keys=message_prompt_keys(config),
        teachers=teachers,
    )
    load = partial(load_held_out, form=form, seed=config.seed, rows=config.kind.rows)
    stops = stop_token_ids(model_folder, tokenizer, vocab_size)
    return Data(
        tokenizer=tokenizer,
        stop_token_ids=stops,
        end_token_ids=end_tokens(config.data, tokenizer, stops),
        train=train,
        held_out=held_out,
        sets=problem_sets(config, held_out, load),
    )


def training_data(config: RunConfig, model_folder: Path, *, vocab_size: int = sys.maxsize) -> Data:
    """Loads the data with `load_data`, such that a dataset job can make rows, and teachers can read. May take minutes.

    Rows without the form of a conversation end the run by a DataError, or are left out as they are drawn, where
    ``on_refused`` says so."""
    data = load_data(config, model_folder, teachers_with_prompt(config), vocab_size=vocab_size)
    if _trains_on_answers(config):
        _tell_ends(data)
    check = make_form_check(config)
    if check is not None and config.written.on_refused == "fail":
        try:
            check(data.train.conversations())
        except DataError as error:
            raise DataError(f"{error}\n{drop_advice(config)}") from error
    return data


def end_tokens(data: DataSection, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]) -> EndTokens:
    """Returns the token after answers of each source: of chats and of conversations, the one with which the chat
    template ends a turn, if known."""
    sources = {source_name(key): one for key, one in data_sources(data).items()}
    files = {name: one for name, one in sources.items() if isinstance(one, FileKeys)}
    chats = {name for name, one in files.items() if one.chat_template or one.fields["messages"] is not None}
    of_turns, plain = end_of_turns(tokenizer, stops) if chats else None, answer_end_token(tokenizer, stops)
    return {name: of_turns if name in chats and of_turns is not None else plain for name in sources}


def _tell_ends(data: Data) -> None:
    """Logs the tokens after answers that are not the tokenizer's ``eos_token``."""
    for end in dict.fromkeys(data.end_token_ids.values()):
        if end not in (None, data.tokenizer.eos_token_id):
            ends = data.tokenizer.eos_token_id in data.stop_token_ids
            why = "is not what ends a turn in the chat template" if ends else "is none of the tokens that end sampling"
            logger.info(
                "learned answers end with %r: the tokenizer's eos_token, %r, %s (eos_token_id of "
                "generation_config.json: %s)",
                *(data.tokenizer.convert_ids_to_tokens(end), data.tokenizer.eos_token, why),
                ", ".join(map(str, data.stop_token_ids)),
            )


def _trains_on_answers(config: RunConfig) -> bool:
    """True if the run trains on answers of problems, or on demonstrations."""
    if config.kind.samples:
        return config.warm_start.steps > 0 or config.algorithm.demonstration_gamma is not None
    sources = data_sources(config.data).values()
    return not config.kind.scores and any(
        not isinstance(one, FileKeys) or one.fields["messages"] is None for one in sources
    )


def problem_sets(config: RunConfig, held_out: Sequence[Prompt], load: Callable[..., Sequence[Prompt]]) -> list[EvalSet]:
    """Returns the sets of ``eval.sets``; without any, the ``held_out`` prompts. ``load`` reads the sets' own data."""
    section = config.eval
    if not section.sets:
        whole = EvalSetSection()
        return [EvalSet(name=None, prompts=held_out, section=whole, temperature=section.temperature)]
    sets = []
    for name, one in section.sets.items():
        try:
            lists = f"eval.sets.{name}.data" in message_prompt_keys(config)
            prompts = held_out if isinstance(one.data, RunData) else load(one.data, lists=lists)
        except (ConfigError, DataError) as error:
            raise type(error)(f"eval.sets.{name}: {error}") from error
        chosen = prompts[: one.limit]
        if one.reward is not None:
            chosen = [replace(prompt, source=f"eval.sets.{name}") for prompt in chosen]
        sets.append(EvalSet(name=name, prompts=chosen, section=one, temperature=section.set_temperature(name)))
    return sets


def stop_token_ids(
    model_folder: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int = sys.maxsize
) -> tuple[int, ...]:
    """Returns tokens that end a completion: the generation config's ``eos_token_id`` (one or more), or the tokenizer's.

    Raises ConfigError without one, and for one that the model, of ``vocab_size`` tokens, lacks.
    """
    path = model_folder / "generation_config.json"
    given = read_json(path, GenerationFields).eos_token_id if path.is_file() else None
    ids = tokenizer.eos_token_id if given is None else given
    if ids is None or ids == []:
        raise ConfigError(
            f"{model_folder}: neither generation_config.json nor the tokenizer names an end-of-sequence token; "
            "give its id as eos_token_id in generation_config.json"
        )
    ends = tuple(ids) if isinstance(ids, list) else (ids,)
    if wrong := [one for one in ends if not 0 <= one < vocab_size]:
        fix = "set eos_token_id in generation_config.json to a token of the model"
        if wrong[0] in range(len(tokenizer)):
            fix = "give the model its own tokenizer, or resize its embedding to the tokenizer (resize_token_embeddings)"
        raise ConfigError(
            f"{path if given is not None else model_folder}: the end-of-sequence token {wrong[0]} is not in the model "
            f"(allowed 0 to {vocab_size - 1}); {fix}"
        )
    return ends
