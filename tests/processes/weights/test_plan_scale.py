"""Plans of public models at cluster scale: balance, volume and cost of the plan itself.

These tests start processes.
"""

from __future__ import annotations

import subprocess
import sys


def test_a_trillion_parameters_are_planned_in_few_calls_and_little_memory_without_torch() -> None:
    code = (
        "import resource, sys\n"
        "from tests.unit.weights.test_plan_scale import layouts\n"
        "from rl_megatron.weights.plans.plan import plan\n"
        "learner, engines = layouts('kimi-k2', 'tp8')\n"
        "calls = [0]\n"
        "def count(*_): calls[0] += 1\n"
        "sys.setprofile(count)\n"
        "moves = plan(learner, engines, placement={r: 512 + r for r in range(256)})\n"
        "parts = [*moves.sends(17), *moves.receives(700)]\n"
        "sys.setprofile(None)\n"
        "print(calls[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(parts))\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert int(said[0]) < 5e6  # 3.7e6
    assert int(said[1]) < 2 * 2**20  # KiB
