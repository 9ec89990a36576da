"""What a process of the kit measures: memory of a step beside the plan, rates, kernels and the host's waits."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import Samples
from tests.gpu import branch
from tests.samples import sequences_of

LAYERS = 4
SEED = 7
REPEATS = 3


def shape_of(small: bool) -> ModelShape:
    """Four layers of Qwen3-30B-A3B, 3.1 B parameters; or tiny ones."""
    return branch.SHAPE if small else replace(NAMED["qwen3-30b-a3b"], num_layers=LAYERS)


def samples_of(tokens: int, length: int, vocabulary: int) -> Samples:
    """Sequences of equal length."""
    ids, targets = torch.randint(0, vocabulary, (2, tokens), generator=torch.Generator().manual_seed(SEED))
    return sequences_of([length] * (tokens // length), input_ids=ids, targets=targets, advantages=torch.ones(tokens))


def fill_at_random(tensors: Mapping[str, torch.Tensor]) -> None:
    """Weights of usual sizes, drawn on the device."""
    for name in sorted(tensors):
        if "norm" in name:
            tensors[name].fill_(1.0)
        else:
            tensors[name].normal_(0.0, 0.02)


def timed(call: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls, after one that does not count."""
    best = float("inf")
    for repeat in range(REPEATS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if repeat:
            best = min(best, time.perf_counter() - began)
    return best


def step_main(rank: int, folder: Path, keys: Mapping[str, Any], tokens: int, length: int, small: bool) -> None:
    """A policy's steps and scores on so many tokens: bytes at most, seconds, kernels of attention, waits by line."""
    learner, device = branch.begin(rank, folder, keys)
    from rl_megatron.learner.megatron import make_policy

    shape = shape_of(small)
    policy = make_policy(shape, learner, device, temperature=1.0)
    fill_at_random(policy.tensors)
    policy.adopt()
    samples = samples_of(tokens, length, shape.vocab_size)
    counts = {"num_tokens": tokens, "num_sequences": tokens // length}

    def step() -> None:
        branch.train_step(policy, [samples], branch.LOSS, 1e-5, **counts)

    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    seen: dict[str, Any] = {"bytes": torch.cuda.max_memory_allocated()}
    seen["reserved"] = torch.cuda.max_memory_reserved() if not small else 0
    seen["step"] = timed(step)
    seen["score"] = timed(lambda: policy.score([samples], frozenset({"logprobs"})))
    seen["waits"] = _waits(step)
    seen["kernels"] = {} if small else _attention(step)
    branch.end(folder, seen)


def _waits(step: Callable[[], None]) -> dict[str, int]:
    """How often each line makes the host wait for the GPU, as torch's debug mode says."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    lines = [one for one in heard if "synchroniz" in str(one.message)]
    return dict(Counter(f"{Path(one.filename).name}:{one.lineno}" for one in lines).most_common())


def _attention(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds on the GPU of the kernels with attention in their names, and of the ten longest others."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda one: -one.device_time_total)
    attention = [one for one in kernels if any(w in one.key.lower() for w in ("flash", "fmha", "attention", "softmax"))]
    return {one.key[:80]: one.device_time_total / 1e3 for one in [*attention[:6], *kernels[:10]]}


def push_main(rank: int, folder: Path, keys: Mapping[str, Any], small: bool) -> None:
    """Pushes into tensors of the same process, with and without verification; checksums, digests, log-probs' chunks."""
    learner, device = branch.begin(rank, folder, keys)
    from rl_megatron.learner.heads import token_logprobs
    from rl_megatron.learner.megatron import make_frozen
    from rl_megatron.weights.checks.reports import box_checksums
    from rl_megatron.weights.layouts.families import hf_layout, megatron_layout
    from rl_megatron.weights.plans.plan import plan
    from rl_megatron.weights.routes.group import ProcessGroupTransport

    shape = shape_of(small)
    model = make_frozen(shape, learner, device, temperature=1.0)
    fill_at_random(model.tensors)
    layout, into = megatron_layout(shape, learner.dims), hf_layout(shape)
    src = dict(model.tensors)
    dtype = next(iter(src.values())).dtype
    dst = {name: torch.empty(size, dtype=dtype, device=device) for name, size in into.local_shapes(0).items()}
    size = sum(tensor.nbytes for tensor in dst.values())
    moves = plan(layout, replace(into, dims=learner.dims))
    seen: dict[str, Any] = {"bytes": size, "tensors": len(dst)}
    for verify in (False, True):
        transport = ProcessGroupTransport(moves, src=src, dst=dst, verify=verify)
        seen[f"push, verify={str(verify).lower()}"] = timed(lambda made=transport: made.move(1))
    seen["checksums"] = timed(lambda: box_checksums((t, tuple(t.shape), ()) for t in dst.values()))
    tokens = 64 if small else 8192
    logits = torch.randn(tokens, shape.vocab_size, device=device, dtype=dtype).requires_grad_()
    targets = torch.zeros(tokens, dtype=torch.int64, device=device)

    def logprobs() -> None:
        said, _ = token_logprobs(logits, targets, temperature=1.0, vocab_size=shape.vocab_size)
        said.sum().backward()

    seen["log-probs"] = timed(logprobs)
    seen["positions"] = tokens
    branch.end(folder, seen)
