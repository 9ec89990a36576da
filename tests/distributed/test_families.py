"""Every family's weights through its table into the learner: the logits are transformers' own in every layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_megatron.config import LearnerSection
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Samples
from tests.distributed.family_models import MODELS, save_model
from tests.distributed.ranks import run_ranks

LENGTHS = (13, 22)


def make_samples() -> Samples:
    """Two sequences of different length, packed."""
    g = torch.Generator().manual_seed(5)
    n = sum(LENGTHS)
    return Samples(
        input_ids=torch.randint(0, 61, (n,), generator=g),
        targets=torch.randint(0, 61, (n,), generator=g),
        mask=torch.ones(n, dtype=torch.bool),
        advantages=torch.randn(n, generator=g),
        rollout_logprobs=torch.zeros(n),
        old_logprobs=torch.zeros(n),
        cu_seqlens=torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()]),
    )


@dataclass(frozen=True)
class LogitsHead:
    """A head whose score is all logits, gathered over TP."""

    vocab_size: int
    score: str = "logits"

    def __call__(self, output: Tensor, _: Any) -> dict[str, Tensor]:
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(output) for _ in range(group.size())]
        torch.distributed.all_gather(parts, output.contiguous(), group=group)
        return {"logits": torch.cat(parts, -1)[0, :, : self.vocab_size]}


def logits_error(folder: Path, learner: LearnerSection, rank: int, device: torch.device) -> tuple[float, int] | None:
    """Largest difference to transformers' logits and the rows compared, on ranks of the last stage."""
    from rl_megatron.learner.forward import run_scores
    from rl_megatron.learner.megatron import MegatronLearner
    from rl_megatron.learner.model import build_chunks, make_config
    from rl_megatron.weights.families import hf_layout, megatron_layout
    from rl_megatron.weights.safetensors_io import Checkpoint, read_boxes

    shape = ModelShape.from_folder(folder)
    config = make_config(shape, learner)
    chunks = build_chunks(shape, learner, config)
    head = LogitsHead(shape.vocab_size)
    megatron = MegatronLearner(shape, learner, device, config, chunks, head)
    layout = megatron_layout(shape, learner.dims, vocab_multiple=learner.vocab_multiple)
    tensors = dict(megatron.tensors)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))  # what the table forgets shows
    read_boxes(Checkpoint(folder), hf_layout(shape), layout, rank, tensors)
    megatron.adopt()
    packed = megatron._pack([make_samples()])
    results = run_scores(megatron._chunks, packed, head)
    if not results:
        return None
    source = packed[0].source
    wanted = torch.load(folder / "logits.pt")
    error = (results[0][source >= 0] - wanted[source[source >= 0]]).abs().max()
    return float(error), int((source >= 0).sum())


def rank_main(rank: int, options: dict[str, int], names: Sequence[str], root: Path) -> None:
    """One rank of a layout: all families, one after the other, in one process."""
    torch.set_num_threads(1)
    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here: before its functions are bound
    from rl_megatron.learner import world

    learner = LearnerSection.model_validate(options)
    device = world.join(learner, rank=rank, rendezvous=f"file://{root}/rendezvous{sorted(options.items())}", seed=1)
    errors = {name: logits_error(root / name, learner, rank, device) for name in names}
    (root / f"rank{rank}.json").write_text(json.dumps(errors))
    world.leave()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    ids = make_samples().input_ids.split(LENGTHS)
    for name in MODELS:
        model = save_model(name, root / name)
        with torch.no_grad():
            torch.save(torch.cat([model(x[None]).logits[0] for x in ids]), root / name / "logits.pt")
    return root


HAS_EXPERTS = [name for name in MODELS if "moe" in name or name in ("mixtral", "gpt_oss", "minimax_m2")]
LAYOUTS: dict[str, tuple[dict[str, int], Sequence[str]]] = {
    "one": ({}, list(MODELS)),
    "tp2": ({"tp": 2}, [name for name in MODELS if name not in HAS_EXPERTS]),
    "tp2-ep2": ({"tp": 2, "ep": 2}, HAS_EXPERTS),
    "pp2": ({"pp": 2}, list(MODELS)),
    "cp2": ({"cp": 2}, list(MODELS)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers(layout: str, models: Path) -> None:
    options, names = LAYOUTS[layout]
    world = LearnerSection.model_validate(options).dims.world_size
    run_ranks(rank_main, world, options, names, models)
    seen = [json.loads((models / f"rank{rank}.json").read_text()) for rank in range(world)]
    for name in names:
        found = [rank[name] for rank in seen if rank[name] is not None]
        print(f"{layout} {name}: {max(error for error, _ in found):.1e}")
        assert sum(rows for _, rows in found) % sum(LENGTHS) == 0
        assert max(error for error, _ in found) < 1e-4, name
