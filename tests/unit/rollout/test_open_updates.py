"""Servers in which a run that was killed left an update of weights open take the next run's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from launcher.servers.engines import SERVERS
from rl_megatron.rollout.servers.http import AttemptFailed, Refused
from tests.unit.rollout.test_draft_tokens import DEEPSEEK, Holding


class Open(Holding):
    """A server with an update that is open: as vLLM and SGLang do, it refuses to begin another, or to end none."""

    def __init__(self) -> None:
        super().__init__()
        self.open = True

    @override
    async def post(self, path: str, body: object = None, *, params: Any = None) -> Any:
        answer = await super().post(path, body, params=params)
        if path in ("/start_weight_update", "/begin_weight_update"):
            if self.open:
                raise AttemptFailed("500: already active") if path[1] == "s" else Refused("400: already open")
            self.open = True
        elif path in ("/finish_weight_update", "/end_weight_update"):
            if not self.open:
                raise Refused("400: none is open")
            self.open = False
        elif path == "/collective_rpc" and isinstance(body, dict):
            self.open = self.open and body["method"] != "rl_megatron_end_update"
        return answer


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize("left", [True, False])
def test_the_next_update_is_begun_and_ended(engine: str, tmp_path: Path, *, left: bool) -> None:
    server = Open()
    server.open, server.paused = left, True
    reports = asyncio.run(SERVERS[engine](DEEPSEEK).load(server, tmp_path / "weights", 4, private=()))
    assert len(reports) == 1
    assert not server.open
