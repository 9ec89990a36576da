"""Has the environments of docs/examples found as modules, as PYTHONPATH does for a run."""

from __future__ import annotations

import sys

from tests.environments.served import EXAMPLES

sys.path.append(str(EXAMPLES))
