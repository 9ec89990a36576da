"""``rl-megatron doctor mismatch``: experiments with learner and engine of a run; prints a table of causes."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from launcher.build.data import Data
from launcher.build.model import starting_folder
from launcher.build.roles import RunParts, find_allocation, run_components
from launcher.controller.roles import WeightGroup
from launcher.preflight.checks import preflight
from launcher.runs.folder import mirror_path
from launcher.runs.stop import stop_signals
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import FileKeys, data_sources, source_name
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.engines.engine import ServerEngine
from rl_megatron.errors import ConfigError, SyncError
from rl_megatron.feature import wanted
from rl_megatron.files import write_atomically
from rl_megatron.interfaces import RunComponents
from rl_megatron.models.shape import ModelShape
from rl_megatron.observability.log import run_log
from rl_megatron.observability.progress import Progress
from rl_megatron.rewards.classifiers.on_ranks import RewardModels
from rl_megatron.rewards.registry import resolve_rewards
from rl_megatron.training.checkpoints import file_digests, latest
from rl_megatron.types import Prompt
from rl_megatron.weights.checkpoints.megatron import is_megatron
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, checksums
from rl_megatron.weights.routes.mirror import dtypes, read_seal, shapes
from tools.lab.mismatch.causes import CAUSES, Finding, Setting, TokenizerCheck, WeightCheck, judge
from tools.lab.mismatch.experiments import Bench, Parameters, run_experiments

_TOKENIZED_PROMPTS = 8
_STYLES = {"guilty": "bold red", "noise": "yellow", "not guilty": "green", "not checked": "magenta"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The run to examine, and the folder for logs and mismatch.json."""

    config: RunConfig
    folder: Path
    checkpoint: Path | None  # None: the model that a run starts from


def find_target(name: str, overrides: Sequence[str]) -> Target:
    """Returns the target of a run's folder or a configuration. Raises ConfigError, also if the job samples nothing."""
    path = Path(name)
    of_run = path.is_dir()
    config = load_config(str(path / "config.yaml") if of_run else name, overrides)
    if not config.kind.samples:
        raise ConfigError(
            f"{name}: job={config.job} samples nothing, so there are no log-probs of an engine to compare; give a run "
            "of job=rl, or a configuration of one with the model, as tiny_cpu model.path=FOLDER"
        )
    if of_run:
        return Target(config=config, folder=path / "doctor", checkpoint=latest(path / "checkpoints"))
    return Target(config=config, folder=config.run.dir / f"doctor-{path.stem}", checkpoint=None)


async def diagnose(target: Target, *, num_prompts: int, num_completions: int) -> bool:
    """Prints the table and writes ``mismatch.json``. Returns True if a cause is guilty or could not be checked.

    Raises RLMegatronError.
    """
    config, folder = _with_every_version_served(target.config), target.folder
    if config.rollout.served and config.rollout.server.colocated:
        parked = " and learner.offload.while_sampling=null" if config.learner.offload.while_sampling else ""
        raise ConfigError(
            "rollout.server.colocated=true: servers release their weights whenever the learner computes, but here both "
            f"are asked in turn; add rollout.server.colocated=false{parked}, with memory for both"
        )
    preflight(config).raise_problems()
    folder.mkdir(parents=True, exist_ok=True)
    models = RewardModels(config.reward_models)
    parts = RunParts(
        config=config,
        folder=folder,
        reward=resolve_rewards(config.reward, config.own_rewards, config.sandbox, models),
        allocation=find_allocation(config, folder),
        reward_models=models,
    )
    progress = Progress(1, "plain", "doctor mismatch", run_folder=folder)
    with run_log(folder, role="doctor"), progress, stop_signals(progress) as stop:
        async with run_components(parts, progress, stop) as (roles, data, shape):
            kept = starting_folder(config) if target.checkpoint is None else None
            examination = _Examination(config=config, folder=folder, roles=roles, data=data, shape=shape, kept=kept)
            if target.checkpoint is not None:
                progress.note(f"weights of {target.checkpoint}")
                await roles.policy.load(target.checkpoint / "learner", file_digests(target.checkpoint / "learner"))
            progress.note(f"sampling {num_prompts} x {num_completions} completions and scoring them")
            found = await examination.findings(num_prompts, num_completions)
    _show(found, str(target.checkpoint or f"{config.model.path or 'the tiny model'}, untrained"))
    report = {"checkpoint": target.checkpoint and str(target.checkpoint), "findings": [asdict(f) for f in found]}
    write_atomically(folder / "mismatch.json", json.dumps(report, indent=1).encode())
    print(f"written: {folder / 'mismatch.json'}; docs/troubleshooting.md says how to read it")
    return any(f.verdict in ("guilty", "not checked") for f in found)


def _with_every_version_served(config: RunConfig) -> RunConfig:
    """Returns the configuration without a probe, which would reject the versions to examine."""
    server = config.rollout.server.model_copy(update={"probe_tolerance": math.inf})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"server": server})})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Examination:
    config: RunConfig
    folder: Path
    roles: RunComponents
    data: Data
    shape: ModelShape
    kept: Path | None  # the folder of the learner's weights; None if it holds others

    async def findings(self, num_prompts: int, num_completions: int) -> list[Finding]:
        """Returns the findings on every cause."""
        try:
            await self.roles.weight_sync.push(1)
        except SyncError as error:
            return _not_served(str(error))
        prompts = PromptStream(self.data.train, seed=self.config.seed).next_prompts(
            min(num_prompts, len(self.data.train))
        )
        rollout, dtype = self.config.rollout, self.config.learner.dtype
        setting = Setting(
            learner_dtype=dtype,
            engine_dtype=dtype,  # a server with another dtype was refused
            configured=Parameters(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k),
            served=rollout.served,
            replays="routes" in self.config.required_columns.keys() - wanted(self.config),  # not the learner's own
            head_dtype=self.config.learner.head_dtype,
        )
        outcomes = await run_experiments(self._bench(), prompts, completions=num_completions, worth=setting.noise)
        weights, tokenizer = await self._weights(), await self._tokenizer(prompts)
        return await asyncio.to_thread(judge, outcomes, setting, weights, tokenizer)

    def _bench(self) -> Bench:
        rollout, learner = self.config.rollout, self.roles.policy
        asked = self.config.required_columns
        routed = not rollout.served or "routes" in asked
        kept = ("kept",) if "kept" in asked else ()
        return Bench(
            learner=learner,
            engine=self.roles.engine,
            dims=self.config.learner.dims,
            max_tokens=self.config.learner.max_tokens_per_micro_batch,
            padding=self.config.learner.padding,
            vocab_size=self.shape.vocab_size,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_new_tokens=rollout.max_new_tokens,
            stop_token_ids=() if rollout.ignore_eos else self.data.stop_token_ids,
            special_token_ids=_special(self.data.tokenizer),
            columns=(*kept, *(("routes",) if self.shape.num_experts and routed else ())),
            seed=self.config.seed,
        )

    async def _weights(self) -> WeightCheck:
        """Compares servers with the model's folder or, if the learner has trained, with the learner's checksums.
        Compares engines in the learner's processes with the same weights pushed again."""
        roles = self.roles
        if isinstance(roles.engine, ServerEngine):
            path = mirror_path(self.config, self.folder)
            expected, where = await asyncio.to_thread(self._expected, path)
            answers = await roles.engine.weights.comparable(path, expected)
            differing = tuple(f"{name} at {url}" for url, (_, names) in answers.items() for name in names)
            total = len(await asyncio.to_thread(shapes, path))
            compared = min(count for count, _ in answers.values())
            how = f"with {where}" if compared else "(it keeps none as it was sent)"
            return WeightCheck(compared=compared, total=total, differing=differing, how=how)
        assert isinstance(roles.weight_sync, WeightGroup)
        before = await roles.weight_sync.mirror_checksums()
        await roles.weight_sync.push(2)
        after = await roles.weight_sync.mirror_checksums()
        pairs = list(zip(before, after, strict=True))
        differing = tuple(
            f"{name} on rank {rank}" for rank, (b, a) in enumerate(pairs) for name in a if b[name] != a[name]
        )
        total = sum(map(len, after))
        return WeightCheck(
            compared=total, total=total, differing=differing, how="with the same weights pushed once more"
        )

    def _expected(self, path: Path) -> tuple[dict[str, int], str]:
        """Returns the checksums that servers should hold, and a text that names their source."""
        quantized = self.config.rollout.server.quantization != "none"
        if self.kept is None or quantized or is_megatron(self.kept):
            return dict(read_seal(path, 1).checksums), "the learner's weights"
        return checksums(HFFolder(self.kept), shapes(path), dtypes(path)), str(self.kept)

    async def _tokenizer(self, prompts: Sequence[Prompt]) -> TokenizerCheck:
        engine, sources = self.roles.engine, data_sources(self.config.data)
        if not isinstance(engine, ServerEngine):
            return TokenizerCheck(compared=0, differing=(), how="the engine sees token ids alone")
        templated = {
            source_name(key) for key, one in sources.items() if isinstance(one, FileKeys) and one.chat_template
        }
        differing, asked = [], prompts[:_TOKENIZED_PROMPTS]
        for prompt in asked:
            ids = await engine.tokenized(prompt.text, add_special_tokens=prompt.source not in templated)
            if ids is None:
                return TokenizerCheck(compared=0, differing=(), how="the server has no tokenizer: it gets token ids")
            if ids != prompt.token_ids:
                differing.append(f"{prompt.id!r}: {list(ids[:8])}..., here {list(prompt.token_ids[:8])}...")
        how = f"its tokenizer gives the same ids for {len(asked)} prompts"
        return TokenizerCheck(compared=len(asked), differing=tuple(differing), how=how)


def _special(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    named = {name: getattr(tokenizer, f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")}
    return {name: token for name, token in named.items() if token is not None}


def _not_served(error: str) -> list[Finding]:
    """Returns the findings if an engine could not load the weights: nothing else can be checked."""
    fix = "docs/how_it_works.md: what a push verifies"
    rest = [Finding(cause=cause, verdict="not checked", evidence="no weights are served") for cause in CAUSES[1:]]
    return [Finding(cause="weights", verdict="guilty", evidence=error, fix=fix), *rest]


def _show(found: Sequence[Finding], what: str) -> None:
    table = Table("cause", "verdict", "evidence", "fix", title=f"mismatch of {what}", show_lines=True)
    for finding in found:
        verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
        table.add_row(finding.cause, verdict, finding.evidence, finding.fix)
    Console(markup=False).print(table)
