"""``rl-megatron watch``: serves runs' reports on loopback until a signal."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher.processes.parent import until_signalled
from launcher.watch.app import WatchApplication
from rl_megatron.errors import ConfigError
from rl_megatron.observability.report import CostCounter
from rl_megatron.rollout.endpoint.server import HttpServer


async def watch_runs(runs: Sequence[Path], port: int, costs: Callable[[Path], CostCounter]) -> None:
    """Serve, with what a run ``costs`` on its page, until SIGINT or SIGTERM.

    Raises ConfigError for a folder that is no run's, or a port that is taken.
    """
    for run in runs:
        if not (run / "config.yaml").is_file():
            raise ConfigError(f"{run}: no config.yaml there; give the folder of a run, such as runs/tiny_cpu")
    token = secrets.token_hex(32)
    app = WatchApplication(runs, token, costs)
    server = HttpServer(app)
    try:
        url = server.listen(port)
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; give another, or 0 for a free one") from error
    async with until_signalled():
        print(f"open {url.removesuffix('v1')}#{token}")
        print("Ctrl-C ends it", flush=True)
    app.ends.set()
    await server.stop()
