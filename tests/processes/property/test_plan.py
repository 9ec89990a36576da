"""Plans over random models and meshes, executed with numpy and compared with shards cut by separately written rules.

These tests start processes.
"""

from __future__ import annotations

import subprocess
import sys


def test_a_plan_does_not_depend_on_hash_seeds() -> None:
    code = (
        "from rl_megatron.models.named import NAMED; from rl_megatron.types import ParallelDims as D\n"
        "from rl_megatron.weights.layouts.layout import Layout; from rl_megatron.weights.plans.plan import plan\n"
        "from rl_megatron.weights.layouts.tables.qwen3_moe import ENGINE_QWEN3_MOE, MEGATRON_QWEN3_MOE\n"
        "import hashlib, sys\n"
        "m = NAMED['qwen3-30b-a3b']\n"
        "learner = Layout(table=MEGATRON_QWEN3_MOE, shape=m, dims=D(tp=2, pp=4, ep=4, dp=4))\n"
        "engine = Layout(table=ENGINE_QWEN3_MOE, shape=m, dims=D(tp=8, ep=8, dp=4))\n"
        "print(hashlib.sha256(repr(plan(learner, engine)).encode()).hexdigest(), 'torch' in sys.modules)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1
    assert said.pop().endswith("False\n")
