"""``rl-megatron train``: checks the configuration, then runs it to its end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from launcher.processes.environment import uncollected
from launcher.runs.folder import NameTaken, choose, refuse_copied
from rl_megatron.config.io import load_config


def train(
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, or group=name")] = None,
    config: Annotated[str, typer.Option(help="a name under conf/, or a YAML file")] = "tiny_cpu",
    resume: Annotated[bool, typer.Option("--resume", help="continue the run from its last checkpoint")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="check the configuration on this machine, and start nothing")
    ] = False,
) -> None:
    """Train a policy by reinforcement learning; everything goes to runs/<name>/.

    Ctrl-C (or SIGTERM) finishes the current step, saves and exits with status 0; a second Ctrl-C exits at once, 130.
    """
    from launcher.preflight.checks import preflight
    from rl_megatron.rewards.classifiers.on_ranks import RewardModels
    from rl_megatron.rewards.registry import resolve_rewards

    loaded = load_config(config, overrides or [])
    if resume:
        refuse_copied(loaded, Path(config), overrides or [])
    named = choose(loaded, Path(config).stem, resume=resume)
    findings = preflight(named)
    findings.raise_problems()
    folder = named.run.dir / str(named.run.name)
    if check:
        if resume:
            from launcher.runs.resume import find

            find(named, folder)
        print(findings.describe())
        return
    models = RewardModels(named.reward_models)
    reward = resolve_rewards(named.reward, named.own_rewards, named.sandbox, models)
    for line in findings.notes():
        print(line, flush=True)
    print(f"rl-megatron: run {folder}", flush=True)  # the imports below take seconds
    try:
        with uncollected():
            from launcher.programs import train as program

        while True:
            try:
                asyncio.run(program.train(named, reward, models, resume=resume))
                return
            except NameTaken:
                if loaded.run.name is not None:
                    raise
                named = choose(loaded, Path(config).stem, resume=resume)
                folder = named.run.dir / str(named.run.name)
                print(f"rl-megatron: run {folder}, as another run took that name", flush=True)
    except KeyboardInterrupt:
        goes_on = "--resume continues from the last checkpoint, or starts over if there is none"
        said = goes_on if folder.is_dir() else "the run had not begun, so start it again"
        print(f"interrupted; {said}", file=sys.stderr)
        raise typer.Exit(130) from None
