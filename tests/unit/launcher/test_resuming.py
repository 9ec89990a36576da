"""What a resume may change, key by key; and the lock of a run, also on file systems that have none."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import sys
import types
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from launcher.__main__ import app
from launcher.commands import train
from launcher.controller.group import Watchdog
from launcher.processes import stacks
from launcher.processes.stacks import LoopWatch
from launcher.runs.folder import choose, claim, lock, refuse_copied
from launcher.runs.resume import find, has_trained
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.resume import FREE, FREE_BEFORE, fixed, is_free, table
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import FileRunData, FileSource
from rl_megatron.config.sections.jobs import LogSection
from rl_megatron.config.sections.reward import EnvironmentSection, RewardSection
from rl_megatron.config.sections.teachers import TeacherSection
from rl_megatron.digests import digests
from rl_megatron.errors import CheckpointError, ConfigError, WorkerFailure
from rl_megatron.files import append_private
from rl_megatron.observability import timeline
from rl_megatron.observability.files import read_jsonl
from rl_megatron.observability.history import SampleRow, SamplesWriter
from rl_megatron.observability.log import run_log
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import MetricsWriter, Recorder
from rl_megatron.observability.sinks.sink import SinkSettings
from rl_megatron.observability.sinks.tensorboard import TensorBoardSink
from rl_megatron.observability.sinks.wandb import WandbSink
from rl_megatron.observability.timeline import TraceFile
from rl_megatron.training.checkpoints import CheckpointStore, TrainerState
from rl_megatron.training.loop import Intervals, Loop
from tests.savings import Ended, Shards
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
    assert FREE.keys() <= {*keys(RunConfig()), *{*(f"data.sources.<name>.{key}" for key in of_source), *of_teacher}}
    assert is_free("data.sources.math.weight")
    assert not is_free("data.sources.math.reward.function")
    assert not is_free("reward.parts.correct.weight")
    assert is_free("rollout.server.replicas")
    assert not is_free("rollout.server.quantization")
    assert is_free("eval.every")
    assert not is_free("eval.success_reward")


def test_the_docs_have_the_table() -> None:
    assert table() in (REPO / "docs/cluster.md").read_text()


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
        f"a different configuration from {run}/checkpoints/step_000001",
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


def test_keys_that_an_older_version_held_fixed_are_free_and_free_ones_fixed_later(tmp_path: Path) -> None:
    keys = ["learner.ep=1"], ["learner.ep=2"], ["learner.router.frozen=true"]
    then, now, other = (load_config("tiny_cpu", [*given]) for given in keys)
    held = {key: value for key, value in fixed(then).items() if key != "learner.router.frozen"}
    assert len(held) < len(fixed(then))
    run = run_of(tmp_path, then, {**held, "learner.ep": 1})
    find(now, run)
    with pytest.raises(CheckpointError, match=r"learner\.router\.frozen: False then, True now"):
        find(other, run)
    then, other = (load_config("tiny_cpu", [f"eval.success_reward={value}"]) for value in (0.5, 0.75))
    find(then, run_of(tmp_path / "old", then, {key: fixed(then)[key] for key in fixed(then).keys() - FREE_BEFORE}))
    with pytest.raises(CheckpointError, match=r"eval\.success_reward: 0\.5 then, 0\.75 now"):
        find(other, run_of(tmp_path / "new", then))


@pytest.mark.parametrize(("value", "said"), [(1.0, None), (0.5, "0.5 then, 1.0 now"), (None, "None then, 1.0 now")])
def test_a_renamed_key_is_compared_by_its_name_of_today(
    value: float | None, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config("tiny_cpu", [])
    held = {key: one for key, one in fixed(config).items() if key != "algorithm.parameters.tau_positive"}
    run = run_of(tmp_path, config, {**held, "algorithm.tau_positive": value})
    if said is None:
        find(config, run)
    else:
        with pytest.raises(CheckpointError, match=rf"algorithm\.parameters\.tau_positive: {said}"):
            find(config, run)
    assert "algorithm.tau_positive is now called algorithm.parameters.tau_positive" in caplog.text


@pytest.mark.parametrize("old", [None, "/other"])
def test_a_renamed_key_without_a_value_leaves_that_of_its_name_of_today(old: str | None, tmp_path: Path) -> None:
    config = load_config("tiny_cpu", ["algorithm.kl.coefficient=0.1", "algorithm.kl.reference=/given"])
    run = run_of(tmp_path, config, {**fixed(config), "dpo.reference": old})
    with contextlib.nullcontext() if old is None else pytest.raises(CheckpointError, match="reference: '/other' then"):
        find(config, run)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        *(("algorithm.second_moment_limit", value, None) for value in (None, False, 0, "", [], {})),
        ("algorithm.second_moment_limit", 0.04, "0.04 then, now no such key; it is called algorithm.parameters."),
        ("data.gone", 1, "1 then, now no such key\nresume with the version that wrote it, or begin another run.name"),
        ("data.gone", None, None),
        ("rollout.max_seconds", 30.0, None),  # its new name is free
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


@pytest.mark.parametrize(("of_policy", "critics", "same"), [("muon", "adamw", False), ("muon", "muon", True)])
def test_a_critic_goes_on_by_its_optimizer(of_policy: str, critics: str, same: bool, tmp_path: Path) -> None:
    keys = ["algorithm=ppo", "algorithm.unfinished_reward=null", f"learner.optimizer.name={of_policy}"]
    config = load_config("tiny_cpu", keys)
    run = run_of(tmp_path, config, {**fixed(config), "algorithm.critic.optimizer.name": critics})
    if same:
        find(config, run)
        return
    with pytest.raises(CheckpointError, match=r"critic\.optimizer\.name: 'adamw' then, now no such key; the critic is"):
        find(config, run)


PROMPT, TEACHER = "rollout.max_prompt_tokens", "algorithm.kl.teachers.solved"
OWN_PROMPT = ("prompt={prompt} {answer}", "max_prompt_tokens=40")
BASES = {
    **{job: (recipe,) for job, recipe in (("sft", "sft_tiny"), ("dpo", "dpo_tiny"), ("reward_model", "reward_tiny"))},
    "": ("tiny_cpu", "algorithm=gkd", f"{PROMPT}=32", *(f"{TEACHER}.{own}" for own in OWN_PROMPT)),
    "environment.options": ("calculator", "environment.template=plain", "warm_start.steps=0"),
}
"""By the section of the keys that change: the recipe of both starts, and its other keys."""


@pytest.mark.parametrize(
    ("section", "then", "now", "refused"),
    [
        ("sft", (), ("on_long=drop",), ()),
        ("sft", (), ("on_long=cut", "max_tokens=64"), ()),
        ("sft", (), ("on_refused=drop",), ()),
        ("dpo", ("on_long=drop",), ("on_long=drop", "on_refused=drop"), ()),
        ("sft", ("on_refused=drop",), ("on_refused=fail",), ("on_refused: 'drop' then, 'fail' now",)),
        ("sft", ("on_long=drop",), ("on_refused=drop", "on_long=fail"), ("on_long: 'drop' then",)),
        ("dpo", (), ("on_long=drop",), ()),
        ("reward_model", (), ("max_tokens=64",), ()),
        ("sft", (), ("on_long=drop", "max_tokens=16"), ("max_tokens: 32 then, 16 now",)),
        ("sft", ("on_long=drop",), ("max_tokens=64",), ("on_long: 'drop' then", "max_tokens: 32 then")),
        ("sft", (), ("batch_size=2",), ("batch_size: 256 then, 2 now",)),
        ("", (), ("rollout.on_long_prompt=drop",), ()),
        ("", (), (f"{PROMPT}=64",), ()),
        ("", (), (f"{TEACHER}.max_prompt_tokens=80",), ()),
        ("", (f"{PROMPT}=64",), (f"{PROMPT}=63",), (f"{PROMPT}: 64 then, 63 now",)),
        ("", ("rollout.on_long_prompt=drop",), (f"{PROMPT}=64",), (f"{PROMPT}: 32 then, 64 now",)),
        ("", ("rollout.on_long_prompt=drop",), (), ("rollout.on_long_prompt: 'drop' then, 'fail' now",)),
        ("environment.options", ("most=1",), ("most=2",), ("most: 1 then, 2 now",)),
        ("environment.options", (), ("most=1",), ("most: not there then, 1 now",)),
        ("environment.options", ("url=http://a:1",), (), ("url: 'http://a:1' then, not there now",)),
    ],
)
def test_a_resume_may_change_what_is_done_with_rows_and_prompts_of_which_none_was_seen(
    section: str, then: tuple[str, ...], now: tuple[str, ...], refused: tuple[str, ...], tmp_path: Path
) -> None:
    """As the error of the first such row advises. Options of an environment are those that it was trained with."""
    above, (recipe, *keys) = f"{section}." * bool(section), BASES[section]
    first, second = (load_config(recipe, [*keys, *(f"{above}{one}" for one in some)]) for some in (then, now))
    run = run_of(tmp_path, first)
    if section == "dpo":
        keep_start(run)
    find(first, run)
    with pytest.raises(CheckpointError) if refused else contextlib.nullcontext() as caught:
        find(second, run)
    assert all(f"{above}{said}" in str(caught and caught.value) for said in refused)


KL = ("tiny_cpu", "algorithm.kl.coefficient=0.1", "warm_start.steps=0")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("dpo_tiny",), "(algorithm.kl.reference=null); put it back, or begin another run.name"),
        (("dpo_tiny", "model.path=/given"), "put it back, or copy model.path=/given there, or begin"),
        (KL, "(algorithm.kl.reference=null); put it back, or begin another run.name"),
        (("tiny_cpu", *KL[1:2], "warm_start.steps=1", "model.path=/given"), "; put it back, or begin another run.name"),
        ((*KL, "algorithm.kl.reference=/other"), None),
        (("dpo_tiny", "learner.lora.rank=4"), None),
        (("tiny_cpu", "warm_start.steps=0"), None),
        (("sft_tiny",), None),
    ],
)
def test_a_lost_reference_is_named_before_ranks_start(keys: tuple[str, ...], said: str | None, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("above", ["data.", "data.sources.math."])
def test_keys_of_another_kind_that_an_older_version_lacked_had_their_defaults(tmp_path: Path, above: str) -> None:
    kind = ["data.type=mixture"] if "sources" in above else []
    files = [*kind, *(f"{above}{key}" for key in ("type=files", "train=a.jsonl", "eval=b.jsonl"))]
    now = load_config("gsm8k_tiny" if not kind else "tiny_cpu", files)
    held = {key: value for key, value in fixed(now).items() if key != f"{above}fields.messages"}
    assert len(held) == len(fixed(now)) - 1
    run = run_of(tmp_path, now, held)
    find(now, run)
    other = load_config("gsm8k_tiny" if not kind else "tiny_cpu", [*files, f"{above}fields.answer=b"])
    with pytest.raises(CheckpointError, match=rf"{above}fields.answer: 'answer' then, 'b' now"):
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
    assert f"{key}: {str(old)!r} then, {str(new)!r} now\ngive these as they were (if files" in str(caught.value)
    assert "make a link or a mount at the old path), or begin another run.name" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"seed: 0 then, 1 now\ngive these as they were, or begin"):
        find(seeded, run)


def test_other_data_is_told_by_few_lines(tmp_path: Path) -> None:
    run = run_of(tmp_path, RunConfig())
    files = FileRunData(type="files", train=Path("x" * 10_000), eval=Path("e"))
    with pytest.raises(CheckpointError, match=r"data\.digits: 2 then, not there now") as caught:
        find(RunConfig(data=files), run)
    assert len(str(caught.value)) < 2000
    options = {f"reward.options.k{i}": i for i in range(1, 24)}
    with pytest.raises(CheckpointError, match=r"k20: 20 then, now no such key\nand 3 more\nresume with the version"):
        find(RunConfig(), run_of(tmp_path / "many", RunConfig(), fixed(RunConfig()) | options))


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
        assert f"config.yaml belongs to run runs/x, but is in {folder.absolute()}" in said
        assert advice in said
    assert resumed(run) == resumed(copied, "run.name=y") == resumed(copied, "run.name=x") == (0, "")
    assert resumed(away, "run.name=x", f"run.dir={away.parent}") == (0, "")
    assert "add run.name=z to" in resumed(run.rename("runs/z"))[1]
    Path("runs/x").symlink_to("z")
    assert resumed(Path("runs/x")) == (0, "")


def test_what_has_no_checkpoint_starts_over(tmp_path: Path) -> None:
    assert find(RunConfig(), tmp_path) is None


# A run's lock, also on file systems that have none.
def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """As the kernel does for files of some file systems."""

    def flock(*_: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_unnamed_runs_that_start_together_take_the_next_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = []

    async def program(config: RunConfig, *_: object, resume: bool) -> None:
        folder = config.run.dir / str(config.run.name)
        if len(claimed) < 2:  # another start is quicker
            folder.mkdir(parents=True)
        claimed.append(folder.name)
        with claim(folder, resume=resume):
            pass

    monkeypatch.setattr(train, "run_training", program)
    said = CliRunner().invoke(app, ["train", f"run.dir={tmp_path}"])
    assert said.exit_code == 0, said
    assert claimed == ["tiny_cpu", "tiny_cpu-2", "tiny_cpu-3"]
    assert f"run {tmp_path}/tiny_cpu-3, because another run took that name" in said.output
    claimed.clear()
    named = CliRunner().invoke(app, ["train", f"run.dir={tmp_path}", "run.name=mine"])
    assert (claimed, "has just taken this name" in str(named.exception)) == (["mine"], True)


def test_a_named_run_that_is_there_is_told_and_another_name_is_as_given(tmp_path: Path) -> None:
    config = load_config("tiny_cpu", [f"run.dir={tmp_path}", "run.name=mine"])
    assert choose(config, "tiny_cpu", resume=False) == config
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match=rf"run\.name=mine: {tmp_path}/mine exists; .*take another name$"):
        choose(config, "tiny_cpu", resume=False)


def test_a_configuration_beside_a_run_may_name_another(tmp_path: Path) -> None:
    """But not the run's own."""
    (tmp_path / "metrics.jsonl").touch()
    config = load_config("tiny_cpu", [f"run.dir={tmp_path}", "run.name=other"])
    refuse_copied(config, tmp_path / "mine.yaml", ())
    with pytest.raises(ConfigError, match=f"belongs to run {tmp_path}/other, but is in"):
        refuse_copied(config, tmp_path / "config.yaml", ())


def test_folders_above_a_runs_are_made(tmp_path: Path) -> None:
    with claim(tmp_path / "a" / "b" / "run", resume=False) as claimed:
        assert claimed.folder == tmp_path / "a" / "b" / "run"


def test_a_file_that_cannot_be_closed_hides_no_error() -> None:
    def fail(first: Exception) -> NoReturn:
        with contextlib.ExitStack() as stack:
            stack.callback(close)
            raise first

    def close() -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system", "metrics.jsonl")

    for first, hidden in ((WorkerFailure("rank 1"), "rank 1"), (OSError("disk"), "None")):
        with pytest.raises(OSError, match=r"metrics\.jsonl") as caught:
            fail(first)
        assert str(train._hidden(caught.value)) == hidden


def test_one_process_at_a_time_has_a_run(tmp_path: Path) -> None:
    """Also once its log was moved, as logrotate does."""
    with claim(tmp_path / "run", resume=False):
        for log in tmp_path.glob("run/*.txt"):
            log.unlink()
        with pytest.raises(ConfigError, match="another process runs in it"), claim(tmp_path / "run", resume=True):
            pass
    with claim(tmp_path / "run", resume=True):
        pass


@pytest.mark.parametrize("fails", ["open", "flock"])
def test_a_claim_that_fails_keeps_nothing_open(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error, which a caller may keep, has kept the lock: a second try in the process was refused by the first."""

    def no_descriptor(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    patched = (os, "open") if fails == "open" else (fcntl, "flock")
    with monkeypatch.context() as now:
        now.setattr(*patched, no_descriptor)
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)) as raised:
            claim(tmp_path / "run", resume=False).__enter__()
    opened = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert [path for path in opened if path.startswith(str(tmp_path))] == []
    with claim(tmp_path / "run", resume=True):
        assert raised.value.errno == errno.EMFILE


@pytest.mark.parametrize("of_nfs", [False, True])
def test_a_lock_that_was_removed_is_taken_again_at_the_next_checkpoint(
    of_nfs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As clusters remove files that are old, which each checkpoint keeps it from being: a second start was let in."""
    utime = os.utime

    def stale(file: int | Path, *times: tuple[int, int]) -> None:
        """What NFS says of an open file that another node has removed."""
        if isinstance(file, int) and not os.fstat(file).st_nlink:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        utime(file, *times)

    if of_nfs:
        monkeypatch.setattr(os, "utime", stale)
    with claim(run := tmp_path / "run", resume=False) as claimed:
        os.utime(run / "lock", (0, 0))
        claimed()
        assert (run / "lock").stat().st_mtime > 0
        assert not caplog.messages
        (run / "lock").unlink()
        claimed()
        assert "lock was removed, and was created and locked again" in caplog.text
        with pytest.raises(ConfigError, match="another process runs in it"), claim(run, resume=True):
            pass
        (run / "lock").unlink()
        with claim(run, resume=True) as other:
            with pytest.raises(CheckpointError, match="lock was removed, and another process now runs in the folder"):
                claimed()
            other()
        claimed()


async def test_a_lock_that_was_removed_is_taken_again_at_the_next_row(tmp_path: Path) -> None:
    """There may be hours to the next checkpoint. A folder that is away for a while is none of a row's business."""
    with claim(run := tmp_path / "run", resume=False) as claimed:
        os.utime(run / "lock", (0, 0))
        recorder = Recorder(run, LogSection(), Progress(1), before_row=claimed.hold)
        await recorder.write({"phase": "rl", "step": 1})
        assert (run / "lock").stat().st_mtime == 0  # it is looked at, no more
        (run / "lock").unlink()
        await recorder.write({"phase": "rl", "step": 2})
        with pytest.raises(ConfigError, match="another process runs in it"), claim(run, resume=True):
            pass
        run.rename(tmp_path / "moved")
        await recorder.write({"phase": "rl", "step": 3})
        (tmp_path / "moved").rename(run)
        (run / "lock").unlink()
        with (
            claim(run, resume=True),
            pytest.raises(CheckpointError, match="and another process now runs in the folder"),
        ):
            await recorder.write({"phase": "rl", "step": 4})
        recorder.close()
    assert [row["step"] for row in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3]


class Training:
    """A job, and a weight sync, of which only what writes the model is asked for."""

    name, first_step_is_saved = "training", False

    async def start(self, *, fresh: bool) -> None:
        raise AssertionError("it writes hf_start")

    async def export(self, folder: Path) -> None:
        folder.mkdir(parents=True)

    async def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("other", [False, True])
async def test_nothing_is_written_where_the_runs_folder_was(tmp_path: Path, other: bool) -> None:
    """It is moved; ``other``: and another is there, as below the mount point of a file system that is unmounted."""
    run, moved, training = tmp_path / "runs/a", tmp_path / "moved", cast(Any, Training())
    pace, state = (
        Intervals(steps=2, metrics=1, evaluations=0, checkpoints=1),
        TrainerState(step=1, prompts={}, stream=None),
    )

    async def saved() -> None:
        await (await loop.checkpoints.save(state, {"learner": cast(Any, Shards())})).finish()

    def exported() -> Coroutine[Any, Any, None]:
        return loop.export(training, run / "hf_step_000001")

    with claim(run, resume=False) as claimed:
        store = CheckpointStore(run / "checkpoints", keep=1, config={}, claimed=claimed)
        loop = Loop(job=training, pace=pace, checkpoints=store, recorder=training, stop=asyncio.Event())
        run.rename(moved)
        if other:
            run.mkdir()
        for write in (saved, exported, loop.run):
            with pytest.raises(CheckpointError, match="is no longer the folder that this run began in"):
                await write()
        assert [path.name for path in run.parent.rglob("*")] == (["a"] if other else [])
        if other:
            run.rmdir()
        moved.rename(run)
        await saved()
        await exported()
        assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "hf_step_000001", "lock"]


def test_no_writer_begins_the_folder_anew_that_was_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row, or the first stack, began a run's folder again at its old path, and the run went on there."""
    pytest.importorskip("tensorboard")
    run, row = tmp_path / "runs/a", {"phase": "rl", "step": 1}
    run.mkdir(parents=True)
    settings, writer = SinkSettings(folder=run, environment={}), MetricsWriter(run)
    mirrored = TensorBoardSink(settings)
    for write in (writer.write, mirrored.log):
        write({"phase": "warm_start", "step": 0, "warm_start/step": 1})
    run.rename(tmp_path / "moved")
    writer.write(row)  # into the file that is open
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    sample = SampleRow(step=1, prompt="", completion="", answer="", reward=0.0)
    watchdog = Watchdog([], cast(Any, None), load_config("tiny_cpu", []), run / "stacks" / "now")
    writers: Mapping[str, Callable[[], object]] = {
        "metrics": lambda: MetricsWriter(run).write(row),
        "TensorBoard": lambda: mirrored.log(row),  # the file of another phase is open
        "W&B's id": WandbSink(settings).open,
        "samples": lambda: SamplesWriter(run).write([sample]),
        "timeline": lambda: TraceFile(run).append([(timeline.STEPS, "step 1", 0, 1, None)]),
        "log": lambda: run_log(run, role="rank", rank=1).__enter__(),
        "stacks of a rank": lambda: stacks.register(run / "stacks" / "now" / "rank-1.txt", silence=1.0),
        "stacks of the loop": lambda: LoopWatch(load_config("tiny_cpu", []), run / "stacks"),
        "stacks of tasks": watchdog._write_tasks,
    }
    for name, write in writers.items():
        with pytest.raises(FileNotFoundError, match=f"{run}"):
            write()
        assert not run.exists(), name


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    refuse(monkeypatch, code)
    with claim(tmp_path / "run", resume=False):
        pass
    assert f"{tmp_path}/run/lock cannot be locked ({os.strerror(code)}); do not start" in caplog.text


def test_another_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, errno.EIO)
    with append_private(tmp_path / "key") as file, pytest.raises(OSError, match=f"error: '{tmp_path}/key'") as raised:
        lock(file)
    assert raised.value.errno == errno.EIO
