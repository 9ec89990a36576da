"""Seconds of a layer and of the output layer on a rank, by term. No torch.

Beside its products a layer has attention, passes over memory, messages, and launches, which count where they take
longer than the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from rl_megatron.scaling.constants import MEMORY
from rl_megatron.scaling.hardware import GB
from rl_megatron.scaling.layers.messages import (
    COUNT,
    LOGPROBS,
    PROBABILITY,
    backward_columns,
    forward_columns,
    head_gathers,
)
from rl_megatron.scaling.layers.products import (
    BYTES_READ,
    LayerKind,
    attention_flops,
    gated,
    latent_up,
    linears,
    product_seconds,
    products,
    rate_of,
)

Seconds = dict[str, float]


@lru_cache(maxsize=4096)
def layer_seconds(k: LayerKind) -> Mapping[str, float]:
    """Seconds of one layer, forward, backward and what is computed again, by term."""
    sparse = len(k.shape.moe_layers)
    if not (sparse if k.sparse else k.shape.num_layers - sparse):
        return {}
    forward, full, c = _forward(k), "full" in k.again, k.constants
    out = {}
    for name, seconds in forward.items():
        out[name] = seconds * (1 + _backward(k, name) * (not k.scored))
    again = forward if full else _parts_again(k, forward)
    out["computed again"] = sum(seconds for name, seconds in again.items() if name not in _MESSAGES)
    for name in _MESSAGES & again.keys():
        out[name] += again[name]
    out["all-to-all"] = out.get("all-to-all", 0.0) * (1 - min(1.0, k.overlap * c.hidden))
    launches = c.host * (0.5 if k.graphs else 1.0) * (1.0 if k.sparse else 0.5)
    launches *= 1 if k.scored else 3 + full
    busy = sum(out.values())
    out["host"] = (busy**4 + launches**4) ** (1 / 4) - busy  # behind the GPU as long as they are shorter
    return out


_MESSAGES = {"all-to-all", "tensor parallel", "context parallel"}


def _backward(k: LayerKind, name: str) -> float:
    """Seconds of a term's backward pass over those of its forward pass."""
    if name == "tensor parallel":
        columns = (backward_columns(k.shape, sparse=k.sparse).both, forward_columns(k.shape, sparse=k.sparse).both)
        return columns[0] / columns[1]
    return 2.5 if name == "attention" else 1.0 if name in _MESSAGES else 2.0


def _parts_again(k: LayerKind, forward: Mapping[str, float]) -> Mapping[str, float]:
    """Forward seconds of the parts of a layer that are computed again."""
    out: Seconds = {}
    between = forward["between products"]
    if "core_attn" in k.again:
        out["attention"] = forward["attention"]
    if "layernorm" in k.again or "moe_act" in k.again:
        out["between products"] = 0.2 * between
    if "mla_up_proj" in k.again and k.shape.latent is not None:
        out["linears"] = sum(products(k, latent_up(k)))
    if not k.sparse and "mlp" in k.again:
        out["linears"] = out.get("linears", 0.0) + sum(products(k, gated(k, k.shape.dense_width)))
    if k.sparse and "moe" in k.again:
        out |= {name: forward[name] for name in ("experts", "all-to-all") if name in forward}
        out["between products"] = 0.5 * between
    if k.sparse and ({"moe", "shared_experts"} & k.again) and k.shape.shared_width:
        out["linears"] = out.get("linears", 0.0) + sum(products(k, gated(k, k.shape.shared_width)))
    if k.sparse and "experts" in k.again:  # torch's layers compute gate and up again
        out["experts"] = forward["experts"] * 2 / 3
    return out


def _forward(k: LayerKind) -> Seconds:
    s, c, gpu = k.shape, k.constants, k.gpu
    rows = k.tokens / k.cp
    own = rows / k.tp
    hbm = gpu.hbm * GB * MEMORY
    rate = rate_of(gpu, _unquantised(k), c) / c.gemm * c.attention
    out: Seconds = {
        "linears": sum(products(k, linears(k))),
        "attention": attention_flops(s, k.length) * own / rate,
        "between products": c.passes * own * s.hidden_size * k.size / hbm,
    }
    if k.tp > 1:
        sent = rows * forward_columns(s, sparse=k.sparse).both * k.size
        out["tensor parallel"] = sent * _per_byte(k)
    if k.cp > 1:
        near = k.tp * k.cp <= gpu.domain
        link = (gpu.nvlink if near else gpu.network) * GB * c.links
        kept: float = s.num_kv_heads * s.head_dim * 2 if s.latent is None else 2 * s.num_heads * s.head_dim
        if s.delta is not None:  # an exchange each way, in place of keys and values
            share = len(s.delta_layers) / s.num_layers
            kept += share * (s.delta.inputs + s.delta.outputs - kept)
        out["context parallel"] = (
            0.3 * rows * kept * k.size * (k.cp - 1) / k.tp / link
        )  # a ring, mostly behind attention
    if k.sparse:
        _add_experts(k, own, out)
    return out


def _add_experts(k: LayerKind, own: float, out: Seconds) -> None:
    """Products of the experts, what lies between them, and the messages of both ways."""
    s, c, gpu = k.shape, k.constants, k.gpu
    local, chosen = s.num_experts / k.ep, s.experts_per_token
    rows = own * chosen * k.etp * (c.imbalance if k.natural else 1.0)
    width, hidden = s.expert_width / k.etp, s.hidden_size
    size, rate, each = BYTES_READ[k.precision], rate_of(gpu, k.precision, c), rows / local
    out["experts"] = local * (
        product_seconds(each, hidden, 2 * width, rate, gpu, c, size)
        + product_seconds(each, width, hidden, rate, gpu, c, size)
    )
    columns = 6 * hidden + 4 * width + (2 * hidden + 14 * width if s.expert_bias else 0)
    cast = 2 * (hidden + width) if k.precision == "float8" else 0  # both inputs read, and written twice
    out["between products"] += rows * k.size * (columns + cast) / (gpu.hbm * GB * MEMORY)
    group = k.ep * k.etp
    if group > 1:
        nodes = max(1.0, group / gpu.domain)
        copies = float(chosen) if k.dispatcher == "alltoall" else nodes * (1 - (1 - 1 / nodes) ** chosen)
        moved = own * (hidden * k.size + PROBABILITY / 2) * (c.imbalance if k.natural else 1.0)  # those go one way
        slow = c.plain if k.dispatcher == "alltoall" else 1.0
        far = moved * copies * (1 - 1 / nodes) / (gpu.network * GB)
        near = moved * chosen * k.etp * (1 - 1 / group) / (gpu.nvlink * GB)
        # Counts are gathered on the way there alone, not in the backward pass.
        counts = k.ep * s.num_experts * COUNT / 2 / (gpu.network if nodes > 1 else gpu.nvlink) / GB / c.links
        out["all-to-all"] = 2 * max(far, near) / c.links / slow + counts


def _per_byte(k: LayerKind) -> float:
    """Seconds of a byte of what a tensor-parallel group gathers or scatters: each rank has its own share already."""
    return (k.tp - 1) / k.tp / (k.gpu.nvlink * GB * k.constants.links)


def _unquantised(k: LayerKind) -> str:
    """The precision of what no recipe computes in float8: attention and the output layer."""
    return "float32" if k.precision == "float32" else "bfloat16"


def embedding_seconds(k: LayerKind) -> Mapping[str, float]:
    """Messages of the embedding of the first stage: its sums are scattered, and their gradient gathered."""
    if k.tp == 1:
        return {}
    whole = k.tokens / k.cp * k.shape.hidden_size * k.size
    return {"tensor parallel": whole * (1 if k.scored else 2) * _per_byte(k)}


@lru_cache(maxsize=4096)
def head_seconds(k: LayerKind, drafts: int) -> Mapping[str, float]:
    """The output layer and log-probs of the last stage, and draft layers as ``k``, forward and backward.

    Where it is computed again ("head"), its products are of float32 (``learner.head_dtype``), and norms of the logits'
    gradients ("norms") multiply once more.
    """
    s, c, rows = k.shape, k.constants, k.tokens / k.cp
    again, norms = "head" in k.again, "norms" in k.again
    rate, size = rate_of(k.gpu, "float32" if again else _unquantised(k), c), 4.0 if again else k.size
    times = (1 if k.scored else 3 + again) + (again and norms)
    logits = product_seconds(rows, s.hidden_size, s.outputs / k.tp, rate, k.gpu, c, size) * times
    read = ((3 if k.scored else 6) + 3 * norms) * rows * s.outputs / k.tp * 4 / (k.gpu.hbm * GB * MEMORY)
    out = {"output layer": (logits + read) * (1 + drafts)}
    if k.tp > 1:
        whole = rows * s.hidden_size * k.size * (1 if k.scored else 1 + head_gathers(float32=again))
        reduced = 2 * rows * LOGPROBS * 4  # an all-reduce sends twice its bytes
        out["tensor parallel"] = (whole + reduced) * (1 + drafts) * _per_byte(k)
    if drafts:
        merge = 3 * product_seconds(rows, 2 * s.hidden_size, s.hidden_size / k.tp, rate, k.gpu, c, k.size)
        out["draft layers"] = drafts * (sum(layer_seconds(k).values()) + merge)
    return out
