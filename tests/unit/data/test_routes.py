"""Routes of completions: compact, checked, concatenated as a column, and restored from a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from rl_megatron.data.routes import decode_routes, encode_routes
from rl_megatron.data.samples import select, to_samples
from rl_megatron.data.trajectories import single_turns
from rl_megatron.errors import DataError
from rl_megatron.rollout.batch import Answered, Drawn, LedgerState, Waiting
from rl_megatron.rollout.stream import StreamState
from rl_megatron.types import Prompt, RolloutGroup, Routes
from tests.completions import completion


def chosen(positions: int, *, first: int = 0, num_experts: int = 16) -> np.ndarray:
    """[positions, 2, 3], every number below ``num_experts``; each position differs from its neighbours."""
    return (first + np.arange(positions * 6).reshape(positions, 2, 3)) % num_experts


def group(routes: list[Routes | None], *, prompt: int = 3, new: int = 2, name: str = "a") -> RolloutGroup:
    of = [completion((7,) * new, routes=r) for r in routes]
    return single_turns(Prompt(id=name, text="", token_ids=(1,) * prompt, answer=""), of)


def contents(of: RolloutGroup) -> tuple[object, ...]:
    rows = [row for one in of.trajectories for row in one.chains]
    turns = [(t.start, t.logprobs.tolist(), t.finish_reason, t.spans, t.text) for row in rows for t in row.turns]
    return of.prompt, of.rewards, [(row.token_ids.tolist(), row.routes) for row in rows], turns


@pytest.mark.parametrize(("num_experts", "width"), [(16, 1), (256, 1), (257, 2), (384, 2)])
def test_an_expert_takes_one_byte_up_to_256_and_two_above(num_experts: int, width: int) -> None:
    experts = chosen(50, first=num_experts - 4, num_experts=num_experts)
    routes = encode_routes(experts, num_experts=num_experts)
    assert len(routes.data) == experts.size * width
    assert decode_routes(routes).tolist() == experts.tolist()


@pytest.mark.parametrize("bad", [-1, 16])
def test_an_expert_that_does_not_exist_is_refused(bad: int) -> None:
    experts = chosen(2)
    experts[1, 1, 1] = bad
    with pytest.raises(DataError, match=r"name experts .* the model has 16"):
        encode_routes(experts, num_experts=16)


def test_samples_hold_every_positions_routes_in_the_order_of_the_completions() -> None:
    arrays = [chosen(4), chosen(4, first=5), chosen(2, first=9)]
    a, b, c = (encode_routes(x, num_experts=16) for x in arrays)
    samples = to_samples([group([a, b]), group([c], prompt=1, name="b")])
    assert samples.routes is not None
    assert samples.routes.dtype == torch.uint8
    assert samples.routes.tolist() == np.concatenate(arrays).tolist()
    picked = select(samples, torch.tensor([2, 0]))
    assert picked.routes is not None
    assert picked.routes.tolist() == np.concatenate([arrays[2], arrays[0]]).tolist()


def test_without_routes_there_is_no_column() -> None:
    samples = to_samples([group([None, None])])
    assert samples.routes is None
    assert "routes" not in samples.columns


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (None, "'a': a completion has no routes"),
        (
            encode_routes(chosen(5), num_experts=16),
            r"'a': its routes have shape \(5, 2, 3\); .* must be \(4, 2, 3\), for each of 5 tokens",
        ),
        (encode_routes(chosen(4)[:, :1], num_experts=16), r"'a': its routes have shape \(4, 1, 3\)"),
        (encode_routes(chosen(4)[:, :, :2], num_experts=16), r"'a': its routes have shape \(4, 2, 2\)"),
    ],
)
def test_routes_that_do_not_fit_their_sequence_are_refused(second: Routes | None, says: str) -> None:
    with pytest.raises(DataError, match=says):
        to_samples([group([encode_routes(chosen(4), num_experts=16), second])])


def test_waiting_rollouts_keep_their_routes_in_a_checkpoint() -> None:
    wide = encode_routes(chosen(4, first=300, num_experts=512), num_experts=512)
    every_byte = Routes(data=bytes(range(240)), shape=(40, 2, 3))
    groups = (group([wide, None]), group([every_byte], prompt=39))
    places = tuple(
        Waiting(drawn=Drawn(ordinal=i, prompt=one.prompt, batch=1), birth=0, due=1, answered=Answered(group=one))
        for i, one in enumerate(groups)
    )
    counts = {"version": 3, "drawn": 2, "opened": 0, "credit": 0, "ahead": 0, "calm": 0}
    state = StreamState(**counts, batch=("a", "b"), places=places, left_out=(), ledger=LedgerState())
    adapter = TypeAdapter(StreamState)
    again = adapter.validate_json(adapter.dump_json(state))
    found = [place.answered.group for place in again.places if place.answered is not None]
    assert [contents(one) for one in found if one is not None] == [contents(one) for one in groups]
    assert replace(again, places=()) == replace(state, places=())
