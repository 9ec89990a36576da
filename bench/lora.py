"""Measure a step of adapters beside one of the whole model: tokens per second, bytes of state and of a checkpoint.

    python -m bench.lora [--size tiny mid] [--rank 16] [--threads 2] [--repeats 7] [--json FILE]

Both are whole steps of one learner's code over the same equally long sequences, in turns, in one process; figures are
medians. State is gradients, float32 copies and moments.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.learner import GSPO, SIZES, VOCABULARY, make_samples, seconds
from bench.results import parse, write
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.data.packing import Packer
from rl_megatron.features.lora.merging import UntrainedAdapters
from rl_megatron.features.lora.rows import LoraLayouts
from rl_megatron.models.tiny import make_tiny_model
from rl_megatron.types import Samples
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape

if TYPE_CHECKING:
    from rl_megatron.learner.trained import MegatronLearner

SPEED_BAR = 0.9  # adapters over the whole model


def filled(folder: Path, learner: LearnerSection, device: torch.device) -> MegatronLearner:
    """A learner with the folder's weights, and adapters as at the start."""
    from rl_megatron.learner.megatron import make_policy

    shape = read_shape(folder)
    made = make_policy(shape, learner, device, temperature=1.0)
    hf, ranks = hf_layout(shape), megatron_layout(shape)
    read_boxes(HFFolder(folder), hf, ranks, 0, dict(made.tensors))
    if made.adapters:
        own = LoraLayouts(learner.lora).file_layout(ranks, hf)
        source = UntrainedAdapters(folder, own.local_shapes(0), 0)
        read_boxes(source, own, LoraLayouts(learner.lora).on_ranks(ranks), 0, made.adapters)
    made.adopt()
    return made


def step_of(made: MegatronLearner, samples: Samples, learner: LearnerSection) -> Callable[[], None]:
    """One train step of all sequences."""
    tokens = len(samples.input_ids)
    batch = Packer(dims=learner.dims, max_tokens=tokens + 512).pack(samples)
    mine = tuple(batch.micro_batches[0])

    def step() -> None:
        made.backward(mine, GSPO, num_tokens=batch.num_tokens, num_sequences=batch.num_sequences)
        made.step(1e-4)

    return step


def state_bytes(made: MegatronLearner) -> int:
    """Of gradients, float32 copies and moments."""
    from rl_megatron.learner.optimizer import optimizer_state

    buffers = [b.grad_data for chunk in made._trained for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    held = {t.data_ptr(): t for t in (*buffers, *optimizer_state(made._optimizer)) if t.dim()}
    return sum(t.numel() * t.element_size() for t in held.values())


def _size(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())


def measure(size: str, rank: int, threads: int, repeats: int, scratch: Path) -> dict[str, object]:
    """One row."""
    warnings.simplefilter("ignore")
    import rl_megatron.learner.megatron  # noqa: F401  makes megatron run here
    from rl_megatron.learner import world

    spec, tokens, length, _ = SIZES[size]
    samples, folder = (
        make_samples(tokens, length, long_tail=False),
        make_tiny_model(spec, scratch, 0, vocab_size=VOCABULARY),
    )
    whole = LearnerSection(threads=threads)
    adapted = LearnerSection.model_validate({"threads": threads, "lora": {"rank": rank}})
    torch.set_num_threads(threads)
    device = world.init_process_groups(whole, rank=0, rendezvous=f"file://{scratch}/rendezvous-{size}", seed=0)
    models = [filled(folder, learner, device) for learner in (whole, adapted)]
    steps = [step_of(made, samples, learner) for made, learner in zip(models, (whole, adapted), strict=True)]
    for step in steps * 2:
        step()
    turns = [tuple(seconds(step) for step in steps) for _ in range(repeats)]
    speeds = [tokens / statistics.median(column) for column in zip(*turns, strict=True)]
    state, saved = [state_bytes(made) for made in models], []
    for number, made in enumerate(models):
        place = scratch / f"{size}-{number}"
        place.mkdir()
        made.save(place)
        saved.append(sum(path.stat().st_size for path in place.iterdir()))
    world.destroy_process_groups()
    return {
        "size": size,
        "tokens": tokens,
        "whole": speeds[0],
        "adapters": speeds[1],
        "speed": speeds[1] / speeds[0],
        "speed_bar": SPEED_BAR,
        "state": state[1] / state[0],
        "saved": saved[1] / saved[0],
        "share": _size(models[1].adapters) / _size(models[0].tensors),
    }


def main() -> None:
    """Measure the chosen sizes, and print one row each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    for name, value in (("rank", 16), ("threads", 2), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parse(parser)
    print("tokens/s of both, then adapters over the whole model: tokens/s (bar), parameters, bytes of state and saved")
    rows = []
    for size in args.size:
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(row := measure(size, args.rank, args.threads, args.repeats, Path(scratch)))
        print(
            "{size:5} {whole:8,.0f} {adapters:8,.0f} {speed:5.2f} ({speed_bar}) {share:5.3f} {state:5.3f} "
            "{saved:5.3f}".format(**row),
            flush=True,
        )
    write(args, rows)


if __name__ == "__main__":
    main()
