"""Creates the sinks of metrics as a run does, and opens none."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.preflight.subject import Finding, PreflightContext, problem, unchecked
from rl_megatron.errors import ConfigError
from rl_megatron.observability.sinks import mlflow
from rl_megatron.observability.sinks.sink import MissingPackageError, SinkSettings, make_sink
from rl_megatron.observability.sinks.webhook import VARIABLE

_VARIABLES = {"mlflow": mlflow.VARIABLE, "webhook": VARIABLE}


def check(subject: PreflightContext) -> Iterator[Finding]:
    """Yields a problem for each entry of ``log.sinks`` that is unknown, or has a wrong argument or no package."""
    config = subject.config
    if config.log.sinks and subject.other_python is not None:
        yield unchecked(f"log.sinks, in {subject.other_python}")
        return
    folder = config.run.dir / (config.run.name or "run")
    settings = SinkSettings(folder=folder, project=config.log.project, environment=subject.environment)
    if VARIABLE in config.slurm.environment:
        yield problem(f"slurm.environment.{VARIABLE}: config.yaml would hold this secret; export it where you submit")
    for name in config.log.sinks:
        variable, where = _VARIABLES.get(name), "slurm.setup" if config.slurm.setup else "the cluster"
        may_export = subject.for_job and (config.slurm.setup or subject.off_cluster)
        if variable and variable not in subject.environment and may_export:
            yield unchecked(f"{variable}, which {where} may export")
            continue
        try:
            make_sink(name, settings)
        except MissingPackageError as error:
            yield unchecked(f"the package of log.sinks={name}") if subject.off_cluster else problem(str(error))
        except ConfigError as error:
            yield problem(str(error))
