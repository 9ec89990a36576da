"""Adapters, whose folders peft loads, and draft layers beside the policy; tests/matrix has both in layouts."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from typing_extensions import override

from rl_megatron.algorithms.losses import CrossEntropy, LossInputs
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.features.lora import merging
from rl_megatron.features.lora.files import adapters_to_peft
from rl_megatron.features.lora.merging import UntrainedAdapters, merge_adapters
from rl_megatron.features.lora.push import ADAPTERS, adapters_folder
from rl_megatron.features.lora.rows import LoraLayouts
from rl_megatron.training.optimizer_steps import CompletedStep
from rl_megatron.types import LossOutput
from rl_megatron.weights.boxes import Box
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, RandomWeights, read_boxes
from rl_megatron.weights.formats.hf_folder import PREFIX
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.plans.plan import plan
from tests.distributed.ranks import run_ranks, whole_gradients, worlds
from tests.draft_models import save_with_drafts, save_with_qwens_draft
from tests.family_models import BASE, MODELS, save_model
from tests.matrix.oracle import as_modules
from tests.samples import TWO, train_step, two_sequences

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner

pytestmark = pytest.mark.slow
LORA: Mapping[str, Any] = {"rank": 4, "alpha": 12.0}
PLAIN = "plain"  # a qwen3 as transformers initializes it: rounding does not grow on the way
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    PLAIN: ("tp2", {"tp": 2}),
    "qwen3_moe": ("tp2-ep2", {"tp": 2, "ep": 2}),
}
EXACT = {"timeout_seconds": 60.0, "optimizer": {"clip_grad": 0.0}}


_MERGED: list[weakref.ref[Tensor]] = []


@contextmanager
def watched_merging() -> Iterator[None]:
    """Remember what is merged meanwhile."""
    from rl_megatron.features.lora.learner import Linear

    merge = Linear.merge

    def remembered(self: Any) -> list[Tensor]:
        made = merge(self)
        _MERGED.extend(map(weakref.ref, made))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Linear, "merge", remembered)
        yield


def merged_alive() -> int:
    """How many of the merged weights are held."""
    gc.collect()
    assert _MERGED
    return sum(ref() is not None for ref in _MERGED)


class Drawn(RandomWeights):
    """Adapters as after training: no B is 0."""

    @override
    def read(self, name: str, box: Box) -> Tensor:
        return super().read(name, box).mul_(2)


class Watching:
    """Cross entropy that sees that no merged weight is held between the forward and the backward pass."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def __call__(self, inputs: LossInputs) -> LossOutput:

        self.held.append(merged_alive())
        return CrossEntropy()(inputs)


def layouts_of(folder: Path, learner: LearnerSection) -> tuple[Layout, Layout, Layout, Layout]:
    """The model's and its adapters', each over ranks and as files have them."""
    shape = read_shape(folder)
    ranks = megatron_layout(shape, learner.dims, stages=learner.stages)
    hf, lora = hf_layout(shape), learner.lora
    return ranks, hf, LoraLayouts(lora).on_ranks(ranks), LoraLayouts(lora).file_layout(ranks, hf)


def fill(policy: MegatronLearner, folder: Path, learner: LearnerSection, rank: int, kind: type[RandomWeights]) -> None:
    ranks, hf, adapters, hf_of = layouts_of(folder, learner)
    read_boxes(HFFolder(folder), hf, ranks, rank, dict(policy.tensors))
    read_boxes(kind(folder, hf_of.local_shapes(0), 3), hf_of, adapters, rank, policy.adapters)
    policy.adopt()


def check(folder: Path, learner: LearnerSection, rank: int, device: torch.device) -> dict[str, Any]:
    """What a rank saw of one model; writes its gradients and a checkpoint."""
    from rl_megatron.learner.megatron import make_policy

    policy = make_policy(read_shape(folder), learner, device, temperature=1.0)
    fill(policy, folder, learner, rank, UntrainedAdapters)
    first = logprobs(policy)
    with policy.adapters_disabled():
        same = all(map(torch.equal, first, logprobs(policy)))
    frozen = {name: tensor.clone() for name, tensor in policy.tensors.items()}
    fill(policy, folder, learner, rank, Drawn)
    with policy.adapters_disabled():
        off = all(map(torch.equal, first, logprobs(policy)))
    off = off and not any(map(torch.equal, first, logprobs(policy)))
    with watched_merging():
        loss = Watching()
        train_step(policy, [two_sequences()], loss, 0.0, num_tokens=sum(TWO), num_sequences=2)
    grads = {name: p.main_grad.clone() for one in policy._adapters for name, p in one.parameters()}
    with policy.merged():
        assert any(not torch.equal(tensor, frozen[name]) for name, tensor in policy.tensors.items())
    back = all(torch.equal(tensor, frozen[name]) for name, tensor in policy.tensors.items())
    policy.save(folder / "saved")
    torch.save(grads, folder / f"{rank}.pt")
    return {"same": same, "off": off, "back": back, "held": max(loss.held, default=0), "trained": trained(policy)}


def logprobs(policy: MegatronLearner) -> list[Tensor]:
    said = policy.score([two_sequences()], frozenset({"logprobs"}))
    return [] if said is None else said["logprobs"]


def trained(policy: MegatronLearner) -> list[str]:
    """Kinds of parameters that have gradients."""
    names = [name for m in policy._models for name, p in m.named_parameters() if p.requires_grad]
    return sorted({re.sub(r".*\.(lora_[AB])\d*$", r"\1", name) for name in names})


def rank_main(rank: int, root: Path) -> None:
    keys = {name: LearnerSection.model_validate({**EXACT, **keys, "lora": LORA}) for name, (_, keys) in LAYOUTS.items()}
    for name, learner, device in worlds(rank, root, keys):
        with whole_gradients():
            (root / f"{name}-{rank}.json").write_text(json.dumps(check(root / name, learner, rank, device)))


def adapters_in_files(folder: Path) -> dict[str, Tensor]:
    """The adapters of `Drawn` by peft's names, with gradients."""
    learner = LearnerSection.model_validate({"lora": LORA})
    shapes = layouts_of(folder, learner)[3].local_shapes(0)
    source = Drawn(folder, shapes, 3)
    return {n: source.read(n, tuple((0, size) for size in shape)).requires_grad_() for n, shape in shapes.items()}


def merged_by_formula(folder: Path, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of the checkpoint with alpha / rank * B A added where there are adapters."""
    out: dict[str, Tensor] = dict(load_file(folder / "model.safetensors"))
    for name, a in adapters.items():
        if ".lora_A." in name:
            weight = name.replace(".lora_A.", ".")
            out[weight] = out[weight] + LORA["alpha"] / len(a) * adapters[name.replace("lora_A", "lora_B")] @ a
    return out


def plain_model(folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    kind, differing = MODELS["qwen3"]
    config = AutoConfig.for_model(kind, **{**BASE, **differing})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    for name in LAYOUTS:
        model = plain_model(root / name) if name == PLAIN else save_model(name, root / name)
        given = as_modules(merged_by_formula(root / name, adapters_in_files(root / name)), model)
        each = [torch.func.functional_call(model, given, (x[None],)).logits[0] for x in pieces()]
        torch.save(torch.cat(each).detach(), root / name / "logits.pt")
        (root / name / "saved").mkdir()
    run_ranks(rank_main, 2, root)
    return root


def pieces() -> Sequence[Tensor]:
    return two_sequences().input_ids.split(TWO)


def gradients_in_files(folder: Path, learner: LearnerSection) -> dict[str, Tensor]:
    """What the ranks wrote, put together under the names of files; replicas hold the same."""
    held = [torch.load(path) for path in sorted(folder.glob("[01].pt"))]
    _, _, src, dst = layouts_of(folder, learner)
    out = {name: torch.full(shape, torch.nan) for name, shape in dst.local_shapes(0).items()}
    for t in plan(src, dst, placement={0: 99}).receives(99):
        piece = held[t.src_rank][t.src_param][tuple(slice(*edge) for edge in t.src_box)]
        out[t.dst_param][tuple(slice(*edge) for edge in t.dst_box)] = piece
    return out


def length(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_alone_are_trained_and_no_merged_weight_is_held_between_the_passes(name: str, models: Path) -> None:
    """At first they change no bit, nor later where they are off, and frozen weights are back after they were merged."""
    for rank in range(2):
        seen = json.loads((models / f"{name}-{rank}.json").read_text())
        assert seen == {"same": True, "off": True, "back": True, "held": 0, "trained": ["lora_A", "lora_B"]}


@pytest.mark.parametrize("name", LAYOUTS)
def test_peft_loads_the_folder_and_computes_the_same(name: str, models: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = models / name
    adapters_to_peft(folder / "saved", tmp_path / "peft", config=folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model, samples = PeftModel.from_pretrained(base, tmp_path / "peft", is_trainable=True).eval(), two_sequences()
    logits = torch.cat([model(x[None]).logits[0] for x in pieces()])
    wanted = torch.load(folder / "logits.pt")
    assert float((logits - wanted).abs().max()) < 1e-6 * float(wanted.abs().max()) * (1 if name == PLAIN else 10)
    merge_adapters(folder / "saved", folder, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    of_merged = torch.cat([merged(x[None]).logits[0] for x in pieces()])
    assert float((of_merged - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    if name != PLAIN:
        return  # peft has the experts of a layer in one tensor
    F.cross_entropy(logits, samples.targets).backward()
    ours = gradients_in_files(folder, LearnerSection.model_validate({**LAYOUTS[name][1], "lora": LORA}))
    theirs = {
        key.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for key, p in model.named_parameters()
        if p.grad is not None
    }
    assert theirs.keys() == ours.keys()
    assert length({key: ours[key] - grad for key, grad in theirs.items()}) < 1e-6 * length(theirs)


# What learner ranks write for servers with adapters: the frozen model to the bit, a folder; for an export, all merged.
KEYS = ("rollout=vllm", "learner.tp=2", "learner.ep=2", "learner.threads=1", "weights.push=adapters")


def config_of(root: Path) -> RunConfig:
    lora = [f"learner.lora.{key}={value}" for key, value in LORA.items()]
    return load_config("tiny_cpu", [*KEYS, *lora, "seed=3", f"weights.folder={root}"])


def folders_main(rank: int, root: Path) -> None:
    from launcher.wire import Setup
    from launcher.worker.learner_rank import LearnerRank

    merging.UntrainedAdapters = Drawn  # type: ignore[misc]
    setup = Setup(
        config=config_of(root), model_folder=root / "model", run_folder=root, rendezvous=f"file://{root}/rendezvous"
    )
    worker = LearnerRank(setup, rank, None)
    for version, name in enumerate(("run-v0", "run-v1", "run-v2")):
        worker.announce(name, ("run-v1",))
        assert not isinstance(worker.stage(version, True), Exception)
        worker.commit(version, True)
    for version, merges in enumerate((False, True, False)):
        worker.merge(merges)
        assert not isinstance(worker.stage(version), Exception)
        worker.commit(version)
        if rank == 0:
            worker.export(root / f"export-{version}")
    worker.close()


def test_the_model_stays_frozen_in_pushes_and_adapters_are_beside_it(tmp_path: Path) -> None:
    """Two ranks, tp and ep 2. 20 seconds."""
    save_model("qwen3_moe", tmp_path / "model")
    run_ranks(folders_main, 2, tmp_path)
    (mirror,) = tmp_path.glob("rl_megatron-*/model.safetensors")
    wanted = adapters_in_files(tmp_path / "model")
    for name in ("run-v1", "run-v2"):
        held = load_file(adapters_folder(mirror, name) / ADAPTERS)
        assert held.keys() == {PREFIX + key for key in wanted}
        assert all(torch.equal(held[PREFIX + key], tensor) for key, tensor in wanted.items())
    assert not adapters_folder(mirror, "run-v0").exists()
    assert json.loads((adapters_folder(mirror, "run-v2") / "adapter_config.json").read_text())["r"] == LORA["rank"]
    base, merged = load_file(tmp_path / "model" / "model.safetensors"), merged_by_formula(tmp_path / "model", wanted)
    for version, right in enumerate((base, merged, base)):
        pushed = load_file(tmp_path / f"export-{version}" / "model.safetensors")
        for name, tensor in right.items():
            if right is base:
                assert torch.equal(pushed[name], tensor), name
            else:
                torch.testing.assert_close(pushed[name], tensor, atol=1e-6, rtol=0)


# A policy learns to the bit as without a draft layer that has no formula, or in bfloat16; tests/matrix has the others.
IN_STACKS = "qwen3_5_moe_stacked"  # the decoder's experts, not the draft layer's
BESIDE_DRAFTS: dict[str, dict[str, Any]] = {IN_STACKS: {}, "glm4_moe": {"dtype": "bfloat16"}}
STEPS = 3


def made(folder: Path, learner: LearnerSection, device: torch.device) -> MegatronLearner:
    from rl_megatron.learner.megatron import make_policy

    shape = replace(read_shape(folder), num_draft_layers=learner.draft.train)
    policy = make_policy(shape, learner, device, temperature=0.7)
    read_boxes(HFFolder(folder), hf_layout(shape), megatron_layout(shape, learner.dims), 0, dict(policy.tensors))
    policy.adopt()
    return policy


def drafts_main(rank: int, root: Path) -> None:
    keys = {name: LearnerSection.model_validate(options) for name, options in BESIDE_DRAFTS.items()}
    for name, plain, device in worlds(rank, root, keys):
        drafts = LearnerSection.model_validate({**BESIDE_DRAFTS[name], "draft": {"train": True}})
        without, beside = (made(root / name, learner, device) for learner in (plain, drafts))
        losses = []
        for _ in range(STEPS):
            step = partial(train_step, num_tokens=sum(TWO), num_sequences=2)
            one, other = (step(policy, [two_sequences()], CrossEntropy(), 3e-3) for policy in (without, beside))
            assert isinstance(one, CompletedStep)
            assert isinstance(other, CompletedStep)
            assert (one.loss, one.result.grad_norm) == (other.loss, other.result.grad_norm)
            losses.append(other.loss_metrics["draft/loss"].value)
        assert losses == sorted(losses, reverse=True), "the draft layer does not learn"
        assert [n for n, tensor in without.tensors.items() if not torch.equal(tensor, beside.tensors[n])] == []


def test_the_policy_learns_to_the_bit_as_without_a_draft_layer(tmp_path: Path) -> None:
    layers: dict[str, Any] = {"num_hidden_layers": 2}  # a draft layer sees the last one alone
    types = ["linear_attention", "full_attention"]
    save_with_qwens_draft(IN_STACKS, tmp_path / IN_STACKS, layer_types=types, **layers)
    save_with_drafts("glm4_moe", tmp_path / "glm4_moe", **layers)
    run_ranks(drafts_main, 1, tmp_path)
