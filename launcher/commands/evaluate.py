"""``rl-megatron eval``: measures a model on sets of problems, without training; compares two such measurements."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from rl_megatron.errors import ConfigError


def evaluate(
    model: Annotated[
        Path | None,
        typer.Argument(help="a Hugging Face folder, a run's folder (its newest checkpoint), or checkpoints/step_N"),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, or group=name")] = None,
    config: Annotated[
        str | None,
        typer.Option(help="a name under conf/, or a YAML file [default: the run's own; for another folder tiny_cpu]"),
    ] = None,
    name: Annotated[str | None, typer.Option(help="of the results' file [default: the checkpoint's]")] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="two files of results: show what the second has more", metavar="A B"),
    ] = None,
) -> None:
    """Measure a model on the sets of problems in eval.sets, with the engine of rollout; print figures with intervals.

    Results go to eval/<name>.json, in the run's folder or here. No learner is started (docs/evaluation.md).
    """
    from launcher.build.trained import trained_model
    from launcher.programs import evaluate as program

    if compare is not None:
        if model is not None:
            raise ConfigError("--compare takes two files that rl-megatron eval wrote, and no MODEL")
        program.show_compared(*compare)
        return
    if model is None:
        raise ConfigError("give a MODEL: a Hugging Face folder, a run's folder or checkpoints/step_N; or --compare A B")
    asyncio.run(program.measure_model(trained_model(model, config, overrides or []), name))
