"""The order in which SGLang 0.5.21 takes requests: those of higher priorities first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.errors import ConfigError
from rl_megatron.rollout.servers.adapter import value_given

_LOW_FIRST = "schedule_low_priority_values_first"
_OVERFLOWS = (
    "--schedule-low-priority-values-first: SGLang 0.5.21 then gives /health the highest priority of 64 bits, to which "
    "its cache adds 1 where its scheduler overlaps, and ends; leave it out"
)


def started_with(extra: Sequence[str]) -> tuple[str, ...]:
    """The options for it, unless ``extra`` has a policy of its own. Raises ConfigError if by ``extra`` lower priorities
    go first, with which a server ends."""
    if value_given(extra, f"--{_LOW_FIRST.replace('_', '-')}") is not None:
        raise ConfigError(f"rollout.server.options has {_OVERFLOWS}")
    own = value_given(extra, "--schedule-policy") is not None
    return () if own else ("--enable-priority-scheduling", "--disable-priority-preemption")


def obstacles(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What keeps a run from using a server with these settings, of its /server_info."""
    return (f"it has {_OVERFLOWS}",) if settings.get(_LOW_FIRST) else ()
