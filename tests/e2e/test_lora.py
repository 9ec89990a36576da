"""A run of adapters: what engines get, what checkpoints hold, and a resume, beside the formula and a run left alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from launcher.build.trained import hugging_face, trained_model
from rl_megatron.errors import ConfigError
from rl_megatron.features.lora.files import stored_lora
from rl_megatron.features.lora.merging import base_digest, merge_adapters
from rl_megatron.models.tiny import TOKENIZER_SIZE, TinySizes, make_tiny_model
from rl_megatron.training.flops import training_flops
from rl_megatron.weights.layouts.families import read_shape
from tests.draft_models import ALONE, COPIES, save_with_drafts, save_with_qwens_draft
from tests.e2e.processes import PORTABLE, Place, Run

GIVEN = (
    *("reward.function=my_rewards:even", "warm_start.steps=0", "eval.every=0", "train.lr_decay=none"),
    *("learner.lora.rank=4", "algorithm.kl.coefficient=0.01", "train.learning_rate=0.02", "checkpoint.every=1"),
)


@pytest.fixture(scope="module")
def whole(place: Place) -> Run:
    """Of two steps."""
    place.environment = PORTABLE
    return place.fork("whole", *GIVEN, "train.steps=2").finish()


def test_engines_get_merged_weights_and_a_resume_goes_on_to_the_bit(place: Place, whole: Run, tmp_path: Path) -> None:
    place.copy(whole, "halves", until=1)
    halves = place.fork("halves", *GIVEN, "train.steps=2", resume=True).finish()
    assert (halves.folder / "hf_step_000002").is_dir()
    rows, again = ([row for row in run.rows() if row["step"]] for run in (whole, halves))
    assert [row["grad_norm"] for row in again] == [row["grad_norm"] for row in rows]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert rows[0]["kl/reference"] == pytest.approx(0, abs=1e-7)  # the reference is the policy without adapters
    assert rows[1]["kl/reference"] > 1e-6
    shape = read_shape(whole.folder / "hf_start")
    assert all(row["flops/train"] < training_flops(shape, [1] * row["tokens/train"]) for row in rows)
    assert all(
        row["mismatch/logprob_abs_max"] < 1e-4 for row in rows
    )  # the engine samples from what the learner trains
    checkpoint = whole.folder / "checkpoints" / "step_000002" / "learner"
    assert stored_lora(checkpoint) is not None
    base = load_file(whole.folder / "hf_start" / "model.safetensors")
    merge_adapters(checkpoint, whole.folder / "hf_start", tmp_path / "merged")
    merged, pushed = (
        load_file(f / "model.safetensors") for f in (tmp_path / "merged", whole.folder / "hf_step_000002")
    )
    assert merged.keys() == pushed.keys() == base.keys()
    for name in base:
        torch.testing.assert_close(merged[name], pushed[name], atol=1e-7, rtol=1e-6)
        assert torch.equal(pushed[name], base[name]) == (not name.endswith("_proj.weight")), name


def test_a_run_is_not_resumed_beside_another_model_at_its_path(place: Place, whole: Run, tmp_path: Path) -> None:
    model = Path(shutil.copytree(whole.folder / "hf_start", tmp_path / "model"))
    given = (*GIVEN, f"model.path={model}")
    place.fork("beside", *given, "train.steps=1").finish()
    digest, tensors = base_digest(model), load_file(model / "model.safetensors")
    other = {name: 1.02 * tensor if "q_proj" in name else tensor for name, tensor in tensors.items()}
    save_file(other, model / "model.safetensors", {"format": "pt"})
    again = place.fork("beside", *given, "train.steps=2", resume=True)
    assert again.end() == 1
    said = " ".join(again.text().split())
    assert "holds adapters of another model than model.path" in said
    assert digest in said
    assert base_digest(model) in said


def test_a_checkpoint_is_evaluated_with_the_model_of_its_run_whatever_configuration_has_the_sets(
    place: Place, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another seed, or another configuration's model, would make or name another frozen model of the same shape."""
    monkeypatch.chdir(place.folder)
    checkpoint, exported = whole.folder / "checkpoints" / "step_000002", whole.folder / "hf_step_000002"
    pushed, other = load_file(exported / "model.safetensors"), tmp_path / "sets.yaml"
    other.write_text(f"defaults: [tiny_cpu]\nmodel: {{path: {exported}}}\n")
    kept = f"model.cache_dir={place.cache}"
    cases: dict[str, tuple[Path, str | None, list[str]]] = {
        "seed": (checkpoint, None, ["seed=7"]),
        "config": (whole.folder, str(other), []),
        "shards": (checkpoint / "learner", None, []),
        "recipe": (checkpoint / "learner", "tiny_cpu", ["seed=7", kept]),
    }
    for name, (model, config, overrides) in cases.items():
        (tmp_path / name).mkdir()
        merged = load_file(hugging_face(trained_model(model, config, overrides), tmp_path / name) / "model.safetensors")
        for key in pushed:
            assert torch.allclose(merged[key], pushed[key], atol=1e-7, rtol=1e-6), (name, key)
    with pytest.raises(ConfigError, match="is of a run from a tiny model, and goes with that alone"):
        trained_model(checkpoint, None, [f"model.path={exported}"])
    copied = Path(shutil.copytree(checkpoint / "learner", tmp_path / "copied"))
    with pytest.raises(ConfigError, match="give the model that they were trained from"):
        trained_model(copied, None, [])


# Runs of a model with a draft layer, which they leave as it was, or train beside the policy.
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
    assert json.loads((run.folder / "hf_step_000002/config.json").read_text()).get("num_nextn_predict_layers", 1) == 1
    return found
