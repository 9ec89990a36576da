"""The start of engines so that they return the experts that their routers choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from rl_megatron.errors import ConfigError
from rl_megatron.feature import EngineHooks


class Routes(EngineHooks):
    """Servers that return routes, for the key (with its value) that needs them; they also fit runs without it."""

    @override
    def arguments(self, given: str | None, device: str) -> Sequence[str]:
        return ("--enable-return-routed-experts",) if given else ()

    @override
    def fits(self, found: object, given: object) -> bool:
        return bool(found) or not given


class VLLMRoutes(Routes):
    """vLLM 0.32.0."""

    @override
    def arguments(self, given: str | None, device: str) -> Sequence[str]:
        if given and device == "cpu":
            raise ConfigError(
                f"{given} needs the engine's routes: vLLM 0.32.0 returns them only from its second model runner, which "
                "needs Triton and so does not run on CPUs; set rollout=local or sglang, or leave it out"
            )
        return super().arguments(given, device)

    @override
    def described(self, settings: Mapping[str, Any]) -> tuple[bool, Sequence[str]]:
        return settings.get("routes") == "True", ()


class SGLangRoutes(Routes):
    """SGLang 0.5.21. It keeps routes by their place in its cache: of a completion that it computes again at a push it
    returns those of the new weights for all tokens. So it is asked again for the rest, which costs the same prefill."""

    resends = True

    @override
    def described(self, settings: Mapping[str, Any]) -> tuple[bool, Sequence[str]]:
        """Reads ``settings`` of its /server_info."""
        return bool(settings.get("enable_return_routed_experts")), ()
