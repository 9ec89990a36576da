"""An adapter whose servers need not know of pushes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_megatron.engines.adapter import Adapter
from rl_megatron.types import GenerationRequest


class Still(Adapter):
    """Loading, pausing and aborting do nothing; how a server samples is for who inherits from it to say."""

    name, module, tested, renormalises_top_p = "Still", "still", "1", True

    async def abort(self, server: Any, request: GenerationRequest, request_id: str) -> None: ...

    async def pause(self, server: Any, mode: object) -> None: ...

    async def resume(self, server: Any) -> None: ...

    async def load(self, server: Any, path: Path, version: int, **options: object) -> list[Any]:
        return []

    async def relabel(self, server: Any, version: int) -> None: ...
