"""``rl-megatron eval``: measures a model on sets of problems, without a learner; compares two such measurements."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from launcher.completion import Overrides, complete_config
from launcher.preflight import devices, engine, own_code, problems_of_data
from launcher.preflight.model_files import raise_unread_files
from launcher.preflight.subject import PreflightContext, run_check
from launcher.processes.scratch import scratch
from launcher.runs.folder import lock
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import FileKeys, data_sources
from rl_megatron.digests import digest_bytes
from rl_megatron.errors import ConfigError, DataError
from rl_megatron.evaluation.results import (
    WHOLE,
    Results,
    SetResult,
    differing_sampling_keys,
    finished_sets,
    make_result,
    paired_figures,
    read_results,
    unfinished,
)
from rl_megatron.evaluation.sets import EvalSet, measure
from rl_megatron.observability.intervals import Interval
from rl_megatron.observability.log import run_log
from rl_megatron.rewards.classifiers.on_ranks import local_reward
from rl_megatron.rewards.registry import resolve_rewards
from rl_megatron.weights.layouts.families import hf_layout, read_shape
from rl_megatron.weights.layouts.learner import job_shape

if TYPE_CHECKING:
    from launcher.build.data import Data
    from launcher.build.trained import TrainedModel
    from rl_megatron.interfaces import RolloutEngine
    from rl_megatron.weights.boxes import Shape


def evaluate(
    model: Annotated[
        Path | None,
        typer.Argument(help="a Hugging Face folder, a run's folder (its newest checkpoint), or checkpoints/step_N"),
    ] = None,
    overrides: Overrides = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="a name under conf/, or a YAML file [default: the run's own; for another folder tiny_cpu]",
            autocompletion=complete_config,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="name of the results file [default: the checkpoint's, with the next free number]")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="compare two files of results: print B - A", metavar="A B"),
    ] = None,
) -> None:
    """Evaluate a model on the sets of problems in eval.sets, and print figures with confidence intervals.

    Results go to eval/<name>.json, in the run's folder or here. No learner is started (docs/evaluation.md).
    """
    if compare is not None:
        if model is not None:
            raise ConfigError("--compare takes two files of rl-megatron eval and no MODEL")
        show_compared(*compare)
        return
    if model is None:
        raise ConfigError("give a MODEL: a Hugging Face folder, a run's folder or checkpoints/step_N; or --compare A B")
    from launcher.build.trained import trained_model

    asyncio.run(measure_model(trained_model(model, config, overrides or []), name))


async def measure_model(target: TrainedModel, name: str | None) -> Path:
    """Measures all sets but those that an evaluation which was stopped has measured, prints the table and writes the
    results. Returns their file. Raises RLMegatronError."""
    from launcher.build.data import load_data
    from launcher.build.trained import config_for_folder, format_variables, hugging_face, standalone_engine

    paths = (target.out / f"{target.name}{number}.json" for number in ("", *(f"-{n}" for n in range(2, 10_000))))
    path = target.out / f"{name}.json" if name else next(path for path in paths if not path.exists())
    _check(target.config)
    with _claimed(path), scratch() as spare, run_log(target.out, role="eval"):
        folder = hugging_face(target, spare)
        config = config_for_folder(target.config, folder)
        shape = job_shape(config, read_shape(folder, config.learner.model))
        raise_unread_files(config, shape)
        data = load_data(config, folder, vocab_size=shape.vocab_size)
        sets = ", ".join(f"{s.name or WHOLE} ({len(s.prompts)} problems, {s.section.samples} each)" for s in data.sets)
        said = f"{target.source}: samples of {sets} by engine {config.rollout.engine}{format_variables(config)}"
        print(said, flush=True)
        begun = Results(
            model=str(target.source),
            weights=await asyncio.to_thread(_digest, folder, config, hf_layout(shape).local_shapes(0)),
            engine=config.rollout.engine,
            config=target.config.model_dump(mode="json"),
            sets={},
        )
        begun = replace(begun, sets=_kept(path, begun, data.sets))
        file = unfinished(path)
        async with standalone_engine(config, folder, shape, target.out) as sampling:
            results = await _measured(config, sampling, data, vocab_size=shape.vocab_size, earlier=begun, file=file)
        results.write(path, private=target.config.private)
        file.unlink(missing_ok=True)
    _show(results)
    print(f"written: {path}")
    return path


def _kept(path: Path, earlier: Results, sets: Sequence[EvalSet]) -> dict[str, SetResult]:
    """Returns `finished_sets`, and prints a line about them."""
    file = unfinished(path)
    try:
        kept = finished_sets(path, earlier, sets)
    except DataError as error:
        raise DataError(f"{error}, or remove it to measure all sets") from error
    if kept:
        print(f"already measured by a stopped evaluation: {', '.join(kept)} (remove {file} to measure again)")
    return kept


async def _measured(
    config: RunConfig, engine: RolloutEngine, data: Data, *, vocab_size: int, earlier: Results, file: Path
) -> Results:
    """Returns ``earlier`` with all sets. It is written into ``file`` after each measured set."""
    from launcher.build.sampler import load_environment, make_sampler, make_set_samplers

    rewards = {name: local_reward(one, config.reward_models) for name, one in config.own_rewards.items()}
    judge = resolve_rewards(local_reward(config.reward, config.reward_models), rewards, config.sandbox)
    made = load_environment(config)
    sampler = make_sampler(config, made, engine, judge, data, vocab_size=vocab_size)
    own = make_set_samplers(config, engine, data, vocab_size=vocab_size)
    sets = dict(earlier.sets)
    try:
        shown = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*shown, console=Console(stderr=True, markup=False)) as bar:
            for one in (one for one in data.sets if (one.name or WHOLE) not in earlier.sets):
                task = bar.add_task(one.name or WHOLE, total=len(one.prompts) * one.section.samples)
                measured = await measure(own.get(one.name or "", sampler), one, config.eval, partial(bar.advance, task))
                sets[one.name or WHOLE] = make_result(one, measured)
                replace(earlier, sets=sets).write(file, private=config.private)
    finally:
        for each in (sampler, *own.values()):
            await each.wait_closed()
    return replace(earlier, sets={name: sets[name] for name in (one.name or WHOLE for one in data.sets)})


def show_compared(first: Path, second: Path) -> None:
    """Prints the paired differences of two files of results. Raises DataError."""
    one, other = read_results(first), read_results(second)
    rows = paired_figures(one, other)
    print(f"A: {first}\nB: {second}")
    table = Table("set", "figure", "A", "B", "B - A", "95 %", "problems")
    for row in rows:
        both = f"{row.first:.4f}", f"{row.second:.4f}"
        table.add_row(row.set, row.figure, *both, f"{row.difference.value:+.4f}", *_ends(row.difference, "+"))
    Console(markup=False).print(table)
    for name, unlike in differing_sampling_keys(one, other).items():
        print(f"{name}: A and B sampled differently: {', '.join(unlike)}")
    for name in sorted(one.sets.keys() ^ other.sets.keys()):
        print(f"left out: {name}, which only one of the two has")


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[None]:
    """Keeps other evaluations from the results' file while the context is open. Raises ConfigError if it is there, or
    another evaluation is to write it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("ab") as file:
        if not lock(file):
            raise ConfigError(
                f"{path}: another running evaluation will write it; wait for its end, or give another name with --name"
            )
        if path.exists():
            with contextlib.suppress(DataError):  # it holds no results, so that the sets that are measured stay
                read_results(path)
                unfinished(path).unlink(missing_ok=True)  # its evaluation was killed between the two
            raise ConfigError(f"{path} exists; remove it, or give another name with --name")
        yield


def _check(config: RunConfig) -> None:
    """Raises ConfigError with what data, engine and reward lack. The learner is not checked: none starts."""
    for key, data in data_sources(config.data).items():
        if isinstance(data, FileKeys) and data.fields["messages"] is not None:
            raise ConfigError(
                f"{key}.fields.messages={data.fields['messages']!r}: conversations have no answers to compare samples "
                "with; give a configuration with problems, for example --config gsm8k_tiny data.eval=FILE"
            )
    subject = PreflightContext(config, for_job=False)
    checks = {"data": problems_of_data.check, "engine": engine.check, "reward": own_code.check}
    problems = [
        f"reward_models.{name}.path={one.path}: it has no config.json, seen from {Path.cwd()}; give the absolute path "
        "of a sequence classifier"
        for name, one in config.reward_models.items()
        if not (one.path / "config.json").is_file()
    ]
    found = [one for name, check in checks.items() for one in run_check(name, check(subject))]
    problems += [one.text for one in (*found, *devices.open_files(config)) if one.kind == "problem"]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _digest(folder: Path, config: RunConfig, shapes: Mapping[str, Shape]) -> str:
    """Returns a digest of all tensors' checksums in learner.dtype, equal for a checkpoint and its exported folder."""
    import torch

    from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, checksums

    dtype = getattr(torch, config.learner.dtype)
    found = checksums(HFFolder(folder), shapes, dict.fromkeys(shapes, dtype))
    return digest_bytes(json.dumps(found, sort_keys=True).encode()).xxh3_128


def _show(results: Results) -> None:
    table = Table("set", "figure", "value", "95 %", "problems", "without a reward", title=results.model)
    for name, one in results.sets.items():
        errors = f"{one.measured.errors} of {len(one.measured.problems) * one.measured.samples}"
        for figure, interval in one.figures.items():
            table.add_row(name, figure, f"{interval.value:.4f}", *_ends(interval), errors)
    Console(markup=False).print(table)


def _ends(interval: Interval, sign: str = "") -> tuple[str, str]:
    """Returns an interval and its number of problems, as cells."""
    if interval.low is None or interval.high is None:
        return "one problem", str(interval.count)
    return f"{interval.low:{sign}.4f} to {interval.high:{sign}.4f}", str(interval.count)
