from __future__ import annotations

import pytest

from launcher.calibration import asked
from rl_megatron.errors import RLMegatronError


def test_a_process_that_says_nothing_is_ended_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process, which imports torch for seconds before it says its first line."""
    monkeypatch.setattr(asked, "SILENT_SECONDS", 0.2)
    with pytest.raises(RLMegatronError, match=r"process 0 of 1 that calibrates said nothing for 0\.2 s, and was ended"):
        asked.calibrate(device="cpu", ranks=1, threads=1, say=print)
