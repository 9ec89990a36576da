"""Times steps of the real learner, and tokens of the embedded engine, on made-up models with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from launcher.calibration.kernels import Kernels
from rl_megatron.options.device import GPU
from rl_megatron.scaling.machines.calibration import Decoded, LearnerProbe, ModelSizes

if TYPE_CHECKING:
    import torch

    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.types import Samples

_SMALL = {
    "cpu": ModelSizes(
        hidden=64, layers=1, heads=4, kv_heads=2, head_dim=16, experts=8, chosen=2, width=32, vocabulary=259
    ),
    GPU: ModelSizes(
        hidden=512, layers=1, heads=8, kv_heads=4, head_dim=64, experts=8, chosen=2, width=512, vocabulary=8192
    ),
}
_WIDE = {
    "cpu": ModelSizes(
        hidden=256, layers=2, heads=8, kv_heads=4, head_dim=32, experts=8, chosen=2, width=192, vocabulary=1024
    ),
    GPU: ModelSizes(
        hidden=2048, layers=2, heads=16, kv_heads=4, head_dim=128, experts=16, chosen=4, width=768, vocabulary=32768
    ),
}
_TOKENS = {"cpu": (512, 3072), GPU: (2048, 16384)}
_LENGTH = {"cpu": 64, GPU: 1024}
_TIMES = 5
_ROWS = (8, 64)
_DECODED, _PROMPT = 16, 32  # tokens


def probe_layouts(ranks: int) -> Iterator[tuple[int, int]]:
    """Degrees dp and ep of the probes."""
    yield ranks, 1
    if ranks > 1:
        yield ranks, ranks


def probes(kernels: Kernels, learner: LearnerSection, device: torch.device, rank: int) -> Iterator[LearnerProbe]:
    """Steps of small and wide models, of few tokens and many, of one and several micro-batches and layers.

    ``learner`` is the layout of the world that this process has joined. Every rank of it calls this.
    """
    few, many = _TOKENS[device.type]
    small, wide = _SMALL[device.type], _WIDE[device.type]
    asked = [(small, few, 1), (small.model_copy(update={"layers": 4}), few, 1), (wide, few, 1), (wide, many, 1)]
    if learner.dims.world_size == 1:
        more = small.model_copy(update={"experts": 16})
        asked += [(small, many, 1), (more, few, 1), (wide.model_copy(update={"layers": 1}), many, 4)]
    for sizes, tokens, micro_batches in asked:
        yield _probe(kernels, learner, device, rank, sizes, tokens, micro_batches)


def _probe(
    kernels: Kernels,
    learner: LearnerSection,
    device: torch.device,
    rank: int,
    sizes: ModelSizes,
    tokens: int,
    micro_batches: int,
) -> LearnerProbe:
    import torch

    from rl_megatron.algorithms.losses import loss_of
    from rl_megatron.config.sections.algorithm import AlgorithmSection
    from rl_megatron.data.packing import pack
    from rl_megatron.learner.megatron import make_policy

    model, dims, length = make_policy(sizes.shape, learner, device, temperature=1.0), learner.dims, _LENGTH[device.type]
    draws = torch.Generator().manual_seed(0)
    for tensor in model.tensors.values():
        with torch.no_grad():
            tensor.copy_(torch.randn(tensor.shape, generator=draws) * 0.4 * sizes.hidden**-0.5)
    model.adopt()
    samples = _samples(sizes, tokens * dims.dp, length, draws)
    batch = pack(samples, dims=dims, max_tokens=-(-tokens // micro_batches) + length // 2)
    mine = tuple(batch.micro_batches[dims.dp_rank(rank)])  # gathered now, as a rank has them
    loss = loss_of(AlgorithmSection(), kl_coefficient=0.0, max_new_tokens=length)

    def step() -> None:
        model.backward(mine, loss, num_tokens=batch.num_tokens, num_sequences=batch.num_sequences)
        model.step(1e-4)

    train = kernels.best(step, times=_TIMES)
    score = kernels.best(lambda: model.score(mine, frozenset({"logprobs"})), times=_TIMES)
    return LearnerProbe(
        sizes=sizes,
        tokens=tokens,
        length=length,
        micro_batches=len(mine),
        dp=dims.dp,
        ep=dims.ep,
        train=train,
        score=score,
    )


def _samples(sizes: ModelSizes, tokens: int, length: int, draws: torch.Generator) -> Samples:
    import torch

    from rl_megatron.types import Samples

    count = tokens // length
    n = count * length
    return Samples(
        input_ids=torch.randint(0, sizes.vocabulary, (n,), generator=draws),
        targets=torch.randint(0, sizes.vocabulary, (n,), generator=draws),
        mask=torch.ones(n, dtype=torch.bool),
        advantages=torch.randn(count, generator=draws).repeat_interleave(length),
        rollout_logprobs=torch.full((n,), -6.0),
        old_logprobs=torch.full((n,), -6.0),
        cu_seqlens=torch.arange(count + 1) * length,
    )


def decoded(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> Iterator[Decoded]:
    """Tokens of the embedded engine, of few rows and of many."""
    import torch

    from rl_megatron.rollout.local.engine import LocalEngine
    from rl_megatron.types import GenerationRequest, SamplingParams

    small, wide = _SMALL[device.type], _WIDE[device.type]
    for sizes in (small, small.model_copy(update={"layers": 4}), wide):
        for rows in _ROWS:
            shape, most = sizes.shape, _PROMPT + _DECODED
            engine = LocalEngine(shape, slots=rows, dtype=dtype, device=device, max_length=most)
            draws = torch.Generator().manual_seed(0)
            for tensor in engine.tensors.values():
                tensor.copy_(torch.randn(tensor.shape, generator=draws) * 0.4 * sizes.hidden**-0.5)

            def sample(count: int, engine: LocalEngine = engine, rows: int = rows) -> None:
                params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=count, stop_token_ids=(), seed=0)
                request = GenerationRequest(
                    id="probe", token_ids=tuple(range(1, _PROMPT + 1)), num_completions=rows, params=params
                )
                engine.generate([request])

            long, short = (kernels.best(lambda n=n: sample(n), times=_TIMES) for n in (_DECODED, 1))  # type: ignore[misc]
            yield Decoded(
                sizes=sizes,
                rows=rows,
                context=_PROMPT + _DECODED // 2,
                seconds=max(1e-7, (long - short) / (_DECODED - 1)),
            )
