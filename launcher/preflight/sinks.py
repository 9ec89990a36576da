"""Creates the sinks of metrics as a run does, and opens none."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.preflight.subject import Finding, PreflightContext, problem, unchecked
from rl_megatron.errors import ConfigError
from rl_megatron.observability.sinks.sink import SinkSettings, make_sink


def check(subject: PreflightContext) -> Iterator[Finding]:
    """Yields a problem for each entry of ``log.sinks`` that is unknown, or has a wrong argument or no package."""
    config = subject.config
    if config.log.sinks and subject.other_python is not None:
        yield unchecked(f"log.sinks, in {subject.other_python}")
        return
    folder = config.run.dir / (config.run.name or "run")
    settings = SinkSettings(folder=folder, project=config.log.project, environment=subject.environment)
    for name in config.log.sinks:
        try:
            make_sink(name, settings)
        except ConfigError as error:
            yield problem(str(error))
