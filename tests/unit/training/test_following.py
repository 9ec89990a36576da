"""When a reference that follows the policy takes its weights, and where it is from at a start and at a resume."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rl_megatron.config.io import load_config
from rl_megatron.interfaces import Roles
from rl_megatron.observability.recorder import Stopwatch
from tests.toy_roles import VOCABULARY, Toy, ToyEngine, ToyWeights, table
from tests.unit.test_every_key_acts import BASE, STARTED, Rig

FOLLOWS = ("algorithm=grpo", "algorithm.kl.coefficient=0.1", "algorithm.kl.follow_rate=0.25")


async def heard(folder: Path, *keys: str, fresh: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """What the policy is asked for the reference in two steps, and the reference but for scores; and the ages in the
    rows."""
    config = load_config("tiny_cpu", [*BASE, *FOLLOWS, *keys])
    policy, reference = (Toy(table(VOCABULARY, VOCABULARY, seed=seed)) for seed in (1, 3))
    engine = ToyEngine(policy, STARTED)
    roles: Any = Roles(
        learners={"policy": policy}, frozen={"reference": reference}, engine=engine, weights=ToyWeights(engine)
    )
    rig = Rig(folder, asyncio.get_running_loop())
    job = rig._trainer(config, roles)
    await job.start_models(fresh=fresh)
    rows = [await job.step(STARTED + number, Stopwatch()) for number in (1, 2)]
    await job.close()
    rig.recorder.close()
    led = [call[-1] for call in policy.heard if call[0] in {"lead", "reset moments"}]
    return (
        led,
        [call for call in reference.heard if call[0] == "start from"],
        [row.get("kl/reference_age") for row in rows],
    )


@pytest.mark.parametrize(
    ("keys", "led", "ages"),
    [
        ((), [0.25, 0.25], [3.0, 3.0]),  # 60 steps are nearly all that there will be: (1 - rate) / rate
        (("algorithm.kl.follow_every=31",), [0.25], [0.75 * 31 + 29, 0.75 * 31 + 30]),  # after step 62
        (
            ("algorithm.kl.follow_rate=1.0", "algorithm.kl.follow_every=100", "algorithm.kl.reset_moments=true"),
            [],
            [60, 61],
        ),
        (
            ("algorithm.kl.follow_rate=1.0", "algorithm.kl.follow_every=31", "algorithm.kl.reset_moments=true"),
            [1.0, "reset moments"],
            [29, 30],
        ),
        (("algorithm.kl.follow_rate=null",), [], [None, None]),
    ],
)
def test_it_takes_weights_when_it_is_due(
    keys: tuple[str, ...], led: list[Any], ages: list[Any], tmp_path: Path
) -> None:
    found, _, in_rows = asyncio.run(heard(tmp_path, *keys, fresh=True))
    assert found == led
    assert in_rows == pytest.approx(ages)


@pytest.mark.parametrize(("keys", "loads"), [((), 0), (("algorithm.kl.follow_rate=null",), 1)])
def test_a_resume_has_it_from_the_checkpoint(keys: tuple[str, ...], loads: int, tmp_path: Path) -> None:
    """A frozen one is read again from where the run began."""
    assert len(asyncio.run(heard(tmp_path, *keys, fresh=True))[1]) == 1
    assert len(asyncio.run(heard(tmp_path, *keys, fresh=False))[1]) == loads
