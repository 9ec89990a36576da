"""Makes engines propose tokens by a model's draft layer, and counts the proposals."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from rl_megatron.feature import EngineHooks

if TYPE_CHECKING:
    from rl_megatron.engines.http import Server
    from rl_megatron.models.shape import ModelShape

_OWN_LAYER = (
    "pushes reach the model's own draft layer alone, which rollout.server.draft_tokens has a server use; set that, and "
    "leave the option out"
)
_COUNTED = re.compile(r"^vllm:spec_decode_num_(draft|accepted)_tokens_total(?:\{.*\})? (\S+)", re.MULTILINE)
_LOSSLESS: Mapping[str, object] = {
    "speculative_algorithm": "EAGLE",
    "speculative_eagle_topk": 1,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
}
"""SGLang's settings with which the model's own layer proposes, and samples have the model's distribution."""


class Drafts(EngineHooks):
    """Counts tokens that servers' draft layers proposed, and accepted ones, from one push to the next."""

    def __init__(self, name: str, shape: ModelShape) -> None:
        super().__init__(name, shape)
        self._last: weakref.WeakKeyDictionary[Server, tuple[float, float]] = weakref.WeakKeyDictionary()
        self._proposed = self._accepted = 0.0

    async def counts(self, server: Server) -> tuple[float, float]:
        """Returns the number of tokens that the server has proposed since its start, and of those it accepted."""
        raise NotImplementedError

    @override
    async def paused(self, server: Server) -> None:
        """Adds the server's counts, without those before its first push."""
        if not self.given(server):
            return
        proposed, accepted = await self.counts(server)
        before = self._last.get(server, (proposed, accepted))
        self._last[server] = proposed, accepted
        self._proposed += proposed - before[0]
        self._accepted += accepted - before[1]

    @override
    def row(self) -> Mapping[str, float]:
        row = {"draft/acceptance": self._accepted / self._proposed} if self._proposed else {}
        self._proposed = self._accepted = 0.0
        return row


class VLLMDrafts(Drafts):
    """vLLM 0.32.0 (config/speculative.py, v1/spec_decode/metrics.py).

    By default the layer proposes its most probable token, which is accepted with the model's probability of it; else
    another is drawn from the model's distribution without it (arXiv:2211.17192, v1/sample/rejection_sampler.py).
    """

    # --speculative-config, which is -sc, --spec-method, --spec-model, --spec-tokens
    refused: ClassVar[Mapping[str, str]] = MappingProxyType(dict.fromkeys(("--specu", "--spec-", "-s"), _OWN_LAYER))

    @override
    def arguments(self, given: int, device: str) -> Sequence[str]:
        said = json.dumps({"method": "mtp", "num_speculative_tokens": given})
        return ("--speculative-config", said) if given else ()

    @override
    def described(self, settings: Mapping[str, Any]) -> tuple[int, Sequence[str]]:
        return int(settings.get("speculative_tokens", 0)), ()

    @override
    def models(self, server: Server) -> Sequence[str]:
        return ("draft",) if self.given(server) else ()

    @override
    async def counts(self, server: Server) -> tuple[float, float]:
        return read_counts(await server.text("/metrics"))


def read_counts(metrics: str) -> tuple[float, float]:
    """Returns counts of proposed and accepted tokens over all data-parallel ranks, from vLLM's /metrics."""
    said = _COUNTED.findall(metrics)
    proposed, accepted = (sum(float(count) for kind, count in said if kind == one) for one in ("draft", "accepted"))
    return proposed, accepted


class SGLangDrafts(Drafts):
    """SGLang 0.5.21 (arg_groups/speculative_hook.py, managers/tokenizer_manager.py).

    The layer proposes its most probable token, which is accepted with the model's probability of it. Otherwise another
    is drawn from the model's distribution without it (speculative/eagle_utils.py, `eagle_sample`).
    """

    refused: ClassVar[Mapping[str, str]] = MappingProxyType({"--specu": _OWN_LAYER})
    counters = ("spec_num_proposed_drafts", "spec_num_correct_drafts")

    def __init__(self, name: str, shape: ModelShape) -> None:
        super().__init__(name, shape)
        self._of: weakref.WeakKeyDictionary[Server, tuple[float, float]] = weakref.WeakKeyDictionary()

    @override
    def arguments(self, given: int, device: str) -> Sequence[str]:
        if not given:
            return ()
        return (
            *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(given)),
            *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(given + 1)),  # drafts + last token
        )

    @override
    def described(self, settings: Mapping[str, Any]) -> tuple[int, Sequence[str]]:
        """Reads ``settings`` of its /server_info."""
        if not settings.get("speculative_algorithm"):
            return 0, ()
        return int(settings["speculative_num_steps"]), [
            f"its {name} is {settings.get(name)}; start it with {wanted} (docs/sft.md)"
            for name, wanted in _LOSSLESS.items()
            if settings.get(name) != wanted
        ]

    @override
    def models(self, server: Server) -> Sequence[str]:
        return ("draft",) if self.given(server) else ()

    @override
    def answered(self, server: Server, counts: Sequence[tuple[int, ...]]) -> None:
        """Counts the requests that have ended."""
        proposed, accepted = self._of.get(server, (0.0, 0.0))
        self._of[server] = proposed + sum(p for p, _ in counts), accepted + sum(a for _, a in counts)

    @override
    async def counts(self, server: Server) -> tuple[float, float]:
        return self._of.get(server, (0.0, 0.0))
