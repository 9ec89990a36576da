"""The console command ``rl-megatron`` (also ``python -m launcher``): its commands; its entry is launcher/entry.py."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from launcher.commands import (
    convert,
    doctor,
    engines,
    evaluate,
    experiment,
    inspect,
    job,
    plan,
    profile,
    rehearse,
    report,
    scale,
    serve,
    submit,
    train,
    verify,
    watch,
)
from launcher.processes import limits
from rl_megatron.errors import ConfigError, RLMegatronError
from rl_megatron.user_code import import_from

_NAMES = {"help_option_names": ["-h", "--help"]}
_COMMANDS = (
    *(train.train, rehearse.rehearse, submit.submit, job.status, job.logs, job.attach, job.cancel, engines.engines),
    profile.profile,
    *(watch.watch, report.report, convert.convert, verify.verify, inspect.inspect, plan.plan, scale.scale),
)
app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, context_settings=_NAMES)
for command in _COMMANDS:
    app.command()(command)
app.command("eval")(evaluate.evaluate)
app.command("serve")(serve.serve_to_tools)
app.add_typer(doctor.app, name="doctor")
app.add_typer(experiment.app, name="experiment")


def _version(asked: bool) -> None:
    if asked:
        print(f"rl-megatron {importlib.metadata.version('rl-megatron')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Reinforcement learning of language models on megatron-core. Each command has --help; docs/ has the rest."""
    try:
        here = Path.cwd()
    except FileNotFoundError as error:
        gone = os.environ.get("PWD", "")
        raise ConfigError(f"the current folder, {gone}, has been removed; change to one that is there") from error
    import_from(here)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. An error that is the user's to read, or the system's, is printed without a traceback; status 1."""
    try:
        limits.raise_open_files()
        app(args=arguments, standalone_mode=True)
    except RLMegatronError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except (OSError, RuntimeError) as error:
        said = limits.refusal(error)
        if said is None:
            raise
        print(f"error: {said}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
