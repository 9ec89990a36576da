"""Runs of a model with a draft layer, which they leave as it was, or train beside the policy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_megatron.models.tiny import TOKENIZER_SIZE, TinySizes, make_tiny_model
from tests.draft_models import ALONE, COPIES, save_with_drafts, save_with_qwens_draft
from tests.e2e.processes import Place

KEYS = (
    "reward.function=my_rewards:even",
    "warm_start.steps=0",
    "train.steps=2",
    "eval.every=0",
    "rollout.max_new_tokens=8",
    "train.learning_rate=0.01",
    "train.lr_decay=none",
)
DRAFTS = {"glm4_moe": "model.layers.4.", "qwen3_next": "mtp."}


@pytest.fixture(scope="module", params=DRAFTS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, dict[str, Tensor]]:
    """A family, a folder and its tensors."""
    family, folder = request.param, tmp_path_factory.mktemp("drafts") / "model"
    save = save_with_qwens_draft if DRAFTS[family] == ALONE else save_with_drafts
    tensors = save(
        family, folder, vocab_size=TOKENIZER_SIZE, max_position_embeddings=1024, bos_token_id=0, eos_token_id=1
    )
    known = make_tiny_model(TinySizes(), folder.parent, 0)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(known / name, folder / name)
    return family, folder, tensors


def test_trained_and_left_a_draft_layer_is_exported_beside_the_same_policy_to_the_bit(
    place: Place, model: tuple[str, Path, dict[str, Tensor]]
) -> None:
    family, folder, tensors = model
    prefix = DRAFTS[family]
    left = place.fork(f"{family}-left", *KEYS, f"model.path={folder}").finish()
    trained = place.fork(f"{family}-trained", *KEYS, f"model.path={folder}", "learner.draft.train=true").finish()
    exports = [load_file(run.folder / "hf_step_000002/model.safetensors") for run in (left, trained)]
    copies = {name for name in tensors if name.startswith(prefix) and name.endswith(COPIES)}
    for run, exported in zip((left, trained), exports, strict=True):
        assert exported.keys() == tensors.keys() - copies
        config = json.loads((run.folder / "hf_step_000002/config.json").read_text())
        assert config.get("num_nextn_predict_layers", 1) == 1
    drafts = {name for name in exports[0] if name.startswith(prefix)}
    assert len(drafts) > 20
    for name, tensor in exports[0].items():
        if name not in drafts:
            assert torch.equal(tensor, exports[1][name]), name
    assert all(torch.equal(exports[0][name], tensors[name]) for name in drafts)
    assert not torch.equal(exports[0]["lm_head.weight"], tensors["lm_head.weight"])
    moved = {name for name in drafts if not torch.equal(exports[1][name], tensors[name])}
    assert {name.removeprefix(prefix) for name in drafts - moved} <= {"mlp.gate.e_score_correction_bias"}
    rows = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["draft/loss"] for row in rows if "draft/loss" in row]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert all(row["draft/grad_norm"] > 0 for row in rows if "draft/loss" in row)
