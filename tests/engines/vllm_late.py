"""A plugin of vLLM for a test's server: calls reach the second dp replica a step later than the first.

That order can happen anywhere, as each replica's process reads its own queue; here it always does while replicas step.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import DPEngineCoreProc

_handle, _end_step = DPEngineCoreProc._handle_client_request, DPEngineCoreProc._has_global_unfinished_reqs
_late: list[Any] = []


def plugin() -> None:
    """Called by vLLM."""
    DPEngineCoreProc._handle_client_request = _handled
    DPEngineCoreProc._has_global_unfinished_reqs = _ended


def _handled(self: Any, kind: Any, given: Any) -> None:
    call = kind == EngineCoreRequestType.UTILITY and given[2] == "collective_rpc"
    if call and self.dp_rank == 1 and self.engines_running:
        _late.append(given)
    else:
        _handle(self, kind, given)


def _ended(self: Any, unfinished: bool) -> bool:
    more: bool = _end_step(self, unfinished)
    while _late:
        _handle(self, EngineCoreRequestType.UTILITY, _late.pop(0))
    return more
