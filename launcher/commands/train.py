"""``rl-megatron train``: checks the configuration, then runs it from its first step or a checkpoint to its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typing_extensions import override

from launcher.build.model import starting_shape
from launcher.commands.report import RunCosts, recorded
from launcher.completion import Overrides, complete_config
from launcher.preflight.checks import preflight
from launcher.preflight.own_code import find_missing_code
from launcher.processes.environment import gc_disabled
from launcher.processes.stacks import LoopWatch
from launcher.runs.folder import NameTaken, choose, claim, refuse_copied
from launcher.runs.stop import StopSignal, stop_signals
from launcher.servers.versions import other_container
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.run import RunConfig
from rl_megatron.entries import PLANNER, load_own
from rl_megatron.errors import RLMegatronError, StopRequested, wait_or_stop
from rl_megatron.files import write_atomically
from rl_megatron.interfaces import RewardFunction
from rl_megatron.observability.log import log_failures, log_outcome, run_log
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder
from rl_megatron.observability.report import write_report
from rl_megatron.observability.sinks.sink import RunEnd, Sinks, SinkSettings
from rl_megatron.observability.verdicts import Verdict, describe_verdicts
from rl_megatron.rewards.classifiers.on_ranks import RewardModels
from rl_megatron.rewards.registry import resolve_rewards

if TYPE_CHECKING:
    from launcher.build.data import Data
    from launcher.build.roles import RunParts
    from rl_megatron.training.checkpoints import Checkpoint
    from rl_megatron.training.loop import Loop

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 60.0  # pause between two reports of a running run
_REPORT_SHARE = 30  # times as long as a report took passes until the next


def train(
    overrides: Overrides = None,
    config: Annotated[
        str, typer.Option(help="a name under conf/, or a YAML file", autocompletion=complete_config)
    ] = "tiny_cpu",
    resume: Annotated[bool, typer.Option("--resume", help="continue the run from its last checkpoint")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="check the configuration on this machine, and start nothing")
    ] = False,
) -> None:
    """Train a policy by reinforcement learning; everything goes to runs/<name>/.

    Ctrl-C (or SIGTERM) finishes the current step, saves and exits with status 0. A second Ctrl-C exits immediately,
    with status 130.
    """
    loaded = load_config(config, overrides or [], missing=find_missing_code)
    if resume:
        refuse_copied(loaded, Path(config), overrides or [])
    named = choose(loaded, Path(config).stem, resume=resume)
    findings = preflight(named, tries=check)
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
        with gc_disabled():
            import launcher.build.jobs  # noqa: F401

        while True:
            try:
                asyncio.run(run_training(named, reward, models, resume=resume))
                return
            except NameTaken:
                if loaded.run.name is not None:
                    raise
                named = choose(loaded, Path(config).stem, resume=resume)
                folder = named.run.dir / str(named.run.name)
                print(f"rl-megatron: run {folder}, because another run took that name", flush=True)
    except KeyboardInterrupt:
        goes_on = "--resume continues from the last checkpoint, or starts over if there is none"
        said = goes_on if folder.is_dir() else "the run had not started, so start it again"
        print(f"interrupted; {said}", file=sys.stderr)
        raise typer.Exit(130) from None


async def run_training(config: RunConfig, reward: RewardFunction, models: RewardModels, *, resume: bool) -> Path:
    """Runs to the end, or to a signal and then saves a checkpoint. Returns the run's folder. Raises RLMegatronError."""
    from launcher.build.roles import RunParts, find_allocation
    from launcher.runs.resume import find, has_trained, record_start

    assert config.run.name is not None
    folder = config.run.dir / config.run.name
    with claim(folder, resume=resume) as claimed:
        start = find(config, folder) if resume else None
        parts = RunParts(
            config=config,
            folder=folder,
            check_claim=claimed,
            hold=claimed.hold,
            reward=reward,
            reward_models=models,
            allocation=find_allocation(config, folder),
            is_resume=start is not None or has_trained(folder),
        )
        save_resolved(config, folder / "config.yaml")
        progress = Progress(
            config.train.steps,
            config.log.progress,
            config.run.name,
            run_folder=folder,
            needs_differences=config.algorithm.needs_differences,
        )
        with run_log(folder, role="controller"), log_failures(), progress, stop_signals(progress) as stop:
            engine = config.rollout.python if other_container(config) is None else None
            at = start.state.step if start else 0
            for line in await asyncio.to_thread(record_start, folder, step=at, engine=engine):  # git may be slow
                progress.note(line)
                logger.info(line)
            _plan(config, folder)
            loop_watch = LoopWatch(config, folder / "stacks")
            advice = f"continue with: rl-megatron train --config {shlex.quote(str(folder / 'config.yaml'))} --resume"
            finished: bool | None = None  # not begun
            try:
                async with _open_sinks(config, folder, start) as sinks, keep_report_current(config, folder):
                    finished = await _train(parts, progress, stop, start, loop_watch, sinks)
                    sinks.end = RunEnd(state="finished") if finished else sinks.end
            except StopRequested as early:
                progress.stopped(f"{early}; nothing is lost; {advice}")
            except (RLMegatronError, OSError) as error:
                if (first := _hidden(error)) is not None:
                    logger.error("after %s: %s", type(first).__name__, error)
                    raise first from error
                if isinstance(error, OSError):
                    claimed()  # tells why the named file cannot be written, if the folder is gone
                raise
            finally:
                loop_watch.stop()
            if stop.comes_back and not finished and parts.allocation is not None:
                parts.allocation.ask_requeue()
            if finished or (finished is False and stop.exports):  # else its job ends soon: a report may take minutes
                await _report(config, folder, progress, stop)
            if finished is False:
                progress.stopped(f"stopped and saved; {advice}")
            log_outcome("finished" if finished else "stopped")
    return folder


@contextlib.asynccontextmanager
async def _open_sinks(config: RunConfig, folder: Path, start: Checkpoint | None) -> AsyncIterator[Sinks]:
    """Context of the run's sinks. They get its end, with the error that ends it, and a bounded time to close."""
    settings = SinkSettings(
        folder=folder,
        project=config.log.project,
        is_fresh=start is None,
        needs_differences=config.algorithm.needs_differences,
        dtype=config.learner.dtype,
        environment=dict(os.environ),
    )
    sinks = Sinks(config.log.sinks, settings)
    try:
        yield sinks
    except StopRequested:
        raise
    except Exception as error:
        sinks.end = RunEnd(state="failed", message=f"{_hidden(error) or error}")
        raise
    finally:
        await asyncio.to_thread(sinks.close)


def _hidden(error: BaseException) -> RLMegatronError | None:
    """Returns why the run ends, if ``error`` is of a file that could not be closed or removed afterwards."""
    while isinstance(error, OSError) and not error.__suppress_context__ and error.__context__ is not None:
        error = error.__context__
        if isinstance(error, RLMegatronError):
            return error
    return None


async def _report(config: RunConfig, folder: Path, progress: Progress, stop: StopSignal) -> None:
    """Writes the run's last report in a thread: a long run's takes seconds, in which a signal leaves it out. All else
    is written by now, so no fault in it makes the run one that failed."""
    costs, left_out = _LoggedCosts(config, progress), partial(_left_out, progress)
    later = f"rl-megatron report {shlex.quote(str(folder))} writes it"
    verdicts = list[Verdict]()
    writing = asyncio.to_thread(_write_page, folder, costs, left_out, on_verdicts=verdicts.extend)
    try:
        with stop.reporting() as asked:
            page = await wait_or_stop(asked, writing)
        for line in (*describe_verdicts(verdicts), f"report: {page}"):
            progress.note(line)
    except StopRequested:
        progress.note(f"the report is left out; {later}")
    except Exception as error:
        ours = not isinstance(error, (RLMegatronError, OSError))
        logger.warning("the report could not be written: %s; %s", error, later, exc_info=ours)
    finally:
        costs.is_over = True


@contextlib.asynccontextmanager
async def keep_report_current(config: RunConfig, folder: Path, seconds: float = _REPORT_SECONDS) -> AsyncIterator[None]:
    """Writes the report again while the context is open, at most once in so many seconds; no fault in it ends a run."""
    writing = asyncio.create_task(_write_reports(config, folder, seconds), name="report")
    try:
        yield
    finally:
        writing.cancel()
        await asyncio.wait([writing])


async def _write_reports(config: RunConfig, folder: Path, seconds: float) -> None:
    """Writes reports in a thread, which has ended when this has: a late one would replace the run's last report."""
    pause = seconds
    while True:
        await asyncio.sleep(pause)
        costs, began = _EndingCosts(config), time.monotonic()
        writing = asyncio.ensure_future(asyncio.to_thread(_write_page, folder, costs, logger.debug, again=pause))
        try:
            await asyncio.wait([writing])
        finally:
            costs.is_over = True
            await asyncio.wait([writing])
            if error := writing.exception():  # raised before the first row, for example
                logger.debug("the report could not be written now: %s", error)
        pause = max(seconds, _REPORT_SHARE * (time.monotonic() - began))


def _write_page(folder: Path, costs: RunCosts, left_out: Callable[[str], None], **options: Any) -> Path:
    given = {"costs": costs, "note": costs.note, "needs_differences": costs.needs_differences, **options}
    return write_report([folder], folder / "report.html", left_out, **given)


class _EndingCosts(RunCosts):
    """RunCosts that end the report's thread, for which Python would wait, once the report is no longer needed."""

    is_over = False

    @override
    def add(self, row: Mapping[str, Any]) -> None:
        """Raises StopRequested."""
        if self.is_over:
            raise StopRequested("the report is no longer needed")
        super().add(row)


class _LoggedCosts(_EndingCosts):
    """RunCosts that report their lines, too."""

    def __init__(self, config: RunConfig, progress: Progress) -> None:
        super().__init__(config)
        self._progress = progress

    @override
    def lines(self) -> list[str]:
        for line in (found := super().lines()):
            self._progress.note(line)
        return found


def _left_out(progress: Progress, why: str) -> None:
    progress.note(f"not in the report: {why}")


def _plan(config: RunConfig, folder: Path) -> None:
    """Writes the planner's expected metrics of a run on GPUs, for the report. No fault in it ends a run."""
    if config.learner.device == "cpu":
        return
    try:
        found = load_own(PLANNER, "metrics")(config, starting_shape(config))
        write_atomically(folder / "plan.json", json.dumps(found).encode())
    except Exception as error:
        logger.warning("the report plans only memory and MFU: %s", error, exc_info=True)


async def _train(
    parts: RunParts,
    progress: Progress,
    stop: StopSignal,
    start: Checkpoint | None,
    loop_watch: LoopWatch,
    sinks: Sinks,
) -> bool:
    """Trains, and exports the model unless a stop says not to. Returns whether every step was made."""
    from launcher.build.jobs import make_loops
    from launcher.build.roles import run_components

    async with run_components(parts, progress, stop) as (roles, data, shape):
        parts = replace(parts, config=_resolve_steps(parts.config, data, progress))
        section, a = parts.config.log, parts.config.algorithm
        is_taught = a.needs_top or a.nll_coefficient > 0
        held = recorded(parts.config)
        recorder = Recorder(
            parts.folder,
            section,
            progress,
            held,
            before_row=parts.hold,
            is_taught=is_taught,
            decode=data.tokenizer.decode,
            sinks=sinks,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, recorder.close)
            warm_start, loop = make_loops(parts, shape, roles, data, recorder, stop)
            loop_watch.begin()
            of_warm_start = start is None or start.state.warm_start_step is not None
            first = warm_start if of_warm_start and warm_start is not None else loop
            if start is None:
                # killed before its first checkpoint, a run starts over
                await asyncio.to_thread(recorder.truncate_after, -1)
            else:
                progress.note(f"resuming from {start.folder}{_nothing_left_message(start, parts.config)}")
                await wait_or_stop(stop, _restore(first, start))
            if warm_start is not None and first is warm_start:
                if warm_start.pace.steps:
                    progress.phase(warm_start.job.name, total=warm_start.pace.steps)
                if not await warm_start.run():
                    return False
            progress.phase(loop.job.name)
            finished = await loop.run()
            if finished or stop.exports:
                if not parts.config.kind.samples:
                    await roles.weight_sync.push(loop.steps_done)  # no step did
                await loop.export(roles.weight_sync, parts.folder / f"hf_step_{loop.steps_done:06d}")
            return finished


def _nothing_left_message(start: Checkpoint, config: RunConfig) -> str:
    """Returns the text about a checkpoint after which no step is left, or an empty string."""
    if start.state.step < config.train.steps or start.state.warm_start_step is not None:
        return ""
    return f": the run is at its last step{'; give a larger train.steps' if config.written_epochs is None else ''}"


def _resolve_steps(config: RunConfig, data: Data, progress: Progress) -> RunConfig:
    """Returns the configuration with as many steps as ``epochs`` of written data take, if that is given."""
    from rl_megatron.training.optimizer_steps import steps_for_epochs

    if (epochs := config.written_epochs) is None:
        return config
    steps = steps_for_epochs(epochs, len(data.train), config.written.batch_size)
    progress.note(f"{config.job}.epochs={epochs:g} of {len(data.train)} rows: {steps} steps")
    progress.total = steps
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


async def _restore(loop: Loop, start: Checkpoint) -> None:
    done = start.state.warm_start_step
    await asyncio.to_thread(loop.recorder.truncate_after, start.state.step, warm_start_step=done)
    await loop.restore(start, start.state.step if done is None else done)
