"""Roles on real ranks: columns of a step, critics, references and reward models in layouts of their own, and memory."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import socket
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from launcher.build.roles import load_reward_models
from launcher.controller.roles import LearnerGroup
from launcher.hosts.local import LocalLauncher
from rl_megatron.algorithms.losses import CrossEntropy
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.data.packing import Packer, make_packer, unpack
from rl_megatron.errors import RLMegatronError
from rl_megatron.interfaces import RunComponents
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.observability.recorder import Stopwatch
from rl_megatron.observability.timeline import profile_folder, read_kernels
from rl_megatron.rewards.classifiers.on_ranks import RewardModels
from rl_megatron.rewards.registry import resolve_rewards
from rl_megatron.training.scores import Packers, ScoredSamples, score_batch
from rl_megatron.training.update import PolicyUpdate
from rl_megatron.types import GenerationRequest, ParallelDims, Prompt, RewardResult, Samples, SamplingParams
from rl_megatron.weights.layouts.families import read_shape
from tests.completions import completion
from tests.distributed.ranks import ragged_samples
from tests.samples import sequences_of

pytestmark = pytest.mark.usefixtures("forked_node")
_PIDFD_GETFD = 438  # a system call of Linux 5.6
LENGTHS = [7, 12, 30, 19] + [500] * 96
PROMPT = 5
TINY = TinySizes(num_layers=2, hidden_size=32, num_experts=4)


def sampled(of: Sequence[int] = LENGTHS) -> Samples:
    """Rows of random tokens, sampled after the prompt."""
    g, lengths = torch.Generator().manual_seed(0), torch.tensor(of)
    ends = lengths.cumsum(0)
    rows = [torch.randint(0, 256, (length + 1,), generator=g) for length in of]
    place = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - lengths, lengths)
    mask = place >= PROMPT - 1
    logprobs = -torch.rand(len(mask), generator=g) * mask
    return sequences_of(
        of,
        input_ids=torch.cat([row[:-1] for row in rows]),
        targets=torch.cat([row[1:] for row in rows]),
        mask=mask,
        rollout_logprobs=logprobs,
        old_logprobs=logprobs.clone(),
    )


def written() -> int:
    """Bytes that this process has written, to the ranks' streams and anywhere else."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def received(pid: int) -> int:
    """Bytes that all sockets of a process have received over TCP, as the kernel counts them."""
    process, total = os.pidfd_open(pid), 0
    for number in map(int, os.listdir(f"/proc/{pid}/fd")):
        file = ctypes.CDLL(None).syscall(_PIDFD_GETFD, process, number, 0)
        assert file >= 0, "the kernel refuses to show another process's sockets"
        if stat.S_ISSOCK(os.fstat(file).st_mode):
            with socket.socket(fileno=file) as one:
                if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                    told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += int.from_bytes(told[128:136], "little")  # tcpi_bytes_received
        else:
            os.close(file)
    os.close(process)
    return total


def by_transformers(model: Path, samples: Samples, row: int) -> Tensor:
    first, stop = samples.cu_seqlens[row : row + 2].tolist()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model)(samples.input_ids[None, first:stop]).logits[0]
    return logits.float().log_softmax(-1).gather(1, samples.targets[first:stop, None]).squeeze(1)


async def replayed(roles: RunComponents, packer: Packer, samples: Samples) -> None:
    """Routers that take the experts of a pass before give its log-probs; a stage reads its own layers' alone."""
    assert isinstance(roles.policy, LearnerGroup)
    batch = packer.pack(samples)
    said = await roles.policy.score(batch, frozenset({"logprobs", "routes"}))
    logprobs, routes = (unpack(batch, said[what], samples) for what in ("logprobs", "routes"))
    assert routes.shape == (len(samples.targets), 2, TINY.experts_per_token)
    ranks = [worker.process.pid for worker in roles.policy._group.workers]
    bytes_read = []
    for given in (None, routes, 3 - routes):
        again = replace(samples, input_ids=samples.input_ids.clone(), extra={} if given is None else {"routes": given})
        before = [received(pid) for pid in ranks]
        batch = packer.pack(again)
        found = unpack(batch, (await roles.policy.score(batch, frozenset({"logprobs"})))["logprobs"], again)
        bytes_read.append([received(pid) - old for pid, old in zip(ranks, before, strict=True)])
        differs = (found - logprobs).abs().max().item()
        assert differs > 0.1 if given is not None and given is not routes else differs < 1e-5
    of_stage = routes.nbytes / 2 / 2  # of a data-parallel rank's rows, one layer
    for rank in (2, 3):  # the second stage; the first ranks have theirs by a pipe from the controller
        assert (bytes_read[1][rank] - bytes_read[0][rank]) / of_stage == pytest.approx(1.0, abs=0.1)


def test_a_step_of_two_data_parallel_ranks_with_two_stages(tmp_path: Path) -> None:
    """Log-probs are transformers'; bytes are counted at the streams; the last pass ends the run."""
    keys = ("learner.threads=1", "learner.ep=1", "learner.dp=2", "learner.pp=2", "rollout.temperature=1.0")
    config = load_config("tiny_cpu", keys)
    model = make_tiny_model(TINY, tmp_path / "cache", seed=3)
    samples, packer = sampled(), make_packer(config.learner, attention_cost=0.0)

    async def step(roles: RunComponents) -> None:
        before = written()
        batch = packer.pack(samples, ranks=packer.ranks(samples, limit=2, seed=0))
        said = await roles.policy.score(batch, frozenset({"logprobs"}))
        current = unpack(batch, said["logprobs"], samples)
        for row in range(3):
            first, stop = samples.cu_seqlens[row : row + 2].tolist()
            torch.testing.assert_close(current[first:stop], by_transformers(model, samples, row), atol=1e-4, rtol=0)
        scored = replace(samples, old_logprobs=current)
        for minibatch in packer.minibatches(scored, limit=2, seeds=[0]):
            await roles.policy.backward(minibatch, CrossEntropy())
            await roles.policy.step(1e-4)
        moved, tokens = written() - before, len(samples.targets) + samples.num_sequences
        columns = 4 * (tokens + int(samples.mask.sum()) + len(current))
        assert columns < moved <= 1.05 * columns, moved / columns

    async def run() -> None:
        async with LocalLauncher(model, tmp_path).start(config) as roles:
            await step(roles)
            await replayed(roles, packer, samples)
            await roles.policy.free_step()
            assert isinstance(roles.policy, LearnerGroup)
            sent = roles.policy._calls._sent
            batch = packer.pack(samples)
            sent.shares(batch, to_score=True)  # as if ranks had them
            await roles.policy.score(batch, frozenset({"logprobs"}))

    with pytest.raises(RLMegatronError, match=r"asked for 'input_ids' of rows .*, which it was not sent"):
        asyncio.run(run())


# A critic and a reference in layouts of their own: what they say and learn is what they do on the learner's ranks.
COLUMN_LENGTHS = [7, 12, 30, 19, 12, 23, 12, 8]
GIVEN = (
    *("learner.threads=1", "learner.ep=1", "learner.dp=2", "learner.max_tokens_per_micro_batch=64"),
    *(
        "rollout.max_new_tokens=16",
        "rollout.max_prompt_tokens=16",
        "rollout.temperature=1.0",
        "train.learning_rate=0.01",
    ),
    *("algorithm=ppo", "algorithm.kl.coefficient=0.1"),
)
APART = (
    *("roles.critic=separate", "roles.layouts.critic.pp=2", "roles.layouts.critic.cp=2"),
    *("roles.reference=separate", "roles.layouts.reference.tp=2", "roles.layouts.reference.ep=2"),
)


def learned(
    folder: Path, model: Path, samples: Samples, *keys: str
) -> tuple[ScoredSamples, ScoredSamples, list[float]]:
    """What all models say of the samples before and after two minibatches of real ranks, and the critic's gradient
    norms."""
    config = load_config("tiny_cpu", [*GIVEN, *keys])

    async def step(roles: RunComponents) -> tuple[ScoredSamples, ScoredSamples, list[float]]:
        for role in ("critic", "reference"):
            await roles.models[role].load_weights(model)
        update = PolicyUpdate(config=config, roles=roles, attention_cost=0.0)
        before = await score_batch(config, roles, update.packers, samples, 1, Stopwatch())
        trained = replace(samples, old_values=before.samples.old_values, ref_logprobs=before.samples.ref_logprobs)
        batches, own_columns = update._minibatches(trained, None, 1)
        _, of_critic = await update._steps(batches, own_columns, 1, Stopwatch(), [], {})
        norms = [made.result.grad_norm for made in of_critic if made is not None]
        return before, await score_batch(config, roles, update.packers, samples, 2, Stopwatch()), norms

    folder.mkdir()

    async def run() -> tuple[ScoredSamples, ScoredSamples, list[float]]:
        async with LocalLauncher(model, folder).start(config) as roles:
            async with roles.record_kernels(profile_folder(folder, 1)):
                found = await step(roles)
            assert len({event.process for event in read_kernels(folder)}) == (3 if keys else 1)
            return found

    return asyncio.run(run())


def test_scores_and_steps_are_those_of_the_learners_layout(tmp_path: Path) -> None:
    model, samples = make_tiny_model(TINY, tmp_path / "cache", seed=3), sampled(COLUMN_LENGTHS)
    returns = torch.rand(len(samples.mask), generator=torch.Generator().manual_seed(1)) * samples.mask
    samples = replace(samples, returns=returns, advantages=returns)
    there, after, norms = learned(tmp_path / "there", model, samples)
    apart, after_apart, norms_apart = learned(tmp_path / "apart", model, samples, *APART)
    for row in range(len(COLUMN_LENGTHS)):
        first, stop = samples.cu_seqlens[row : row + 2].tolist()
        said = by_transformers(model, samples, row)
        torch.testing.assert_close(apart.samples.ref_logprobs[first:stop], said, atol=1e-4, rtol=0)
    assert len(norms) == 2
    assert after.samples.old_values.abs().max() > 0.01
    torch.testing.assert_close(norms_apart, norms, atol=0, rtol=1e-5)
    for one, other in ((apart, there), (after_apart, after)):
        for name in ("ref_logprobs", "old_values"):
            torch.testing.assert_close(getattr(one.samples, name), getattr(other.samples, name), atol=1e-5, rtol=0)
        torch.testing.assert_close(one.next_values, other.next_values, atol=1e-5, rtol=0)


# A reference that follows the policy in two layouts: transformers', with numpy's moving average of exported weights.
RATE, SAVED, STEPS = 0.3, 2, 3
FOLLOWS = (
    *("learner.threads=1", "learner.max_tokens_per_micro_batch=64", "rollout.temperature=1.0"),
    *("rollout.max_new_tokens=16", "rollout.max_prompt_tokens=16"),
    *("algorithm=grpo", "algorithm.kl.coefficient=0.1", f"algorithm.kl.reference_update_rate={RATE}"),
)
LAYOUTS = {"apart": ("learner.ep=1", "learner.dp=2"), "cut": ("learner.tp=2", "learner.ep=2", "learner.etp=1")}


def followed(folder: Path, model: Path, samples: Samples, shards: Path, *keys: str, goes_on: bool) -> Tensor:
    """The reference's log-probs after all steps, whose weights are exported; or after those behind the checkpoint."""
    config = load_config("tiny_cpu", [*FOLLOWS, *keys])

    async def steps(roles: RunComponents) -> Tensor:
        if goes_on:
            await roles.policy.load(shards, {})
        else:
            await roles.models["reference"].load_weights(model)
        for number in range(SAVED + 1 if goes_on else 1, STEPS + 1):
            batch = make_packer(config.learner, attention_cost=0.0).pack(samples)
            await roles.policy.backward(batch, CrossEntropy())
            await roles.policy.step(0.02)
            await roles.policy.update_reference(RATE)
            await roles.weight_sync.push(number)
            await roles.weight_sync.export(folder / f"of_step_{number}")
            if number == SAVED and not goes_on:
                await (await roles.policy.save(shards)).finalize()
        packers = Packers(config=config, attention_cost=0.0)
        found = await score_batch(config, roles, packers, samples, 1, Stopwatch())
        assert found.samples.ref_logprobs is not None
        return found.samples.ref_logprobs

    folder.mkdir()

    async def run() -> Tensor:
        async with LocalLauncher(model, folder).start(config) as roles:
            return await steps(roles)

    return asyncio.run(run())


def test_it_is_the_average_of_what_was_exported_in_every_layout(tmp_path: Path) -> None:
    model = make_tiny_model(TINY, tmp_path / "cache", seed=3)
    samples, shards = sampled(COLUMN_LENGTHS), tmp_path / "shards"
    shards.mkdir()
    whole = followed(tmp_path / "apart", model, samples, shards, *LAYOUTS["apart"], goes_on=False)
    resumed = followed(tmp_path / "cut", model, samples, shards, *LAYOUTS["cut"], goes_on=True)
    mean = shutil.copytree(model, tmp_path / "mean") / "model.safetensors"
    for number in range(1, STEPS + 1):
        now = load_file(tmp_path / "apart" / f"of_step_{number}" / "model.safetensors")
        held = load_file(mean)
        assert held.keys() == now.keys()
        moved = {name: np.float32(1 - RATE) * held[name] + np.float32(RATE) * now[name] for name in held}
        save_file(moved, mean, metadata={"format": "pt"})
    for row in range(len(COLUMN_LENGTHS)):
        first, stop = samples.cu_seqlens[row : row + 2].tolist()
        said = by_transformers(mean.parent, samples, row)
        for found in (whole, resumed):
            torch.testing.assert_close(found[first:stop], said, atol=1e-4, rtol=0)
        far = by_transformers(tmp_path / "apart" / f"of_step_{STEPS}", samples, row)
        assert (said - far).abs().max() > 0.01  # the policy itself says something else


# Reward models on ranks of their own, of two families: scores are transformers', by each model's own tokenizer.
SCORED_PROMPT = Prompt(id="p", text="12+34=", token_ids=(1, 2), answer="46")
GROUPS = (
    ["46", "a much longer answer, of several words: 46", "", "4", "é 7"],
    ["one alone", "and a longer one: " + "0123456789" * 7],
)
MOST = 64  # tokens of a micro-batch, and so of what is read of a text
WEIGHTS = {"experts": 2.0, "dense": -0.5}
SCORER_LAYOUTS = {
    "tensor and expert parallel; pipeline": ("experts.tp=2", "experts.ep=2", "dense.pp=2"),
    "data parallel with experts; context parallel": ("experts.dp=2", "experts.ep=2", "dense.cp=2"),
}


def classifiers(folder: Path, policy: Path) -> dict[str, Path]:
    """One of the policy's family, and a Llama of other sizes whose padding ends some texts."""
    torch.manual_seed(5)
    experts = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(policy, num_labels=1))
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = AutoTokenizer.from_pretrained(policy)
    (pad,) = tokens("4", add_special_tokens=False)["input_ids"]
    dense = LlamaForSequenceClassification(LlamaConfig(vocab_size=300, num_labels=1, pad_token_id=pad, **sizes))
    made = {"experts": experts, "dense": dense}
    for name, model in made.items():
        model.save_pretrained(folder / name)
        tokens.save_pretrained(folder / name)
    return {name: folder / name for name in made}


def config_of(policy: Path, folders: dict[str, Path], *layouts: str) -> RunConfig:
    keys = [f"reward_models.{name}.path={path}" for name, path in folders.items()]
    keys += [f"reward.parts.{name}.function=ranks:{name}" for name in folders]
    keys += [f"reward.parts.{name}.weight={WEIGHTS[name]}" for name in folders]
    keys += [f"roles.layouts.reward_{layout}" for layout in layouts]
    learner = ("learner.threads=1", "learner.ep=1", f"learner.max_tokens_per_micro_batch={MOST}")
    return load_config("tiny_cpu", [f"model.path={policy}", *learner, *keys])


async def scored(config: RunConfig, policy: Path, folder: Path) -> list[list[RewardResult]]:
    """What the run's reward says of all groups, which ask at once."""
    models = RewardModels(config.reward_models)
    reward = resolve_rewards(config.reward, config.own_rewards, config.sandbox, models)
    async with LocalLauncher(policy, folder).start(config) as roles:
        assert set(roles.models) == {"policy", "reward_experts", "reward_dense"}
        await load_reward_models(config, read_shape(policy), roles, models)
        asked = (reward(SCORED_PROMPT, [completion((1,))] * len(texts), texts) for texts in GROUPS)
        return list(await asyncio.gather(*asked))


def scores_by_transformers(folder: Path, text: str) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    with torch.no_grad():
        return float(model(**tokenizer(text, truncation=True, max_length=MOST, return_tensors="pt")).logits)


@pytest.mark.parametrize("layouts", SCORER_LAYOUTS.values(), ids=SCORER_LAYOUTS)
def test_scores_are_those_of_transformers_and_are_weighed(tmp_path: Path, layouts: tuple[str, ...]) -> None:
    policy = make_tiny_model(TINY, tmp_path / "cache", seed=3)
    folders = classifiers(tmp_path, policy)
    found = asyncio.run(scored(config_of(policy, folders, *layouts), policy, tmp_path))
    for texts, group in zip(GROUPS, found, strict=True):
        for text, one in zip(texts, group, strict=True):
            wanted = {name: scores_by_transformers(path, SCORED_PROMPT.text + text) for name, path in folders.items()}
            assert one.parts == pytest.approx(wanted, abs=1e-4)
            assert one.total == pytest.approx(sum(WEIGHTS[name] * wanted[name] for name in wanted), abs=2e-4)
    assert len({round(one.total, 4) for group in found for one in group}) == 7


# A rank's memory does not grow with its steps.
CYCLE = 25  # steps after which a rank gives back what it has freed
WARM, MANY_STEPS = 100 + 3 * CYCLE, 500  # with AVX-512 kernels for new shapes take 10 MB up to step 75
MOST_A_STEP = 0.02e6  # bytes a step


async def step(roles: RunComponents, number: int, g: torch.Generator) -> None:
    """Sample, train and push, on other lengths each time."""
    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=4, stop_token_ids=(257,), seed=number)
    prompts = [tuple(torch.randint(0, 256, (length,), generator=g).tolist()) for length in (3, 5, 4 + number % 9)]
    requests = [
        GenerationRequest(id=f"{number}-{i}", token_ids=ids, num_completions=8, params=params)
        for i, ids in enumerate(prompts)
    ]
    await asyncio.gather(*map(roles.engine.generate, requests))
    samples = ragged_samples(16 + number % 8, g)
    batch = Packer(dims=ParallelDims(), max_tokens=4096).pack(samples)
    await roles.policy.backward(batch, CrossEntropy())
    await roles.policy.step(1e-4)
    await roles.weight_sync.push(number)


async def test_it_stays_flat(tmp_path: Path) -> None:
    """20 seconds."""
    config = load_config("tiny_cpu", ["learner.threads=1", "learner.ep=1", "learner.dp=1"])
    model = make_tiny_model(TinySizes(num_layers=1, hidden_size=32, num_experts=4), tmp_path / "cache", seed=3)
    g = torch.Generator().manual_seed(5)
    held: list[int] = []
    async with LocalLauncher(model, tmp_path).start(config) as roles:
        assert isinstance(roles.policy, LearnerGroup)
        (worker,) = roles.policy._group.workers
        rank = psutil.Process(worker.process.pid)
        for number in range(1, MANY_STEPS + 1):
            await step(roles, number, g)
            held.append(rank.memory_info().rss)
    before, after = (min(held[last - 3 * CYCLE : last]) for last in (WARM, MANY_STEPS))
    assert (after - before) / (MANY_STEPS - WARM) <= MOST_A_STEP
