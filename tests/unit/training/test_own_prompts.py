"""Teachers that read a prompt of their own: what they say is of the tokens that the policy sampled, where it did."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from rl_megatron.config.io import load_config
from rl_megatron.data.samples import read_by_teacher, to_samples
from rl_megatron.interfaces import Pass
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.training.scores.requests import Packers, measured
from rl_megatron.types import Prompt, RolloutGroup, Samples, Want
from tests.turns import trajectory
from tests.unit.training.test_scoring import Ranks, roles_of

KEY = "algorithm.kl.teachers"
OWN = {"a": (9, 8, 7, 6, 5), "b": (4,), "c": (3, 3)}  # what a teacher reads in place of each prompt
LENGTHS = {"a": (3, 5), "b": (2, 7), "c": (4, 1)}  # of completions


def said_after(role: str, text: Sequence[int], target: int) -> float:
    """What a model says of a token behind a text: it depends on every token before it."""
    return -(1 + crc32(f"{role} {list(text)} {target}".encode()) % 1000) / 100


class Readers(Ranks):
    """Ranks whose models read the whole of a sequence."""

    @override
    def scored(self, rank: int, passes: list[Pass], share: Any) -> list[tuple[dict[Want, list[Tensor]], float]]:
        rows = self.held[rank].take(share)
        return [({what: [self.read(one.role, what, m) for m in rows] for what in one.want}, 1.0) for one in passes]

    def read(self, role: str, what: Want, rows: Samples) -> Tensor:
        out = torch.zeros(len(rows.input_ids))
        for first, stop in zip(rows.cu_seqlens.tolist(), rows.cu_seqlens[1:].tolist(), strict=False):
            for at in range(first, stop):
                out[at] = said_after(role, rows.input_ids[first : at + 1].tolist(), int(rows.targets[at]))
        return (
            out if what != "top" else torch.stack([rows.targets.float(), out], 1)[:, :, None] * rows.mask[:, None, None]
        )


def groups() -> list[RolloutGroup]:
    return [
        RolloutGroup(
            prompt=Prompt(
                id=name, text="", token_ids=(1, 2), answer="", source="ab"[name == "b"], read_by={"me": OWN[name]}
            ),
            trajectories=tuple(trajectory([length], seed=length) for length in LENGTHS[name]),
        )
        for name in OWN
    ]


@pytest.mark.parametrize(
    ("algorithm", "keys", "role"),
    [
        ("distill", [], "policy"),
        ("gkd", [], "policy"),
        ("gkd", ["algorithm.kl.follow_rate=0.1"], "reference"),
        ("distill", [f"{KEY}.me.path=tests"], "teacher_me"),
        ("gkd", [f"{KEY}.me.path=tests", "roles.layouts.teacher_me.tp=1"], "teacher_me"),
        (
            "distill",
            [f"{KEY}.me.sources=[b]", f"{KEY}.other.path=conf", f"{KEY}.other.sources=[a]", "data.type=mixture"]
            + [f"data.sources.{name}.type=arithmetic" for name in "ab"],
            "policy",
        ),
    ],
)
def test_each_sampled_token_is_judged_behind_the_teachers_own_prompt(
    algorithm: str, keys: list[str], role: str
) -> None:
    given = [f"algorithm={algorithm}", f"{KEY}.me.prompt={{prompt}}", f"{KEY}.me.max_prompt_tokens=8", *keys]
    config = load_config("tiny_cpu", ["learner.ep=1", "learner.dp=2", *given])
    names = ["learner", "teacher_me", "teacher_other"]
    ranks = {name: Readers(1 if name == "teacher_me" and "layouts" in str(keys) else 2) for name in names}
    if role != "teacher_me":
        del ranks["teacher_me"]
    samples = to_samples(groups(), sources=config.source_names)
    packers, watch = Packers(config=config, attention_cost=0.0), Stopwatch()
    found = asyncio.run(measured(config, roles_of(config, ranks), packers, samples, 1, watch, groups=groups()))
    wanted, old = [np.zeros(len(samples.targets), np.float32) for _ in range(2)]
    at = 0
    for group in groups():
        other = bool(config.source_names) and group.prompt.source == "a"
        for one in group.trajectories:
            tokens = one.chains[0].token_ids.tolist()
            for place in range(1, len(tokens)):
                old[at] = said_after("policy", tokens[:place], tokens[place])
                text = tokens[:place] if other else [*OWN[group.prompt.id], *tokens[2:place]]
                if other or place >= 2:
                    wanted[at] = said_after("teacher_other" if other else role, text, tokens[place])
                at += 1
    np.testing.assert_allclose(found.samples.ref_logprobs, wanted, rtol=1e-6)
    np.testing.assert_array_equal(found.samples.old_logprobs, old)
    if algorithm == "gkd":
        assert found.samples.ref_top is not None
        np.testing.assert_array_equal(found.samples.ref_top[:, 0, 0], samples.targets * samples.mask)
        np.testing.assert_array_equal(found.samples.ref_top[:, 1, 0], wanted)
    assert watch.row()["seconds/reference"] > 0
    of_teacher = [] if role == "teacher_me" else [[role]]
    assert [[one.role for one in asked] for asked in ranks["learner"].asked] == [*of_teacher, ["policy"]]


def test_what_a_server_reads_may_be_longer_than_a_micro_batch_of_the_learner() -> None:
    of = ["server=http://127.0.0.1:9", "engine=vllm", "path=tests", "prompt={prompt}", "max_prompt_tokens=900"]
    keys = [f"{KEY}.me.{key}" for key in of]
    config = load_config("tiny_cpu", ["algorithm=distill", "learner.max_tokens_per_micro_batch=64", *keys])
    long = [replace(one, prompt=replace(one.prompt, read_by={"me": (1,) * 800})) for one in groups()]
    batch = Packers(config=config, attention_cost=0.0).apart(
        read_by_teacher(long, "me", np.arange(6), success_reward=1), "teacher_me"
    )
    assert sorted(int(one) for row in batch.sequences for part in row for one in part) == [*range(6)]


def test_a_place_in_the_prompt_is_filled_with_the_best_other_completion_that_is_right() -> None:
    """By hand: of each row, what is read before its own tokens. An end token is not shown."""
    first = [trajectory([3], seed=1, total=1.0), trajectory([2], seed=2, total=0.0), trajectory([4], seed=3, total=2.0)]
    cut = trajectory([3], seed=4, total=1.0, finish="length")
    prompt = Prompt(id="p", text="", token_ids=(1, 2), answer="", read_by={"me": (9, -1, 8)})
    both = [
        RolloutGroup(prompt=prompt, trajectories=tuple(first)),
        RolloutGroup(prompt=prompt, trajectories=(cut, trajectory([2], seed=5, total=0.9))),
    ]
    sampled = [one.chains[0].token_ids[2:].tolist() for group in both for one in group.trajectories]
    best, second = [9, *sampled[2][:-1], 8], [9, *sampled[0][:-1], 8]
    before = [best, best, second, [1, 2], [9, *sampled[3], 8]]  # the cut one has no right one beside it, but is whole
    for part in (np.arange(5), np.array([3, 1])):
        read = read_by_teacher(both, "me", part, success_reward=1.0)
        ends = read.cu_seqlens.tolist()
        for number, first_at, stop in zip(part.tolist(), ends, ends[1:], strict=False):
            row = [*read.input_ids[first_at:stop].tolist(), int(read.targets[stop - 1])]
            assert row == before[number] + sampled[number]
            assert read.mask[first_at:stop].tolist() == [at >= len(before[number]) for at in range(1, len(row))]
