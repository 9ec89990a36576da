"""docs/configuration.md matches the schema, key by key.

These tests start processes.
"""

from __future__ import annotations

import subprocess
import sys

from tests.unit.test_configuration_docs import REPO


def test_a_machine_without_torch_can_make_it() -> None:
    code = "import sys; sys.modules['torch'] = None; import rl_megatron.config.docs as d; d.render()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)
