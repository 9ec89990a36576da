"""``rl-megatron serve``: a model for evaluation tools that speak OpenAI's HTTP interface."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer


def serve_to_tools(
    model: Annotated[
        Path,
        typer.Argument(help="a Hugging Face folder, a run's folder (its newest checkpoint), or checkpoints/step_N"),
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, or group=name")] = None,
    config: Annotated[
        str | None,
        typer.Option(help="a name under conf/, or a YAML file [default: the run's own; for another folder tiny_cpu]"),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="on 127.0.0.1; 0: a free one")] = 8000,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="a file of mode 0600 with the key that clients send [default: a new one, whose path is shown]"
        ),
    ] = None,
) -> None:
    """Serve a model's completions and chat completions on this machine, with the engine of rollout, until Ctrl-C.

    Each request says how to sample. No learner is started (docs/evaluation.md).
    """
    from launcher.build.trained import trained_model
    from launcher.programs.serve import serve_model

    asyncio.run(serve_model(trained_model(model, config, overrides or []), port, key_file))
