"""Draft layers for the tiny models of `tests.family_models`, under the names of DeepSeek-V3 and GLM-4.5, and Qwen's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.family_models import save_model

COPIES = ("embed_tokens.weight", "shared_head.head.weight", "shared_head.weight")
ALONE = "mtp."
QWENS = {
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.norm.weight": "shared_head.norm.weight",
}
"""Qwen's names of a draft layer's own parts, and those of others behind the layer's."""
HUNYUANS = {
    "final_layernorm.": "shared_head.norm.",
    "mlp.router.gate.": "mlp.gate.",
    "mlp.expert_bias": "mlp.e_score_correction_bias",
    "mlp.shared_mlp.": "mlp.shared_experts.",
}
"""Hunyuan 3's names in files, and those of others, which transformers has in its modules."""


def one_by_one(name: str, shape: torch.Size) -> dict[str, torch.Size]:
    """The tensors of single experts that ``name``, of all experts, holds."""
    count, rows, columns = shape
    if name.endswith(".down_proj"):
        return {
            name.replace("experts.", f"experts.{e}.") + ".weight": torch.Size((rows, columns)) for e in range(count)
        }
    half, stem = torch.Size((rows // 2, columns)), name.removesuffix("gate_up_proj")
    return {f"{stem}{e}.{x}_proj.weight": half for e in range(count) for x in ("gate", "up")}


def save_with_qwens_draft(name: str, folder: Path, *, stacked: bool = False, **changed: Any) -> dict[str, Tensor]:
    """Save the model with Qwen's one draft layer of random weights, whose experts are ``stacked`` in one tensor or one
    by one; returns all of the folder's tensors. Its last layer must attend."""
    save_model(name, folder, **changed)
    tensors, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(7)
    layers = [key.partition("layers.") for key in tensors if ".layers." in key and "visual" not in key]
    last = max(int(rest.split(".")[0]) for _, _, rest in layers)
    first = f"{layers[0][0]}layers.{last}."
    alike = {key.removeprefix(first): tensor.shape for key, tensor in tensors.items() if key.startswith(first)}
    if not stacked:
        for key in [key for key in alike if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            alike |= one_by_one(key, alike.pop(key))
    size = alike["input_layernorm.weight"][0]
    wanted = {f"mtp.layers.0.{key}": shape for key, shape in alike.items()}
    wanted |= {key: torch.Size([size, 2 * size] if key == "mtp.fc.weight" else [size]) for key in QWENS}
    tensors |= {key: torch.randn(shape, generator=draw) * 0.25 for key, shape in wanted.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def save_with_drafts(name: str, folder: Path, count: int = 1, **changed: Any) -> dict[str, Tensor]:
    """Save the model with ``count`` draft layers of random weights; returns all of the folder's tensors."""
    save_model(name, folder, **changed)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    tensors = load_file(folder / "model.safetensors")
    layers, size = config["num_hidden_layers"], config["hidden_size"]
    last, draw = f"model.layers.{layers - 1}.", torch.Generator().manual_seed(7)

    def drawn(shape: torch.Size, name: str) -> Tensor:
        mean, spread = (1.0, 0.3) if name.endswith("norm.weight") else (0.0, 0.25)
        return torch.randn(shape, generator=draw) * spread + mean

    alike = {key.removeprefix(last): tensor.shape for key, tensor in tensors.items() if key.startswith(last)}
    is_hunyuan = config["model_type"] == "hy_v3"
    norms = ("enorm", "hnorm", "final_layernorm" if is_hunyuan else "shared_head.norm")
    own = {f"{x}.weight": torch.Size([size]) for x in norms}
    own["eh_proj.weight"] = torch.Size([size, 2 * size])
    for layer in range(layers, layers + count):
        tensors |= {f"model.layers.{layer}.{key}": drawn(shape, key) for key, shape in (alike | own).items()}
        output = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        if is_hunyuan:
            tensors[f"model.layers.{layer}.shared_head.weight"] = output.clone()
            continue
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = output.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path.write_text(json.dumps({**config, "num_nextn_predict_layers": count}))
    return tensors


class WrittenDraft(torch.nn.Module):
    """The forward of one draft layer, of transformers' own layer and norms, by the formula of arXiv:2412.19437, 2.2.
    Its parameters have the names of files behind ``model.layers.N.``, or behind ``mtp.layers.0.``, as `file_name`
    tells. vLLM's ``masks_first``: its layer reads zeros for the embedding at a sequence's first position."""

    def __init__(self, folder: Path, *, masks_first: bool = False) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__()
        self._masks_first = masks_first
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self.model.eval().requires_grad_(False)
        config, last = self.model.config, self.model.model.layers[-1]
        size = config.hidden_size
        self.layer = type(last)(config, config.num_hidden_layers - 1)
        norm = type(self.model.model.norm)
        self.enorm, self.hnorm, self.norm = (norm(size, eps=config.rms_norm_eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)
        found = load_file(folder / "model.safetensors")
        alone = any(n.startswith(ALONE) for n in found)
        self._prefix = "mtp.layers.0." if alone else f"model.layers.{config.num_hidden_layers}."
        of_layer = [n for n in found if n.startswith((ALONE, self._prefix)) and not n.endswith(COPIES)]
        self._files = {self._own_name(n): n for n in of_layer}
        self.held = {own: found[n].requires_grad_() for own, n in self._files.items()}

    def file_name(self, name: str) -> str:
        """The file's name of a parameter."""
        return self._files[name]

    def _own_name(self, file_name: str) -> str:
        name = QWENS.get(file_name, file_name).removeprefix(self._prefix)
        for theirs, ours in HUNYUANS.items():
            name = name.replace(theirs, ours)
        return name

    def logits(self, tokens: Tensor) -> Tensor:
        """Of one text [L] -> [L - 2, V]: position i says token i + 2."""
        held = self.held
        hidden = self.model.model(tokens[None, :-1]).last_hidden_state.detach()
        own = {
            "enorm.weight": held["enorm.weight"],
            "hnorm.weight": held["hnorm.weight"],
            "norm.weight": held["shared_head.norm.weight"],
            "eh_proj.weight": held["eh_proj.weight"],
            **{f"layer.{name}": tensor for name, tensor in self._in_layer().items()},
        }
        return torch.func.functional_call(self, own, (hidden, tokens))

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        embedded = self.model.model.embed_tokens(tokens[None, 1:])
        if self._masks_first:
            embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], 1)
        mixed = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], -1))[:, :-1]
        places = torch.arange(mixed.shape[1])[None]
        rotary = self.model.model.rotary_emb(mixed, places)
        causal = torch.full((mixed.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        out = self.layer(mixed, attention_mask=causal, position_ids=places, position_embeddings=rotary)
        out = out[0] if isinstance(out, tuple) else out
        return self.model.lm_head(self.norm(out))[0]

    def _in_layer(self) -> dict[str, Tensor]:
        """Under transformers' names, which has the experts of a layer in one tensor."""
        held, found = self.held, dict[str, Tensor]()
        known = {name for name, _ in [*self.layer.named_parameters(), *self.layer.named_buffers()]}
        config = self.model.config
        experts = range(config.n_routed_experts if hasattr(config, "n_routed_experts") else config.num_experts)
        for name in known:
            if name == "mlp.experts.gate_up_proj":
                parts = [[held[f"mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up")] for e in experts]
                found[name] = torch.stack([torch.cat(pair) for pair in parts])
            elif name == "mlp.experts.down_proj":
                found[name] = torch.stack([held[f"mlp.experts.{e}.down_proj.weight"] for e in experts])
            elif name in held:
                found[name] = held[name]
        return found
