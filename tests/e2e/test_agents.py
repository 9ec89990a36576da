"""Runs of an agent with the openai client, asynchronous and in a thread, and of an environment: one file
each, beside the run."""

from __future__ import annotations

import urllib.error
import urllib.request

import psutil
import pytest

from rl_megatron.evaluation.results import read_results
from tests.e2e.processes import Place
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
from rl_megatron.environments.protocol import EnvironmentStep, Observed


class Odd:
    """Half of what a random model samples gets 1, whether it is cut or not."""

    def __init__(self, question):
        self.question = question

    async def start(self, task, seed):
        return Observed(said=task.text)

    async def step(self, reply):
        return EnvironmentStep(observation=Observed(said=self.question))

    async def score(self, transcript):
        return float(sum(transcript.replies[0].text.encode()) % 2)

    async def close(self):
        pass
'''
KEYS = (
    "environment.template=plain",
    "environment.min_turn_tokens=1",
    "rollout.max_new_tokens=8",
    "environment.max_tokens=64",
    "learner.ep=1",
)


def test_an_agent_with_a_client_trains_on_what_was_sampled(place: Place) -> None:
    """The learner's log-probs of the trained tokens are the engine's of those that it sampled."""
    (place.folder / "my_agent.py").write_text(AGENT)
    (place.folder / "hold").touch()
    function = "environment.function=my_agent:talks"
    run = place.fork("agent", function, *KEYS, "warm_start.steps=0", "train.steps=2", "eval.every=0")
    run.until((place.folder / "holding").exists, "a second turn")
    processes = family(run.process.pid)
    check_sockets(processes)
    (port,) = ports_of(psutil.Process(run.process.pid))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=120)
    check_secrets(processes, run.folder)
    (place.folder / "hold").unlink()
    run.finish()
    rows = [row for row in run.rows() if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert (row["environment/turns_mean"], row["environment/rows_mean"]) == (2.0, 1.0), row
        assert row["mismatch/logprob_abs_max"] < 1e-5, row  # of tokens sampled and trained on
        assert row["grad_norm"] > 0, row


def test_an_environment_is_one_file_of_the_user(place: Place) -> None:
    (place.folder / "my_env.py").write_text(ENVIRONMENT)
    given = ("environment.function=my_env:Odd", "environment.options.question=?", "environment.max_turns=2")
    run = place.fork("environment", *given, *KEYS, "warm_start.steps=0", "train.steps=1", "eval.every=0").finish()
    (row,) = [row for row in run.rows() if row["step"]]
    assert 0 < row["reward/mean"] < 1, row
    assert row["grad_norm"] > 0, row


def test_a_source_of_a_mixture_has_an_environment_of_its_own(place: Place) -> None:
    """Half of its trajectories get 1; a random model's sums are all wrong."""
    (place.folder / "my_env.py").write_text(ENVIRONMENT)
    own = ("function=my_env:Odd", "options.question=?", "template=plain", "max_turns=2", "max_tokens=20")
    keys = (
        *(
            "data=mixture",
            "data.sources.odd.operation=product",
            "rollout.prompts_per_step=4",
            "rollout.group_size=4",
            "rollout.max_new_tokens=4",
        ),
        *(f"data.sources.{name}.{key}" for name in ("sums", "odd") for key in ("type=arithmetic", "num_eval=16")),
        *(f"data.sources.odd.environment.{key}" for key in (*own, "min_turn_tokens=2")),
        *("learner.ep=1", "learner.threads=1", "log.tensorboard=false", f"model.cache_dir={place.cache}"),
        *("warm_start.steps=0", "train.steps=1", "eval.every=1", "run.name=mixed"),
    )
    run = place.call_in_fork("train", *keys)
    run.folder = place.folder / "runs" / "mixed"
    run.finish()
    before, after = run.rows()
    assert 0 < before["eval/accuracy"] < 1  # of both sources
    assert after["source/sums/reward"] == 0 < after["source/odd/reward"] < 1, after
    assert after["environment/turns_mean"] >= 1, after
    assert after["mismatch/logprob_abs_max"] < 1e-5, after
    assert after["grad_norm"] > 0, after


def test_a_set_in_an_environment_of_its_own_beside_a_run_without_one(place: Place) -> None:
    """Before and after a step, while another set has the reward of training; and by rl-megatron eval."""
    (place.folder / "my_env.py").write_text(ENVIRONMENT)
    own = ("function=my_env:Odd", "options.question=?", "template=plain", "max_turns=2", "max_tokens=12")
    keys = (
        *("learner.ep=1", "warm_start.steps=0", "train.steps=1", "eval.sets.sums.limit=4", "eval.sets.odd.samples=4"),
        *("eval.sets.odd.temperature=1.0", "eval.sets.odd.max_new_tokens=4"),
        *(f"eval.sets.odd.environment.{key}" for key in (*own, "min_turn_tokens=2")),
    )
    run = place.fork("odd_set", *keys).finish()
    before, after = run.rows()
    assert 0.2 < before["eval/odd/mean_at_4"] < 0.8
    assert before["eval/odd/length"] > 4  # of two turns
    assert "environment/turns_mean" not in after
    place.call_in_fork("eval", str(run.folder), "--name", "again")
    found = read_results(run.folder / "eval" / "again.json").sets["odd"]
    assert found.figures["mean@4"].value == after["eval/odd/mean_at_4"]
    assert found.measured.length == after["eval/odd/length"]
