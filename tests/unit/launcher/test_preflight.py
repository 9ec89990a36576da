"""What a preflight reports of jobs on written text, of batches, and of packages of the user's own."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerBase

from launcher.build.data import Data, load_data, training_data
from launcher.build.jobs import dataset_job
from launcher.build.model import starting_shape
from launcher.build.roles import RunParts
from launcher.preflight import own_code, sizes
from launcher.preflight.checks import preflight
from launcher.preflight.subject import PreflightContext
from rl_megatron.agents.conversation.forms import TrainingConversation
from rl_megatron.agents.conversation.written import ConversationRows
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.interfaces import RunComponents
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.training.jobs.written import DatasetJob, make_units
from tests.unit.launcher.commands import Said
from tests.unit.launcher.sites import data_file, model_folder
from tests.unit.launcher.test_memory import QWEN3

TALK = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
PAIRED = ("data.fields.rejected=worse",)


def files(folder: Path, **splits: Sequence[object]) -> tuple[str, ...]:
    """The keys of files with these rows."""
    named = [f"data.{split}={data_file(folder / f'{split}.jsonl', *rows)}" for split, rows in splits.items()]
    return ("data.type=files", *named)


def chat_model(folder: Path, chat_template: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Path:
    """A model whose tokenizer has this template, and splits no special token."""
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(model_folder(folder, {**QWEN3, "vocab_size": 259}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"split_special_tokens": False}))
    return folder


def job_of(config: RunConfig, folder: Path) -> tuple[DatasetJob, Data]:
    """The job on written text of a configuration, without processes, and its data."""
    none: Any = None
    parts = RunParts(config=config, folder=folder, reward=none, allocation=None)
    roles = RunComponents(learners={"policy": none}, frozen_models={}, engine=none, weight_sync=none)
    assert config.model.path is not None
    data = training_data(config, config.model.path)
    return dataset_job(parts, starting_shape(config), roles, data, attention_cost=1.0, note=print), data


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("dpo_tiny", ("dpo.batch_size=3", "learner.dp=4"), "3 pairs (dpo.batch_size) for 4 data-parallel ranks"),
        ("reward_tiny", ("reward_model.batch_size=4", "learner.dp=4"), None),
        ("sft_tiny", ("sft.batch_size=1", "learner.dp=2"), "1 rows (sft.batch_size) for 2 data-parallel ranks"),
        ("sft_tiny", ("sft.batch_size=2", "learner.dp=2"), None),
    ],
)
def test_ranks_without_a_row_or_pair_of_written_text_are_noted(name: str, more: tuple[str, ...], said: str) -> None:
    """Such a step has no minibatches, and no rank has half of a pair."""
    notes = [text for text in preflight(load_config(name, more)).texts("note") if "data-parallel" in text]
    assert len(notes) == (said is not None)
    assert all(said in text and f"raise {said.split('(')[1].split(')')[0]}" in text for text in notes)


@pytest.mark.parametrize(("name", "what"), [("sft_tiny", "rows"), ("dpo_tiny", "pairs")])
def test_epochs_of_a_mixture_are_noted(name: str, what: str) -> None:
    """How many rows a source has is not known before the run."""
    sources, section = ["data=mixture", "data.sources.one.type=arithmetic"], name.removesuffix("_tiny")
    for more, noted in (((), False), (("data.sources.other.type=arithmetic", "data.sources.other.digits=3"), True)):
        config = load_config(name, [*sources, *more, f"{section}.epochs=2"])
        said = f"{section}.epochs=2 counts the {what} of all sources, but data.sources.<name>.weight decides"
        assert any(text.startswith(said) for text in preflight(config).texts("note")) == noted


def test_bad_pairs_are_found_before_the_run(tmp_path: Path) -> None:
    row = {"answer": "2", "m": 10**400}
    train, held_out = {**row, "question": "train", "worse": "3"}, {**row, "question": "eval", "worse": "2"}
    keys = (*files(tmp_path, train=[train], eval=[held_out]), "data.fields.rejected=worse")
    found = "\n".join(preflight(load_config("dpo_tiny", keys)).texts("problem"))
    assert "eval.jsonl:1: fields 'answer' and 'worse' are equal" in found
    found = "\n".join(preflight(load_config("reward_tiny", [*keys, "data.fields.margin=m"])).texts("problem"))
    assert "train.jsonl:1: field 'm' is 1000" in found


def test_rows_without_a_label_are_found_before_the_run(tmp_path: Path) -> None:
    """In both splits, all by name; none where such rows are left out."""
    labels: dict[str, list[object]] = {"train": [True, "yes", False, None], "eval": [1, 2, 0]}
    rows = {
        name: [{"prompt": f"{name} {n}", "completion": "2", "label": one} for n, one in enumerate(values)]
        for name, values in labels.items()
    }
    keys = (*files(tmp_path, **rows), "data.fields.prompt=prompt", "data.fields.answer=completion", "dpo.loss=kto")
    found = "\n".join(preflight(load_config("dpo_tiny", keys)).texts("problem"))
    for place, value in (("train.jsonl:2", "'yes'"), ("train.jsonl:4", "None"), ("eval.jsonl:2", "2")):
        assert f"{place}': field 'label' is {value};" in found, found
    assert found.count("dpo.loss=kto reads there") == 3
    assert "dpo.on_refused=drop" in found
    left = preflight(load_config("dpo_tiny", [*keys, "dpo.on_refused=drop"]))
    assert not any("label" in text for text in left.texts("problem"))


@pytest.mark.parametrize("field", ["talk", "worse"])
def test_null_arguments_of_calls_in_jsonl_are_noted_once_and_in_parquet_left_out(tmp_path: Path, field: str) -> None:
    """As a table of Arrow's has them: each call with the arguments of every function."""
    calls = [{"function": {"name": name, "arguments": {name: 1}}} for name in "ab"]
    rows = []
    for row in range(3):
        talk = [{"role": "user", "content": f"{row}"}, {"role": "assistant", "content": "2"}]
        rows.append({"talk": talk, "worse": [talk[0], {"role": "assistant", "content": "3"}]})
        rows[-1][field][1]["tool_calls"] = calls if row else None
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "t.parquet")
    data_file(tmp_path / "t.jsonl", *table.to_pylist())
    fields = ("data.type=files", "data.fields.messages=talk", "data.fields.rejected=worse", "data.on_leak=keep")
    for kind, wanted in (("jsonl", 1), ("parquet", 0)):
        given = [f"data.{name}={tmp_path}/t.{kind}" for name in ("train", "eval")]
        notes = preflight(load_config("dpo_tiny", [*fields, *given])).texts("note")
        found = [text for text in notes if "t.jsonl:2: a tool call has null" in text]
        assert len([text for text in found if "in 2 of the first 3 rows" in text]) == wanted, notes


@pytest.mark.parametrize("form", ["conversations", "pairs"])
def test_all_bad_rows_are_found_before_the_run_up_to_twenty(tmp_path: Path, form: str) -> None:
    def row(number: int, *, bad: bool) -> dict[str, object]:
        asked = {"role": "user", "content": f"{number}"}
        talk = [asked] if bad else [asked, {"role": "assistant", "content": "2"}]
        return {"question": f"{number}", "answer": "2", "worse": "2" if bad else "3", "talk": talk}

    bad = {"train": [2, 5], "eval": list(range(101, 124))}
    train = [row(line, bad=line in bad["train"]) for line in range(1, 7)]
    given = files(tmp_path, train=train, eval=[row(line + 1000, bad=line in bad["eval"]) for line in range(1, 130)])
    jobs = {"conversations": ("sft_tiny", "fields.messages=talk"), "pairs": ("dpo_tiny", "fields.rejected=worse")}
    job, field = jobs[form]
    found = "\n".join(preflight(load_config(job, (*given, f"data.{field}"))).texts("problem"))
    for name, lines in bad.items():
        assert [line for line in range(1, 130) if f"{name}.jsonl:{line}: field" in found] == lines[:20], found
    assert "... and 3 more bad rows" in found


SHOWS = "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
SHOWS += "{% if add_generation_prompt %}assistant:{% endif %}"
ENDS = SHOWS.replace("<end>", "<eos>")
OTHER = [{"role": "user", "content": "another 1"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("name", "row", "template", "said"),
    [
        ("sft", {"talk": TALK[::-1]}, None, "message 1 is the assistant's, which answers nobody"),
        ("sft", {"talk": TALK}, SHOWS.replace("m.content", "m.content if m.role == 'user'"), "not write its content"),
        ("sft", {"talk": TALK}, SHOWS.replace("assistant:{", "assistant:<think>{"), "the chat template's prompt for"),
        ("sft", {"talk": TALK, "label": False}, SHOWS, "field 'label' is false, which says of KTO's rows"),
        ("dpo", {"talk": TALK, "worse": OTHER}, SHOWS, "its conversations first differ in message 1"),
        (
            "dpo",
            {"talk": TALK, "worse": [TALK[0], {**TALK[1], "role": "assistant", "content": "3", "refusal": "no"}]},
            SHOWS,
            "does not write its refusal",
        ),
        ("reward", {"talk": TALK, "worse": TALK[:1] * 2 + TALK[1:] + TALK[:1]}, SHOWS, "is of the role 'user'"),
        ("reward", {"talk": TALK, "worse": OTHER}, "{{ raise_exception('no') }}", "chat template refuses these"),
        ("gsm8k", {"talk": TALK[:1], "answer": "2", "label": False}, SHOWS, "or set warm_start.steps=0"),
        ("gsm8k", {"talk": TALK[:1], "answer": "2"}, "{{ raise_exception('no') }}", "chat template fails at it"),
        (
            "gsm8k",
            {"talk": TALK[:1], "answer": "2"},
            SHOWS.replace("messages", "messages[1:]"),
            "does not write message 1",
        ),
    ],
)
def test_what_a_job_or_the_chat_template_refuses_is_found_before_the_run(
    tmp_path: Path, name: str, row: dict[str, object], template: str | None, said: str
) -> None:
    """As when rows are made, where a run would end at the step that draws one; not where such rows are left out."""
    model = model_folder(tmp_path / "model", QWEN3)
    worse = [TALK[0], {**TALK[1], "content": "3"}]
    good = {"talk": TALK[:1] if name == "gsm8k" else TALK, "answer": "1", "worse": worse}
    before = 1 if template is not None else 100  # more than the template is asked to show
    path = data_file(tmp_path / "rows.jsonl", *[good] * before, row)
    given = ("data.type=files", f"data.train={path}", f"data.eval={path}", "data.on_leak=keep", f"model.path={model}")
    fields = {"gsm8k": ("fields.prompt=talk", "chat_template=true"), "sft": ("fields.messages=talk",)}
    keys = [*given, *(f"data.{one}" for one in fields.get(name, ("fields.messages=talk", "fields.rejected=worse")))]
    keys += ["warm_start.steps=1"] if name == "gsm8k" else []

    def found(*more: str) -> list[str]:
        problems = preflight(load_config(f"{name}_tiny", [*keys, *more])).texts("problem")
        return [text for text in problems if said in text]

    (model / "chat_template.jinja").write_text(template or SHOWS)
    assert f"rows.jsonl:{before + 1}" in found()[0]
    if name == "gsm8k":
        assert bool(found("warm_start.steps=0")) == ("label" not in row)  # whose answer is not learned then
        return
    job = {"reward": "reward_model"}.get(name, name)
    assert all("no row remains" in text for text in found(f"{job}.on_refused=drop"))


@pytest.mark.parametrize(
    ("name", "key", "given", "more"),
    [
        ("sft_tiny", "data", "fields.messages='talk'", ()),
        ("dpo_tiny", "data", "fields.messages='talk'", ("data.fields.rejected=worse",)),
        ("reward_tiny", "data", "fields.messages='talk'", ("data.fields.rejected=worse",)),
        ("tiny_cpu", "eval.sets.own.data", "chat_template=true", ()),
    ],
)
def test_data_needs_its_chat_template(tmp_path: Path, name: str, key: str, given: str, more: tuple[str, ...]) -> None:
    model = model_folder(tmp_path / "model", QWEN3)
    splits = ("train", "eval") if key == "data" else ("eval",)
    rows = [f"{key}.{split}={data_file(tmp_path / split)}" for split in splits]
    config = load_config(name, [f"model.path={model}", f"{key}.type=files", f"{key}.{given}", *rows, *more])
    said = f"{key}.{given}, but the tokenizer of model.path={model} has no chat template"
    assert not any(said in text for text in preflight(config).texts("problem"))
    (model / "chat_template.jinja").unlink()
    assert any(said in text for text in preflight(config).texts("problem"))


@pytest.mark.parametrize(("name", "more"), [("sft_tiny", ()), ("dpo_tiny", PAIRED), ("reward_tiny", PAIRED)])
def test_conversations_need_a_template_that_ends_turns(tmp_path: Path, name: str, more: tuple[str, ...]) -> None:
    """A reward model reads whole conversations, so that its template needs to end none."""
    rows = [f"data.{split}={data_file(tmp_path / split)}" for split in ("train", "eval")]
    config = load_config(name, ["data.type=files", "data.fields.messages=talk", *rows, *more])
    assert config.model.path is None
    found = [text for text in preflight(config).texts("problem") if "data.fields.messages='talk', but" in text]
    said = TrainingConversation(id="p", messages=TALK, tools=[])
    conversations = ConversationRows(tokenizer := byte_tokenizer(), [tokenizer.eos_token_id])
    if name == "reward_tiny":
        assert (found, conversations.whole(said)) == ([], "user: 1\nassistant: 2\n")
        return
    assert "set model.path to a model with a chat template that ends" in "".join(found)
    with pytest.raises(DataError, match="no token ends sampling"):
        conversations.make_rows([said])


@pytest.mark.parametrize(("name", "more"), [("sft_tiny", ()), ("dpo_tiny", PAIRED), ("reward_tiny", PAIRED)])
def test_conversations_are_read_through_while_processes_start(tmp_path: Path, name: str, more: tuple[str, ...]) -> None:
    """With the data, on the thread of a start: 50 us each, which the event loop would stand still for. Those without a
    form are refused by the door of others: a resume may leave them out."""
    model = chat_model(tmp_path / "model", ENDS)
    formless = [{"role": "user", "content": [{"type": "image_url"}]}, TALK[1]]

    def rows(*talks: Sequence[object]) -> list[object]:
        return [{"talk": talk, "worse": [*talk[:1], {**TALK[1], "content": "3"}]} for talk in talks]

    train = rows(formless, [{**TALK[0], "content": "4"}, TALK[1]])
    given = (*files(tmp_path, train=train, eval=rows(TALK)), "data.fields.messages=talk", *more)
    config = load_config(name, given)
    assert len(load_data(config, model).train) == 2  # for an evaluation, which trains on none
    with pytest.raises(DataError, match=r"^prompt 'train:1': message 1 has content .*image_url") as refused:
        training_data(config, model)
    key = f"{config.job}.on_refused=drop"
    assert str(refused.value).endswith(f"\nor leave such rows out with {key}, which a resume may set")
    config = load_config(name, [f"model.path={model}", *given, key])
    job, data = job_of(config, tmp_path)
    units, left_out = make_units(data.train[:], job.units_of, config)
    assert [[row.id for row in unit] for unit in units] == [["train:2"] * (1 + len(more))]
    assert [why.split(" has content")[0] for why in left_out.refused] == ["prompt 'train:1': message 1"]


@pytest.mark.parametrize(("name", "more"), [("sft_tiny", ()), ("dpo_tiny", PAIRED)])
def test_learned_answers_end_with_a_token_that_ends_sampling(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, more: tuple[str, ...]
) -> None:
    """As a conversation's turns must, and as Kimi's folders do not by the tokenizer's eos_token."""
    model = model_folder(tmp_path / "model", {**QWEN3, "vocab_size": 259})
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [256]}))
    rows = {split: [{"question": split, "answer": "2", "worse": "3"}] for split in ("train", "eval")}
    config = load_config(name, [f"model.path={model}", *files(tmp_path, **rows), *more])
    with caplog.at_level(logging.INFO):
        job, data = job_of(config, tmp_path)
    assert [int(row.token_ids[-1]) for unit in job.units_of(data.train[:]) for row in unit] == [256] * (1 + len(more))
    assert "learned answers end with '<pad>': the tokenizer's eos_token, '<eos>', is none of the tokens" in caplog.text


def test_learned_answers_of_chats_end_as_the_template_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Engines stop at either token: GLM's chats end with <|user|>, and its eos_token ends a text."""
    template = "{% for m in messages %}{{ m.content }}{{ '<pad>' if m.role[0] == 'a' }}{% endfor %}"
    model = chat_model(tmp_path / "m", template)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 256]}))
    keys = ["data.type=mixture"]
    for source in ("plain", "chats"):
        for split in ("train", "eval"):
            path = data_file(tmp_path / f"{source}_{split}.jsonl", {"question": f"{source} {split}", "answer": "2"})
            keys.append(f"data.sources.{source}.{split}={path}")
        keys += [f"data.sources.{source}.type=files", f"data.sources.{source}.chat_template={source == 'chats'}"]
    config = load_config("sft_tiny", [f"model.path={model}", *keys])
    with caplog.at_level(logging.INFO):
        job, data = job_of(config, tmp_path)
    ends = {unit[0].id.split("/")[0]: int(unit[0].token_ids[-1]) for unit in job.units_of(data.train[:])}
    assert ends == {"plain": 257, "chats": 256}
    with pytest.raises(
        DataError, match=r"^prompt '.*': its answer contains the text of a token that ends sampling \(id 256\)"
    ):
        job.units_of([replace(data.train[0], answer="2<pad>")])
    assert "learned answers end with '<pad>': the tokenizer's eos_token, '<eos>', is not what ends" in caplog.text


@pytest.mark.parametrize(("name", "more", "rows"), [("sft_tiny", (), 1), ("dpo_tiny", PAIRED, 2)])
def test_a_job_knows_of_rows_that_were_too_long(tmp_path: Path, name: str, more: tuple[str, ...], rows: int) -> None:
    model = model_folder(tmp_path / "model", {**QWEN3, "vocab_size": 259})
    train, held_out = (
        [{"question": question, "answer": "2", "worse": "3"} for question in questions]
        for questions in (("1", "2" * 99, "3"), ("4",))
    )
    section = name.removesuffix("_tiny")
    keys = [*files(tmp_path, train=train, eval=held_out), f"{section}.on_long=drop", f"{section}.max_tokens=20"]
    job, _ = job_of(load_config(name, [f"model.path={model}", *keys, *more]), tmp_path)
    assert (job.size, job.dropped) == (2, rows)


@pytest.mark.parametrize("form", ["problems", "conversations"])
@pytest.mark.parametrize(("name", "more"), [("sft_tiny", ()), ("dpo_tiny", PAIRED), ("reward_tiny", PAIRED)])
def test_a_token_without_an_embedding_ends_the_run(tmp_path: Path, name: str, more: tuple[str, ...], form: str) -> None:
    """No engine is there that would refuse it, and the learner would read zeros for it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<new>"])
    model = chat_model(tmp_path / "model", ENDS, tokenizer)
    rows = dict[str, list[dict[str, Any]]]()
    for split, said in (("train", "<new>2"), ("eval", "2")):
        row: dict[str, Any] = {"question": split, "answer": said, "worse": "3"}
        if form == "conversations":
            row |= {"talk": [{"role": "user", "content": split}, {"role": "assistant", "content": said}]}
            row |= {"worse": [row["talk"][0], {"role": "assistant", "content": "3"}]}
        rows[split] = [row]
    field = ["data.fields.messages=talk"] if form == "conversations" else []
    config = load_config(name, [f"model.path={model}", *field, *files(tmp_path, **rows), *more])
    job, data = job_of(config, tmp_path)
    assert job.units_of([replace(one, meta={"label": True}) for one in data.held_out])
    of_kto = [replace(one, meta={"label": False}) for one in data.held_out]
    if name == "sft_tiny":
        with pytest.raises(DataError, match=r"^prompt 'eval:1': field 'label' is false, which says of KTO's rows"):
            job.units_of(of_kto)
        assert form == "conversations" or job.units_of([replace(one, answer="false") for one in of_kto])
    else:
        assert job.units_of(of_kto)
    with pytest.raises(DataError, match=r"^prompt 'train:1' has the token 259, but .* has 259 rows"):
        job.units_of(data.train[:])
    assert any(
        "the tokenizer has 1, for example '<new>' (259)" in text for text in preflight(config).texts("unchecked")
    )


# What the checks before a run say of a batch and of what is under way for it.
@pytest.mark.parametrize(
    ("most", "groups", "said"),
    [
        (32, 8, None),
        (33, 7, "32 trajectories run concurrently (environment.concurrency=33), but servers have at most 28"),
        (30, 7, "30 trajectories run concurrently (environment.concurrency=30), but servers have at most 28"),
        (28, 7, None),
        (27, 7, "environment.concurrency=27 of 32 trajectories run concurrently, but servers could"),
        (31, 64, "environment.concurrency=31 of 32 trajectories run concurrently, but servers could"),
        (1024, 64, None),
    ],
)
def test_trajectories_that_wait_for_servers_or_the_reverse_are_noted(most: int, groups: int, said: str | None) -> None:
    served = ("rollout=vllm", "rollout.server.addresses=http://a:1", f"rollout.server.max_concurrent_groups={groups}")
    many = ("rollout.prompts_per_step=8", "rollout.group_size=4", f"environment.concurrency={most}")
    config = load_config("calculator", [*served, *many])
    notes = [
        found.text for found in sizes.check_batches(PreflightContext(config, False)) if "trajectories" in found.text
    ]
    assert len(notes) == (said is not None), notes
    assert all(text.startswith(str(said)) for text in notes)


@pytest.mark.parametrize(
    ("more", "noted"),
    [
        (("algorithm=reinforce",), []),
        (("algorithm=remax", "train.minibatches=3"), ["train.minibatches=3 * train.epochs=1"]),
        (("algorithm=rloo", "train.epochs=2"), ["train.minibatches=1 * train.epochs=2"]),
        (("algorithm=rloo", "train.max_staleness=2"), ["train.max_staleness=2"]),
        (("algorithm=rloo", "train.max_staleness=2", "algorithm.correction.mode=truncate"), []),
        (
            ("algorithm=reinforce", "train.max_staleness=2", "train.minibatches=2"),
            ["train.minibatches=2 * train.epochs=1", "train.max_staleness=2"],
        ),
        (("algorithm=grpo", "train.max_staleness=2", "train.epochs=2"), []),
    ],
)
def test_an_objective_without_a_ratio_on_older_samples_is_noted(more: tuple[str, ...], noted: list[str]) -> None:
    found = sizes.check_batches(PreflightContext(load_config("tiny_cpu", list(more)), False))
    texts = [one.text for one in found if one.text.startswith("algorithm.objective=reinforce has no ratio")]
    assert [given for text, given in zip(texts, noted, strict=True) if given not in text] == []


_KL, _FIX = "algorithm.kl.coefficient=0.01", "algorithm.correction"


@pytest.mark.parametrize(
    ("more", "refused", "noted"),
    [
        (("algorithm=grpo",), "", ""),
        (("algorithm=dpo",), "", ""),  # pairs have no ratio to the engine
        (("algorithm=gspo", "algorithm.correction.mode=truncate"), "", "in algorithm.correction;"),
        (("algorithm=grpo", _KL), "", "in algorithm.kl.importance_weighted=true;"),
        (("algorithm=grpo", "algorithm.objective=mine:loss"), "", "if it reads rollout_logprobs;"),
        (("algorithm=reinforce", "algorithm.old_logprobs=rollout"), "", ""),
        (("algorithm=reinforce", "algorithm.old_logprobs=rollout", _KL), "", "importance_weighted=true;"),
        (
            ("algorithm=rloo", "algorithm.old_logprobs=rollout", _KL, "algorithm.kl.placement=completion_reward"),
            "algorithm.old_logprobs=rollout",
            "",
        ),
        (
            ("algorithm=grpo", "algorithm.correction.mode=truncate", "algorithm.correction.level=product"),
            "=product",
            "",
        ),
        (
            ("algorithm=gspo", f"{_FIX}.mode=band", f"{_FIX}.level=sequence", f"{_FIX}.low=0.999"),
            "algorithm.correction.level=sequence",
            "",
        ),
        *(
            ((f"algorithm={row}",), "algorithm.old_logprobs=rollout", "")
            for row in ("vespo", "topr", "dppo_tv", "m2po")
        ),
        (("algorithm=grpo", "algorithm.old_logprobs=interpolated"), "algorithm.old_logprobs=interpolated", ""),
    ],
)
def test_ratios_to_an_engine_that_leaves_tokens_out(more: tuple[str, ...], refused: str, noted: str) -> None:
    """The engine renormalizes over top_p's tokens, so every token's ratio is below that of the two policies."""
    load_config("tiny_cpu", list(more))
    if refused:
        with pytest.raises(ConfigError, match=rf"rollout\.top_p=0\.95 with \S*{refused}: "):
            load_config("tiny_cpu", [*more, "rollout.top_p=0.95"])
        return
    found = sizes.check_batches(PreflightContext(load_config("tiny_cpu", [*more, "rollout.top_p=0.95"]), False))
    texts = [one.text for one in found if one.text.startswith("rollout.top_p=0.95: ")]
    assert len(texts) == bool(noted)
    assert all(noted in text for text in texts)


def test_pairs_and_demonstrations_are_sequences_of_a_step() -> None:
    """Of groups of 16, of which the other 14 are not trained on."""
    keys = ["algorithm=dpo", "learner.ep=1", "learner.dp=4", "rollout.prompts_per_step=3", "rollout.group_size=16"]
    (idle,) = sizes.check_batches(PreflightContext(load_config("tiny_cpu", [*keys, "train.minibatches=3"]), False))
    product = "rollout.prompts_per_step=3 * 2 of a pair / train.minibatches=3"
    assert idle.text.startswith(f"an optimizer step has 2 sequences ({product}) for 4 data-parallel ranks")
    with pytest.raises(ConfigError, match=r"train\.minibatches=4 is more than the 3 pairs of a step"):
        load_config("tiny_cpu", [*keys, "train.minibatches=4"])
    keys = ["algorithm=luffy", "rollout.prompts_per_step=4", "rollout.group_size=3", "rollout.max_prompt_tokens=16"]
    idle, *_ = sizes.check_batches(
        PreflightContext(load_config("tiny_cpu", [*keys, "learner.ep=1", "learner.dp=32"]), False)
    )
    product = "rollout.prompts_per_step=4 * (rollout.group_size=3 + 1 demonstration) / train.minibatches=2"
    assert idle.text.startswith(f"an optimizer step has 8 sequences ({product}) for 32 data-parallel ranks")


# Preflight looks for packages of the user's own; those of layers are in tests/unit/learner/test_own_family.py.
def test_packages_that_are_not_there_are_found_before_ranks_start() -> None:
    of_rows = ("algorithm.advantage_mean", "algorithm.preference.loss")
    for recipe, key in (*(("tiny_cpu", key) for key in of_rows), ("dpo_tiny", "dpo.loss")):
        row = ["algorithm=dpo"] if "preference" in key else []
        said = preflight(load_config(recipe, [*row, f"{key}=nowhere:mine"])).texts("problem")
        assert f"{key}=nowhere:mine: no module 'nowhere'; install it or put its folder on PYTHONPATH" in said
    keys = ("algorithm=gmpo", "algorithm.objective=nowhere.of:mine")
    (found,) = preflight(load_config("tiny_cpu", [*keys])).texts("problem")
    expected = "algorithm.objective=nowhere.of:mine: no module 'nowhere'; install it or put its folder on PYTHONPATH"
    assert found == expected
    there = preflight(load_config("tiny_cpu", ["algorithm=gmpo", "algorithm.objective=tests.samples:share_of"]))
    assert there.texts("problem") == []
    assert "algorithm.objective=tests.samples:share_of, which ranks import" in there.texts("unchecked")


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("its.layers:norms", "'norms' of its.layers is not there; did you mean 'norm'?"),
        ("its.layer:norm", "no module 'its.layer'; install it or put its folder on PYTHONPATH"),
        ("its.layers.deep:norm", "no module 'its.layers.deep'; install it or put its folder on PYTHONPATH"),
        ("its:norm", "'norm' of its is not there"),
        ("its.layers:norm", None),
        ("its.layers:other", None),
        ("its.layers:given", None),
        ("its.layers:late", None),
        ("its.all:anything", None),
        ("its.made:anything", None),
        ("its.broken:anything", None),  # as ranks say, with the line
        ("its.plain.deep.mod:norm", None),
        ("its.plain.deep.mod:norms", "'norms' of its.plain.deep.mod is not there; did you mean 'norm'?"),
        ("its.plain.mod:norm", "no module 'its.plain.mod'; install it or put its folder on PYTHONPATH"),
        ("its.updated:anything", None),
        ("its.matched:first", None),
        ("its.matched:rest", None),
        ("its.matched:others", None),
        ("its.matched:anything", "'anything' of its.matched is not there"),
        ("its.moved.elsewhere:anything", None),
        ("its.registers.made:anything", None),
        ("os.path:join", None),
        ("plainly.deep.mod:norm", None),
    ],
)
def test_a_name_that_is_not_in_its_module_is_found_without_an_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, said: str | None
) -> None:
    texts = {
        "__init__": "raise SystemExit('imported')",
        "layers": "from a import b as other\nif other:\n    given = late = 1\ndef norm(shape, layer): ...",
        "all": "from a import *",
        "made": "globals()['any' + 'thing'] = 1",
        "broken": "def (",
        "plain/deep/mod": "def norm(shape, layer): ...",
        "../plainly/deep/mod": "def norm(shape, layer): ...",
        "updated": "import sys\nsys.modules[__name__].__dict__.update(anything=1)",
        "matched": "match a:\n    case [first, *rest]: ...\n    case {'b': 1, **others}: ...",
        "moved/__init__": "__path__ = ['/elsewhere']",
        "registers": "import sys\nsys.modules[__name__ + '.made'] = sys",
    }
    (tmp_path / "its").mkdir()
    for name, text in texts.items():
        file = tmp_path / "its" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = own_code.check_modules(PreflightContext(load_config("tiny_cpu", [f"learner.layers={own}"]), False))
    wanted = ("problem", f"learner.layers={own}: {said}") if said else None
    expected = [wanted or ("unchecked", f"learner.layers={own}, which ranks import")]
    assert [(one.kind, one.text) for one in found] == expected


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["environment.function=its_code:Gues"], "'Gues' of its_code is not there; did you mean 'Guess'?"),
        (["algorithm.objective=its_cod:loss", "rollout.group_size=0"], "no module 'its_cod'; install it"),
        (["environment.function=its_code:Guess"], "an environment's demonstrations are plain text"),
        (["environment.function=its_code:Gues", "slurm.python=/other"], "an environment's demonstrations are plain"),
        (["rollout.group_size=0", "reward.function=hf:here"], "must be greater"),
    ],
)
def test_code_that_does_not_exist_is_named_before_rules_that_it_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keys: list[str], said: str
) -> None:
    (tmp_path / "its_code.py").write_text("class Guess: ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = Said("train", capsys)(*keys, status=1).splitlines()[0]
    assert first.startswith(f"error: {keys[0]}")
    assert said in first
