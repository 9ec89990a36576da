"""Adapters of a dense model and of one with experts in eight layouts, beside peft and transformers; their folders."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import override

from rl_megatron.algorithms.losses import CrossEntropy, LossInputs
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.training.measures import Made
from rl_megatron.types import LossOutput
from rl_megatron.weights.adapters.files import PREFIX, adapters_to_peft, peft_config
from rl_megatron.weights.adapters.merging import merge_adapters
from rl_megatron.weights.boxes import Box
from rl_megatron.weights.checkpoints.made_up import MadeUp, Untrained
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.lora import hf_adapters, learner_adapters, ranks_of_parts
from rl_megatron.weights.plans.plan import plan
from rl_megatron.weights.push.beside import ADAPTERS, adapters_folder
from tests.distributed.ranks import run_ranks, whole_gradients, worlds
from tests.distributed.test_families import LENGTHS, logits_error, make_samples
from tests.family_models import BASE, MODELS, save_model
from tests.optimizer_step import train_step

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner

pytestmark = pytest.mark.slow
LORA: Mapping[str, Any] = {"rank": 4, "alpha": 12.0}
PLAIN_START, PLAIN_MOE = "plain", "plain_moe"  # as transformers initialises: rounding does not grow on the way
OF_PEFT = {PLAIN_START: "qwen3", PLAIN_MOE: "qwen3_moe"}  # and the families of these
NAMES = [*OF_PEFT, "qwen3", "qwen3_moe", "deepseek_v3", "qwen3_next"]
BARS = {**dict.fromkeys([*OF_PEFT, "qwen3"], 1e-6), "qwen3_moe": 1e-5, "deepseek_v3": 1e-5, "qwen3_next": 5e-5}
MOE = ["qwen3_moe", "deepseek_v3"]
TWO = {"num_hidden_layers": 2}  # a dense layer is among deepseek_v3's
LAYOUTS: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "one": ({}, NAMES),
    "tp2": ({"tp": 2}, NAMES),
    "tp2-ep2": ({"tp": 2, "ep": 2}, [PLAIN_MOE, *MOE]),
    "ep2": ({"ep": 2}, [PLAIN_MOE, *MOE]),
    "pp2": ({"pp": 2}, NAMES),
    "pp2-vpp2": ({"pp": 2, "vpp": 2}, [*OF_PEFT, "qwen3"]),
    "cp2": ({"cp": 2}, [*OF_PEFT, "qwen3_moe", "qwen3_next"]),
    "tp2-recompute": ({"tp": 2, "recompute": {"uniform": 1}}, [*OF_PEFT, "qwen3", "qwen3_moe"]),
    "bfloat16": ({"dtype": "bfloat16"}, ["qwen3_moe"]),
}
PLAIN = {"timeout_seconds": 60.0, "optimizer": {"clip_grad": 0.0}}
STEPS = 2


_MERGED: list[weakref.ref[Tensor]] = []


@contextmanager
def watched_merging() -> Iterator[None]:
    """Remember what is merged meanwhile."""
    from rl_megatron.learner.lora import merging

    merge = merging.Linear.merge

    def remembered(self: Any) -> list[Tensor]:
        made = merge(self)
        _MERGED.extend(map(weakref.ref, made))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging.Linear, "merge", remembered)
        yield


def merged_alive() -> int:
    """How many of the merged weights are held."""
    gc.collect()
    assert _MERGED
    return sum(ref() is not None for ref in _MERGED)


class Drawn(MadeUp):
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
    return ranks, hf, learner_adapters(ranks, lora), hf_adapters(hf, ranks_of_parts(ranks, lora))


def fill(policy: MegatronLearner, folder: Path, learner: LearnerSection, rank: int, kind: type[MadeUp]) -> None:
    ranks, hf, adapters, hf_of = layouts_of(folder, learner)
    read_boxes(HFFolder(folder), hf, ranks, rank, dict(policy.tensors))
    read_boxes(kind(folder, hf_of.local_shapes(0), 3), hf_of, adapters, rank, policy.adapters)
    policy.adopt()


def check(folder: Path, layout: str, learner: LearnerSection, rank: int, device: torch.device) -> dict[str, Any]:
    """What a rank saw of one model; writes its gradients and its merged weights."""
    from rl_megatron.learner.megatron import make_policy

    policy = make_policy(read_shape(folder), learner, device, temperature=1.0)
    fill(policy, folder, learner, rank, Untrained)
    start = {name: tensor.clone() for name, tensor in policy.adapters.items()}
    first = logprobs(policy)
    with policy.without_adapters():
        same = all(map(torch.equal, first, logprobs(policy)))
    frozen = {name: tensor.clone() for name, tensor in policy.tensors.items()}
    fill(policy, folder, learner, rank, Drawn)
    error = logits_error(policy, torch.load(folder / "logits.pt"))
    n, copies = sum(LENGTHS), max(learner.vpp, learner.dims.dp)  # each data-parallel rank has the same
    counts = {"num_tokens": n * copies, "num_sequences": 2 * copies}
    with watched_merging():
        loss = Watching()
        result = train_step(policy, [make_samples()] * learner.vpp, loss, 0.0, **counts)
    grads = {name: p.main_grad.clone() for one in policy._adapters for name, p in one.parameters()}
    with policy.merged():
        merged = {name: tensor.clone() for name, tensor in policy.tensors.items()}
    back = all(torch.equal(tensor, frozen[name]) for name, tensor in policy.tensors.items())
    if IN_PEFT.get(folder.name) == layout:
        policy.save(folder / "saved-peft")
    torch.save({"start": start, "grads": grads, "merged": merged}, folder / f"{layout}-{rank}.pt")
    seen = {"same": same, "back": back, "held": max(loss.held, default=0), "trained": trained(policy)}
    if isinstance(result, Made) and error is not None:
        seen |= {"logits": error, "loss": result.loss, "norm": result.step.grad_norm}
    return seen


def logprobs(policy: MegatronLearner) -> list[Tensor]:
    said = policy.score([make_samples()], frozenset({"logprobs"}))
    return [] if said is None else said["logprobs"]


def trained(policy: MegatronLearner) -> list[str]:
    """Kinds of parameters that have gradients."""
    names = [name for m in policy._models for name, p in m.named_parameters() if p.requires_grad]
    return sorted({re.sub(r".*\.(lora_[AB])\d*$", r"\1", name) for name in names})


def relay(folder: Path, layout: str, learner: LearnerSection, rank: int, device: torch.device) -> list[Any]:
    """Resumes what the layout before saved, if there is one; trains, saves, trains on."""
    from rl_megatron.learner.megatron import make_policy

    policy = make_policy(read_shape(folder), learner, device, temperature=1.0)
    fill(policy, folder, learner, rank, Drawn)
    out = []
    before = RELAY[RELAY.index(layout) - 1] if layout != RELAY[0] else None
    if before is not None:
        policy.load(folder / f"saved-{before}")
        out.append(steps(policy))
    else:
        steps(policy)
    policy.save(folder / f"saved-{layout}")
    out.append(steps(policy))
    return out


def steps(policy: MegatronLearner) -> list[tuple[float, float]]:
    counts = {"num_tokens": sum(LENGTHS), "num_sequences": 2}
    made = [train_step(policy, [make_samples()], CrossEntropy(), 1e-2, **counts) for _ in range(STEPS)]
    return [(one.loss, one.step.grad_norm) for one in made if isinstance(one, Made)]


RELAY = ["tp2", "pp2", "tp2-ep2", "one"]
IN_PEFT = {PLAIN_START: "tp2", "qwen3_moe": "tp2-ep2"}  # the layout that saved what peft loads


def rank_main(rank: int, root: Path) -> None:
    plain = {n: LearnerSection.model_validate({**PLAIN, **keys, "lora": LORA}) for n, (keys, _) in LAYOUTS.items()}
    for layout, learner, device in worlds(rank, root, plain):
        with whole_gradients():
            found = {name: check(root / name, layout, learner, rank, device) for name in LAYOUTS[layout][1]}
        (root / f"{layout}-{rank}.json").write_text(json.dumps(found))
    relayed = {name: LearnerSection.model_validate({**LAYOUTS[name][0], "lora": LORA}) for name in RELAY}
    (root / "relay").mkdir(exist_ok=True)
    for layout, learner, device in worlds(rank, root / "relay", relayed):
        found = {name: relay(root / name, layout, learner, rank, device) for name in MOE}
        (root / f"relay-{layout}-{rank}.json").write_text(json.dumps(found))


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


def as_modules(merged: Mapping[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Under the names of transformers' modules, which hold the experts of a layer in one tensor."""
    experts: dict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)
    out = {}
    for name, tensor in merged.items():
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            experts[found[1], found[3]][int(found[2])] = tensor
        else:
            out[name] = tensor
    stacks = {key: torch.stack([held[e] for e in range(len(held))]) for key, held in experts.items()}
    for (place, part), stack in stacks.items():
        if part == "gate":
            out[f"{place}.gate_up_proj"] = torch.cat([stack, stacks[place, "up"]], 1)
        elif part == "down":
            out[f"{place}.down_proj"] = stack
    assert out.keys() == {*dict(model.named_parameters()), *dict(model.named_buffers())} & out.keys()
    return out


def plain_model(name: str, folder: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    kind, differing = MODELS[OF_PEFT[name]]
    config = AutoConfig.for_model(kind, **{**BASE, **differing})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model


def in_peft(folder: Path, adapters: Mapping[str, Tensor], out: Path) -> Any:
    """peft's model of adapters that are written as a folder."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out.mkdir()
    save_file({PREFIX + name: a.detach() for name, a in adapters.items()}, out / "adapter_model.safetensors")
    lora = LearnerSection.model_validate({"lora": LORA}).lora
    (out / "adapter_config.json").write_text(json.dumps(peft_config(lora, read_shape(folder), folder)))
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return PeftModel.from_pretrained(base, out, is_trainable=True).eval()


def gradients_in_peft(folder: Path, model: Any, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the files' names. peft has the experts of a layer in one tensor, and zeros beside their parts: where each
    element is says a folder whose elements are their numbers."""
    ends = torch.tensor([a.numel() for a in adapters.values()]).cumsum(0).tolist()
    numbers = {
        name: torch.arange(end - a.numel(), end).view(a.shape) + 1
        for (name, a), end in zip(adapters.items(), ends, strict=True)
    }
    numbered = in_peft(folder, {name: each.float() for name, each in numbers.items()}, folder / "numbers")
    found, places = torch.full((ends[-1] + 1,), torch.nan), dict(numbered.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[places[name].detach().long()] = parameter.grad
    return {name: found[each] for name, each in numbers.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    samples = make_samples()
    for name in NAMES:
        changed = TWO if name in MOE else {}
        model = plain_model(name, root / name) if name in OF_PEFT else save_model(name, root / name, **changed)
        adapters = adapters_in_files(root / name)
        merged = merged_by_formula(root / name, adapters)
        if name in OF_PEFT:
            asked = in_peft(root / name, adapters, root / name / "in_peft")
            each = [asked(x[None]).logits[0] for x in samples.input_ids.split(LENGTHS)]
        else:
            given = as_modules(merged, model)
            each = [
                torch.func.functional_call(model, given, (x[None],)).logits[0] for x in samples.input_ids.split(LENGTHS)
            ]
        logits = torch.cat(each)
        loss = F.cross_entropy(logits, samples.targets)
        loss.backward()
        torch.save(logits.detach(), root / name / "logits.pt")
        grads = {key: tensor.grad for key, tensor in adapters.items()}
        if name in OF_PEFT:
            grads = gradients_in_peft(root / name, asked, adapters)
        assert all(grad is not None and grad.abs().max() > 0 for grad in grads.values())
        plain = {key: tensor.detach() for key, tensor in merged.items()}
        torch.save({"loss": loss.item(), "grads": grads, "merged": plain}, root / name / "wanted.pt")
        for layout in (*RELAY, "peft"):
            (root / name / f"saved-{layout}").mkdir()
    run_ranks(rank_main, 2, root)
    return root


def in_files(folder: Path, layout: str, learner: LearnerSection) -> dict[str, dict[str, Tensor]]:
    """What the ranks wrote, put together under the names of files; replicas hold the same."""
    held = [torch.load(path) for path in sorted(folder.glob(f"{layout}-[01].pt"))]
    ranks, hf, adapters, hf_of = layouts_of(folder, learner)
    out: dict[str, dict[str, Tensor]] = {}
    ways = {"start": (adapters, hf_of), "grads": (adapters, hf_of), "merged": (ranks, hf)}
    for what, (src, dst) in ways.items():
        out[what] = {name: torch.full(shape, torch.nan) for name, shape in dst.local_shapes(0).items()}
        for t in plan(src, dst, placement={0: 99}).receives(99):
            piece = held[t.src_rank][what][t.src_param][tuple(slice(*edge) for edge in t.src_box)]
            out[what][t.dst_param][tuple(slice(*edge) for edge in t.dst_box)] = piece
        for name in held[0][what].keys() & held[-1][what].keys():
            first, last = (rank[what][name] for rank in (held[0], held[-1]))
            if learner.tp == 1 or "layernorm" in name:
                torch.testing.assert_close(first, last, atol=1e-7, rtol=1e-6)
    return out


def length(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "bfloat16"])
def test_start_logits_gradients_and_merged_weights_are_those_of_the_oracle(layout: str, models: Path) -> None:
    learner = LearnerSection.model_validate({**LAYOUTS[layout][0], "lora": LORA})
    seen = [json.loads(path.read_text()) for path in sorted(models.glob(f"{layout}-[01].json"))]
    for name in LAYOUTS[layout][1]:
        wanted, found = torch.load(models / name / "wanted.pt"), in_files(models / name, layout, learner)
        assert found["grads"].keys() == wanted["grads"].keys()
        norm = length(wanted["grads"])
        apart = length({key: found["grads"][key] - grad for key, grad in wanted["grads"].items()}) / norm
        merged = max(float((found["merged"][key] - wanted["merged"][key]).abs().max()) for key in found["merged"])
        answers = [rank[name] for rank in seen if "logits" in rank[name]]
        start = in_files(models / name, "one", LearnerSection.model_validate({"lora": LORA}))["start"]
        assert all(torch.equal(found["start"][key], tensor) for key, tensor in start.items())
        assert any(tensor.any() for tensor in start.values())
        print(f"{layout} {name}: gradients {apart:.1e}, merged {merged:.1e}, {answers}, norm {norm}")
        assert apart < BARS[name]
        assert merged < 1e-6
        assert answers
        for rank in answers:
            assert rank["logits"] < (1e-6 if name in OF_PEFT else 1e-4)
            assert rank["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert rank["norm"] == pytest.approx(norm, rel=1e-5)
        for one in (rank[name] for rank in seen):
            assert (one["same"], one["back"], one["held"], one["trained"]) == (True, True, 0, ["lora_A", "lora_B"])


@pytest.mark.parametrize("name", IN_PEFT)
def test_peft_loads_the_folder_and_computes_the_same(name: str, models: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, layout = models / name, IN_PEFT[name]
    adapters_to_peft(folder / "saved-peft", tmp_path / "peft", config=folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model, samples = PeftModel.from_pretrained(base, tmp_path / "peft", is_trainable=True).eval(), make_samples()
    logits = torch.cat([model(x[None]).logits[0] for x in samples.input_ids.split(LENGTHS)])
    wanted = torch.load(folder / "logits.pt")
    assert float((logits - wanted).abs().max()) < 1e-6 * float(wanted.abs().max()) * (1 if name == PLAIN_START else 10)
    merge_adapters(folder / "saved-peft", folder, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32, attn_implementation="eager")
    of_merged = torch.cat([merged(x[None]).logits[0] for x in samples.input_ids.split(LENGTHS)])
    assert float((of_merged - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    if name != PLAIN_START:
        return  # peft has the experts of a layer in one tensor
    F.cross_entropy(logits, samples.targets).backward()
    learner = LearnerSection.model_validate({**LAYOUTS[layout][0], "lora": LORA})
    ours = in_files(folder, layout, learner)["grads"]
    theirs = {
        key.removeprefix("base_model.model.").replace(".default", ""): p.grad
        for key, p in model.named_parameters()
        if p.grad is not None
    }
    assert theirs.keys() == ours.keys()
    assert length({key: ours[key] - grad for key, grad in theirs.items()}) < 1e-6 * length(theirs)


@pytest.mark.parametrize("name", MOE)
def test_another_layout_goes_on_as_the_one_that_saved(name: str, models: Path) -> None:
    runs = {
        layout: [json.loads(path.read_text())[name] for path in sorted(models.glob(f"relay-{layout}-[01].json"))]
        for layout in RELAY
    }
    for before, after in pairwise(RELAY):
        left = next(rank[-1] for rank in runs[before] if rank[-1])
        for resumed in (rank[0] for rank in runs[after] if rank[0]):
            assert len(resumed) == STEPS
            assert resumed == [pytest.approx(step, rel=1e-4) for step in left], (before, after)


# What learner ranks write for servers with adapters: the frozen model to the bit, a folder; for an export, all merged.
KEYS = ("rollout=vllm", "learner.tp=2", "learner.ep=2", "learner.threads=1", "weights.push=adapters")


def config_of(root: Path) -> RunConfig:
    lora = [f"learner.lora.{key}={value}" for key, value in LORA.items()]
    return load_config("tiny_cpu", [*KEYS, *lora, "seed=3", f"weights.folder={root}"])


def folders_main(rank: int, root: Path) -> None:
    from launcher.wire.channel import Setup
    from launcher.worker.learner_rank import Worker
    from rl_megatron.weights.checkpoints import made_up

    made_up.Untrained = Drawn  # type: ignore[misc]
    setup = Setup(
        config=config_of(root), model_folder=root / "model", run_folder=root, rendezvous=f"file://{root}/rendezvous"
    )
    worker = Worker(setup, rank, None)
    for version, name in enumerate(("run-v0", "run-v1", "run-v2")):
        worker.name_adapters(name, ("run-v1",))
        assert not isinstance(worker.stage_adapters(version), Exception)
        worker.commit_adapters(version)
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
