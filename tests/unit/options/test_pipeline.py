"""How many micro-batches are in flight, beside megatron-core's own schedule."""

from __future__ import annotations

import pytest

import rl_megatron.learner.megatron  # noqa: F401  before megatron is imported
from rl_megatron.options.pipeline import in_flight

LAYERS = ((3,), (1, 1), (2, 1), (1, 2), (1, 4, 2), (5, 1, 1, 2))


@pytest.mark.parametrize("sizes", LAYERS)
@pytest.mark.parametrize("pp", [2, 3, 8])
def test_as_many_are_in_flight_as_megatrons_schedule_has(
    pp: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

    vpp, count = len(sizes), 6 * pp
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: pp)
    monkeypatch.setattr(
        parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: vpp if vpp > 1 else None
    )
    chunks = [chunk for _, chunk in get_schedule_table(count, vpp, pp)]
    for stage in range(pp):
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage)
        total, _, warmup, _ = get_pp_rank_microbatches(count, vpp, pp)
        held = [sum(sizes[chunk] for chunk in chunks[:warmup])]
        for n in range(total - warmup):  # one forward, one backward
            held.append(held[-1] + sizes[chunks[warmup + n]])
            held.append(held[-1] - sizes[vpp - 1 - chunks[n]])
        assert in_flight(pp, stage, sizes) == max(held) / sum(sizes)
