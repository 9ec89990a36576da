"""What a resume may change is marked key by key, and what it may not is known from the checkpoint, not from a file."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from launcher.runs.resume import find, has_trained
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.resume import COSTS, FREE, FREE_BEFORE, fixed, is_free, table
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import FileRunData, FileSource
from rl_megatron.config.sections.reward import EnvironmentSection, RewardSection
from rl_megatron.config.sections.teachers import TeacherSection
from rl_megatron.digests import digests
from rl_megatron.errors import CheckpointError
from rl_megatron.observability.metrics.writer import MetricsWriter
from rl_megatron.training.checkpoints import CheckpointStore, TrainerState
from tests.savings import Ended
from tests.unit.launcher.commands import status_of

REPO = Path(__file__).resolve().parents[3]


class Weights:
    async def save(self, folder: Path) -> Ended:
        (folder / "weights").write_bytes(b"weights")
        return Ended(digests(folder, ["weights"]))


def run_of(
    folder: Path, config: RunConfig, held: Mapping[str, Any] | None = None, warm_start_step: int | None = None
) -> Path:
    """With a checkpoint that holds the values ``held``, or else those of ``config`` that are fixed."""
    folder.mkdir(parents=True, exist_ok=True)
    store = CheckpointStore(folder / "checkpoints", keep=1, config=held or fixed(config))
    step = 1 if warm_start_step is None else 0
    state = TrainerState(step=step, prompts={}, stream=None, warm_start_step=warm_start_step)
    learner: Any = Weights()

    async def write() -> None:
        await (await store.save(state, {"learner": learner})).finish()

    asyncio.run(write())
    save_resolved(config, folder / "config.yaml")
    return folder


def test_a_run_has_trained_once_a_row_is_recorded(tmp_path: Path) -> None:
    assert not has_trained(tmp_path)
    writer = MetricsWriter(tmp_path)
    assert not has_trained(tmp_path)
    writer.write({"step": 1, "phase": "rl"})
    assert has_trained(tmp_path)
    writer.truncate_after(-1)  # it starts over
    assert not has_trained(tmp_path)
    writer.close()


def keep_start(run: Path) -> None:
    (run / "hf_start").mkdir()
    (run / "hf_start" / "model.safetensors").touch()


def keys(section: BaseModel, above: str = "") -> Iterator[str]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        yield f"{above}{name}"
        if isinstance(value, BaseModel):
            yield from keys(value, f"{above}{name}.")


def test_every_section_is_marked_and_every_mark_is_of_a_key() -> None:
    assert set(RunConfig.model_fields) <= FREE.keys()
    inner = {"reward": RewardSection, "environment": EnvironmentSection}
    of_inner = {f"{name}.{key}" for name, section in inner.items() for key in section.model_fields}
    of_source = {*FileSource.model_fields, *of_inner}
    of_teacher = (f"algorithm.kl.teachers.<name>.{key}" for key in TeacherSection.model_fields)
    of_entries = {*(f"data.sources.<name>.{key}" for key in of_source), *of_teacher}
    assert FREE.keys() <= {*keys(RunConfig()), *of_entries}
    assert COSTS.keys() <= set(keys(RunConfig()))
    assert is_free("data.sources.math.weight")
    assert not is_free("data.sources.math.reward.function")
    assert not is_free("reward.parts.correct.weight")
    assert is_free("rollout.server.replicas")
    assert not is_free("rollout.server.quantization")
    assert is_free("eval.every")
    assert not is_free("eval.success_reward")


def test_the_docs_have_the_table() -> None:
    assert table() in (REPO / "docs/running.md").read_text()


def test_a_config_file_edited_between_two_starts_is_refused_by_key(tmp_path: Path) -> None:
    run = run_of(tmp_path, load_config("tiny_cpu", ["algorithm=gspo", "reward.parts.exact_match=1"]))
    path = run / "config.yaml"
    find(load_config(str(path), []), run)
    path.write_text(
        path.read_text().replace("ratio_level: sequence", "ratio_level: token").replace("seed: 0", "seed: 1")
    )
    edited = load_config(str(path), ["reward.parts.exact_match.weight=2"])
    with pytest.raises(CheckpointError) as caught:
        find(edited, run)
    for line in (
        "seed: 0 then, 1 now",
        "algorithm.ratio_level: 'sequence' then, 'token' now",
        "reward.parts.exact_match.weight: 1.0 then, 2.0 now",
        f"another configuration than {run}/checkpoints/step_000001",
    ):
        assert line in str(caught.value)


@pytest.mark.parametrize(
    ("key", "free"),
    [
        *(("learner.tp=2", True), ("train.max_staleness=3", True), ("learner.recompute.uniform=1", True)),
        *(("rollout.server.replicas=4", True), ("reward.timeout_seconds=7", True), ("roles.critic=separate", True)),
        *(("rollout.group_size=2", False), ("learner.dtype=bfloat16", False), ("reward.function=length", False)),
        *(("learner.ep=2", True), ("warm_start.steps=1", False)),
        *(("learner.optimizer.name=muon", False), ("learner.optimizer.clip_grad=2", True)),
    ],
)
def test_layout_limits_and_lengths_are_free_and_numbers_are_not(key: str, free: bool) -> None:
    ours = ["algorithm=ppo", "learner.ep=1", "rollout=vllm", "learner.threads=1", "warm_start.steps=0"]
    assert (fixed(load_config("tiny_cpu", ours)) == fixed(load_config("tiny_cpu", [*ours, key]))) == free


def test_keys_that_an_older_version_held_fixed_are_free_and_those_it_lacked_had_their_defaults(tmp_path: Path) -> None:
    keys = ["learner.ep=1"], ["learner.ep=2"], ["learner.router.frozen=true"]
    then, now, other = (load_config("tiny_cpu", [*given]) for given in keys)
    held = {key: value for key, value in fixed(then).items() if key != "learner.router.frozen"}
    assert len(held) < len(fixed(then))
    run = run_of(tmp_path, then, {**held, "learner.ep": 1})
    find(now, run)
    with pytest.raises(CheckpointError, match=r"learner\.router\.frozen: False then, True now"):
        find(other, run)


def test_a_key_that_an_older_version_left_free_is_fixed_from_the_next_checkpoint_on(tmp_path: Path) -> None:
    then, other = (load_config("tiny_cpu", [f"eval.success_reward={value}"]) for value in (0.5, 0.75))
    find(then, run_of(tmp_path / "old", then, {key: fixed(then)[key] for key in fixed(then).keys() - FREE_BEFORE}))
    with pytest.raises(CheckpointError, match=r"eval\.success_reward: 0\.5 then, 0\.75 now"):
        find(other, run_of(tmp_path / "new", then))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        *(("algorithm.second_moment_limit", value, None) for value in (None, False, 0, "", [], {})),
        ("algorithm.second_moment_limit", 0.04, "0.04 then, now no such key; it is called algorithm.tokens.limit, "),
        ("data.gone", 1, "1 then, now no such key\nresume with the version that wrote it, or begin another run.name"),
        ("data.gone", None, None),
        ("gone.inner", None, None),
        ("learner.optimizer.distributed", True, None),
        ("learner.optimizer.distributed", False, "False then, now no such key; data-parallel ranks shard"),
        ("reward.parts.exact_match.gone", None, None),
        ("reward.parts.exact_match.gone", 1, "1 then, now no such key\nresume with the version that wrote it"),
        ("reward.parts.length.weight", 0, "0 then, not there now\ngive these as they were, or begin another run.name"),
        ("environment.options.limit", 0, "0 then, not there now\ngive these as they were, or begin another run.name"),
    ],
)
def test_a_key_that_this_version_lacks_was_off(
    key: str, value: object, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else what it did cannot be done; the name of an entry that the user left out is another matter."""
    config = load_config("tiny_cpu", ["reward.parts.exact_match=1"])
    run = run_of(tmp_path, config, {**fixed(config), key: value})
    if said is None:
        find(config, run)
        assert key in caplog.text
        return
    with pytest.raises(CheckpointError) as caught:
        find(config, run)
    assert f"{key}: {said}" in str(caught.value)


@pytest.mark.parametrize(
    ("job", "then", "now", "refused"),
    [
        ("sft", (), ("on_long=drop",), ()),
        ("sft", (), ("on_long=cut", "max_tokens=2048"), ()),
        ("sft", (), ("on_refused=drop",), ()),
        ("dpo", ("on_long=drop",), ("on_long=drop", "on_refused=drop"), ()),
        ("sft", ("on_refused=drop",), ("on_refused=fail",), ("on_refused: 'drop' then, 'fail' now",)),
        ("sft", ("on_long=drop",), ("on_refused=drop", "on_long=fail"), ("on_long: 'drop' then",)),
        ("dpo", (), ("on_long=drop",), ()),
        ("reward_model", (), ("max_tokens=2048",), ()),
        ("sft", (), ("on_long=drop", "max_tokens=512"), ("max_tokens: 1024 then, 512 now",)),
        ("sft", ("on_long=drop",), ("max_tokens=2048",), ("on_long: 'drop' then", "max_tokens: 1024 then")),
        ("sft", (), ("batch_size=2",), ("batch_size: 64 then, 2 now",)),
    ],
)
def test_what_is_done_with_longer_and_refused_rows_may_change_where_none_was_seen(
    job: str, then: tuple[str, ...], now: tuple[str, ...], refused: tuple[str, ...], tmp_path: Path
) -> None:
    """As the error of the first such row advises."""
    given = ({"job": job, job: dict(one.split("=") for one in some)} for some in (then, now))
    first, second = map(RunConfig.model_validate, given)
    run = run_of(tmp_path, first)
    if job == "dpo":
        keep_start(run)
    if not refused:
        find(second, run)
        return
    with pytest.raises(CheckpointError) as caught:
        find(second, run)
    assert all(f"{job}.{said}" in str(caught.value) for said in refused)


@pytest.mark.parametrize(
    ("then", "now", "refused"),
    [
        ((), ("rollout.on_long_prompt=drop",), None),
        ((), ("rollout.max_prompt_tokens=64",), None),
        ((), ("algorithm.kl.teachers.solved.max_prompt_tokens=80",), None),
        (("rollout.max_prompt_tokens=64",), ("rollout.max_prompt_tokens=63",), "max_prompt_tokens: 64 then, 63 now"),
        (("rollout.on_long_prompt=drop",), ("rollout.max_prompt_tokens=64",), "max_prompt_tokens: 32 then, 64 now"),
        (("rollout.on_long_prompt=drop",), (), "on_long_prompt: 'drop' then, 'fail' now"),
    ],
)
def test_what_is_done_with_longer_prompts_may_change_where_none_was_drawn(
    then: tuple[str, ...], now: tuple[str, ...], refused: str | None, tmp_path: Path
) -> None:
    """As the error of the first such prompt, drawn from a parquet file, advises."""
    own = "algorithm.kl.teachers.solved"
    keys = ("algorithm=gkd", "rollout.max_prompt_tokens=32", f"{own}.prompt={{prompt}} {{answer}}")
    keys = (*keys, f"{own}.max_prompt_tokens=40")
    run = run_of(tmp_path, load_config("tiny_cpu", [*keys, *then]))
    config = load_config("tiny_cpu", [*keys, *now])
    if refused is None:
        find(config, run)
        return
    with pytest.raises(CheckpointError, match=refused):
        find(config, run)


KL = ("tiny_cpu", "algorithm.kl.coefficient=0.1", "warm_start.steps=0")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("dpo_tiny",), "(dpo.reference=null); put it back, or begin another run.name"),
        (("dpo_tiny", "model.path=/given"), "put it back, or copy model.path=/given there, which it is, or begin"),
        (KL, "(algorithm.kl.reference=null); put it back, or begin another run.name"),
        (("tiny_cpu", *KL[1:2], "warm_start.steps=1", "model.path=/given"), "; put it back, or begin another run.name"),
        ((*KL, "algorithm.kl.reference=/other"), None),
        (("dpo_tiny", "learner.lora.rank=4"), None),
        (("tiny_cpu", "warm_start.steps=0"), None),
        (("sft_tiny",), None),
    ],
)
def test_a_frozen_reference_that_is_gone_is_named_before_ranks_start(
    keys: tuple[str, ...], said: str | None, tmp_path: Path
) -> None:
    config = load_config(keys[0], list(keys[1:]))
    run = run_of(tmp_path, config)
    if said is not None:
        with pytest.raises(CheckpointError) as caught:
            find(config, run)
        assert str(caught.value).startswith(f"{run}/hf_start: it has neither ")
        assert said in str(caught.value)
        keep_start(run)
    find(config, run)


def test_a_warm_start_that_was_stopped_has_kept_no_reference_yet(tmp_path: Path) -> None:
    config = load_config("tiny_cpu", [KL[1]])
    find(config, run_of(tmp_path, config, warm_start_step=3))


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        (("most=1",), ("most=2",), "most: 1 then, 2 now"),
        ((), ("most=1",), "most: not there then, 1 now"),
        (("url=http://127.0.0.1:1",), (), "url: 'http://127.0.0.1:1' then, not there now"),
    ],
)
def test_options_of_an_environment_are_those_that_it_was_trained_with(
    then: tuple[str, ...], now: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    keys = ["environment.function=calculator", "environment.template=plain", "warm_start.steps=0"]
    first, second = (
        load_config("tiny_cpu", [*keys, *(f"environment.options.{one}" for one in some)]) for some in (then, now)
    )
    run = run_of(tmp_path, first)
    find(first, run)
    with pytest.raises(CheckpointError) as caught:
        find(second, run)
    assert f"environment.options.{said}" in str(caught.value)


@pytest.mark.parametrize("above", ["data.", "data.sources.math."])
def test_keys_of_sections_of_another_kind_that_an_older_version_lacked_had_their_defaults(
    tmp_path: Path, above: str
) -> None:
    kind = ["data.type=mixture"] if "sources" in above else []
    files = [*kind, *(f"{above}{key}" for key in ("type=files", "train=a.jsonl", "eval=b.jsonl"))]
    now = load_config("gsm8k_tiny" if not kind else "tiny_cpu", files)
    held = {key: value for key, value in fixed(now).items() if key != f"{above}messages_field"}
    assert len(held) == len(fixed(now)) - 1
    run = run_of(tmp_path, now, held)
    find(now, run)
    other = load_config("gsm8k_tiny" if not kind else "tiny_cpu", [*files, f"{above}answer_field=b"])
    with pytest.raises(CheckpointError, match=rf"{above}answer_field: 'answer' then, 'b' now"):
        find(other, run)


@pytest.mark.parametrize("key", ["data.train", "data.eval", "model.path"])
def test_a_path_that_differs_is_given_as_it_was_by_a_link_there(key: str, tmp_path: Path) -> None:
    """Models, and the fields of rows that rewards read, are compared by their paths alone."""
    old, new = tmp_path / "old", tmp_path / "new"
    files = {"data.type": "files", "data.train": "a.jsonl", "data.eval": "b.jsonl"}
    then, now, seeded = (
        load_config("gsm8k_tiny", [f"{name}={value}" for name, value in {**files, key: path, **more}.items()])
        for path, more in ((old, {}), (new, {}), (old, {"seed": 1}))
    )
    run = run_of(tmp_path, then)
    with pytest.raises(CheckpointError) as caught:
        find(now, run)
    assert f"{key}: {str(old)!r} then, {str(new)!r} now\ngive these as they were (what lies" in str(caught.value)
    assert "by a link or a mount at the path then), or begin another run.name" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"seed: 0 then, 1 now\ngive these as they were, or begin"):
        find(seeded, run)


def test_other_data_is_told_by_few_lines(tmp_path: Path) -> None:
    run = run_of(tmp_path, RunConfig())
    files = FileRunData(type="files", train=Path("x" * 10_000), eval=Path("e"))
    with pytest.raises(CheckpointError, match=r"data\.digits: 2 then, not there now") as caught:
        find(RunConfig(data=files), run)
    assert len(str(caught.value)) < 2000


def test_fewer_steps_than_are_made_are_refused(tmp_path: Path) -> None:
    """But where epochs say how many there are."""
    for keys in (["tiny_cpu"], ["sft_tiny"]):
        longest, equal, fewer = (load_config(*keys, [f"train.steps={steps}"]) for steps in (9, 1, 0))
        run = run_of(tmp_path / keys[0], longest)
        find(equal, run)
        with pytest.raises(CheckpointError, match=rf"train\.steps=0, but {run}/.*is of step 1; give train\.steps=1 or"):
            find(fewer, run)
    epochs = load_config("sft_tiny", ["sft.epochs=1"])
    find(epochs.model_copy(update={"train": fewer.train}), run_of(tmp_path / "epochs", epochs))


def test_a_check_of_a_resume_refuses_what_the_resume_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_of(Path("runs/x"), load_config("tiny_cpu", ["run.name=x"]))
    for seed, status, said in ((0, 0, ""), (1, 1, "seed: 0 then, 1 now")):
        assert status_of("train", "--config", f"{run}/config.yaml", "--resume", "--check", f"seed={seed}") == status
        assert said in capsys.readouterr().err


def test_a_copied_or_moved_folder_is_no_longer_the_run_that_its_config_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until an override does: a resume would go on in the other folder, whose checkpoints it would remove."""
    (tmp_path / "else where").mkdir()
    monkeypatch.chdir(tmp_path)
    run = run_of(Path("runs/x"), load_config("tiny_cpu", ["run.name=x"]))

    def resumed(folder: Path, *keys: str) -> tuple[object, str]:
        status = status_of("train", "--config", f"{folder}/config.yaml", "--resume", "--check", *keys)
        return status, capsys.readouterr().err

    copied = Path(shutil.copytree(run, "runs/y"))
    away = Path(shutil.copytree(run, tmp_path / "else where" / "x"))
    for folder, advice in ((copied, "add run.name=y to"), (away, f"add run.name=x run.dir='{away.parent}' to")):
        status, said = resumed(folder)
        assert status == 1
        assert f"config.yaml is of the run runs/x, but lies in {folder.absolute()}" in said
        assert advice in said
    assert resumed(run) == resumed(copied, "run.name=y") == resumed(copied, "run.name=x") == (0, "")
    assert resumed(away, "run.name=x", f"run.dir={away.parent}") == (0, "")
    moved = run.rename("runs/z")
    assert "add run.name=z to" in resumed(moved)[1]
    Path("runs/x").symlink_to("z")
    assert resumed(Path("runs/x")) == (0, "")


def test_what_has_no_checkpoint_starts_over(tmp_path: Path) -> None:
    assert find(RunConfig(), tmp_path) is None
