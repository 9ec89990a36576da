"""Runs of a model with a draft layer, which they leave as it was, or train beside the policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_megatron.models.tiny import TOKENIZER_SIZE, TinySizes, make_tiny_model
from tests.draft_models import ALONE, COPIES, save_with_drafts, save_with_qwens_draft
from tests.e2e.processes import Place, Run

KEYS = (
    "reward.function=my_rewards:even",
    "warm_start.steps=0",
    "train.steps=2",
    "eval.every=0",
    "rollout.max_new_tokens=8",
    "train.learning_rate=0.01",
    "train.lr_decay=none",
)
DRAFTS, LEFT = {"glm4_moe": "model.layers.4.", "qwen3_next": "mtp."}, "glm4_moe"


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


def test_a_draft_layer_is_trained_and_exported(place: Place, model: tuple[str, Path, dict[str, Tensor]]) -> None:
    """Where it is not trained it is left, beside the same policy to the bit; a run of one family shows that."""
    family, folder, tensors = model
    run = place.fork(f"{family}-trained", *KEYS, f"model.path={folder}", "learner.draft.train=true").finish()
    trained = exported(run, tensors.keys(), DRAFTS[family])
    drafts = {name for name in trained if name.startswith(DRAFTS[family])}
    assert len(drafts) > 20
    moved = {name for name in drafts if not torch.equal(trained[name], tensors[name])}
    assert {name.removeprefix(DRAFTS[family]) for name in drafts - moved} <= {"mlp.gate.e_score_correction_bias"}
    assert not torch.equal(trained["lm_head.weight"], tensors["lm_head.weight"])
    rows = [row for row in run.rows() if "draft/loss" in row]
    assert len(rows) == 2
    assert rows[1]["draft/loss"] < rows[0]["draft/loss"]
    assert all(row["draft/grad_norm"] > 0 for row in rows)
    if family == LEFT:
        run = place.fork(f"{family}-left", *KEYS, f"model.path={folder}").finish()
        left = exported(run, tensors.keys(), DRAFTS[family])
        assert [
            name for name in left if not torch.equal(left[name], (tensors if name in drafts else trained)[name])
        ] == []


def exported(run: Run, names: Collection[str], prefix: str) -> dict[str, Tensor]:
    """What it exported, which has all but what is of other tensors a copy."""
    found = load_file(run.folder / "hf_step_000002/model.safetensors")
    assert found.keys() == {name for name in names if not (name.startswith(prefix) and name.endswith(COPIES))}
    config = json.loads((run.folder / "hf_step_000002/config.json").read_text())
    assert config.get("num_nextn_predict_layers", 1) == 1
    return found
