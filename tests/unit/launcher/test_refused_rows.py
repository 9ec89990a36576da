"""Every row that a test of the readers knows as refused, read by a run and by its preflight: both refuse it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launcher.build.data import training_data
from launcher.build.jobs import LearnedRows, dataset_job
from launcher.build.model import starting_shape
from launcher.build.roles import RunParts
from launcher.build.sampler import make_demonstrations
from launcher.preflight import model_files, problems_of_data
from launcher.preflight.subject import PreflightContext, run_check
from rl_megatron.config.io import load_config
from rl_megatron.config.resume import flat
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import MixtureData
from rl_megatron.errors import RLMegatronError
from rl_megatron.interfaces import RunComponents
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.training.jobs.written import held_out_parts
from rl_megatron.types import Samples
from tests.unit.data import test_context_of_rows, test_pairs, test_written_rows
from tests.unit.launcher.sites import data_file, model_folder
from tests.unit.launcher.test_memory import QWEN3
from tests.unit.rollout.conversation import test_conversation

TEMPLATE = (
    "{% for m in messages if m.role != 'lost' %}{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
USER, SAYS = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}
ADD = {"function": {"name": "add", "arguments": "{a:1"}}
TALKS, PAIRS = {"fields.messages": "good"}, {"fields.messages": "good", "fields.rejected": "bad"}
CHAT = {"fields.prompt": "prompt", "fields.answer": "reward_model.ground_truth", "chat_template": "true"}
TRL = {
    "fields.messages": "chosen",
    "fields.rejected": "rejected",
    "fields.context": "prompt",
    "fields.system": "system",
}
Case = tuple[str, Mapping[str, Any], Any]
"""The recipe, the keys of its data, and a row, which may be the text of a line."""


def table(test: Callable[..., None], *names: str) -> list[tuple[Any, ...]]:
    """The values of these parameters in the cases of a test."""
    for mark in cast(Any, test).pytestmark:
        if mark.name == "parametrize" and set(names) <= set(given := mark.args[0]):
            return [tuple(case[given.index(name)] for name in names) for case in mark.args[1]]
    raise AssertionError(f"{test.__name__} has no table of {names}")


def of_other_tests() -> Iterator[Case]:
    forms = {
        form: {f"fields.{key}": name for key, name in its.items()} for form, its in test_written_rows.FORMS.items()
    }
    for (row,) in table(test_pairs.test_rows_that_are_no_pair_are_refused_by_line, "row"):
        form = "pairs of answers" if isinstance(row, dict) and "q" in row else "pairs of conversations"
        yield "reward_tiny", forms[form], row
    for form, bad in table(test_written_rows.test_bad_rows_are_named_by_file_and_row, "form", "bad"):
        recipe = "reward_tiny" if "pairs" in form else "sft_tiny"
        yield recipe, forms[form], test_written_rows.row(form, "9", "1", "3") | bad
    for (row,) in table(test_context_of_rows.test_what_is_no_context_is_refused_by_its_place, "row"):
        yield "dpo_tiny", TRL, row
    for chat, keys in table(test_context_of_rows.test_a_list_that_is_no_prompt_is_refused_by_its_place, "chat", "keys"):
        given = {name: str(value).lower() for name, value in flat(keys)}
        yield "gsm8k_tiny", CHAT | given, test_context_of_rows.of_verl(chat)[0]
    for (of,) in table(test_context_of_rows.test_a_row_without_one_is_refused_before_the_run, "of"):
        row = {"question": "1", "answer": "2", "of": of}
        yield "gsm8k_tiny", {"fields.demonstration": "of.target", "algorithm": "luffy"}, row
    long = test_context_of_rows.test_one_that_no_policy_would_sample_is_refused_with_its_prompt
    for (answer,) in table(long, "answer"):
        yield "gsm8k_tiny", {"algorithm": "luffy"}, {"question": "1", "answer": answer.replace("|", "<eos>") * 9}
    for (messages,) in table(test_conversation.test_messages_that_cannot_be_a_prompt_are_refused, "messages"):
        yield "sft_tiny", TALKS, {"good": messages and [*messages, SAYS]}
    for (turn,) in table(test_conversation.test_a_hidden_turn_is_refused, "turn"):
        yield "sft_tiny", TALKS, {"good": [USER, {"role": "assistant", **turn}]}
        yield "reward_tiny", PAIRS, {"good": [USER, SAYS], "bad": [USER, {"role": "assistant", **turn}]}


def more() -> Iterator[Case]:
    """Rows of which a run said no once its ranks were up."""
    image = {"type": "image_url", "image_url": {"url": "x"}}
    yield "sft_tiny", TALKS, {"good": [USER | {"content": [image, {"type": "text", "text": "1"}]}, SAYS]}
    yield "sft_tiny", TALKS, {"good": [USER, SAYS | {"content": "", "tool_calls": [ADD]}]}
    yield "sft_tiny", TALKS, {"good": [USER, SAYS, {"role": "tool", "content": {"r": 1}}, SAYS]}
    yield "sft_tiny", TALKS, {"good": [USER, SAYS | {"weight": 2}]}
    yield "sft_tiny", TALKS, {"good": [USER, SAYS | {"content": "2<eos>3"}]}
    yield "sft_tiny", TALKS, {"good": [USER, SAYS | {"content": "2<new>"}]}
    yield "sft_tiny", TALKS, {"good": [USER, SAYS | {"content": "2" * 999}]}
    yield "sft_tiny", TALKS, {"good": [USER, SAYS], "label": False}
    for keys in ({}, {"chat_template": "true"}):
        yield "sft_tiny", keys, {"question": "1", "answer": "2<eos>3"}
        yield "sft_tiny", keys, {"question": "1<new>", "answer": "2"}
        yield "gsm8k_tiny", keys, {"question": "1<new>", "answer": "2"}
        yield "gsm8k_tiny", keys, {"question": "1" * 5000, "answer": "2"}
        yield "gsm8k_tiny", keys | {"warm_start.steps": "1"}, {"question": "1", "answer": "2<eos>3"}
        yield "gsm8k_tiny", keys | {"warm_start.steps": "1"}, {"question": "1", "answer": "2", "label": False}
    yield "sft_tiny", TALKS | {"fields.tools": "tools"}, {"good": [USER, SAYS], "tools": [{"name": "add"}]}
    yield "dpo_tiny", PAIRS, {"good": [USER, SAYS], "bad": [USER | {"content": "1?"}, SAYS]}
    yield "dpo_tiny", PAIRS, {"good": [USER, SAYS], "bad": [USER, SAYS, USER, SAYS]}
    yield "reward_tiny", PAIRS, {"good": [USER, SAYS], "bad": [USER, SAYS, USER]}
    of_rows = (b'{"question": "\xff", "answer": "1"}', b'{"question": 7, "answer": "1"}')
    for line in (b'{"question"', b"[1]", b"", *of_rows):
        yield "gsm8k_tiny", {}, line
        yield "sft_tiny", {}, line


CASES = [*of_other_tests(), *more()]


@cache
def model(folder: Path) -> Path:
    """A model whose tokenizer has a token more than its embedding has rows."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    tokenizer.chat_template, tokenizer.split_special_tokens = TEMPLATE, False
    made = model_folder(folder / "model", {**QWEN3, "vocab_size": 259})
    tokenizer.save_pretrained(made)
    return made


def written(path: Path, row: Any) -> bool:
    """Whether the file could be written."""
    if path.suffix == ".parquet":
        if not isinstance(row, dict):
            return False
        try:
            pq.write_table(pa.Table.from_pylist([row]), path)
        except (pa.ArrowException, TypeError):  # a column of several types
            return False
        return True
    path.write_bytes(row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode())
    return True


def run_refuses(config: RunConfig, folder: Path) -> str:
    """Why a run ends before its first step, as it reads and makes its rows; empty if it does not."""
    none, shape = cast(Any, None), starting_shape(config)
    try:
        data = training_data(config, folder, vocab_size=shape.vocab_size)
        if not config.kind.samples:
            parts = RunParts(config=config, folder=folder, reward=none, allocation=None)
            roles = RunComponents(learners={"policy": none}, frozen_models={}, engine=none, weight_sync=none)
            job = dataset_job(parts, shape, roles, data, attention_cost=1.0, note=print)
            asyncio.run(job._prefetch_rows())
            held_out_parts(data.train[:], job.units_of, lambda rows: cast(Samples, rows), config)
            return ""
        rows = LearnedRows(
            tokenizer=data.tokenizer,
            stop_token_ids=data.stop_token_ids,
            end_token_ids=data.end_token_ids,
            vocab_size=shape.vocab_size,
        )
        if config.warm_start.steps:
            rows.warm(data.train[:], config)
        for prompt in data.train[:]:
            if config.algorithm.demonstration_gamma is not None:
                make_demonstrations(config, data, shape.vocab_size)(prompt)
    except RLMegatronError as error:
        return str(error)
    return ""


def keys_of(recipe: str, given: Mapping[str, Any], folder: Path) -> list[str]:
    """The keys of a run, without its files."""
    whole = ("algorithm", "warm_start", "dpo", "sft")
    keys = [f"{name if name.split('.')[0] in whole else f'data.{name}'}={value}" for name, value in given.items()]
    keys += [] if "warm_start.steps" in given or recipe != "gsm8k_tiny" else ["warm_start.steps=0"]
    return [*keys, "data.type=files", "data.on_leak=keep", f"model.path={folder}"]


def verdict(config: RunConfig, folder: Path) -> str:
    """Why the run is refused, as its check says too."""
    subject = PreflightContext(config, for_job=False)
    found = [*run_check("data", problems_of_data.check(subject)), *run_check("files", model_files.check(subject))]
    problems = [one.text for one in found if one.kind == "problem"]
    refused = run_refuses(config, folder)
    assert bool(refused) == bool(problems), refused or problems
    return refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("refused"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_row_that_a_run_refuses_is_refused_by_its_check(
    tmp_path: Path, folder: Path, number: int, suffix: str, request: pytest.FixtureRequest
) -> None:
    recipe, given, row = CASES[number]
    path = tmp_path / f"rows{suffix}"
    if not written(path, row):
        return
    config = load_config(recipe, [*keys_of(recipe, given, folder), f"data.train={path}", f"data.eval={path}"])
    assert verdict(config, folder) or number < len(CASES) - len([*more()]) or suffix == ".parquet"


DROPS = {"dpo.on_refused": "drop", "dpo.on_long": "drop"}
TEACHER = {"coefficient": 0.1} | {
    f"teachers.t.{k}": v for k, v in (("prompt", "{of}: {prompt}"), ("max_prompt_tokens", 9))
}
TAUGHT = {f"algorithm.kl.{name}": value for name, value in TEACHER.items()}
GOOD = {"good": [USER, SAYS], "bad": [USER, SAYS | {"content": "3"}], "question": "1", "answer": "2", "of": "2"}
PLACED: list[tuple[Case, str]] = [
    (("dpo_tiny", PAIRS | DROPS, {"good": [USER, {"role": "assistant"}]}), "train eval"),
    (("dpo_tiny", {"fields.rejected": "of"} | DROPS, {"question": "1" * 999, "of": "4"}), "train eval"),
    (("gsm8k_tiny", TAUGHT, {"of": b"\xff"}), "train mixture"),
    (("gsm8k_tiny", TAUGHT, {"of": None}), "train mixture"),
    (("gsm8k_tiny", TAUGHT, {"of": "1" * 99}), "train mixture"),
    (
        ("gsm8k_tiny", {"chat_template": "true"}, {"question": json.dumps([USER | {"content": None}])}),
        "train eval mixture",
    ),
]
"""Each with the places where it ends a run."""


def placed(config: RunConfig, place: str, row: Path, good: Path) -> RunConfig:
    """The run with the row there, and good ones elsewhere."""
    files = {"train": row if place in ("train", "mixture") else good, "eval": row if place == "eval" else good}
    data = config.data.model_copy(update=files)
    if place == "mixture":
        source = {**data.model_dump(exclude={"on_leak", "curriculum"})}
        sources = {"a": source | {"train": good}, "b": source}
        data = MixtureData.model_validate({"type": "mixture", "on_leak": "keep", "sources": sources})
    return config.model_copy(update={"data": data})


@pytest.mark.parametrize("place", ["train", "eval", "mixture"])
@pytest.mark.parametrize("number", range(len(PLACED)))
def test_a_row_has_one_verdict_wherever_it_is(tmp_path: Path, folder: Path, number: int, place: str) -> None:
    (recipe, given, row), where = PLACED[number]
    path, good = tmp_path / "row.parquet", tmp_path / "good.parquet"
    assert written(path, GOOD | row)
    assert written(good, GOOD | ({"of": "3"} if "fields.rejected" in given else {}))
    keys = [*keys_of(recipe, given, folder), f"data.train={good}", f"data.eval={good}"]
    assert bool(verdict(placed(load_config(recipe, keys), place, path, good), folder)) == (place in where)


ENDS = "generation_config.json"


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        (
            {"tokenizer_config.json": {"eos_token": None}},
            (),
            "names an end-of-sequence token; give its id as eos_token",
        ),
        (
            {ENDS: {"eos_token_id": []}},
            (),
            "names an end-of-sequence token; give its id as eos_token_id in generation_",
        ),
        ({ENDS: {"eos_token_id": [2, 99999]}}, (), "99999 is not in the model (allowed 0 to 258); set eos_token_id"),
        (
            {ENDS: {"eos_token_id": 259}},
            (),
            f"{ENDS}: the end-of-sequence token 259 is not in the model (allowed 0 to 258); give the model its own",
        ),
        ({ENDS: {"eos_token_id": "2"}}, (), "eos_token_id"),
        (
            {"chat_template.json": {"chat_template": TEMPLATE}},
            ("data.chat_template=true",),
            "has no chat template; set",
        ),
        ({"tokenizer.json": {"model": {}}}, (), "transformers cannot read its tokenizer"),
        ({}, ("data.chat_template=true", "model.template_variables.thinking=true"), "does not read thinking"),
    ],
)
def test_a_folder_that_a_run_refuses_is_refused_by_its_check(
    tmp_path: Path, change: dict[str, dict[str, Any]], more: tuple[str, ...], said: str
) -> None:
    """End tokens, chat templates and tokenizers, as its files have them."""
    folder = model(tmp_path)
    for name, keys in change.items():
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | keys))
    if "chat_template.json" in change:
        (folder / "chat_template.jinja").unlink()
    path = data_file(tmp_path / "rows.jsonl")
    files = (f"data.train={path}", f"data.eval={path}", "data.on_leak=keep", f"model.path={folder}")
    config = load_config("gsm8k_tiny", [*files, "warm_start.steps=0", "data.chat_template=false", *more])
    problems = [one.text for one in run_check("files", model_files.check(PreflightContext(config, for_job=False)))]
    assert any(said in text for text in problems), problems
    assert run_refuses(config, folder)


@pytest.mark.parametrize(
    ("template", "header"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}", "<assistant>"),
        ("{% for m in messages %}{{ '[I]' + m.content + '[/I]' if m.role == 'user' else m.content }}{% endfor %}", ""),
        (TEMPLATE, ""),
    ],
)
@pytest.mark.parametrize("more", [("data.chat_template=true",), ("data.fields.messages=talk",), ()])
def test_a_template_that_ignores_the_generation_prompt_is_noted(
    tmp_path: Path, template: str, header: str, more: tuple[str, ...]
) -> None:
    """Not one like Mistral's, which writes nothing between a prompt and its answer."""
    folder = model(tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    files = [f"data.{name}={data_file(tmp_path / 'rows.jsonl')}" for name in ("train", "eval")]
    config = load_config("sft_tiny", ["data.type=files", *files, f"model.path={folder}", *more])
    found = [one.text for one in model_files.check(PreflightContext(config, for_job=False)) if one.kind == "note"]
    if header and more:
        assert [f"a prompt ends without '{header}'" in text for text in found] == [True]
    else:
        assert found == []


def test_messages_that_no_environment_can_begin_with_are_noted(tmp_path: Path) -> None:
    """An environment of the user's may change them."""
    system, folder = {"role": "system", "content": "Be brief."}, model(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("lost", "system"))
    chats = [[USER], [system, USER], [system, USER | {"content": "2"}]]
    rows = data_file(tmp_path / "rows.jsonl", *({"question": chat, "answer": "1"} for chat in chats))
    files = [f"data.{name}={rows}" for name in ("train", "eval")]
    chat = ("environment.function=calculator", "environment.template=chat", "warm_start.steps=0", "data.on_leak=keep")
    config = load_config("tiny_cpu", ["data.type=files", *chat, *files, f"model.path={folder}"])
    found = [*problems_of_data.check(PreflightContext(config, for_job=False))]
    (said,) = {one.text for one in found if one.kind == "note" and "environment" in one.text}
    assert said.startswith(f"{rows}:2: the model's chat template passes over message 1, of the role 'system'")
    assert said.endswith("an environment cannot start from 2 of 3 rows")


def test_what_a_run_would_log_of_rows_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = data_file(tmp_path / "rows.jsonl", *[{"question": "1", "answer": "1"}] * 2)
    held = data_file(tmp_path / "held.jsonl")
    files = (f"data.train={rows}", f"data.eval={held}", "warm_start.steps=0")
    found = [*problems_of_data.check(PreflightContext(load_config("gsm8k_tiny", files), for_job=False))]
    (said,) = [one.text for one in found if one.kind == "fact"]
    assert said.startswith("dropped 1 of 2 training problems, which are duplicates; the first is ")
    assert not caplog.records
