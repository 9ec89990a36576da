"""A run of agents, one with the openai client, asynchronous and in a thread, and one an environment, a file each beside
the run; and a run with a server that evaluates while it trains, also in such an environment, and is resumed."""

from __future__ import annotations

import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from launcher.controller.roles import WeightGroup
from launcher.hosts.local import LocalLauncher
from launcher.runs.folder import mirror_path
from rl_megatron.config.io import load_config
from rl_megatron.evaluation.results import read_results
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.observability.metrics import deterministic
from rl_megatron.weights.checks.reports import checksum, seal_from_reports
from rl_megatron.weights.routes.mirror import read, shapes
from tests.e2e.processes import PORTABLE, Place, Run
from tests.exposure import check_secrets, check_sockets, family, ports_of

AGENT = '''
import asyncio
from pathlib import Path

import openai


async def talks(task, model):
    """Two turns of four tokens at most; half of what a random model samples gets 1. A test may hold it."""
    served = {"base_url": model.base_url, "api_key": model.api_key}
    asked = {"model": "policy", "max_tokens": 4}
    messages = [{"role": "user", "content": task.text}]
    async with openai.AsyncOpenAI(**served) as client:
        first = await client.chat.completions.create(messages=messages, **asked)
    messages += [first.choices[0].message, {"role": "user", "content": "?"}]
    while Path("hold").exists():
        Path("holding").touch()
        await asyncio.sleep(0.01)

    def second():
        with openai.OpenAI(**served) as client:
            return client.chat.completions.create(messages=messages, **asked)

    text = (await asyncio.to_thread(second)).choices[0].message.content
    return float(sum(text.encode()) % 2)
'''
ENVIRONMENT = '''
from rl_megatron.environments.protocol import EnvironmentStep, Observation


class Odd:
    """Two turns; half of what a random model samples gets 1 more, whether it is cut or not."""

    def __init__(self, question, least=0):
        self.question, self.least = question, least

    async def start(self, task, seed):
        return Observation(content=task.text)

    async def step(self, reply):
        return EnvironmentStep(observation=Observation(content=self.question))

    async def score(self, transcript):
        return float(self.least + sum(transcript.replies[0].text.encode()) % 2)

    async def close(self):
        pass
'''
ODD = ("function=my_env:Odd", "options.question=?", "template=plain", "max_turns=2", "min_turn_tokens=2")
MIXTURE = (
    *("learner.ep=1", "learner.threads=1", "log.sinks=[]", "warm_start.steps=0"),
    *("rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=8", "train.steps=2"),
    *("environment.function=my_agent:talks", "environment.template=plain", "environment.min_turn_tokens=1"),
    *("environment.max_tokens=64", "data=mixture", "data.sources.odd.operation=product", "eval.every=2"),
    *(f"data.sources.{name}.{key}" for name in ("sums", "odd") for key in ("type=arithmetic", "num_eval=16")),
    *(f"data.sources.odd.environment.{key}" for key in (*ODD, "options.least=2", "max_tokens=64")),
)


def test_agents_with_a_client_and_by_turns_train_on_what_was_sampled(place: Place) -> None:
    """The learner's log-probs of the trained tokens are the engine's of those that it sampled. A source of the mixture
    has an environment of its own."""
    (place.folder / "my_agent.py").write_text(AGENT)
    (place.folder / "my_env.py").write_text(ENVIRONMENT)
    (place.folder / "hold").touch()
    run = place.fork_alone("agent", *MIXTURE)
    run.until((place.folder / "holding").exists, "a second turn")
    processes = family(run.process.pid)
    check_sockets(processes)
    (port,) = ports_of(psutil.Process(run.process.pid))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=120)
    check_secrets(processes, run.folder)
    (place.folder / "hold").unlink()
    run.finish()
    before, *rows = run.rows()
    assert 0 < before["eval/accuracy"] < 1  # of both sources
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert 0 < row["source/sums/reward"] < 1 < 2 < row["source/odd/reward"] < 3, row
        assert row["environment/turns_mean"] >= 1.5, row  # an agent's have two
        assert not any(name.startswith("environment/branches/") for name in row), row
        assert row["mismatch/logprob_abs_max"] < 1e-5, row  # of tokens sampled and trained on
        assert row["grad_norm"] > 0, row


KEYS = (
    *(
        "learner.ep=1",
        "warm_start.steps=20",
        "reward.function=my_rewards:even",
        "rollout.server.replicas=1",
        "train.steps=5",
    ),
    "train.learning_rate=1e-30",  # changes no weight, so that figures do not depend on which pushes meet a request
    *("checkpoint.every=2", "checkpoint.keep=9", "eval.mode=background", "eval.every=2", "eval.sets.plain.limit=4"),
    *(f"eval.sets.odd.{key}" for key in ("limit=6", "samples=3", "temperature=1.0", "max_new_tokens=9")),
    *(f"eval.sets.odd.environment.{key}" for key in (*ODD, "max_tokens=24")),
)


def evaluated(run: Run) -> dict[int, dict[str, Any]]:
    found = [row for row in run.rows() if row["phase"] == "eval"]
    assert len({row["step"] for row in found}) == len(found)
    return {row["step"]: row for row in found}


def of_odd(row: dict[str, Any]) -> dict[str, Any]:
    return deterministic({name: value for name, value in row.items() if name.startswith("eval/odd/")})


def test_evaluations_beside_training_have_the_figures_of_others_and_a_resume_has_each_once(place: Place) -> None:
    place.environment = PORTABLE
    (place.folder / "my_env.py").write_text(ENVIRONMENT)
    run = place.fork("beside", *KEYS).finish()
    first, last = evaluated(run), run.rows()[-1]
    assert set(first) <= {2, 4}
    assert 1 <= len(first) <= 2
    assert (last["step"], last["phase"]) == (5, "rl")
    for step in (4, 5):
        shutil.rmtree(run.folder / "checkpoints" / f"step_{step:06d}")
    run = place.fork("beside", *KEYS, resume=True).finish()
    again, rows = evaluated(run), [row for row in run.rows() if row["phase"] == "rl"]
    assert 2 in again
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert "environment/turns_mean" not in rows[5]
    assert 0.2 < rows[5]["eval/odd/mean_at_3"] < 0.8
    assert rows[5]["eval/odd/length"] > 9  # some have two turns
    for row in (*first.values(), *again.values(), rows[0], last):
        assert of_odd(row) == of_odd(rows[5]), row
    place.call_in_fork("eval", str(run.folder), "--name", "again")
    found = read_results(run.folder / "eval" / "again.json").sets["odd"]
    assert found.figures["mean@3"].value == rows[5]["eval/odd/mean_at_3"]
    assert found.measured.length == rows[5]["eval/odd/length"]


# The file that engine servers read is compared with what the learner's ranks hold, not with what arrived in it.
async def test_a_bit_that_flips_between_learner_and_file_is_not_sealed(tmp_path: Path) -> None:
    keys = ("rollout=vllm", "rollout.python=python", f"weights.folder={tmp_path}", "learner.threads=1")
    config = load_config("tiny_cpu", [*keys, "learner.tp=2", "learner.pp=2", "learner.ep=2"])
    model = make_tiny_model(TinySizes(), tmp_path / "cache", seed=3)
    wanted = {n: checksum(t, tuple(t.shape)) for n, t in load_file(model / "model.safetensors").items()}
    path = mirror_path(config, tmp_path)
    async with LocalLauncher(model, tmp_path).start(config) as roles:
        assert isinstance(roles.weight_sync, WeightGroup)
        await roles.weight_sync.push(1)
        assert {name: checksum(t, tuple(t.shape)) for name, t in read(path, 1).items()} == wanted
        with path.open("r+b") as file:
            file.seek(path.stat().st_size - 1)
            (byte,) = file.read(1)
            file.seek(path.stat().st_size - 1)
            file.write(bytes([byte ^ 1]))
        assert seal_from_reports(await roles.weight_sync.sums(), shapes(path)) == wanted
        found = {name: checksum(t, tuple(t.shape)) for name, t in read(path, 1).items()}
        assert len([name for name in wanted if found[name] != wanted[name]]) == 1
