"""Seconds of a layer and of the output layer on a rank, by term. No torch.

Beside its products a layer has attention, passes over memory, messages, and launches, which count where they take
longer than the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from rl_megatron.scaling.constants import MEMORY
from rl_megatron.scaling.layers.products import (
    BYTES_READ,
    GB,
    Kind,
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
def layer_seconds(k: Kind) -> Mapping[str, float]:
    """Seconds of one layer, forward, backward and what is computed again, by term."""
    sparse = len(k.shape.moe_layers)
    if not (sparse if k.sparse else k.shape.num_layers - sparse):
        return {}
    forward, full, c = _forward(k), "full" in k.again, k.constants
    out = {}
    for name, seconds in forward.items():
        backward = (
            2.5 if name == "attention" else 1.0 if name in _MESSAGES else c.backward if name in _PRODUCTS else 2.0
        )
        out[name] = seconds * (1 + backward * (not k.scored))
    again = forward if full else _parts_again(k, forward)
    out["computed again"] = sum(seconds for name, seconds in again.items() if name not in _MESSAGES)
    for name in _MESSAGES & again.keys():
        out[name] += again[name]
    out["all-to-all"] = out.get("all-to-all", 0.0) * (1 - min(1.0, k.overlap * c.hidden))
    launches = c.host * (0.5 if k.graphs else 1.0) * (1.0 if k.sparse else 0.5)
    launches = (launches + c.each_expert * k.sparse * k.shape.num_experts / k.ep) * (1 if k.scored else 3 + full)
    busy, power = sum(out.values()), c.ahead
    out["host"] = (busy**power + launches**power) ** (1 / power) - busy  # behind the GPU as long as they are shorter
    return out


_MESSAGES = {"all-to-all", "tensor parallel", "context parallel"}
_PRODUCTS = {"linears", "experts"}


def _parts_again(k: Kind, forward: Mapping[str, float]) -> Mapping[str, float]:
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


def _forward(k: Kind) -> Seconds:
    s, c, gpu = k.shape, k.constants, k.gpu
    rows = k.tokens / k.cp
    own = rows / k.tp
    hbm = gpu.hbm * GB * MEMORY
    rate = rate_of(gpu, "bfloat16", c) / c.gemm * c.attention
    out: Seconds = {
        "linears": sum(products(k, linears(k))),
        "attention": attention_flops(s, k.length) * own / rate,
        "between products": c.passes * own * s.hidden_size * k.size / hbm,
    }
    if k.tp > 1:
        sent = 4 * rows * s.hidden_size * k.size * (k.tp - 1) / k.tp
        out["tensor parallel"] = sent / (gpu.nvlink * GB * c.links) + c.latency
    if k.cp > 1:
        near = k.tp * k.cp <= gpu.domain
        link = (gpu.nvlink if near else gpu.network) * GB * c.links
        kept = s.num_kv_heads * s.head_dim * 2 if s.latent is None else 2 * s.num_heads * s.head_dim
        out["context parallel"] = (
            0.3 * rows * kept * k.size * (k.cp - 1) / k.tp / link
        )  # a ring, mostly behind attention
    if k.sparse:
        _add_experts(k, own, out)
    return out


def _add_experts(k: Kind, own: float, out: Seconds) -> None:
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
    out["between products"] += c.inside * rows * k.size * (columns + cast) / (gpu.hbm * GB * MEMORY)
    group = k.ep * k.etp
    if group > 1:
        nodes = max(1.0, group / gpu.domain)
        copies = float(chosen) if k.dispatcher == "alltoall" else nodes * (1 - (1 - 1 / nodes) ** chosen)
        moved = own * hidden * k.size * (c.imbalance if k.natural else 1.0)
        slow = c.plain if k.dispatcher == "alltoall" else 1.0
        far = moved * copies * (1 - 1 / nodes) / (gpu.network * GB)
        near = moved * chosen * k.etp * (1 - 1 / group) / (gpu.nvlink * GB)
        out["all-to-all"] = 2 * max(far, near) / c.links / slow + c.latency


@lru_cache(maxsize=4096)
def head_seconds(k: Kind, drafts: int) -> Mapping[str, float]:
    """The output layer and log-probs of the last stage, and draft layers as ``k``, forward and backward."""
    s, c, rows = k.shape, k.constants, k.tokens / k.cp
    rate = rate_of(k.gpu, "bfloat16", c)
    times = 1 if k.scored else 1 + c.backward + ("head" in k.again)
    logits = product_seconds(rows, s.hidden_size, s.vocab_size / k.tp, rate, k.gpu, c, k.size) * times
    read = c.logits * (3 if k.scored else 6) * rows * s.vocab_size / k.tp * 4 / (k.gpu.hbm * GB * MEMORY)
    out = {"output layer": (logits + read) * (1 + drafts)}
    if drafts:
        merge = 3 * product_seconds(rows, 2 * s.hidden_size, s.hidden_size / k.tp, rate, k.gpu, c, k.size)
        out["draft layers"] = drafts * (sum(layer_seconds(k).values()) + merge)
    return out
