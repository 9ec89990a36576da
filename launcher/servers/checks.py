"""Checks that engine servers fit the run, before the first step and before a restarted server is used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_megatron.config.run import RunConfig
from rl_megatron.engines.adapter import Adapter, Description
from rl_megatron.engines.http import AttemptFailed, Server
from rl_megatron.errors import ConfigError, EngineError
from rl_megatron.feature import features
from rl_megatron.models.families.fields import read_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerChecks:
    """The requirements on servers for a run whose longest sequence has ``max_length`` tokens."""

    config: RunConfig
    adapter: Adapter
    model_folder: Path
    max_length: int

    async def check(self, servers: Sequence[Server]) -> None:
        """Raises ConfigError with all problems of the servers at once, and EngineError."""
        found = [(server, await self._described(server)) for server in servers]
        self._raise_misfits([(server.url, described) for server, described in found])
        for server, described in found:
            server.priorities, server.features = described.priorities, described.features

    async def _described(self, server: Server) -> Description:
        try:
            open_to_strangers = await server.open_to_strangers()
            described = await self.adapter.describe(server)
        except AttemptFailed as error:
            raise EngineError(f"rollout.engine={self.config.rollout.engine}: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{server.url} answers as no server of {self.adapter.name} does ({error!r:.200}); "
                "check what runs there, rollout.engine and rollout.server.addresses"
            ) from error
        if open_to_strangers and self.config.rollout.server.addresses:
            logger.warning("%s answers without a token: who reaches it can change weights or run code", server.url)
        elif open_to_strangers:
            raise ConfigError(f"{server.url} answers without the run's token; check rollout.server.options")
        return described

    def _raise_misfits(self, found: Sequence[tuple[str, Description]]) -> None:
        wanted = self.config.learner.dtype
        known = read_config(self.model_folder).get("architectures") or ()
        architecture, problems = ",".join(known), []
        for url, described in found:
            logger.info("%s %s at %s: %s", self.adapter.name, described.version, url, described)
            problems += [f"{url}: {problem}" for problem in described.problems]
            if described.version.split("+")[0] != self.adapter.tested:
                logger.warning("%s: only %s %s is tested", url, self.adapter.name, self.adapter.tested)
            if architecture and not described.problems and described.architecture != architecture:
                problems.append(
                    f"{url}: it serves {described.architecture}, but the model to train is {architecture}; start it "
                    f"with {self.model_folder}"
                )
            if not described.problems and described.dtype != wanted:
                problems.append(f"{url}: it computes in {described.dtype}, but learner.dtype={wanted}; make them equal")
            for hooks in self.adapter.hooks:
                serving, runs = features()[hooks.name].serving, described.features.get(hooks.name, 0)
                if serving is None or described.problems or hooks.fits(runs, given := serving.given(self.config)):
                    continue
                problems.append(f"{url}: " + serving.misfit.format(found=runs, given=serving.named(given)))
            if described.max_length < self.max_length:
                problems.append(
                    f"{url}: its longest sequence is {described.max_length}, by its context and its cache; "
                    f"{self.max_length} is needed: raise rollout.server.memory_fraction, tp or dp, start servers at "
                    "rollout.server.addresses with a longer context, or lower rollout.max_new_tokens"
                )
        if problems:
            raise ConfigError("\n".join(problems))
