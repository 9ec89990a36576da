"""Each fault that a preflight finds, alone in a configuration that is otherwise correct."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.build.model import starting_folder, starting_shape
from launcher.preflight import reward
from launcher.preflight.checks import CHECKS, Preflight, preflight
from launcher.preflight.subject import Found, Subject, problem
from launcher.programs.submit import prepare
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.weights.layouts.families import read_shape
from tests.unit.launcher.commands import status_of
from tests.unit.launcher.sites import answering, site
from tests.unit.launcher.test_memory import QWEN3

REWARDS = """
import threading

asked, over = [], threading.Event()

def good(prompt, completions, texts):
    asked.append((prompt.text, texts, [len(c.token_ids) for c in completions]))
    return [1.0, 0.0]

def short(prompt, completions, texts):
    return [1.0]

def raising(prompt, completions, texts):
    raise KeyError("price list")

async def blocking(prompt, completions, texts):
    over.wait()
"""
GPUS = ("learner.device=cuda", "slurm.gpus_per_node=8")


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """Of a recipe for one node, all of whose files are here."""
    (tmp_path / "preflight_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield site(tmp_path, QWEN3)
    if rewards := sys.modules.pop("preflight_rewards", None):
        rewards.over.set()  # else the loop of all async rewards of this process stands still


def job(keys: tuple[str, ...], *more: str) -> RunConfig:
    return load_config("qwen3_30b_a3b", ["run.name=x", *keys, *more])


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_torch_may_move_is_not_mapped(
    keys: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = f"slurm.environment.{name}='max_split_size_mb:64,expandable_segments:True'"
    (problem,) = preflight(job(keys, given), for_job=True).texts("problem")
    said = f"{name}=max_split_size_mb:64,expandable_segments:True: weights.transport=direct maps one process's GPU"
    assert problem.startswith(said)
    assert problem.endswith("leave expandable_segments out, or set weights.transport=file")
    for more in (("weights.transport=file", given), (given.replace("True", "False"),)):
        assert preflight(job(keys, *more), for_job=True).texts("problem") == []
    monkeypatch.setenv(name, "expandable_segments:True")
    assert len(preflight(job(keys), for_job=True).texts("problem")) == 1


def test_a_sound_job_has_no_problem_and_says_what_nobody_looked_at(keys: tuple[str, ...]) -> None:
    found = preflight(job(keys), for_job=True)
    assert found.texts("problem") == found.texts("note") == []
    *costs, graded = found.texts("fact")
    assert graded == "reward 'final_number' gives 1 for the answer itself, 0 for 'a made-up completion'"
    assert costs[0] == "a push of weights by cuda_ipc, through NVLink:"
    assert costs[-1] == "all speeds are assumed, none is measured (slurm.speeds)"
    assert found.describe().splitlines()[-1] == (
        "not checked: whether prompts fit in rollout.max_prompt_tokens; the GPUs of the job's nodes; "
        "that a node has 447 GB of memory for checkpoint.async_save; that vllm starts; "
        f"{keys[-1].partition('=')[2]}: the versions of its libraries cannot be read: Permission denied"
    )
    assert all(name in found.describe() for name in CHECKS)


def remove(path: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).unlink()


def cut(folder: Path) -> None:
    os.truncate(folder / "model" / "model.safetensors", 60)


def test_the_tiny_model_has_a_chat_template() -> None:
    config = load_config("calculator", ["environment.template=chat", "warm_start.steps=0"])
    assert not preflight(config).texts("problem")


@pytest.mark.parametrize(
    ("break_it", "more", "said"),
    [
        (remove("model/tokenizer.json"), (), "model: it has no tokenizer (tokenizer.json"),
        (
            remove("model/model.safetensors"),
            (),
            "model: it has neither model.safetensors.index.json nor model.safetensors",
        ),
        (cut, (), "model.safetensors is torn"),
        (remove("model/chat_template.jinja"), (), "data.chat_template=true, but the tokenizer of model.path="),
        (
            remove("model/chat_template.jinja"),
            ("environment.function=calculator", "reward.function=exact_match", "data.chat_template=false"),
            "environment.template=chat, but the tokenizer of model.path=",
        ),
        (remove("model/config.json"), (), "model: it has no config.json"),
        (remove("data/eval.jsonl"), (), "eval.jsonl: no such file"),
        (None, ("data.prompt_field=text",), "train.jsonl:1: no field 'text'; it has answer, question"),
        (None, ("data.prompt_template=Q:",), "data.prompt_template='Q:' has no '{prompt}'"),
        (remove("vllm/bin/python"), (), "vllm/bin/python: no such file; set the interpreter that vllm is installed"),
        (None, ("rollout=sglang",), "sglang is not installed in "),
        (None, ("reward.function=preflight_rewards:nope",), "'nope' of preflight_rewards is not there"),
        (
            None,
            ("reward.function=preflight_rewards:short",),
            "returned 1 rewards for 2 completions; it must return one",
        ),
        (None, ("reward.function=preflight_rewards:raising",), "raised KeyError: 'price list'; fix it, or set"),
        (
            None,
            ("reward.function=preflight_rewards:blocking", "reward.timeout_seconds=0.2"),
            "no answer within reward.",
        ),
        (None, ("reward.function=hf:judge",), "reward 'hf:judge': it has no config.json"),
        (None, ("learner.ep=3", "learner.tp=1", "learner.dp=3"), "learner: ep = 3 does not divide 128 experts"),
        (None, ("slurm.gpu_memory_gb=40",), "slurm.gpu_memory_gb=40: rank 0 needs"),
        (None, ("slurm.nodes=8",), "set learner.dp=16"),
    ],
)
def test_what_would_end_the_run_late_is_told_at_once(
    tmp_path: Path, keys: tuple[str, ...], break_it: Callable[[Path], None] | None, more: tuple[str, ...], said: str
) -> None:
    if break_it is not None:
        break_it(tmp_path)
    if more == ("rollout=sglang",):
        answering(tmp_path / "vllm" / "bin" / "python")
        more, said = (
            (*more, keys[-1], "rollout.server.tp=8"),
            "sglang is not installed there; install it (docs/engines.md",
        )
    problems = preflight(job(keys, *more), for_job=True).texts("problem")
    assert any(said in text for text in problems), problems


def test_all_that_is_wrong_is_told_together_and_nothing_is_made(tmp_path: Path, keys: tuple[str, ...]) -> None:
    (tmp_path / "model" / "tokenizer.json").unlink()
    wrong = ("data.train=/nonexist.jsonl", "reward.function=nobodys_rewards:nope", "rollout.python=/nope/python")
    with pytest.raises(ConfigError) as caught, prepare(job(keys, *wrong), "any"):
        pass
    lines = str(caught.value).splitlines()
    for text in ("it has no tokenizer", "/nonexist.jsonl: no such file", "no module 'nobodys_rewards'", "/nope/python"):
        assert sum(text in line for line in lines) == 1
    assert len(lines) == 4
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ("slurm.nodes=8", "learner.dp=16"),
            "servers sample on 8 of the 64 GPUs of the learner's nodes, which it shares, and the others "
            "are idle meanwhile; rollout.server.replicas=8 uses 64",
        ),
        (("slurm.nodes=8", "learner.dp=16", "rollout.server.replicas=8"), None),
        (
            ("slurm.engines.nodes=2", "rollout.server.tp=4", "rollout.server.memory_fraction=0.9"),
            "servers sample on 4 of the 16 GPUs of the servers' own nodes, and the others are idle meanwhile; "
            "rollout.server.replicas=4 uses 16",
        ),
        (
            ("rollout.prompts_per_step=1", "rollout.group_size=4"),
            "1 sequences (rollout.prompts_per_step=1 * rollout.group_size=4 / train.minibatches=4) for 2 data-parallel "
            "ranks (learner.dp), so 1",
        ),
    ],
)
def test_gpus_and_ranks_that_would_be_idle_are_noted(keys: tuple[str, ...], more: tuple[str, ...], said: str) -> None:
    notes = preflight(job(keys, *more), for_job=True).texts("note")
    assert len(notes) == (said is not None)
    assert all(said in text for text in notes)


@pytest.mark.parametrize(
    ("algorithm", "noted"),
    [
        (("advantage_mean=none",), True),
        (("advantage_mean=none", "advantage_std=batch"), True),
        (("advantage_mean=none", "advantage_std=group"), False),
        (("advantage_mean=group",), False),
    ],
)
@pytest.mark.parametrize("mode", ["off", "drop", "refill"])
def test_groups_that_are_left_out_although_they_teach_are_noted(
    keys: tuple[str, ...], algorithm: tuple[str, ...], noted: bool, mode: str
) -> None:
    row = ("algorithm=reinforce", *(f"algorithm.{each}" for each in algorithm), f"rollout.dynamic_sampling={mode}")
    texts = preflight(job(keys, *row), for_job=True).texts("note")
    said = "leaves out groups of equal rewards, which algorithm.advantage_mean=none learns from where they are not 0"
    assert any(f"dynamic_sampling={mode} {said}" in text for text in texts) == (noted and mode != "off"), texts


@pytest.mark.parametrize(
    ("more", "noted"),
    [
        (("algorithm=vapo", "train.steps=30"), "algorithm.critic.only_steps=50 covers all of train.steps=30"),
        (("algorithm=vapo", "train.steps=50"), "algorithm.critic.only_steps=50 covers all of train.steps=50"),
        (("algorithm=vapo", "train.steps=51"), None),
        (("algorithm=ppo", "train.steps=1"), None),
    ],
)
def test_a_run_that_never_trains_the_policy_is_noted(
    keys: tuple[str, ...], more: tuple[str, ...], noted: str | None
) -> None:
    texts = [text for text in preflight(job(keys, *more), for_job=True).texts("note") if "only_steps" in text]
    assert len(texts) == (noted is not None)
    assert all(text.startswith(f"{noted}, so only the critic is trained") for text in texts)


def test_the_reward_is_asked_once_about_the_first_problem(keys: tuple[str, ...]) -> None:
    found = preflight(job(keys, "reward.function=preflight_rewards:good"), for_job=True)
    import preflight_rewards  # type: ignore[import-not-found]

    text, texts, lengths = preflight_rewards.asked[0]
    assert (text, texts) == ("What is 2 + 3?", ("It is 5.\n#### 5", "a made-up completion"))
    assert lengths == [len(t) + 1 for t in texts]
    assert found.texts("fact")[-1] == (
        "reward 'preflight_rewards:good' gives 1 for the answer itself, 0 for 'a made-up completion'"
    )
    preflight_rewards.asked.clear()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("reward.function=http://judge:1/score",), "the reward server http://judge:1/score"),
        (
            (
                "rollout.server.addresses=http://a:1",
                "rollout.server.tp=1",
                "rollout.python=null",
                "rollout.server.memory_fraction=null",
            ),
            "http",
        ),
        (("slurm.engines.container=/images/rl.sqsh",), "whether vllm is installed in slurm.engines.container"),
        (("slurm.python=/other/python", "rollout.python=null"), "whether vllm is installed in slurm.python=/other/"),
        (
            ("slurm.python=/other/python", "reward.function=gone:reward"),
            "the reward gone:reward, in slurm.python=/other/python",
        ),
        (("slurm.python=/other/python",), "torch in slurm.python=/other/python, in which the controller runs"),
        (("slurm.gpu_memory_gb=null",), "the memory of the GPUs, because slurm.gpu_memory_gb is not set"),
    ],
)
def test_what_only_the_run_can_see_is_said_to_be_unchecked(
    keys: tuple[str, ...], more: tuple[str, ...], said: str
) -> None:
    found = preflight(job(keys, *more), for_job=True)
    assert found.texts("problem") == []
    assert any(said in text for text in found.texts("unchecked"))


def test_a_controllers_environment_without_torch_is_refused(keys: tuple[str, ...], tmp_path: Path) -> None:
    """Whatever runs in containers: the controller starts them, and is in none."""
    python, packages = answering(tmp_path / "bin" / "python"), tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    (tmp_path / "pyvenv.cfg").touch()
    given = job(keys, f"slurm.python={python}", "slurm.container=/images/rl.sqsh", "slurm.engines.container=/e.sqsh")
    (found,) = preflight(given, for_job=True).texts("problem")
    assert found.startswith(f"slurm.python={python}: torch is not installed there, and the controller runs in it, outs")
    (packages / "torch").mkdir()
    assert preflight(given, for_job=True).texts("problem") == []


UNASKED = ("hf:model", "ranks:judge", "http://judge:1/score", "tests")


@pytest.mark.parametrize("function", UNASKED)
def test_parts_beside_one_that_is_not_called_are_found_and_called(keys: tuple[str, ...], function: str) -> None:
    """The recipe's reward is one function; a sum's parts are given beside the default."""
    judge = ("reward_models.judge.path=model",) if function == "ranks:judge" else ()
    beside = ("reward.function=exact_match", f"reward.parts.a.function={function}", *judge)

    def found(part: str) -> Preflight:
        return preflight(job(keys, *beside, f"reward.parts.b.function={part}"), for_job=True)

    assert "no module 'nobodys_rewards'" in str(found("nobodys_rewards:nope").texts("problem"))
    assert "raised KeyError: 'price list'" in str(found("preflight_rewards:raising").texts("problem"))
    told = found("final_number")
    assert told.texts("fact")[-1].startswith("reward 'final_number' gives 1 for the answer itself, 0 for")
    said = "the sandbox" if function == "tests" else f"the reward {'server' if '/' in function else 'model'} {function}"
    assert any(text.startswith(said) for text in told.texts("unchecked"))


def test_a_reward_that_takes_long_is_not_waited_for(keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward, "SECONDS", 0.2)
    found = preflight(job(keys, "reward.function=preflight_rewards:blocking"), for_job=True)
    assert found.texts("problem") == []
    assert "the reward 'preflight_rewards:blocking', which did not answer within 0.2 s" in found.texts("unchecked")


@pytest.mark.parametrize("more", [(), ("model.tiny.num_layers=3",), ("rollout=vllm",)])
def test_the_tiny_models_sizes_are_known_before_it_is_made(tmp_path: Path, more: tuple[str, ...]) -> None:
    config = load_config("tiny_cpu", [f"model.cache_dir={tmp_path}", *more])
    assert starting_shape(config) == read_shape(starting_folder(config))


def test_check_says_what_it_found_by_its_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of("train", "--check") == 0
    assert "reward 'exact_match' gives 1 for the answer itself" in capsys.readouterr().out
    assert status_of("train", "--check", "learner.ep=3", "reward.function=gone:x") == 1
    said = capsys.readouterr().err
    assert "learner: ep = 3 does not divide 8 experts" in said
    assert "no module 'gone'" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [(), ("slurm.environment.WANDB_API_KEY=mine",)])
def test_what_holds_a_jobs_variables_is_nobody_elses(keys: tuple[str, ...], given: tuple[str, ...]) -> None:
    with prepare(job(keys, *given), "any") as made:
        folder = made.folder
    modes = {stat.S_IMODE((folder / name).stat().st_mode) & 0o077 for name in ("config.yaml", "job.sbatch")}
    assert (modes == {0}) == bool(given)


@pytest.mark.parametrize("key", ["rollout.python=", "reward.function=hf:", "model.path="])
def test_what_the_system_refuses_one_check_hides_no_fault_that_others_find(keys: tuple[str, ...], key: str) -> None:
    """A path that is too long is refused as another user's folder is, to root too."""
    long = f"/{'a' * 300}"
    wrong = ("data.train=/nonexist.jsonl", "slurm.nodes=2", f"{key}{long}")
    problems = preflight(job(keys, *wrong), for_job=True).texts("problem")
    for said in ("/nonexist.jsonl: no such file", "slurm.nodes=2 * slurm.ntasks_per_node=8", "File name too long"):
        assert sum(said in text for text in problems) == 1, problems
    assert len(problems) == 3


def test_all_faults_of_one_check_are_told(keys: tuple[str, ...]) -> None:
    gone = "reward.function=nobodys_rewards:nope", "eval.sets.a.reward.function=preflight_rewards:nope"
    full = "slurm.gpu_memory_gb=40", "slurm.memory_per_node=10G"
    problems = preflight(job(keys, *gone, *full), for_job=True).texts("problem")
    refused = "no module 'nobodys_rewards'", "'nope' of preflight_rewards is not"
    for said in (*refused, "rank 0 needs", "of a node's memory"):
        assert sum(said in text for text in problems) == 1, problems


def test_an_error_of_a_check_is_told_with_what_others_find(
    keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def torn(subject: Subject) -> Iterator[Found]:
        yield problem("found before")
        raise KeyError(subject.config.run.name)

    monkeypatch.setattr("launcher.preflight.checks.CHECKS", {"torn": torn, **CHECKS})
    before, error, other = preflight(job(keys, "data.train=/nonexist.jsonl"), for_job=True).texts("problem")
    assert (before, error) == ("found before", "the check of torn raised KeyError: 'x'; its traceback is above")
    assert "/nonexist.jsonl: no such file" in other
    assert "raise KeyError" in caplog.text
