"""What SGLang 0.5.21 is started with, so that a model's draft layer proposes tokens, and what it counts of them
(arg_groups/speculative_hook.py, managers/tokenizer_manager.py)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.engines.answers import SampledColumns
from rl_megatron.engines.http import Server

_LOSSLESS: Mapping[str, object] = {
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 1,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
}
"""Its settings with which the model's own layer proposes, and what is sampled has the model's distribution."""


def started_with(tokens: int) -> tuple[str, ...]:
    """The options for so many tokens at each step; none for 0.

    The layer proposes its most probable token, which is accepted with the model's probability of it; else another is
    drawn from the model's distribution without it (speculative/eagle_utils.py, `eagle_sample`).
    """
    if not tokens:
        return ()
    return (
        *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(tokens)),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(tokens + 1)),  # and the last token
    )


def proposed_by(settings: Mapping[str, Any]) -> int:
    """Tokens that a server with these settings, of its /server_info, proposes at each step."""
    return int(settings["speculative_num_steps"]) if settings.get("speculative_algorithm") else 0


def obstacles(settings: Mapping[str, Any]) -> list[str]:
    """Why a run cannot use a server that proposes by other means, or samples from another distribution."""
    if not settings.get("speculative_algorithm"):
        return []
    return [
        f"its {name} is {settings.get(name)}; start it with {wanted} (docs/draft_layers.md)"
        for name, wanted in _LOSSLESS.items()
        if settings.get(name) != wanted
    ]


class Counted:
    """What draft layers proposed and models accepted, by server, over the requests that have ended."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Server, tuple[float, float]] = weakref.WeakKeyDictionary()

    def add(self, server: Server, answers: Sequence[SampledColumns]) -> None:
        """Count a request's completions."""
        proposed, accepted = self.of(server)
        proposed += sum(one.proposed for one in answers)
        self._of[server] = proposed, accepted + sum(one.accepted for one in answers)

    def of(self, server: Server) -> tuple[float, float]:
        """Tokens proposed, and those accepted."""
        return self._of.get(server, (0.0, 0.0))
