"""What the checks before a run say of a batch and of what is under way for it."""

from __future__ import annotations

import pytest

from launcher.preflight import batches
from launcher.preflight.subject import Subject
from rl_megatron.config.io import load_config


@pytest.mark.parametrize(
    ("most", "groups", "said"),
    [
        (32, 8, None),
        (
            33,
            7,
            "32 trajectories are under way at once (environment.concurrency=33), but servers have at most 28 turns",
        ),
        (
            30,
            7,
            "30 trajectories are under way at once (environment.concurrency=30), but servers have at most 28 turns",
        ),
        (28, 7, None),
        (
            27,
            7,
            "environment.concurrency=27 trajectories are under way at once, of 32 that there are to sample, though ",
        ),
        (
            31,
            64,
            "environment.concurrency=31 trajectories are under way at once, of 32 that there are to sample, though ",
        ),
        (1024, 64, None),
    ],
)
def test_trajectories_that_wait_for_servers_or_servers_for_them_are_noted(
    most: int, groups: int, said: str | None
) -> None:
    served = ("rollout=vllm", "rollout.server.addresses=http://a:1", f"rollout.server.concurrency={groups}")
    sizes = ("rollout.prompts_per_step=8", "rollout.group_size=4", f"environment.concurrency={most}")
    config = load_config("calculator", [*served, *sizes])
    notes = [found.text for found in batches.check(Subject(config, False)) if "trajectories" in found.text]
    assert len(notes) == (said is not None), notes
    assert all(text.startswith(str(said)) for text in notes)
