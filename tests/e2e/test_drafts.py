"""A run of a model with a draft layer, which it leaves as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from rl_megatron.config.run import TinyModelSection
from rl_megatron.models.tiny import TOKENIZER_SIZE, make_tiny_model
from tests.draft_models import save_with_drafts
from tests.e2e.processes import Place

KEYS = (
    "reward.function=my_rewards:even",
    "warm_start.steps=0",
    "train.steps=1",
    "eval.every=0",
    "rollout.max_new_tokens=8",
)


def test_the_export_of_a_trained_model_has_the_draft_layer_with_which_it_started(place: Place, tmp_path: Path) -> None:
    model = tmp_path / "model"
    tensors = save_with_drafts(
        "glm4_moe", model, vocab_size=TOKENIZER_SIZE, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1
    )
    known = make_tiny_model(TinyModelSection(), tmp_path, 0)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(known / name, model / name)
    run = place.fork("drafts", *KEYS, f"model.path={model}")
    run.finish()
    folder = run.folder / "hf_step_000001"
    exported = load_file(folder / "model.safetensors")
    drafts = {name for name in exported if name.startswith("model.layers.4.")}
    copies = {f"model.layers.4.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    assert exported.keys() == tensors.keys() - copies
    assert len(drafts) > 20
    assert all(torch.equal(exported[name], tensors[name]) for name in drafts)
    assert not torch.equal(exported["lm_head.weight"], tensors["lm_head.weight"])
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1
