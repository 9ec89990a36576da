"""Rules on the learner's keys, by themselves and for a model's sizes; rules of features; and models that have
routers as megatron-core has none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING

from rl_megatron import feature
from rl_megatron.config.activations import TORCH_ONLY, activation_bytes, freed, torch_only, wants_transformer_engine
from rl_megatron.config.sections.learner import HALVES, LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.rules import SET, UNSET, Above, Excludes, Has, Not, On, Rule, as_given, broken, excluded

if TYPE_CHECKING:
    from rl_megatron.models.shape import ModelShape

DEEPEP_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Groups of ranks that DeepEP has settings for (deep_ep/buffer.py, get_dispatch_config)."""
_CHUNK = 64  # HYBRIDEP_TOKEN_ALIGNMENT of megatron-core 0.19.2
_LEAST = 0.01  # share of a layer's kept bytes; a module that frees less costs time for nothing
_SLOWEST_DECAY = math.nextafter(1 - 1 / (2**8 + 2), 0)
"""bfloat16 has 8 bits of a significand. A factor above this rounds 1 + 2 ** -7 to itself, so it never decays."""
_TWO, _OUT = "set one of the two", "leave it out"
_ON_CPU, _OWN_LAYERS = On("learner.device", "cpu"), On("learner.own_layers", SET, "learner.layers")
_KERNELS, _NO_EXPERTS = On("learner.dispatcher", Not("alltoall")), On("shape.num_experts", 0, "shape.family")
_FLOAT8 = On("learner.fp8")
_LOW_MOMENTS = On("learner.optimizer.moments_dtype", "bfloat16")


# fmt: off
_ROWS: Sequence[Rule] = (
    *excluded(_KERNELS,
        (_ON_CPU, "its kernels need GPUs", "set learner.dispatcher=alltoall"),
        (On("learner.dtype", "float32"), "its kernels send only bfloat16", "set learner.dtype=bfloat16"),
        ((On("learner.ep", 1), On("learner.dims.etp", 1, "learner.etp")), "every token stays on its rank", _OUT)),
    *excluded(On("learner.deterministic", True),
        (_KERNELS, "its kernels have no deterministic mode", "set learner.dispatcher=alltoall")),
    *(Excludes(one=one, other=_NO_EXPERTS, where="shape", why="the model has no experts", fix=_OUT)
      for one in (_KERNELS, On("learner.router.frozen", True))),
    Excludes(one=On("learner.gradient_dtype", "bfloat16"), other=On("learner.dtype", "float32"),
             why="gradients need the precision of parameters", fix="set learner.dtype=bfloat16, or leave it out"),
    Excludes(one=On("learner.layers", "transformer_engine"), other=(On("learner.cp", Above(1)),
             On("learner.dtype", "float32")), why="with context parallelism TransformerEngine has attention kernels "
             "for half precision only", fix="set learner.dtype=bfloat16, or learner.layers=auto, which then uses "
             "torch's layers"),
    Excludes(one=On("learner.recompute.uniform"), other=On("learner.recompute.parts", Not(())),
             why="uniform already recomputes whole layers", fix=_TWO),
    Excludes(one=On("learner.vpp", Above(1)), other=On("learner.pp", 1), why="chunks need a pipeline",
             fix="set learner.vpp=1 or learner.pp >= 2"),
    Excludes(one=On("learner.padding.sequences"), other=On("learner.padding.tokens", UNSET), why="micro-batches would "
             "still have any number of positions", fix="set both, or neither"),
    Excludes(one=On("learner.recompute.parts", Has("mla_up_proj")), other=_OWN_LAYERS, fix=_OUT,
             why="custom layers choose what they recompute"),
    *excluded(On("learner.offload.optimizer", Above(0)),
        (_ON_CPU, "its state is already in host memory", _OUT),
        (On("learner.optimizer.name", Not("adamw")), "megatron-core can do this only with AdamW", "set it to adamw"),
        (On("learner.dtype", Not("bfloat16")), "megatron-core can do this only with bfloat16 parameters",
         "set learner.dtype=bfloat16")),
    *excluded(On("learner.offload.while_sampling"), (_ON_CPU, "there is no GPU memory to free", _OUT)),
    *(row for half, parts in HALVES.items() for row in excluded(On("learner.offload.activations", Has(half)),
        (_ON_CPU, "there is no GPU memory to free", _OUT),
        (On("learner.recompute.uniform"), "recomputed layers keep only their inputs", _TWO),
        *((On("learner.recompute.parts", Has(part)), "it recomputes a part of what would be offloaded", _TWO)
          for part in parts),
        (_FLOAT8, "layers keep float8 copies of weights with activations, and these would be offloaded too", _TWO),
        (_OWN_LAYERS, "the run does not know what custom layers keep", _OUT))),
    *(Excludes(one=On("learner.offload.activations", Has(half)), other=lacks, why=f"the model has no {what}", fix=_OUT,
               where="shape") for half, lacks, what in (("moe", _NO_EXPERTS, "experts"),
      ("mlp", (On("shape.num_experts", Above(0)), On("shape.dense_layers", 0, "shape.family")), "dense layers"))),
    Excludes(one=On("learner.offload.activations", Has("moe")), other=_KERNELS, fix=_TWO,
             why="it would offload tensors of other CUDA streams without waiting for them"),
    *excluded(_LOW_MOMENTS,
        (On("learner.optimizer.name", Not("adamw")), "megatron-core supports them only for AdamW", "set it to adamw"),
        (On("learner.dtype", Not("bfloat16")), "megatron-core supports them only with bfloat16 parameters",
         "set learner.dtype=bfloat16"),
        *((On(f"learner.optimizer.{beta}", Above(_SLOWEST_DECAY)), "bfloat16 has 8 bits, so some moments round back "
           "to their old value and never decay", f"set it below {_SLOWEST_DECAY:.4g}, or leave "
           "moments_dtype out") for beta in ("beta1", "beta2")),
        (_ON_CPU, "only TransformerEngine's Adam keeps them, on GPUs", _OUT),
        (On("learner.offload.optimizer", Above(0)), "bfloat16 moments need TransformerEngine's Adam, which the second "
         "key does not use", _TWO)),
    *excluded(_FLOAT8,
        (_ON_CPU, "its kernels need GPUs", _OUT),
        (On("learner.dtype", Not("bfloat16")), "parameters must be bfloat16", "set learner.dtype=bfloat16"),
        *((on, "only TransformerEngine's layers support it", "set auto")
          for on in (On("learner.layers", "torch"), _OWN_LAYERS))),
    *excluded(_FLOAT8, (TORCH_ONLY, "only torch's layers support that", _OUT), where="shape"),
    *excluded(On("learner.layers", "transformer_engine"),
        (TORCH_ONLY, "only torch's layers support that", "set learner.layers=auto or torch"), where="shape"),
)
# fmt: on


def problems(learner: LearnerSection, shape: ModelShape | None = None) -> Iterator[str]:
    """Yields why the keys are invalid, and what to do. ``shape`` is None before a model is read.

    Raises ConfigError like `feature.features`.
    """
    features = feature.features().values()
    rows = [*_ROWS, *(row for one in features for row in one.learner_rules)]
    yield from broken(rows, SimpleNamespace(learner=learner))
    if shape is not None:
        yield from broken(rows, SimpleNamespace(learner=learner, torch_only=torch_only(shape)), "shape", shape)
    for check in (*_CHECKS, *(one.problems for one in features)):
        yield from check(learner, shape)


def refuse(shape: ModelShape, learner: LearnerSection) -> None:
    """Raises ConfigError naming every part of the model that megatron-core 0.16 computes wrongly or cannot build."""
    found = [*_unbuildable(shape), *problems(learner, shape)]
    if found:
        raise ConfigError(f"model_type={shape.family!r} cannot be trained as configured:\n  " + "\n  ".join(found))


def sparse_problem(learner: LearnerSection, shape: ModelShape) -> str | None:
    """Returns why the learner cannot compute sequences longer than an indexer's ``top_k``; None if it can, or if the
    model has no indexer."""
    if shape.indexer is None:
        return None
    if learner.cp > 1:
        return f"with learner.cp={learner.cp} ranks share a sequence, and its indexer reads all of it; set learner.cp=1"
    chunks, full = learner.pp * learner.vpp, shape.indexer.layers
    starts = accumulate(learner.stages or [shape.num_layers // chunks] * chunks)
    shared = next((start for start in starts if start < shape.num_layers and start not in full), None)
    if shared is None:
        return None
    return (
        f"layer {shared}, the first of a pipeline chunk, takes the keys that a layer of another chunk chooses; set "
        f"learner.stage_layers so that chunks begin at layers with an indexer: {', '.join(map(str, full))}"
    )


def _recompute_problems(learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
    """Yields an error for keys that exclude each other, useless parts, and groups that do not divide the layers."""
    section = learner.recompute
    given = f"learner.recompute.parts={as_given(section.parts)}"
    if "moe" in section.parts and {"moe_act", "shared_experts"} & {*section.parts}:
        yield f"{given}: moe includes moe_act and shared_experts; keep only moe of the three"
    if shape is not None:
        yield from _useless(learner, shape)
        yield from _uneven(learner, shape)


def _useless(learner: LearnerSection, shape: ModelShape) -> Iterator[str]:
    """Parts that free less than `_LEAST` of every layer, with the reason."""
    fused = wants_transformer_engine(learner, shape)
    of_norms = "its norms are fused into linear layers" if fused else "it needs TransformerEngine's layers"
    reasons = {
        "core_attn": "attention keeps only its inputs",
        "layernorm": of_norms,
        "mla_up_proj": "the model has no latent attention",
        "mlp": "the model has no dense layers",
        "moe": "the model has no experts",
        "moe_act": "the model has no experts",
        "shared_experts": "the model has no shared experts",
    }
    layers, longest = range(shape.num_layers), learner.max_tokens_per_micro_batch
    for module in learner.recompute.parts:
        shares = (
            freed(learner, shape, n, longest).get(module, 0.0) / activation_bytes(learner, shape, n, longest)
            for n in layers
        )
        if all(share < _LEAST for share in shares):
            yield f"learner.recompute.parts={module} would free nothing: {reasons[module]}; leave it out"


def _uneven(learner: LearnerSection, shape: ModelShape) -> Iterator[str]:
    """Yields an error if groups do not divide the layers of a pipeline chunk: megatron-core then needs more layers."""
    section = learner.recompute
    sizes = sorted(set(learner.stages or [shape.num_layers // (learner.pp * learner.vpp)]))
    if section.uniform is not None and (odd := [size for size in sizes if size % section.uniform]):
        yield (
            f"learner.recompute.uniform={section.uniform} does not divide the {odd[0]} layers of a pipeline chunk; "
            "set it to 1 or another divisor"
        )


def _pipeline_problems(learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
    """Yields an error if ``stage_layers`` does not have a number for each chunk, or the model has other layers."""
    given, chunks = learner.stages, learner.pp * learner.vpp
    if given is not None and len(given) != chunks:
        yield (
            f"learner.stage_layers={learner.stage_layers} has {len(given)} numbers, but learner.pp*learner.vpp = "
            f"{learner.pp}*{learner.vpp} = {chunks}; give one number for each model chunk"
        )
    elif given is not None and shape is not None and sum(given) != shape.num_layers:
        yield (
            f"learner.stage_layers={learner.stage_layers} has {sum(given)} layers, but the model has "
            f"{shape.num_layers}; assign each layer to one chunk"
        )


def _experts_problems(learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
    """Yields an error for degrees that megatron-core 0.16.1 rejects late."""
    d = learner.dims
    inner = d.tp * d.cp * d.dp
    if inner % (d.ep * d.etp):
        yield (
            f"learner: ep*etp = {d.ep}*{d.etp} = {d.ep * d.etp} does not divide "
            f"tp*cp*dp = {d.tp}*{d.cp}*{d.dp} = {inner}; "
            f"leave learner.dp out, or set it so that {d.ep * d.etp} divides tp*cp*dp"
        )
    if shape is not None and (shape.expert_bias or shape.stacked_experts) and d.etp > 1:
        kind = "experts with biases" if shape.expert_bias else "experts in one tensor per layer"
        yield (f"learner.etp={d.etp}: {kind} cannot be sharded; set learner.etp=1, and spread them with learner.ep")


def _replicas_problems(learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
    """Yields an error if ranks cannot divide the heads of delta nets."""
    if shape is None or shape.delta is None or learner.cp == 1:
        return
    ranks, heads = learner.tp * learner.cp, shape.delta.key_heads
    if heads % ranks:
        yield (
            f"learner.cp={learner.cp} with learner.tp={learner.tp}: tp*cp={ranks} ranks share "
            f"the key heads of delta nets, and do not divide the {heads} of the model; lower one of them"
        )


def _padding_problems(learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
    """Yields an error for sizes that do not rise, end at another maximum, or are padded further by tp, cp or fp8."""
    section, most = learner.padding, learner.max_tokens_per_micro_batch
    given, sizes = f"learner.padding.tokens={section.tokens}", section.sizes
    if not sizes:
        return
    if any(one >= next_one for one, next_one in pairwise(sizes)):
        yield f"{given}: the sizes do not rise; sort them, and give each once"
    if sizes[-1] != most:
        yield (
            f"{given} with learner.max_tokens_per_micro_batch={most}: the last size must equal the "
            "second key, so that every micro-batch fits; change one of the two"
        )
    if odd := [size for size in sizes if size % learner.token_multiple]:
        yield (
            f"{given} with learner.tp={learner.tp}, learner.cp={learner.cp} and learner.fp8={learner.fp8}: "
            f"{odd[0]} is not a multiple of {learner.token_multiple}; round the sizes up to multiples"
        )


def _dispatcher_problems(learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
    """Yields an error for numbers of ranks without DeepEP settings, and for HybridEP with unequal lengths."""
    if learner.dispatcher == "alltoall":
        return
    given, d = f"learner.dispatcher={learner.dispatcher}", learner.dims
    if learner.dispatcher == "deepep" and 1 != d.ep * d.etp not in DEEPEP_RANKS:
        known = ", ".join(map(str, DEEPEP_RANKS))
        yield (
            f"{given} with learner.ep={d.ep} and learner.etp={d.etp}: DeepEP has no settings for {d.ep * d.etp} "
            f"ranks, only for {known}; change their product to one of them"
        )
    if learner.dispatcher == "hybridep" and len(learner.padding.sizes) != 1:
        yield (
            f"{given} with learner.padding.tokens={learner.padding.tokens or 'null'}: its ranks exchange routing "
            "maps of equal length, so all micro-batches need one size; set "
            f"learner.padding.tokens={learner.max_tokens_per_micro_batch}"
        )
    if learner.dispatcher == "hybridep" and (odd := [n for n in learner.padding.sizes if n % (_CHUNK * d.tp * d.cp)]):
        yield (
            f"{given} with learner.padding.tokens={odd[0]}, learner.tp={d.tp} and learner.cp={d.cp}: its kernels "
            f"take chunks of {_CHUNK} tokens per rank; round it up to a multiple of {_CHUNK * d.tp * d.cp}"
        )


def _fp8_problems(learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
    """Yields an error for sizes that blocks of float8 do not divide."""
    if learner.fp8 is None or shape is None:
        return
    given = f"learner.fp8={learner.fp8}"
    unit = 32 if learner.fp8 == "mxfp8" else 16
    if learner.fp8 == "blockwise" and learner.tp > 1:
        for size, what in _gathered(shape).items():
            if size % learner.float8_rows:
                yield (
                    f"{given} with learner.tp={learner.tp}: ranks gather the {size} {what} in float8, and this is "
                    f"not a multiple of {learner.float8_rows}; set learner.tp=1, or learner.fp8=tensorwise"
                )
    for size, what in _sizes(learner, shape).items():
        if size % unit:
            yield f"{given}: {size} {what} are not a multiple of {unit}; lower learner.tp or etp, or leave it out"


def _gathered(shape: ModelShape) -> dict[int, str]:
    """Returns what ranks of a tensor-parallel group gather for a linear layer, by size."""
    ranks = () if shape.latent is None else (shape.latent.query_rank or 0, shape.latent.kv_rank)
    return {shape.hidden_size: "hidden columns", **{rank: "columns of a latent" for rank in ranks if rank}}


def _sizes(learner: LearnerSection, shape: ModelShape) -> dict[int, str]:
    """Returns the inputs and outputs of a rank's linear layers, by size."""
    d, out = learner.dims, {shape.hidden_size: "hidden columns"}
    if shape.latent is None:
        out[shape.num_heads * shape.head_dim // d.tp] = "columns of a rank's heads"
        out[max(shape.num_kv_heads // d.tp, 1) * shape.head_dim] = "columns of a rank's keys"
    else:
        out[shape.num_heads * shape.latent.value_dim // d.tp] = "columns of a rank's heads"
        out[shape.latent.kv_rank + shape.latent.rope_dim] = "columns of latents"
        out |= _gathered(shape)
    if shape.dense_width:
        out[shape.dense_width // d.tp] = "columns of a rank's dense layers"
    if shape.num_experts:
        out[shape.expert_width // d.etp] = "columns of a rank's experts"
    if shape.shared_width:
        out[shape.shared_width // d.tp] = "columns of a rank's shared experts"
    return out


_CHECKS: tuple[Callable[[LearnerSection, ModelShape | None], Iterator[str]], ...] = (
    _recompute_problems,
    _pipeline_problems,
    _experts_problems,
    _replicas_problems,
    _padding_problems,
    _dispatcher_problems,
    _fp8_problems,
)


def _unbuildable(shape: ModelShape) -> Iterator[str]:
    router, top_k = shape.router, shape.experts_per_token
    if router.score == "sigmoid" and (top_k == 1 or not shape.normalize_top_k):
        yield (
            f"a sigmoid router with num_experts_per_tok={top_k} and norm_topk_prob={shape.normalize_top_k}: megatron "
            f"normalizes the weights of the chosen experts only if there are two or more, and then always"
        )
    if router.score == "softmax" and shape.normalize_top_k and top_k == 1 < shape.num_experts:
        yield (
            f"num_experts_per_tok=1 of {shape.num_experts} experts with norm_topk_prob=True: the chosen expert's "
            "weight is always 1, so its router would never learn, and megatron rejects it; choose 2 experts, or set "
            "norm_topk_prob=False if the model was trained with it"
        )
    summed, of_group = {"top2": 2, "max": 1}[router.group_score], shape.num_experts // router.groups
    if 1 <= router.top_groups < router.groups and of_group < summed:
        yield (
            f"{router.groups} groups of {of_group} of {shape.num_experts} experts: its best {summed} score each; "
            "set n_group in config.json (without it, the family's default holds, for example 8 for deepseek_v3)"
        )
    if 1 <= router.top_groups < router.groups and top_k // router.top_groups != summed:
        yield (
            f"the model scores a group of experts by its best {summed}, but megatron by its best "
            f"num_experts_per_tok / topk_group = {top_k} / {router.top_groups} = {top_k // router.top_groups}"
        )
