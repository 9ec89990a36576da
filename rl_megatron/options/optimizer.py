"""``learner.optimizer``: AdamW, or Muon for matrices, whose state data-parallel ranks shard (arXiv:1910.02054)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from rl_megatron.errors import ConfigError
from rl_megatron.options.option import BYTES, Dtype, Keywords, Option, Rank, Terms, padded_vocab
from rl_megatron.section import Fraction, NonNegativeFloat, PositiveFloat, Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape

NEWTON_SCHULZ_STEPS = 5
"""Steps of Muon's iteration, after which all but the smallest singular values are about 0.7 to 1.2."""
_MOMENT = 4  # bytes
_SLOWEST_DECAY = 1 - 1 / (2**8 + 2)
"""bfloat16 has 8 bits of a significand. A factor of at least this rounds 1 + 2 ** -7 to itself, so it never decays."""
STEPPED_AT_ONCE = 2**26
"""Parameters that are stepped together where moments are not float32, or one tensor of more, of which a rank may step
all: of those there are float32 copies then."""


class MuonSection(Section):
    """The setting of ``name=muon`` alone."""

    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """The update of a matrix [rows, columns] is multiplied by 0.2 sqrt(max(rows, columns)), so that learning rates of
    AdamW fit (Moonlight, arXiv:2502.16982), or by sqrt(max(1, rows / columns)) (kellerjordan.github.io/posts/muon), as
    torch.optim.Muon does. What AdamW steps has the same learning rate."""


class OptimizerSection(Section):
    """AdamW or Muon, by megatron-core's OptimizerConfig. Data-parallel ranks shard the state: AdamW's in equal parts,
    Muon's in whole parameters."""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: the matrices of the decoder's layers, routers among them, are stepped by their orthogonalised momentum,
    query, key, value, gate and up projections and those of each expert by themselves. AdamW steps the rest: embedding,
    output layer, norms, biases."""
    muon: MuonSection = MuonSection()
    beta1: Fraction = 0.9
    """Decay of the moving mean of gradients."""
    beta2: Fraction = 0.95
    """Decay of the moving mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Constant added to the denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices and embeddings. Norms and biases do not decay, as in megatron-core."""
    clip_grad: NonNegativeFloat = 1.0
    """Maximum global norm of the gradient; 0 does not clip."""
    moments_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which both moments are kept between steps, by TransformerEngine's Adam, on GPUs alone. bfloat16 halves
    their 8 bytes a parameter. Steps are still computed in float32. How training fares is not measured."""


class OptimizerKeys(Section):
    """The section of keys of `Optimizer`."""

    optimizer: OptimizerSection = OptimizerSection()


class Optimizer(Option):
    """AdamW, or Muon beside it, over float32 copies of the parameters. The learner sets the learning rate before each
    step."""

    keys = OptimizerKeys

    def problems(self, learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
        """Muon with what it cannot do, and its setting without it."""
        section = learner.optimizer
        if section.name == "muon" and learner.batch_invariant:
            yield (
                "learner.optimizer.name=muon with learner.batch_invariant=true: that mode's torch.addmm takes no "
                "factors, and Muon's iteration has some; leave one of them out"
            )
        if section.name != "muon" and section.muon != MuonSection():
            yield (
                f"learner.optimizer.muon.scale with learner.optimizer.name={section.name} would have no effect; "
                "set learner.optimizer.name=muon, or leave it out"
            )
        yield from _moments_problems(learner)

    def megatron(self, learner: LearnerSection, shape: ModelShape) -> Keywords:
        """The optimizer's settings. Megatron's own sharding cuts parameters, and Muon takes whole ones.

        Raises ConfigError for moments that are not float32 without TransformerEngine.
        """
        section = learner.optimizer
        sharded = section.name == "adamw"
        return Keywords(
            ddp={"use_distributed_optimizer": sharded},
            optimizer={
                "optimizer": {"adamw": "adam", "muon": "muon"}[section.name],
                "lr": 0.0,
                "adam_beta1": section.beta1,
                "adam_beta2": section.beta2,
                "adam_eps": section.eps,
                "weight_decay": section.weight_decay,
                "clip_grad": section.clip_grad,
                "use_distributed_optimizer": sharded,
                **({"muon_scale_mode": section.muon.scale} if section.name == "muon" else {}),
                **(_low_moments(learner) if section.moments_dtype != "float32" else {}),
            },
        )

    def memory(self, learner: LearnerSection, shape: ModelShape, rank: Rank, terms: Terms) -> Terms:
        """Bytes of AdamW's two moments, or of Muon's one, and, with bfloat16 parameters, of float32 copies; shared
        out, with Muon by whole parameters: a rank has at least the embedding's or the output layer's."""
        stepped = rank.stepped(learner)
        if learner.optimizer.moments_dtype != "float32":  # a step has copies of moments
            copies = 2 * _MOMENT * min(stepped, max(STEPPED_AT_ONCE, rank.largest))
            state = (2 * BYTES["bfloat16"] + BYTES["float32"]) * stepped
            return {**terms, "optimizer": state, "step": terms["step"] + copies}
        each, d, held = 2 * _MOMENT + (4 if learner.dtype == "bfloat16" else 0), learner.dims, rank.trained
        dense, experts = float(held.dense * each), float(held.experts * each)
        if learner.optimizer.name == "muon":
            dense, experts = dense - _MOMENT * rank.matrices.dense, experts - _MOMENT * rank.matrices.experts
        largest = 0.0
        if learner.optimizer.name == "muon" and rank.stage in (0, d.pp - 1):
            largest = padded_vocab(shape, d.tp) // d.tp * shape.hidden_size * each
        shared = max(dense / (d.dp * d.cp), largest) + experts * d.etp * d.ep / (d.tp * d.cp * d.dp)
        return {**terms, "optimizer": shared}


def _moments_problems(learner: LearnerSection) -> Iterator[str]:
    """Moments in bfloat16 where TransformerEngine's Adam does not keep them, or where they would not decay."""
    dtype = learner.optimizer.moments_dtype
    if dtype == "float32":
        return
    given = f"learner.optimizer.moments_dtype={dtype}"
    if learner.device == "cpu":
        yield f"{given} with learner.device=cpu: TransformerEngine's Adam keeps them, on GPUs alone; leave it out"
    lacking = {
        "learner.optimizer.name=adamw": learner.optimizer.name == "adamw",
        "learner.dtype=bfloat16": learner.dtype == "bfloat16",
    }
    for key in (key for key, there in lacking.items() if not there):
        yield f"{given}: megatron-core can do this only with {key}; set it"
    if learner.offload.optimizer:
        yield (
            f"{given} with learner.offload.optimizer={learner.offload.optimizer:g}: that needs a learner without "
            f"TransformerEngine, whose Adam keeps moments in {dtype}; set one of the two"
        )
    for key in ("beta1", "beta2"):
        if (decay := getattr(learner.optimizer, key)) >= _SLOWEST_DECAY:
            yield (
                f"{given} with learner.optimizer.{key}={decay:g}: bfloat16 has 8 bits, to which numbers are rounded "
                f"that were multiplied by it, so some would never decay; set it below {_SLOWEST_DECAY:.4g}, or leave "
                "moments_dtype out"
            )


def _low_moments(learner: LearnerSection) -> dict[str, object]:
    """Keywords for moments in ``moments_dtype``. Raises ConfigError without TransformerEngine."""
    dtype = learner.optimizer.moments_dtype
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            f"learner.optimizer.moments_dtype={dtype}: TransformerEngine, whose Adam keeps them, is not installed "
            "here; install it, or leave the key out"
        )
    return {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": Dtype(dtype),
        "exp_avg_sq_dtype": Dtype(dtype),
        "main_params_dtype": Dtype("float32"),
        "main_grads_dtype": Dtype(learner.gradient_dtype),
        "store_param_remainders": False,  # megatron-core could not save them for another layout
    }
