"""The composition root: chooses the launcher for a RunConfig, starts its processes and loads the data."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from launcher.build.data import Data, training_data
from launcher.build.model import starting_folder
from launcher.hosts.local import LocalLauncher
from launcher.hosts.sites import server_sites
from launcher.hosts.slurm.allocation import Allocation
from launcher.hosts.slurm.launcher import SlurmLauncher
from launcher.processes.guards import HERE
from launcher.processes.own_thread import DedicatedThread
from launcher.runs.stop import StopSignal
from launcher.servers.engines import load_adapter
from launcher.servers.pool import ServerLauncher
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.reward import REWARD
from rl_megatron.data.packing import causal_attention_cost, make_packer
from rl_megatron.errors import ConfigError, wait_or_stop
from rl_megatron.feature import served_models
from rl_megatron.interfaces import Launcher, RewardFunction, RunComponents, ignore_progress
from rl_megatron.models.shape import ModelShape
from rl_megatron.observability.progress import Progress
from rl_megatron.placement.ranks import ranks_by_role
from rl_megatron.rewards.classifiers.on_ranks import RewardModels
from rl_megatron.training.scores import RankedScores
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.layouts.learner import job_shape, role_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """The parts of a run besides processes and data. Building them finds errors before any process starts."""

    config: RunConfig
    folder: Path
    reward: RewardFunction
    allocation: Allocation | None  # None: the run uses no Slurm allocation
    check_claim: Callable[[], None] = lambda: (
        None
    )  # raises CheckpointError where the folder is another than at the start
    hold: Callable[[], None] = lambda: None  # takes the run's lock again if it was removed; raises CheckpointError
    reward_models: RewardModels = field(default_factory=RewardModels)  # ranks load them
    is_resume: bool = False  # its servers have served this run before


@contextlib.asynccontextmanager
async def run_components(
    parts: RunParts, progress: Progress, stop: StopSignal
) -> AsyncIterator[tuple[RunComponents, Data, ModelShape]]:
    """Starts learner and engine; yields them, the data and the model's shape. Leaving the context ends all processes.

    Raises StopRequested if a stop is requested first.
    """
    async with contextlib.AsyncExitStack() as stack:
        yield await wait_or_stop(stop, _start(stack, parts, progress, stop))


async def _start(
    stack: contextlib.AsyncExitStack, parts: RunParts, progress: Progress, stop: StopSignal
) -> tuple[RunComponents, Data, ModelShape]:
    """Starts learner and engine; ``stack`` gets the callbacks that end them."""
    config, thread = parts.config, DedicatedThread("start")  # a stop does not wait for this thread
    stack.callback(thread.close)
    progress.note("preparing the model")
    model_folder = await thread(starting_folder, config)
    shape = job_shape(config, read_shape(model_folder, config.learner.model))
    counted = ", ".join(f"{count} {role} processes" for role, count in ranks_by_role(config).items())
    progress.note(f"starting {counted} and loading data")
    launcher = await thread(_launcher, parts, model_folder, shape, stop)  # it looks up nodes' names
    starting = asyncio.create_task(stack.enter_async_context(launcher.start(config, progress.note)))
    try:
        data = await thread(training_data, config, model_folder, vocab_size=shape.vocab_size)
    except BaseException:  # an error in the data is raised before all processes are up
        starting.cancel()
        await asyncio.wait([starting])
        raise
    roles = await starting
    served = await served_models(config, shape, partial(load_adapter, shape=shape), progress.note)
    roles = replace(roles, frozen_models={**roles.frozen_models, **served})
    await load_reward_models(config, shape, roles, parts.reward_models, progress.note)
    return roles, data, shape


def attention_cost(shape: ModelShape) -> float:
    """Returns the cost by which a packer balances work; see `causal_attention_cost`."""
    return causal_attention_cost(
        linear_parameters=shape.active_parameters, attention_width=shape.num_layers * shape.num_heads * shape.head_dim
    )


async def load_reward_models(
    config: RunConfig,
    shape: ModelShape,
    roles: RunComponents,
    models: RewardModels,
    tell: Callable[[str], None] = ignore_progress,
) -> None:
    """Makes ranks load the reward models, before any job requests a reward. The policy has ``shape``."""
    for role, model in roles.reward_models.items():
        name = role.removeprefix(REWARD)
        tell(f"loading the reward model {name}")
        sizes = role_shape(config, shape, role)
        await model.load_weights(config.reward_models[name].path)
        packer = make_packer(config.role_learner(role), attention_cost=attention_cost(sizes))
        models.loaded[name] = RankedScores(model=model, packer=packer, vocab_size=sizes.vocab_size)


def find_allocation(config: RunConfig, folder: Path) -> Allocation | None:
    """Returns the allocation to use. Raises ConfigError if the launcher lacks one, or Ray needs another process."""
    allocation = None if config.run.launcher == "local" else Allocation.from_environment(folder, config)
    if config.run.launcher == "slurm" and allocation is None:
        raise ConfigError(
            "run.launcher=slurm, but this is not a Slurm job; use rl-megatron submit, or set run.launcher=local"
        )
    if config.run.launcher == "ray" and allocation is not None and allocation.this_node not in allocation.nodes:
        raise ConfigError(
            f"run.launcher=ray in job {allocation.id}, but this process is on {allocation.this_node}. It needs "
            f"Ray's raylet next to it, on one of the learner's nodes ({', '.join(allocation.nodes)}); use rl-megatron "
            "submit, or set run.launcher=slurm, which starts ranks from anywhere"
        )
    return allocation


def _launcher(parts: RunParts, model_folder: Path, shape: ModelShape, stop: StopSignal) -> Launcher:
    if parts.config.run.launcher == "ray":
        return _on_ray(parts, model_folder, shape, stop)
    launcher: Launcher = LocalLauncher(model_folder, parts.folder)
    if parts.allocation is not None:
        launcher = SlurmLauncher(model_folder, parts.folder, parts.allocation, stop.forward)
    if parts.config.rollout.served:
        found, host = (
            server_sites(parts.config, parts.allocation),
            parts.allocation.address() if parts.allocation else HERE,
        )
        launcher = ServerLauncher(launcher, model_folder, parts.folder, shape, found, host, resumes=parts.is_resume)
    return launcher


def _on_ray(parts: RunParts, model_folder: Path, shape: ModelShape, stop: StopSignal) -> Launcher:
    try:
        from launcher.hosts.ray.cluster import InCluster, RayCluster
        from launcher.hosts.ray.launcher import RayLauncher
    except ModuleNotFoundError as error:
        raise ConfigError("run.launcher=ray: Ray is not installed; pip install 'rl-megatron[ray]'") from error
    cluster = RayCluster(parts.config, parts.allocation, parts.folder)
    on_signal = stop.request if parts.allocation is None else stop.forward
    launcher: Launcher = RayLauncher(cluster, model_folder, parts.folder, on_signal)
    if parts.config.rollout.served:
        found = server_sites(parts.config, parts.allocation, cluster.start_guard)
        launcher = ServerLauncher(
            launcher, model_folder, parts.folder, shape, found, cluster.host, resumes=parts.is_resume
        )
    return InCluster(cluster=cluster, inner=launcher)
