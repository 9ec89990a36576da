"""Every algorithm's loss and a reference: equal in one process and cut over data, context, pipeline, tensor and expert
ranks. tests/matrix has critics."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_megatron.algorithms.auxiliary import KtoLoss
from rl_megatron.algorithms.losses import policy_loss as loss_of
from rl_megatron.algorithms.losses import token_weight
from rl_megatron.algorithms.segments import sequence_ids
from rl_megatron.columns import Ragged
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import Packer, unpack
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.training.optimizer_steps import CompletedStep
from rl_megatron.types import Batch, Loss, Samples, SkippedStep, Want
from rl_megatron.weights.layouts.families import read_shape
from tests.distributed.ranks import run_ranks
from tests.rows import NAMES, config_of, policy_loss
from tests.samples import sequences_of, train_step

OfLayout = Callable[[str], list[dict[str, Any]]]
OF_BELOW = (
    *("cispo", "dr_grpo", "luffy", "gspo", "topr", "sapo", "gmpo", "decoupled_ppo"),
    *("kl and entropy", "kl_cov", "gkd", "interpolated"),
    *("dpo", "rejected, worst", "rejected, sequence", "turns", "prompts", "kept"),
)
"""Losses of every aggregation, ratio level and term."""
STAGED = ("alone, two layers", "pp2")
"""Layouts of two layers, the least that stages take; the others have one, for losses see none."""
BELOW = (*STAGED, "tp2-ep2")
"""Layouts that cut below the log-probs, of which a loss sees nothing: settings of one function stand for its rows."""
TOP = 9
KEYS: dict[Want, str] = {"logprobs": "score", "entropy": "entropy", "top": "top", "logit_norms": "norms"}
CUT: dict[str, dict[str, int]] = {"dp2": {"dp": 2}, "cp2": {"cp": 2}, "pp2": {"pp": 2}, "tp2-ep2": {"tp": 2, "ep": 2}}
LAYOUTS = {"alone": {}, "alone, two layers": {}, **CUT}


def make_samples() -> Samples:
    """24 ragged sequences whose log-probs, reference and values differ from what the model will say by a little."""
    g = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 40, (24,), generator=g)
    n = int(lengths.sum())
    position = torch.arange(n) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    near = -5.5 + 0.3 * torch.randn(3, n, generator=g)  # of a random policy over 256 tokens
    mask = position >= 2
    named = torch.randn(n, 256, generator=g).log_softmax(1).topk(7)
    return sequences_of(
        lengths,
        input_ids=torch.randint(0, 256, (n,), generator=g),
        targets=torch.randint(0, 256, (n,), generator=g),
        mask=mask,
        advantages=torch.randn(n, generator=g),
        rollout_logprobs=near[0],
        old_logprobs=near[1],
        ref_logprobs=near[2],
        old_values=0.1 * torch.randn(n, generator=g),
        returns=torch.randn(n, generator=g),
        proximal_share=torch.rand(n, generator=g),
        nll_weights=0.01 * (position % 3 == 0) * mask,
        old_kl_weights=2.0 * (position % 5 == 0) * mask,
        ref_top=torch.stack([named.indices.float(), named.values], 1),
    )


@functools.cache
def jobs() -> dict[str, tuple[Loss, int, Samples]]:
    """Loss, unit of packing and samples of each row of conf/algorithm/, and of the terms beside them."""
    samples = make_samples()
    plain = replace(samples, proximal_share=None, nll_weights=None, old_kl_weights=None, ref_top=None)
    grouped = replace(plain, group_of=torch.arange(samples.num_sequences) // 6)
    out: dict[str, tuple[Loss, int, Samples]] = {}
    for name in NAMES:
        config = config_of(name)
        unit = 2 if config.algorithm.pairs else 1
        held = samples.old_kl_weights if config.algorithm.tokens.choose == "kl_cov" else None
        weight = token_weight(grouped, config.algorithm.aggregation, max_length=1)
        row = replace(plain, nll_weights=samples.nll_weights, old_kl_weights=held, token_weight=weight)
        if config.algorithm.demonstration_gamma is not None:
            row = replace(row, demonstrated=(sequence_ids(samples.cu_seqlens) % 4 == 0))
        taught = config.algorithm.needs_top
        out[name] = of(config, float(taught)), unit, replace(row, ref_top=samples.ref_top if taught else None)
    config = load_config("tiny_cpu", ["algorithm=grpo", "algorithm.entropy_coefficient=0.1"])
    out["kl and entropy"] = of(config, 0.3), 1, plain
    for level, high in (("worst", 0.8), ("sequence", 0.1)):
        rejected = {"mode": "reject", "level": level, "high": high}
        out[f"rejected, {level}"] = policy_loss(objective="cispo", correction=rejected, max_new_tokens=1), 1, plain
    out["kept"] = of(config, 0.3), 1, replace(plain, extra={"kept": kept_tokens(plain)})
    out["kto"] = KtoLoss(beta=0.1, reference_point=0.5), 1, plain
    out["interpolated"] = of(load_config("tiny_cpu", ["algorithm=decoupled_ppo"])), 1, samples
    return out | turns(plain)


def kept_tokens(samples: Samples) -> Ragged:
    """1 to 40 tokens of each masked-in position, with its target: on some positions, of one TP rank alone."""
    g = torch.Generator().manual_seed(6)
    counts = (torch.randint(1, 41, samples.mask.shape, generator=g) * samples.mask).int()
    drawn = torch.rand(len(samples.mask), 256, generator=g)
    drawn.scatter_(1, samples.targets[:, None], 2.0)
    order = drawn.argsort(1, descending=True)
    return Ragged(torch.cat([row[:count] for row, count in zip(order, counts.tolist(), strict=True)]).int(), counts)


def turns(samples: Samples) -> dict[str, tuple[Loss, int, Samples]]:
    """Ratios of turns of eight tokens, which context ranks share, under weights of trajectories of three rows; and
    weights of prompts of six rows."""
    position = torch.arange(len(samples.mask)) - torch.repeat_interleave(
        samples.cu_seqlens[:-1], samples.cu_seqlens.diff()
    )
    numbers = torch.arange(samples.num_sequences)
    samples = replace(samples, group_of=numbers // 6, trajectory_of=numbers // 3)
    wide = ["algorithm.clip_low=0.1", "algorithm.clip_high=0.1"]
    level = load_config("calculator", ["algorithm=gspo", "algorithm.ratio_level=turn", *wide])
    mean = load_config("tiny_cpu", ["algorithm=cispo", "algorithm.aggregation=prompt_mean"])
    by_turn, by_prompt = (
        replace(samples, token_weight=token_weight(samples, config.algorithm.aggregation, max_length=1))
        for config in (level, mean)
    )
    by_turn = replace(by_turn, turn_of=(position // 8).int())
    return {"turns": (of(level), 1, by_turn), "prompts": (of(mean), 1, by_prompt)}


def numbers_of(result: CompletedStep) -> dict[str, object]:
    """The metrics of a step's loss by name."""
    return {name: metric.value for name, metric in result.loss_metrics.items()}


def of(config: RunConfig, kl_coefficient: float = 0.0) -> Loss:
    longest = config.rollout.max_new_tokens
    return loss_of(config.algorithm, kl_coefficient=kl_coefficient, max_new_tokens=longest)


def rank_main(rank: int, layout_name: str, folder: Path, model: Path, max_tokens: int) -> None:
    """One rank: a step at rate 0 for each loss, and log-probs under other weights."""
    torch.set_num_threads(1)
    from rl_megatron.learner import world
    from rl_megatron.learner.megatron import make_policy
    from rl_megatron.learner.trained import MegatronLearner
    from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
    from rl_megatron.weights.layouts.layout import Layout
    from rl_megatron.weights.layouts.tables.grouped_query import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE

    shape, learner = read_shape(model), LearnerSection.model_validate(LAYOUTS[layout_name])
    device = world.init_process_groups(learner, rank=rank, rendezvous=f"file://{folder}/rendezvous", seed=1)
    layout = Layout(table=MEGATRON_QWEN3_MOE, shape=shape, dims=learner.dims)
    hf = Layout(table=HF_QWEN3_MOE, shape=shape)
    dp = learner.dims.dp_rank(rank)
    seen: dict[str, Any] = {}

    def fill(megatron: MegatronLearner) -> None:
        tensors = dict(megatron.tensors)
        shapes = layout.local_shapes(rank).items()
        unused = {name: torch.empty(size) for name, size in shapes if name not in tensors}
        read_boxes(HFFolder(model), hf, layout, rank, tensors | unused)
        megatron.adopt()

    def step(megatron: MegatronLearner, loss: Loss, unit: int, samples: Samples, rate: float) -> list[Any] | None:
        batch = Packer(dims=learner.dims, max_tokens=max_tokens, rows_per_unit=unit).pack(samples)
        counts = {"num_tokens": batch.num_tokens, "num_sequences": batch.num_sequences}
        result = train_step(megatron, batch.micro_batches[dp], loss, rate, **counts)
        assert not isinstance(result, SkippedStep)
        return None if result is None else [result.loss, result.result.grad_norm, numbers_of(result)]

    policy = make_policy(shape, learner, device, temperature=0.7, top_k=TOP)
    fill(policy)
    every = jobs()
    seen |= {name: step(policy, *every[name], 0.0) for name in (OF_BELOW if layout_name in BELOW else every)}
    samples = make_samples()
    batch = Packer(dims=learner.dims, max_tokens=max_tokens).pack(samples)
    seen |= scores(policy, batch, dp, samples)
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    world.destroy_process_groups()


def scores(policy: Any, batch: Batch, dp: int, samples: Samples) -> dict[str, object]:
    """What the policy says under its own weights, under half of them, and under its own again."""
    halved, out = {name: tensor * 0.5 for name, tensor in policy.tensors.items()}, dict[str, object]()
    ours = replace(batch, sequences=(batch.sequences[dp],))
    for name, weights in (("own", None), ("halved", halved), ("own again", None)):
        said = policy.score(batch.micro_batches[dp], frozenset(KEYS), weights) or {}
        for key, column in said.items():
            out[f"{KEYS[key]} {name}"] = unpack(ours, [column], samples).tolist()
    return out


def run(folder: Path, model: Path, layout: str) -> list[dict[str, Any]]:
    """What the ranks of a layout saw; those with results first."""
    folder.mkdir()
    world_size = LearnerSection.model_validate(LAYOUTS[layout]).dims.world_size
    run_ranks(rank_main, world_size, layout, folder, model, 300 if layout in CUT else 4096)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """Of one layer and of two."""
    root = tmp_path_factory.mktemp("models")
    return [make_tiny_model(TinySizes(num_layers=n, hidden_size=32, num_experts=4), root, seed=3) for n in (1, 2)]


@pytest.fixture(scope="module")
def of_layout(models: Sequence[Path], tmp_path_factory: pytest.TempPathFactory) -> OfLayout:
    """What the ranks of a layout saw, which run once."""
    folder = tmp_path_factory.mktemp("layouts")
    return functools.cache(lambda layout: run(folder / layout, models[layout in STAGED], layout))


@pytest.fixture(scope="module")
def alone(of_layout: OfLayout) -> dict[str, Any]:
    return of_layout("alone")[0]


def assert_same(found: list[Any], wanted: list[Any], name: str) -> None:
    loss, norm, metrics = found
    assert loss == pytest.approx(wanted[0], abs=1e-6, rel=1e-6), name
    assert norm == pytest.approx(wanted[1], rel=1e-4), name
    for metric in metrics:
        assert metrics[metric] == pytest.approx(wanted[2][metric], rel=1e-5, abs=1e-5), (name, metric)


@pytest.mark.parametrize("layout", CUT)
def test_losses_critic_and_reference_do_not_depend_on_the_layout(layout: str, of_layout: OfLayout) -> None:
    ranks, (alone,) = of_layout(layout), of_layout("alone, two layers" if layout in STAGED else "alone")
    last_stage = [seen for seen in ranks if seen["gspo"] is not None]
    assert last_stage
    for seen in last_stage:
        for name in OF_BELOW if layout in BELOW else jobs():
            assert_same(seen[name], alone[name], name)
    for name in ("own", "halved", "own again"):
        for key in (f"{of} {name}" for of in KEYS.values()):
            parts = [torch.tensor(seen[key]) for seen in ranks if key in seen]
            torch.testing.assert_close(torch.stack(parts).sum(0), torch.tensor(alone[key]), rtol=0, atol=1e-5)


def test_the_most_probable_tokens_are_those_of_transformers(alone: dict[str, Any], models: Sequence[Path]) -> None:
    """And their log-probs at the temperature; outside the mask there are zeros. Norms are those of whole logits."""
    samples = make_samples()
    theirs = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    found = torch.tensor(alone["top own"])
    assert found.shape == (len(samples.mask), 2, TOP)
    assert not found[~samples.mask].any()
    for first, stop in pairwise(samples.cu_seqlens.tolist()):
        with torch.no_grad():
            logprobs = (theirs(samples.input_ids[None, first:stop]).logits[0] / 0.7).log_softmax(-1)
        mask, named = samples.mask[first:stop], found[first:stop]
        wanted = logprobs.topk(TOP).values[mask]
        torch.testing.assert_close(named[mask][:, 1], wanted, rtol=0, atol=1e-4)
        torch.testing.assert_close(logprobs[mask].gather(1, named[mask][:, 0].long()), wanted, rtol=0, atol=1e-4)
        p = logprobs.double().exp()
        norms = 1 - 2 * p.gather(1, samples.targets[first:stop, None]).squeeze(1) + p.square().sum(1)
        assert alone["norms own"][first:stop] == pytest.approx(norms.tolist(), abs=1e-5)


def test_the_reference_pass_leaves_the_policy_as_it_was(alone: dict[str, Any]) -> None:
    assert alone["score own"] == alone["score own again"]
    assert alone["score own"] != alone["score halved"]


def test_a_score_of_the_entropy_is_that_of_the_loss(alone: dict[str, Any]) -> None:
    entropy = torch.tensor(alone["entropy own"])[make_samples().mask].mean().item()
    assert alone["grpo"][2]["entropy"] == pytest.approx(entropy, rel=1e-5)
