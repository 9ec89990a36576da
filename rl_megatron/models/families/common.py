"""The parts that readers of several families share: refusals, rotary embeddings, the fields that every decoder has.

transformers drops from a file what equals its default only in some versions, so a missing key means that default: each
reader has those of its family's configuration class (`with_defaults`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from rl_megatron.errors import ConfigError, quote_start
from rl_megatron.models.families.fields import ConfigFields, RopeFields
from rl_megatron.models.json_files import Fields
from rl_megatron.models.shape import Rope

SILU: Mapping[str, object] = {"hidden_act": "silu"}
"""The activation of every gated MLP here but gpt-oss', which adds to it, for `require_fixed_values`."""
_MAMBA = "its mamba layers are not computed here"
_FACTORS = "factors of its config.json multiply embeddings, residuals and logits, which is not computed here"
_POSITIONS = "its queries are scaled by their positions, which is not computed here"
_TOWER = "of models for images and text, only Qwen3.5-MoE's and Kimi-K2.5's text models are read"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        ("nemotron_h", "granitemoehybrid", "jamba", "bamba", "falcon_h1", "zamba", "zamba2", "mamba2"), _MAMBA
    ),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _FACTORS),
    "ernie4_5_moe": "its routers add a bias to softmax scores, which megatron-core 0.16 does with sigmoids alone",
    **dict.fromkeys(("mistral3", "mistral4"), _POSITIONS),
    "deepseek_v4": "its compressed attention and its several residual streams are not computed here",
    "glm5_next": "its several residual streams and its linear attention are not computed here",
    "qwen4_exp": "its gated residuals and the indexer of its attention are not computed here",
    "kimi_linear": "its layers of Kimi delta attention are not computed here",
    "mimo_v2_flash": "its layers with windows have heads of other numbers and sizes than the rest",
    "afmoe": "it has four norms a layer, of which two are not computed here",
    **dict.fromkeys(
        ("qwen3_vl_moe", "qwen3_vl", "glm4v_moe", "llama4", "gemma3", "ernie4_5_vl_moe", "minimax_m3_vl", "step3p7"),
        _TOWER,
    ),
}
"""``model_type`` -> why models of that family are refused."""
_KINDS = ("default", "linear", "llama3", "yarn")
_NULLABLE = {"q_lora_rank", "sliding_window", "num_key_value_heads", "n_group", "topk_group"}  # null: it is absent


def text_model(raw: Mapping[str, Any], path: Path) -> Fields:
    """Returns the keys of the text model of one for images and text, whose config.json has ``text_config``."""
    above = {key: raw[key] for key in ("model_type", "tie_word_embeddings") if raw.get(key) is not None}
    return Fields({**raw["text_config"], **above}, path, ConfigFields, "text_config.")


def with_defaults(raw: dict[str, Any], defaults: Mapping[str, object]) -> dict[str, Any]:
    """Returns the keys with the family's ``defaults`` for those that are missing, or null where that says nothing."""
    filled, given = copy(raw), dict(raw)  # the first names keys in its errors
    filled.update(
        (key, value)
        for key, value in defaults.items()
        if key not in given or (given[key] is None and key not in _NULLABLE)
    )
    return filled


def require_fixed_values(raw: Mapping[str, Any], path: Path, fixed: Mapping[str, object]) -> None:
    """Raises ConfigError for a key of ``fixed`` that holds another value; a missing key is as ``fixed``, and so is null
    but for a flag, where it is false."""
    for key, wanted in fixed.items():
        if raw.get(key, wanted) not in ((True,) if wanted is True else (wanted, None)):
            raise ConfigError(f"{path}: {key}={quote_start(raw.get(key))} is not supported; allowed: {wanted!r}")


def read_rope(raw: Mapping[str, Any], path: Path, *, head_dim: int, turns_part: bool = False) -> tuple[float, Rope]:
    """Base and `Rope` as transformers 5 writes them (``rope_parameters``) or 4 did (``rope_theta``, ``rope_scaling``).

    Where both are there, transformers takes the older. ``turns_part``: the family's class reads
    ``partial_rotary_factor``. Raises ConfigError for a kind that is not known, and for a key that its class does not
    read.
    """
    given = Fields(raw.get("rope_scaling") or raw.get("rope_parameters") or {}, path, RopeFields, "rope_parameters.")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _KINDS:
        raise ConfigError(
            f"{path}: rope_type={quote_start(kind)} is not supported; allowed: {', '.join(map(repr, _KINDS))}"
        )
    base = float(given.get("rope_theta") or raw.get("rope_theta") or 1e4)  # default of classes that name no other
    part = given.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if not turns_part and part != 1:
        raise ConfigError(
            f"{path}: partial_rotary_factor={quote_start(part)} is not supported; allowed: 1.0, all of a head"
        )
    if kind in ("linear", "llama3") and given.get("mscale_all_dim"):
        raise ConfigError(f"{path}: mscale_all_dim is not supported with rope_type={kind!r}; allowed: with 'yarn'")
    dim = int(head_dim * part)
    turning = 0 if dim == head_dim else dim
    if kind == "default":
        return base, Rope(dim=turning)
    if kind == "linear":
        return base, Rope(kind="linear", dim=turning, factor=float(given["factor"]))
    original = int(given.get("original_max_position_embeddings") or raw["max_position_embeddings"])
    factor = float(given.get("factor") or raw["max_position_embeddings"] / original)
    if kind == "llama3":
        return base, Rope(
            kind="llama3",
            dim=turning,
            factor=factor,
            original_positions=original,
            low_frequency=float(given["low_freq_factor"]),
            high_frequency=float(given["high_freq_factor"]),
        )
    return base, _yarn(given, turning, factor, original)


def _yarn(given: Mapping[str, Any], dim: int, factor: float, original: int) -> Rope:
    mscale, all_dim = (float(given.get(key) or 0) for key in ("mscale", "mscale_all_dim"))
    attention = given.get("attention_factor")
    if attention is None and mscale and all_dim:
        attention = yarn_scale(factor, mscale) / yarn_scale(factor, all_dim)
    return Rope(
        kind="yarn",
        dim=dim,
        factor=factor,
        original_positions=original,
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        truncate=bool(given.get("truncate", True)),
        mscale=mscale,
        mscale_all_dim=all_dim,
        attention_factor=float(yarn_scale(factor) if attention is None else attention),
    )


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's growth of attention with the context's: 1 where it does not grow."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def decoder_fields(raw: Mapping[str, Any], path: Path, *, turns_part: bool = False) -> dict[str, Any]:
    """Returns the fields of `ModelShape` that every family of grouped-query attention spells alike; `read_rope` has
    ``turns_part``. Raises ConfigError for a key of another type, also of a plain dict."""
    raw = raw if isinstance(raw, Fields) else Fields(raw, path, ConfigFields)
    heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    theta, rope = read_rope(raw, path, head_dim=head_dim, turns_part=turns_part)
    return {
        "family": raw["model_type"],
        "num_layers": raw["num_hidden_layers"],
        "hidden_size": raw["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "vocab_size": raw["vocab_size"],
        "rope_theta": theta,
        "rope": rope,
        "norm_eps": raw["rms_norm_eps"],
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "max_positions": raw["max_position_embeddings"],
    }


def dense_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model without experts."""
    return {
        "num_experts": 0,
        "experts_per_token": 0,
        "expert_width": 0,
        "normalize_top_k": False,
        "dense_width": raw["intermediate_size"],
    }


def value_or_default(raw: Mapping[str, Any], key: str, default: float) -> Any:
    """Returns the value of ``key``, or ``default`` where it is null or missing; 0 and false are values."""
    return default if raw.get(key) is None else raw[key]


def dense_first(raw: Mapping[str, Any], path: Path, default: int) -> int:
    """Returns how many of the first layers are dense, by ``mlp_layer_types``, ``first_k_dense_replace``, or both."""
    kinds, layers, first = raw.get("mlp_layer_types"), raw["num_hidden_layers"], raw.get("first_k_dense_replace")
    if kinds is None:
        return int(value_or_default(raw, "first_k_dense_replace", default))
    dense = kinds.count("dense") if first is None else first
    if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise ConfigError(
            f"{path}: mlp_layer_types={quote_start(kinds)} with first_k_dense_replace={first} is not supported; "
            "allowed: "
            f"'dense' for the first layers, as many as first_k_dense_replace says if it is given, and 'sparse' for "
            f"all others of {layers}"
        )
    return int(dense)


def windows(raw: Mapping[str, Any], path: Path, kinds: Sequence[str] | None = None) -> tuple[int, ...]:
    """Returns sliding windows by layer, from ``layer_types`` or, without them, ``kinds``, or for all layers."""
    window, layers = int(raw.get("sliding_window") or 0), int(raw["num_hidden_layers"])
    if not window:
        return ()
    kinds = raw.get("layer_types") or kinds
    require_fixed_values(raw, path, {"use_sliding_window": True})  # no class with these windows reads it
    if kinds is None:
        return (window,) * layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != layers:
        raise ConfigError(
            f"{path}: layer_types={quote_start(kinds)} is not supported; allowed: 'full_attention' or "
            f"'sliding_attention' for each of {layers} layers"
        )
    by_layer = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return by_layer if any(by_layer) else ()
