"""Kernels of a run's steps are recorded, and lie inside the ranks' calls in its timeline."""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import Place
from tests.unit.launcher.commands import status_of

EVEN = "reward.function=my_rewards:even"
FULL = """
import torch
from dataclasses import replace
from megatron.core.transformer.transformer_layer import TransformerLayer
from rl_megatron.learner.model.layers import torch_layer_spec

class Full(TransformerLayer):
    def {where}(self, *_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

def full(shape, layer):
    return replace(torch_layer_spec(shape, layer), module=Full)
"""


def events_of(trace: Path) -> dict[str, list[dict[str, Any]]]:
    """The spans of a trace by process and thread, in their order."""
    events = json.loads(gzip.decompress(trace.read_bytes()))
    names = {kind: {} for kind in ("process_name", "thread_name")}
    found: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] in names:
            names[event["name"]][event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            process = names["process_name"][event["pid"], 0].split(" (")[0]
            found.setdefault(f"{process}: {names['thread_name'][event['pid'], event['tid']]}", []).append(event)
    return found


def test_steps_are_profiled_as_configured(place: Place) -> None:
    run = place.fork("profiled", "learner.ep=2", EVEN, "train.steps=3", "profile.steps=2", "profile.ranks=[0,1]")
    assert run.end() == 0
    (folder,) = (run.folder / "profile").iterdir()
    assert folder.name == "step_000002"
    assert {path.name for path in folder.iterdir()} == {"rank-0.json.gz", "rank-1.json.gz", "ranks.json"}
    trace = run.folder / "timeline.json.gz"
    assert status_of("report", str(run.folder), "--trace", str(trace)) == 0
    found = events_of(trace)
    assert "step 2" in {event["name"] for event in found["controller: steps"]}
    calls = found["rank 1: calls"]
    begins = [event["ts"] for event in calls if event["name"] in ("backward", "score", "step", "generate")]
    for thread in (name for name in found if name.startswith("rank 1: operators")):
        assert all(begin["ts"] >= begins[0] - 1000 for begin in found[thread])
    products = [one for name, some in found.items() if name.startswith("rank 1: operators") for one in some]
    products = [one for one in products if one["name"] == "aten::mm"]
    assert len(products) > 100
    inside = [event for event in calls if "call" in event.get("args", {})]
    starts = [event["ts"] for event in inside]
    for one in products:
        around = inside[bisect_right(starts, one["ts"] + 2000) - 1]
        assert around["ts"] - 2000 <= one["ts"] <= one["ts"] + one["dur"] <= around["ts"] + around["dur"] + 2000


@pytest.mark.parametrize("where", ["__init__", "forward"])
def test_a_rank_whose_memory_is_full_says_the_plan_of_it(place: Place, where: str) -> None:
    (place.folder / f"full_{where}.py").write_text(FULL.replace("{where}", where))
    run = place.fork(f"full{where}", "learner.ep=1", EVEN, f"learner.layers=full_{where}:full")
    assert run.end() == 1
    text = " ".join(run.text().split())
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." in text
    assert re.search(r"the plan of its GPU, 0\.\d+ GB: parameters 0\.000\d+, gradients 0\.000\d+, optimizer", text)
    assert "the largest, weight push: lower weights.bucket_mb" in text
    assert "profile.memory=true writes a snapshot of what was allocated where" in text
