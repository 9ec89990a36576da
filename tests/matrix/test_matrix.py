"""Models, layouts and features in pairs, each cell beside transformers and torch.optim; and pushes of such models."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.features.overlap.feature import overlap_section
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.checkpoints import convert
from rl_megatron.weights.checks.compare import compare
from rl_megatron.weights.checks.reports import checksum, largest_change, seal_from_reports
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.plans.plan import plan
from rl_megatron.weights.routes.rendezvous import RendezvousStore
from tests.draft_models import save_with_drafts, save_with_qwens_draft
from tests.family_models import save_model
from tests.matrix import oracle, probes, pushes
from tests.matrix.cells import FIRST, WITH_DRAFTS, Cell, Tolerance, cover, has_values, named
from tests.matrix.oracle import Wanted
from tests.matrix.probes import VALUE_LAYER
from tests.matrix.pushes import ENGINES, LEARNERS, PUSHES, QUICK, VERSIONS, WRITERS, Push
from tests.matrix.worlds import LIMIT, Worlds
from tools.convert.inspection import dropped_tensors
from tools.planner.memory import footprints

CELLS = [pytest.param(cell, id=str(cell), marks=() if cell in FIRST else pytest.mark.slow) for cell in cover()]


@pytest.fixture
def worlds() -> Iterator[Worlds]:
    """Of one cell: threads of a world's groups outlive it, a hundred in each rank, and end with the process alone."""
    ranks = Worlds()
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """A model's folder, with a draft layer and converted, and transformers' model of it."""
    root = tmp_path_factory.mktemp("models")

    @functools.cache
    def made(name: str) -> tuple[Path, Any]:
        family, more = named(name)
        model = save_model(family, root / name, **more)
        if name in WITH_DRAFTS:
            (save_with_qwens_draft if family == "qwen3_next" else save_with_drafts)(family, root / name, **more)
        convert.hf_to_megatron(root / name, root / name / "megatron")
        return root / name, model

    return made


def in_files(
    cell: Cell, folder: Path, learner: LearnerSection, ranks: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The ranks' tensors put together under the names of files, and what no file has of a value layer."""
    of_ranks, of_files = probes.layouts_of(folder, learner, cell.features)
    ways = [(of_ranks, of_files)]
    if learner.lora.rank is not None:
        ways.append(probes.of_adapters(of_ranks, of_files, learner))
    beside = {"output_layer.bias", *VALUE_LAYER} if has_values(cell.features) else set()
    out = {name: tensor for rank in ranks for name, tensor in rank.items() if name in beside}
    for src, dst in ways:
        out |= {name: torch.full(shape, torch.nan) for name, shape in dst.local_shapes(0).items()}
        for t in plan(src, dst, placement={0: 99}).receives(99):
            piece = ranks[t.src_rank][t.src_param][tuple(slice(*edge) for edge in t.src_box)]
            out[t.dst_param][tuple(slice(*edge) for edge in t.dst_box)] = piece
    return out


def assert_stepped(cell: Cell, folder: Path, learner: LearnerSection, ranks: Sequence[Any], wanted: Wanted) -> None:
    """The last step says what the oracle's says; of how far a tensor has moved, it is a few thousandths elsewhere."""
    most, said = cell.tolerance, [rank["second"] for rank in ranks if rank["second"] is not None]
    assert said
    for found in said:
        assert found == found | {name: near(value, most) for name, value in wanted.steps[1].items()}
    for name, tensor in in_files(cell, folder, learner, [rank["tensors"] for rank in ranks]).items():
        goal = wanted.tensors[name]
        moved, apart = (float((goal - other).norm()) for other in (wanted.start[name], tensor))
        lost = 1e-6 * float(goal.norm()) + most.rounds * float((oracle.rounded(goal) - goal).norm())
        assert apart <= most.moved * moved + lost, f"{name} is {apart} off after it moved by {moved}"


def near(value: float, most: Tolerance) -> Any:
    return pytest.approx(value, rel=most.said, abs=most.told)


def assert_scored(cell: Cell, shape: ModelShape, ranks: Sequence[Any], wanted: Wanted) -> None:
    """Logits, log-probs and entropy of each text; of a skipped step the micro-batches that have the bad one."""
    samples = probes.make_samples(shape, cell.features)
    batch = probes.packed(samples, cell.learner)
    masks, most = samples.mask.split(samples.cu_seqlens.diff().tolist()), cell.tolerance.scored
    seen = set()
    for rank in ranks:
        row = batch.sequences[rank["dp"]]
        assert rank["culprits"] == [(rank["dp"], m) for m, ids in enumerate(row) if probes.BAD in ids]
        if rank["scores"] is None:
            continue
        for m, ids in enumerate(row):
            seen |= {*ids.tolist()}
            for values in rank["scores"].get("values", [])[m : m + 1]:
                assert (values - torch.cat([wanted.values[i] for i in ids.tolist()])).abs().max() < most
            if "critic" in cell.features:
                continue
            logits, logprobs, entropy = (rank["scores"][name][m] for name in ("logits", "logprobs", "entropy"))
            theirs = torch.cat([wanted.logits[i][masks[i]] for i in ids.tolist()])
            assert (logits - theirs).abs().max() < most
            inside, targets = batch.micro_batches[rank["dp"]][m].mask, batch.micro_batches[rank["dp"]][m].targets
            said = (theirs / probes.TEMPERATURE).log_softmax(-1)
            assert (logprobs[inside] - said.gather(1, targets[inside][:, None])[:, 0]).abs().max() < most
            assert (entropy[inside] + (said.exp() * said).sum(-1)).abs().max() < most
            for routes in rank["scores"].get("routes", [])[m : m + 1]:
                assert torch.equal(routes.long().sort(-1).values, torch.cat([wanted.routes[i] for i in ids.tolist()]))
    assert seen >= {*range(samples.num_sequences)}


def assert_planned(cell: Cell, folder: Path, ranks: Sequence[Any]) -> None:
    """Ranks hold the bytes of the plan of memory."""
    learner = cell.learner.model_copy(update={"offload": LearnerSection().offload})  # which needs servers
    config = RunConfig.model_validate({"learner": learner, "rollout": {"max_prompt_tokens": 64}})
    planned = {m.stage: m.terms for m in footprints(config, read_shape(folder))}
    each = len(ranks) // learner.pp
    for stage, terms in planned.items():
        held = [rank["bytes"] for rank in ranks[stage * each : (stage + 1) * each]]
        for one in held:
            assert one["parameters"] == pytest.approx(terms["parameters"], rel=1e-9)
            room = 1.05 if learner.lora.rank is None else 2.0  # each adapter is padded
            assert terms["gradients"] <= one["gradients"] < room * terms["gradients"]
        total = sum(one["optimizer"] for one in held)  # one rank's part begins and ends where a buffer is cut
        assert total == pytest.approx(each * terms["optimizer"], rel=1e-9)
        if learner.optimizer.name == "muon":  # shared out by whole parameters
            assert max(one["optimizer"] for one in held) == pytest.approx(terms["optimizer"], rel=0.03)


@pytest.mark.parametrize("cell", CELLS)
def test_it_steps_and_resumes_as_transformers_and_torch(
    cell: Cell, worlds: Worlds, models: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    (folder, model), saved = models(cell.model), tmp_path / "saved"
    saved.mkdir()
    first = worlds.call(cell.learner.dims.world_size, probes.steps, cell, folder, tmp_path)
    second = worlds.call(cell.resumed.dims.world_size, probes.resumed, cell, folder, tmp_path)
    wanted = oracle.wanted(cell, folder, copy.deepcopy(model), tmp_path / "files", cell.learner)
    of_later = wanted
    if "balance" in cell.features:  # whose losses are of micro-batches
        of_later = oracle.wanted(cell, folder, copy.deepcopy(model), tmp_path / "later", cell.resumed)
    seen, later = first(), second()
    assert_scored(cell, read_shape(folder), seen, wanted)
    for rank in seen:
        for name in ("loss", "norm") if rank["first"] else ():
            assert rank["first"][name] == near(wanted.steps[0][name], cell.tolerance)
    assert_stepped(cell, folder, cell.learner, seen, wanted)
    assert_stepped(cell, folder, cell.resumed, later, of_later)
    if not has_values(cell.features):  # which the plan of a policy leaves out
        assert_planned(cell, folder, seen)
    assert not overlap_section(cell.learner).gradients or max(rank["buckets"] for rank in seen) > 2
    if wanted.merged:
        for name, tensor in in_files(cell, folder, cell.learner, [rank["merged"] for rank in seen]).items():
            assert ".lora_" in name or (tensor - wanted.merged[name]).abs().max() < 1e-5, name
    elif "critic" not in cell.features:  # which no class of transformers has
        convert.megatron_to_hf(saved, tmp_path / "back", config=folder)
        back = load_file(tmp_path / "back" / "model.safetensors")
        held = in_files(cell, folder, cell.learner, [rank["saved"] for rank in seen])
        held = {name: tensor for name, tensor in held.items() if name not in VALUE_LAYER}
        assert back.keys() == held.keys()
        assert ("value_layer" in (dropped_tensors(saved, config=folder) or "")) is has_values(cell.features)
        assert [name for name, tensor in held.items() if not torch.equal(tensor, back[name])] == []


PUSHED = [pytest.param(cell, id=str(cell), marks=() if cell in QUICK else pytest.mark.slow) for cell in PUSHES]


@pytest.fixture(scope="module")
def senders() -> Iterator[Worlds]:
    ranks = Worlds()
    yield ranks
    ranks.close()


@pytest.mark.parametrize("cell", PUSHED)
def test_engines_and_files_get_the_bytes_of_the_whole_tensors(cell: Push, senders: Worlds, tmp_path: Path) -> None:
    """Checksums of both ends and largest errors agree, a sparse push has few bytes, and a NaN is refused."""
    keeper = RendezvousStore("127.0.0.1", LIMIT / 2)
    rendezvous = keeper.rendezvous(LEARNERS + ENGINES, learners=LEARNERS, backend="gloo")
    size = LEARNERS if cell.end == "files" else LEARNERS + ENGINES
    (tmp_path / "config.json").write_text("{}")
    said = senders.call(size, pushes.pushed, cell, rendezvous, tmp_path)()
    learners, engines = said[:LEARNERS], said[LEARNERS:]
    if cell.encoding == "sparse":
        first, later = (sum(one["bytes"][i] for one in learners) for i in range(len(VERSIONS)))
        assert 0 < 4 * later < first
    for i, version in enumerate(VERSIONS):
        wanted, error = pushes.whole(cell, version)
        shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
        if engines:
            reports = [one["reports"][i] for one in learners]
            found = compare(
                seal_from_reports(reports, shapes), shapes, [one["reports"][i] for one in engines], frozenset()
            )
            assert not found.differing
            assert cell.model != "qwen3_moe" or all("_scale" in name for name in found.unchecked)
            size, name = largest_change(one.changes for one in reports) or (0.0, "")
            assert (size, name) == (pytest.approx(error[0], rel=1e-6), error[1])
        for group in WRITERS if not engines and cell.encoding != "adapters" else ():
            sealed = seal_from_reports([learners[rank]["sums"][i] for rank in group], shapes)
            assert sealed == {name: checksum(tensor, shapes[name]) for name, tensor in wanted.items()}
    for one in learners if engines and cell.form else ():
        assert one["refused"].startswith(f"{one['name']} has values that are NaN")
