"""Learner ranks in separate processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.learner import keywords
from rl_megatron.types import Samples
from tests.forks import FORKS
from tests.samples import sequences_of

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronScorer

LIMIT = 1200.0  # seconds; an idle machine needs at most 40, one with a load of 30 more than 500


def run_ranks(main: Callable[..., None], world_size: int, *arguments: Any) -> None:
    """Fork ``main(rank, *arguments)`` for each rank and wait for all of them; fails if one does."""
    ranks = [FORKS.Process(target=main, args=(rank, *arguments)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LIMIT)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0] * world_size, f"the ranks' exit statuses are {codes}; None has not ended in {LIMIT:.0f} s"


def worlds(
    rank: int, root: Path, layouts: Mapping[str, LearnerSection]
) -> Iterator[tuple[str, LearnerSection, torch.device]]:
    """In a rank's process: its world in each layout, one after the other. It is idle where a layout has fewer ranks."""
    torch.set_num_threads(1)
    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here: before its functions are bound
    from rl_megatron.learner import world

    for name, learner in layouts.items():
        if rank < learner.dims.world_size:
            device = world.init_process_groups(
                learner, rank=rank, rendezvous=f"file://{root}/rendezvous-{name}", seed=1
            )
            yield name, learner, device
            world.destroy_process_groups()


@contextmanager
def whole_gradients() -> Iterator[None]:
    """Every data-parallel rank that is made inside has whole gradients, and none a shard of the optimizer's state."""
    off = {"use_distributed_optimizer": False}
    of_gradients, of_optimizer = keywords._gradient_keywords, keywords._optimizer_keywords
    with (
        patch.object(keywords, "_gradient_keywords", lambda learner: of_gradients(learner) | off),
        patch.object(keywords, "_optimizer_keywords", lambda learner: of_optimizer(learner) | off),
    ):
        yield


def fill(scorer: MegatronScorer, learner: LearnerSection, rank: int, folder: Path) -> None:
    """Give a rank's model the weights of a Hugging Face folder."""
    from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
    from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape

    shape = read_shape(folder)
    layout = megatron_layout(shape, learner.dims)
    read_boxes(HFFolder(folder), hf_layout(shape), layout, rank, dict(scorer.tensors))
    scorer.adopt()


def ragged_samples(count: int, g: torch.Generator) -> Samples:
    """``count`` sequences, the first two targets of each masked out; advantages and log-probs are 0."""
    lengths = torch.randint(4, 40, (count,), generator=g)
    n = int(lengths.sum())
    position = torch.arange(n) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    return sequences_of(
        lengths,
        input_ids=torch.randint(0, 256, (n,), generator=g),
        targets=torch.randint(0, 256, (n,), generator=g),
        mask=position >= 2,
    )
