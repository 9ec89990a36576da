"""Composition, overrides and errors of the configuration, on the real schema and on folders made for the test.

These tests start processes.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.unit.test_config_io import REPO


def test_the_configuration_imports_no_torch() -> None:
    code = (
        "import json, sys, rl_megatron.config.run, rl_megatron.config.io as c; c.load_config('tiny_cpu', []); "
        "print(json.dumps([m for m in ('torch', 'megatron', 'transformers', 'numpy') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
