"""Runs of a model with a draft layer, which they leave as it was, or train beside the policy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_megatron.config.run import TinyModelSection
from rl_megatron.models.tiny import TOKENIZER_SIZE, make_tiny_model
from tests.draft_models import COPIES, save_with_drafts
from tests.e2e.processes import Place

KEYS = (
    "reward.function=my_rewards:even",
    "warm_start.steps=0",
    "train.steps=2",
    "eval.every=0",
    "rollout.max_new_tokens=8",
)
DRAFT = "model.layers.4."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A folder and its tensors."""
    folder = tmp_path_factory.mktemp("drafts") / "model"
    tensors = save_with_drafts(
        "glm4_moe", folder, vocab_size=TOKENIZER_SIZE, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1
    )
    known = make_tiny_model(TinyModelSection(), folder.parent, 0)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(known / name, folder / name)
    return folder, tensors


def test_trained_and_left_a_draft_layer_is_exported_beside_the_same_policy_to_the_bit(
    place: Place, model: tuple[Path, dict[str, Tensor]]
) -> None:
    folder, tensors = model
    left = place.fork("left", *KEYS, f"model.path={folder}")
    left.finish()
    trained = place.fork("trained", *KEYS, f"model.path={folder}", "learner.draft.train=true")
    trained.finish()
    exports = [load_file(run.folder / "hf_step_000002/model.safetensors") for run in (left, trained)]
    copies = {DRAFT + name for name in COPIES}
    for run, exported in zip((left, trained), exports, strict=True):
        assert exported.keys() == tensors.keys() - copies
        config = json.loads((run.folder / "hf_step_000002/config.json").read_text())
        assert config["num_nextn_predict_layers"] == 1
    drafts = {name for name in exports[0] if name.startswith(DRAFT)}
    assert len(drafts) > 20
    for name, tensor in exports[0].items():
        if name not in drafts:
            assert torch.equal(tensor, exports[1][name]), name
    assert all(torch.equal(exports[0][name], tensors[name]) for name in drafts)
    assert not torch.equal(exports[0]["lm_head.weight"], tensors["lm_head.weight"])
    moved = {name for name in drafts if not torch.equal(exports[1][name], tensors[name])}
    assert drafts - moved == {DRAFT + "mlp.gate.e_score_correction_bias"}
    rows = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["draft/loss"] for row in rows if "draft/loss" in row]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert all(row["draft/grad_norm"] > 0 for row in rows if "draft/loss" in row)
