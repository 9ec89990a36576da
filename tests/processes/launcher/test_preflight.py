"""Each fault that a preflight finds, alone in a configuration that is otherwise correct; of data, and of machines."""

from __future__ import annotations

import os
import re
import resource
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.build.model import starting_folder, starting_shape
from launcher.commands.submit import prepare
from launcher.preflight import devices, engine, own_code
from launcher.preflight.checks import CHECKS, Preflight, checks, preflight
from launcher.preflight.subject import Finding, PreflightContext, problem
from launcher.servers import versions
from launcher.servers.versions import has_module
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.slurm import parse_minutes
from rl_megatron.errors import ConfigError
from rl_megatron.weights.layouts.families import read_shape
from tests.unit.launcher.commands import program, status_of
from tests.unit.launcher.sites import answering, data_file, environment, site
from tests.unit.launcher.test_memory import QWEN3, QWEN_30B

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

def of_trl(prompts, completions, answer, **kwargs):
    return [float(answer == completions) for _ in completions]
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
    return load_config(QWEN_30B, ["run.name=x", *keys, *more])


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_may_move_is_not_mapped(keys: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    expected = "a push of weights by direct, through NVLink, to the learner rank beside each of the servers' ranks:"
    assert costs[0] == expected
    assert costs[-1] == "all speeds are assumed, none is measured (slurm.speeds)"
    assert found.describe().splitlines()[-1] == (
        "not checked: the GPUs of the job's nodes; "
        "that a node has 447 GB of memory for checkpoint.async_save; whether vllm starts; "
        f"{keys[-1].partition('=')[2]}: cannot read the versions of its libraries: Permission denied"
    )
    assert all(name in found.describe() for name in checks())


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
        (remove("model/model.safetensors"), (), "it has neither model.safetensors.index.json nor model.safetensors"),
        (cut, (), "model.safetensors is torn"),
        (remove("model/chat_template.jinja"), (), "data.chat_template=true, but the tokenizer of model.path="),
        (
            remove("model/chat_template.jinja"),
            ("environment.function=calculator", "reward.function=exact_match", "data.chat_template=false"),
            "environment.template=chat, but the tokenizer of model.path=",
        ),
        (remove("model/config.json"), (), "model: it has no config.json"),
        (remove("data/eval.jsonl"), (), "eval.jsonl: no such file"),
        (None, ("data.fields.prompt=text",), "train.jsonl:1: no field 'text'; it has answer, question"),
        (None, ("data.prompt_template=Q:",), "data.prompt_template='Q:' has no '{prompt}'"),
        (remove("vllm/bin/python"), (), "vllm/bin/python: no such file; set it to the interpreter that has vllm"),
        (None, ("rollout=sglang",), "sglang is not installed in "),
        (None, ("reward.function=preflight_rewards:nope",), "'nope' of preflight_rewards is not there"),
        (None, ("reward.function=preflight_rewards:short",), "returned 1 rewards for 2 completions; it must return"),
        (None, ("reward.function=preflight_rewards:raising",), "raised KeyError: 'price list'; fix it, or set"),
        (None, ("reward.function=preflight_rewards:blocking", "reward.timeout_seconds=0.2"), "no answer within"),
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
            "are idle; rollout.server.replicas=8 uses 64",
        ),
        (("slurm.nodes=8", "learner.dp=16", "rollout.server.replicas=8"), None),
        (
            ("slurm.engines.nodes=2", "rollout.server.tp=4", "rollout.server.memory_fraction=0.9"),
            "servers sample on 4 of the 16 GPUs of the servers' own nodes, and the others are idle; "
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
    said = "drops groups of equal rewards, but algorithm.advantage_mean=none learns from them unless they are 0"
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
def test_a_run_without_policy_steps_is_noted(keys: tuple[str, ...], more: tuple[str, ...], noted: str | None) -> None:
    texts = [text for text in preflight(job(keys, *more), for_job=True).texts("note") if "only_steps" in text]
    assert len(texts) == (noted is not None)
    assert all(text.startswith(f"{noted}, so the run trains only the critic") for text in texts)


def test_the_reward_is_asked_once_about_the_first_problem(keys: tuple[str, ...]) -> None:
    found = preflight(job(keys, "reward.function=preflight_rewards:good"), for_job=True)
    import preflight_rewards  # type: ignore[import-not-found]

    text, texts, lengths = preflight_rewards.asked[0]
    assert (text, texts) == ("What is 2 + 3?", ("It is 5.\n#### 5", "a made-up completion"))
    assert lengths == [len(t) + 1 for t in texts]
    expected = "reward 'preflight_rewards:good' gives 1 for the answer itself, 0 for 'a made-up completion'"
    assert found.texts("fact")[-1] == expected
    preflight_rewards.asked.clear()


def test_equal_rewards_for_right_and_wrong_are_noted(keys: tuple[str, ...]) -> None:
    found = preflight(job(keys, "reward.function=preflight_rewards:of_trl"), for_job=True)
    said = "reward 'preflight_rewards:of_trl' gives 0 for the answer itself, 0 for 'a made-up completion': does it read"
    assert any(text.startswith(said) for text in found.texts("note"))


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
        (("slurm.python=/other/python", "reward.function=gone:reward"), "the reward gone:reward, in slurm.python=/oth"),
        (("slurm.python=/other/python",), "torch in slurm.python=/other/python, which runs the controller"),
        (("slurm.gpu_memory_gb=null",), "the memory of the GPUs, because slurm.gpu_memory_gb is not set"),
    ],
)
def test_what_only_the_run_can_see_is_unchecked(keys: tuple[str, ...], more: tuple[str, ...], said: str) -> None:
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
    assert found.startswith(f"slurm.python={python}: torch is not installed there, but the controller runs there, out")
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
    monkeypatch.setattr(own_code, "SECONDS", 0.2)
    found = preflight(job(keys, "reward.function=preflight_rewards:blocking"), for_job=True)
    assert found.texts("problem") == []
    assert "the reward 'preflight_rewards:blocking', which did not answer within 0.2 s" in found.texts("unchecked")


@pytest.mark.parametrize("more", [(), ("model.tiny.num_layers=3",), ("rollout=vllm",)])
def test_the_tiny_models_sizes_are_known_before_it_is_made(tmp_path: Path, more: tuple[str, ...]) -> None:
    config = load_config("tiny_cpu", [f"model.cache_dir={tmp_path}", *more])
    assert starting_shape(config) == read_shape(starting_folder(config))


TRIED = """
import asyncio
from rl_megatron.environments.protocol import EnvironmentStep, Observation

class Right:
    async def start(self, task, seed):
        self.answer = task.answer
        return Observation(content=task.text)
    async def step(self, reply):
        return EnvironmentStep(reward=float(reply.text == self.answer))
    async def score(self, transcript):
        return 0.0
    async def close(self):
        print("closed")

class Number(Right):
    async def step(self, reply):
        return 1.0

class Plain(Right):
    def start(self, task, seed):
        return Observation(content=task.text)

class Raises(Right):
    async def step(self, reply):
        raise ConnectionError("no server")

class Late(Right):
    async def step(self, reply):
        await asyncio.Event().wait()

def falls(log_ratio, inputs, lengths, row):
    return log_ratio.exp() * inputs.advantages * (1 + row.clip_low + row.clip_high), inputs.mask & False

def fails(log_ratio, inputs, lengths, row):
    raise ValueError("no loss today")
"""


@pytest.mark.parametrize(
    ("keys", "for_job", "kind", "text"),
    [
        (
            ("environment.function=tried_for_test:Right",),
            False,
            "fact",
            "tried with '.*', its answer and made-up replies: reward 1",
        ),
        (("environment.function=tried_for_test:Number",), False, "problem", "turn 1: step returned a float"),
        (
            ("environment.function=tried_for_test:Plain",),
            False,
            "problem",
            "turn 0: start is not async; write async def",
        ),
        (("environment.function=tried_for_test:Raises",), False, "problem", "step raised ConnectionError: no server"),
        (("environment.function=tried_for_test:Raises",), True, "note", "step raised ConnectionError: no server"),
        (("environment.function=tried_for_test:Late",), False, "unchecked", "step did not end within .*=0.1"),
        (("algorithm.objective=tried_for_test:falls",), False, "note", "lowers the log-probs of all tokens with a pos"),
        (("algorithm.objective=tried_for_test:fails",), True, "problem", "raised ValueError: no loss today"),
    ],
)
def test_custom_losses_and_environments_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], for_job: bool, kind: str, text: str
) -> None:
    (tmp_path / "tried_for_test.py").write_text(TRIED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    more = ("warm_start.steps=0", "environment.step_seconds=0.1") if "environment" in keys[0] else ()
    config = load_config("guess" if more else "tiny_cpu", [*keys, *more])
    assert not preflight(config, for_job=for_job).texts("problem")
    said = preflight(config, for_job=for_job, tries=True)
    assert re.search(text, "\n".join(said.texts(kind))), said.found


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
    def torn(subject: PreflightContext) -> Iterator[Finding]:
        yield problem("found before")
        raise KeyError(subject.config.run.name)

    monkeypatch.setattr("launcher.preflight.checks.CHECKS", {"torn": torn, **CHECKS})
    before, error, other = preflight(job(keys, "data.train=/nonexist.jsonl"), for_job=True).texts("problem")
    assert (before, error) == ("found before", "the check of torn raised KeyError: 'x'; its traceback is above")
    assert "/nonexist.jsonl: no such file" in other
    assert "raise KeyError" in caplog.text


# The preflight's look at the first rows of files of problems.
TALK = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]


def test_only_the_first_rows_are_read(tmp_path: Path, keys: tuple[str, ...]) -> None:
    from launcher.preflight.problems_of_data import ROWS

    path = data_file(tmp_path / "long.jsonl", *[{"question": "q", "answer": "1"}] * ROWS, "bad")
    found = preflight(job(keys, f"data.train={path}"), for_job=True)
    assert found.texts("problem") == []
    assert f"rows of {path} after the first {ROWS}" in found.texts("unchecked")


def test_what_is_trained_on_and_held_out_is_told_before_a_process_starts(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """By the lines of the load, which does it again with all rows; what evaluations do not read is not held out."""
    train = data_file(tmp_path / "train.jsonl", *({"question": f"{n} + 1?", "answer": f"{n + 1}"} for n in range(9)))
    held = data_file(
        tmp_path / "eval.jsonl", {"question": "of nobody", "answer": "1"}, {"question": " 3  + 1?", "answer": "4"}
    )
    given = (f"data.train={train}", f"data.eval={held}")
    (text,) = preflight(job(keys, *given), for_job=True).texts("problem")
    assert text.splitlines()[0] == f"{train}:4: trained on, but held out in {held}:2 (data)"
    assert text.splitlines()[1].startswith("1 of 9 training problems are held out too")
    for key in ("data.on_leak=drop", "data.on_leak=keep", "data.max_eval=1"):
        assert preflight(job(keys, *given, key), for_job=True).texts("problem") == []


def test_training_rows_need_a_demonstration_and_held_out_ones_none(tmp_path: Path, keys: tuple[str, ...]) -> None:
    rows = [{"question": f"{n}", "answer": "1", "solution": "s" * (n < 2)} for n in range(3)]
    train = data_file(tmp_path / "train.jsonl", *rows)
    held = data_file(tmp_path / "eval.jsonl", {"question": "of nobody", "answer": "1"})
    luffy = ("algorithm=luffy", f"data.train={train}", f"data.eval={held}", "data.fields.demonstration=solution")
    (text,) = preflight(job(keys, *luffy), for_job=True).texts("problem")
    assert text == f"{train}:3: field 'solution' is ''; a demonstration is a text; remove the row"


def test_an_answer_that_is_an_object_is_noted_and_its_field_can_be_named(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """With the object as the answer, the built-in rewards give 0 to right ones."""
    path = data_file(tmp_path / "rows.jsonl", {"question": "2 + 3?", "judge": {"ground_truth": "5", "style": "rule"}})
    given = (f"data.train={path}", f"data.eval={path}", "data.on_leak=keep", "data.fields.answer=judge")
    found = preflight(job(keys, *given), for_job=True)
    (said,) = {text for text in found.texts("note") if "object" in text}
    assert said == (
        f"{path}:1: data.fields.answer='judge' is an object, and completions are compared with its JSON; name a "
        "field in it with data.fields.answer=judge.<field> (1 of the first 1 rows)"
    )
    assert preflight(job(keys, *given, "reward.function=length"), for_job=True).texts("note") == []
    found = preflight(job(keys, *given, "data.fields.answer=judge.ground_truth"), for_job=True)
    assert found.texts("note") == found.texts("problem") == []
    assert found.texts("fact")[-1].startswith("reward 'final_number' gives 1 for the answer itself")


PNG, OF_M = {"bytes": "iVBO", "path": None}, ("fields.messages=m",)


@pytest.mark.parametrize(
    ("job_of", "row", "given", "noted"),
    [
        ("sft", {"system": "Be brief.", "input": "3", "question": "q", "answer": "a"}, (), ("system", "input")),
        ("sft", {"system": "Be brief.", "question": "q", "answer": "a", "input": ""}, ("fields.system=system",), ()),
        ("rl", {"system_prompt": "Be brief.", "input": "3", "question": "q", "answer": "a"}, (), ("system_prompt",)),
        ("sft", {"m": TALK, "tools": "[{}]", "system": None, "functions": []}, ("fields.messages=m",), ("tools",)),
        ("sft", {"input": {"text": "q"}, "answer": "a"}, ("fields.prompt=input.text",), ()),
        ("sft", {"m": TALK, "enable_thinking": True}, ("fields.messages=m",), ("enable_thinking",)),
        ("sft", {"m": TALK, "tools": [], "system": "Be brief."}, ("fields.messages=m", "fields.system=system"), ()),
        ("rl", {"question": "<image> q", "answer": "a", "images": ["a.png"], "videos": []}, (), ("images",)),
        (
            "rl",
            {"question": "q", "answer": "a", "Image_URL": "x", "scan": PNG, "imagery": "x"},
            (),
            ("Image_URL", "scan"),
        ),
        ("sft", {"m": TALK, "audio": {"array": [0.5], "sampling_rate": 1}, "pages": [PNG]}, OF_M, ("audio", "pages")),
    ],
)
def test_fields_of_published_data_that_no_key_reads_are_noted(
    tmp_path: Path, job_of: str, row: dict[str, object], given: tuple[str, ...], noted: tuple[str, ...]
) -> None:
    path = data_file(tmp_path / "rows.jsonl", row)
    keys = [f"data.{key}" for key in (f"train={path}", f"eval={path}", "type=files", "on_leak=keep", *given)]
    chats = ["data.chat_template=true"] if "fields.system=system" in given and "m" not in row else []
    found = preflight(load_config("sft_tiny" if job_of == "sft" else "gsm8k_tiny", [*keys, *chats])).texts("note")
    said = [text for text in found if "but no key of" in text]
    assert [text.split(" have a field ")[1].split(",")[0] for text in said] == [repr(name) for name in noted]
    assert all(text.startswith(f"{path}: 1 of the first 1 rows") for text in said)


@pytest.mark.parametrize(
    ("recipe", "answer", "more", "noted"),
    [
        ("gsm8k_tiny", r"We have $\boxed{\frac{1}{2}}$.", (), ":1: the answer is a formula, and final_number comp"),
        ("gsm8k_tiny", r"\frac{1}{2}", ("reward.function=math_verify",), ""),
        ("gsm8k_tiny", r"$\frac{4}{2}$ is 2\n#### 2", (), ""),
        ("gsm8k_tiny", ["1", "2"], (), ":1: data.fields.answer='answer' is a list, and completions are compared with"),
        ("sft_tiny", ["a", "b"], (), ":1: data.fields.answer='answer' is a list, and its JSON is learned; write one"),
        ("sft_tiny", r"\frac{1}{2}", (), ""),
        ("gsm8k_tiny", '["34"]', (), ":1: data.fields.answer='answer' is the JSON text of a list, and completions are"),
        ("gsm8k_tiny", "[3, 4)", (), ""),
        ("sft_tiny", '["34"]', (), ""),
        ("sft_tiny", "1", ("data.fields.prompt=asked",), ":1: data.fields.prompt='asked' is the JSON text of a list"),
    ],
)
def test_answers_that_are_read_otherwise_than_they_may_be_meant_are_noted(
    tmp_path: Path, recipe: str, answer: object, more: tuple[str, ...], noted: str
) -> None:
    path = data_file(tmp_path / "rows.jsonl", {"question": "q", "answer": answer, "asked": '[{"role": "user"}]'})
    given = [f"data.{key}" for key in (f"train={path}", f"eval={path}", "type=files", "on_leak=keep")]
    found = preflight(load_config(recipe, [*given, *more])).texts("note")
    said = {text.removeprefix(str(path)) for text in found if text.startswith(f"{path}:1: ")}
    assert (len(said), all(text.startswith(noted) for text in said)) == (bool(noted), True)


def test_notes_on_answers_look_at_all_first_rows(tmp_path: Path) -> None:
    answers = ["1", ["2", "3"], "4", True, {"a": 1}, ["5"]]
    path = data_file(tmp_path / "rows.jsonl", *({"question": f"{n}", "answer": one} for n, one in enumerate(answers)))
    keys = [f"data.{key}" for key in (f"train={path}", f"eval={path}", "type=files", "on_leak=keep")]
    notes = preflight(load_config("gsm8k_tiny", keys)).texts("note")
    for line, kind, count in ((2, "a list", 2), (4, "true or false", 1), (5, "an object", 1)):
        (said,) = [
            text for text in notes if text.startswith(f"{path}:{line}: data.fields.answer='answer' is {kind}, and")
        ]
        assert said.endswith(f"({count} of the first 6 rows)")


@pytest.mark.parametrize("inside", ["", "deep/er"])
def test_a_folder_for_weights_that_no_run_can_use_is_refused(tmp_path: Path, inside: str) -> None:
    """A job's nodes may have a folder that is not here."""
    (file := tmp_path / "w").touch()
    served = ("rollout=local", "rollout.server.replicas=2")

    def found(folder: Path, *, for_job: bool = False) -> list[str]:
        config = load_config("tiny_cpu", [*served, f"weights.folder={folder}"])
        return [text for text in preflight(config, for_job=for_job).texts("problem") if "weights.folder" in text]

    for for_job in (False, True):
        (said,) = found(file / inside, for_job=for_job)
        assert said.endswith(f"cannot create the file of weights in {file}: it is not a folder; give another")
    assert found(tmp_path / "new" / "er") == found(Path("/nonexistent"), for_job=True) == []
    if os.access("/proc", os.W_OK):
        return
    (said,) = found(Path("/proc/x"))
    assert said.endswith("cannot create the file of weights in /proc: it cannot be written to; give another")


# What a preflight sees of this machine: its GPUs and memory, and the packages of an interpreter.
@pytest.mark.parametrize(
    ("listed", "visible", "count"),
    [(8, None, 8), (8, "0,1", 2), (8, "", 0), (8, "-1", 0), (2, "1,5,0", 1), (0, None, 0), (None, None, 0)],
)
def test_gpus_are_counted_as_cuda_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: int | None, visible: str | None, count: int
) -> None:
    if listed is not None:
        driver = tmp_path / "nvidia-smi"
        driver.write_text(
            "#!/bin/sh\n" + "".join(f"echo 'GPU {i}: NVIDIA H100 (UUID: GPU-x)'\n" for i in range(listed))
        )
        driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.count_visible_gpus(visible) == count


def gpus_here(folder: Path, monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    """Have a driver list one GPU."""
    driver = folder / "nvidia-smi"
    answers = f"case $1 in -L) echo 'GPU 0: B200 (UUID: GPU-x)';; *) echo {capability};; esac"
    program(driver, f"#!/bin/sh\n{answers}\n")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "torch_is_for_cpus", lambda: False)


@pytest.mark.parametrize(
    ("engine", "capability", "option", "told"),
    [
        ("sglang", "10.0", "", True),
        ("sglang", "12.0", "", True),
        ("sglang", "9.0", "", False),
        ("sglang", "10.0", "--fp8-gemm-backend triton", False),
        ("vllm", "10.0", "", False),
    ],
)
def test_float8_on_gpus_of_which_an_engine_packs_the_scales_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, capability: str, option: str, told: bool
) -> None:
    gpus_here(tmp_path, monkeypatch, capability)
    keys = ["learner.ep=1", "learner.device=cuda", "learner.dtype=bfloat16", "rollout.server.quantization=fp8"]
    config = load_config("tiny_cpu", [f"rollout={engine}", *keys, f"rollout.server.options={option!r}"])
    found = [one.text for one in devices.check(PreflightContext(config, for_job=False)) if one.kind == "problem"]
    assert [text.endswith("or rollout=vllm") and "sglang#9855" in text for text in found] == [True] * told


@pytest.mark.parametrize(
    ("recipe", "capability", "said"),
    [
        ("mxfp8", "9.0", "capability 10 or more, but those here have 9; set tensorwise or blockwise, or leave it out"),
        ("tensorwise", "8.0", "capability 8.9 or more, but those here have 8; leave it out"),
        ("mxfp8", "10.3", ""),
        ("blockwise", "9.0", ""),
        ("mxfp8", "", ""),
    ],
)
def test_a_recipe_of_float8_that_gpus_have_no_kernels_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, capability: str, said: str
) -> None:
    """The capabilities are those of A100 (8.0), H100 (9.0) and B300 (10.3) in NVIDIA's list."""
    gpus_here(tmp_path, monkeypatch, capability)
    keys = ["learner.ep=1", "learner.device=cuda", "learner.dtype=bfloat16", f"learner.fp8={recipe}"]
    found = devices.check(PreflightContext(load_config("tiny_cpu", keys), for_job=False))
    problems = [one.text for one in found if one.kind == "problem"]
    assert problems == ([f"learner.fp8={recipe} needs GPUs of compute {said}"] if said else [])


def test_more_ranks_than_a_machine_has_memory_for_are_told_before_one_starts() -> None:
    said = preflight(load_config("tiny_cpu", ["learner.dp=1000000000"]), for_job=False).texts("problem")
    assert "1000000000 learner ranks (tp*cp*dp*pp) are 1000000000 processes on this machine of " in said[0]
    assert not preflight(load_config("tiny_cpu", ["learner.dp=8"]), for_job=False).texts("problem")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("/opt/efa/lib:$LD_LIBRARY_PATH", True),
        ("${HOME}/lib", True),
        ("$(cat /site/path)", True),
        ("~/lib", True),
        ("/opt/lib:~me/lib", True),
        ("/opt/lib", False),
        ("cost $5, or 7~8", False),
    ],
)
def test_a_variable_of_a_job_that_looks_as_if_bash_read_it_is_told_by_name(value: str, told: bool) -> None:
    """Not by its value, which may be a secret."""
    found = preflight(load_config("tiny_cpu", [f"slurm.environment.LD_LIBRARY_PATH={value!r}"]), for_job=True)
    notes = [note for note in found.notes() if "slurm.environment" in note]
    assert [("slurm.setup=export LD_LIBRARY_PATH=" in note, value in note) for note in notes] == [(True, False)] * told


@pytest.mark.parametrize(("time", "told"), [("4", True), ("5:00", True), ("6", False), ("0", False)])
def test_a_job_that_is_asked_to_save_as_soon_as_it_starts_is_told(time: str, told: bool) -> None:
    """0 is no limit."""
    notes = preflight(load_config("tiny_cpu", [f"slurm.time={time}"]), for_job=True).notes()
    said = f"note: slurm.time={time} is no longer than slurm.signal_seconds=300"
    assert [note.startswith(said) for note in notes if "signal_seconds" in note] == [True] * told


@pytest.mark.parametrize(
    ("time", "minutes"),  # man sbatch
    [("90", 90), ("90:30", 90.5), ("1:30:00", 90), ("2-12", 3600), ("2-12:30", 3630), ("1-0:30:30", 1470.5)],
)
def test_a_time_limit_is_read_as_slurm_does(time: str, minutes: float) -> None:
    assert parse_minutes(time) == minutes


def test_a_learner_on_gpus_where_none_can_be_used_is_told_so() -> None:
    problems = preflight(load_config("tiny_cpu", ["learner.device=cuda"])).texts("problem")
    assert len(problems) == 1
    assert problems[0].startswith("learner.device=cuda, but ")
    assert "learner.device=cpu" in problems[0]


def test_an_engine_is_found_by_its_files(tmp_path: Path) -> None:
    """Whose interpreter, here an empty file, need not answer."""
    python = environment(tmp_path / "a", "vllm")
    assert has_module("vllm", python) is True
    assert has_module("sglang", python) is None
    (tmp_path / "a/lib/python3.11/site-packages/sglang-0.5.dist-info").mkdir()
    assert has_module("sglang", python) is True
    assert has_module("vllm", Path("/nowhere/bin/python")) is None


def test_an_interpreter_whose_packages_are_elsewhere_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a system's, or by PYTHONPATH or a .pth file. One that does not answer is not waited for."""
    python = answering(environment(tmp_path / "a", "vllm"))
    packages = Path(tmp_path, "a/lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "editable.pth").write_text(f"{tmp_path / 'editable'}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "set"))
    assert has_module("json", python) is True
    for folder, package in (("editable", "one_engine"), ("set", "other_engine")):
        assert has_module(package, python) is False
        (tmp_path / folder / package).mkdir(parents=True)
        assert has_module(package, python) is True
    python.unlink()
    program(python, "#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(versions, "ANSWER_SECONDS", 0.2)
    assert has_module("json", python) is None


def test_an_engine_whose_module_is_in_a_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "packaged_engine.py").write_text("class Mine:\n    module = 'my_servers.http'\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def problems(*keys: str) -> list[str]:
        config = load_config("tiny_cpu", ["rollout.engine=packaged_engine:Mine", *keys])
        return [one.text for one in engine.check(PreflightContext(config, for_job=False)) if one.kind == "problem"]

    assert problems(f"rollout.python={environment(tmp_path / 'a', 'my_servers')}") == []
    (said,) = problems()
    assert f"{sys.executable}: my_servers is not installed there; " in said


@pytest.mark.parametrize(
    ("base", "keys", "requests", "trajectories"),
    [
        ("tiny_cpu", ["train.max_staleness=1"], 64, 0),  # a request of each completion that is drawn
        ("tiny_cpu", ["train.max_staleness=1", "rollout.server.max_concurrent_groups=3"], 24, 0),
        ("tiny_cpu", ["train.max_staleness=1", "rollout.max_in_flight=40"], 40, 0),
        ("tiny_cpu", [], 4, 0),  # of each group
        ("calculator", ["environment.concurrency=16"], 16, 16),  # of each trajectory's turn
        ("calculator", ["environment.concurrency=40"], 32, 32),  # no more than are drawn
        ("calculator", ["environment.concurrency=1024"], 0, 1024),  # of an evaluation
    ],
)
def test_requests_and_trajectories_beyond_the_limit_of_open_files_are_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, base: str, keys: list[str], requests: int, trajectories: int
) -> None:
    sizes = ["learner.ep=1", "rollout.group_size=8", "rollout.prompts_per_step=4"]
    config = load_config(base, ["rollout=vllm", "rollout.server.addresses=http://a:1", *sizes, *keys])
    needed = 1 + requests + 3 * trajectories + 256  # with the stream of one rank

    def said(limit: int, *, for_job: bool = False) -> list[str]:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
        return [one.text for one in devices.check(PreflightContext(config, for_job)) if one.kind == "problem"]

    assert said(needed) == said(needed - 1, for_job=True) == []
    (problem,) = said(needed - 1)
    assert (f"{requests} requests at servers" in problem) == (requests > 0)
    assert f"about {needed} files, but the limit here is {needed - 1}" in problem
