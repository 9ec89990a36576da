"""What ranks of a tensor-parallel or expert-parallel group send for a token of one layer, in closed form. No torch.

Columns are numbers of a token on the larger side of a collective, as a dry run counts them (tests/recipes). With
sequence parallelism (arXiv:2205.05198) each block of a layer gathers its input, again in the backward pass for the
gradient of its weights, where it also gathers the gradient of its output; it scatters the sums of its output and of
its input's gradient. Of latents only those are gathered that are projected up.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.models.shape import ModelShape

PROBABILITY, COUNT = 4, 8  # bytes of an expert's probability, and of a count of tokens
LOGPROBS = 4  # float32 numbers of a token that the output layer's ranks reduce: maxima, sums, logits, entropies


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Numbers of a token that are gathered and scattered in one direction through a layer."""

    gathered: float
    scattered: float

    @property
    def both(self) -> float:
        """Gathered and scattered together."""
        return self.gathered + self.scattered


def forward_columns(shape: ModelShape, *, sparse: bool) -> Columns:
    """Of the forward pass of a layer with experts or without."""
    inputs, outputs, up, rotary = _sizes(shape, sparse)
    return Columns(gathered=inputs + up + rotary, scattered=outputs)


def backward_columns(shape: ModelShape, *, sparse: bool) -> Columns:
    """Of its backward pass. Rotary keys are no product's input: only their gradient travels."""
    inputs, outputs, up, rotary = _sizes(shape, sparse)
    return Columns(gathered=inputs + outputs + up, scattered=inputs + up + rotary)


def _sizes(shape: ModelShape, sparse: bool) -> tuple[float, float, float, float]:
    """Whole inputs that a layer gathers, and outputs that it scatters; latents that it projects up, and rotary keys.

    Experts get their tokens by the all-to-all; shared ones are a block as a dense MLP is.
    """
    mlp = 0 if sparse and not shape.shared_width else 1
    h, m = shape.hidden_size, shape.latent
    if m is None:
        return h * (mlp + 1.0), h * (mlp + 1.0), 0.0, 0.0
    return h * float(mlp), h * (mlp + 1.0), float((m.query_rank or 0) + m.kv_rank), float(m.rope_dim)


def head_gathers(*, float32: bool) -> int:
    """How often the output layer gathers hidden states of a token: a float32 head keeps them for its backward pass."""
    return 1 if float32 else 2


def replicated(shape: ModelShape, layers: float, sparse: float, *, last: bool) -> float:
    """Parameters that all ranks of a tensor-parallel group hold whole: norms, routers, down-projections."""
    h, m = shape.hidden_size, shape.latent
    each = 2.0 * h + (2 * shape.head_dim if shape.qk_norm == "head" else 0)
    if m is not None:
        rank = (m.query_rank or 0) + m.kv_rank
        each += h * (rank + m.rope_dim) + rank
    gates = h if shape.shared_gate else 0
    return each * layers + sparse * (shape.num_experts * h + gates) + h * last
