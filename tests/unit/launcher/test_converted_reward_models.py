"""A reward model's shards, which have no config.json, converted with that of a classifier or of a policy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jinja2
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from launcher.preflight.model_files import check
from launcher.preflight.subject import Subject
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from tests.unit.launcher.commands import status_of


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier, and shards of it without config.json."""
    root = tmp_path_factory.mktemp("reward_model")
    shutil.copytree(make_tiny_model(TinySizes(), root, 0), root / "hf")
    tensors = load_file(root / "hf" / "model.safetensors")
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:1].clone()
    save_file(tensors, root / "hf" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((root / "hf" / "config.json").read_text())
    config["architectures"] = ["Qwen3MoeForSequenceClassification"]
    (root / "hf" / "config.json").write_text(json.dumps(config))
    (root / "hf" / "chat_template.jinja").write_text("{{ who | default('nobody') }} asks")
    assert status_of("convert", root / "hf", root / "shards") == 0
    for path in root.glob("shards/*"):
        if path.suffix in (".json", ".jinja") and path.name != "metadata.json":
            path.unlink()
    return root


@pytest.mark.parametrize("where", ["run", "torn", "alone"])
def test_a_converted_reward_model_has_its_runs_template_variables_or_a_note_says_why_not(
    where: str, reward_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, hf, out = tmp_path / "rm" / "checkpoints" / "step_000001" / "learner", reward_model / "hf", tmp_path / "out"
    shutil.copytree(reward_model / "shards", shards)
    pairs = ["data.type=files", "data.train=a", "data.eval=b", "data.messages_field=good", "data.rejected_field=bad"]
    if where != "alone":
        given = load_config("reward_tiny", [*pairs, f"model.path={hf}", "model.template_variables.who=somebody"])
        save_resolved(given, tmp_path / "rm" / "config.yaml")
    if where == "torn":
        (tmp_path / "rm" / "config.yaml").write_text("job: [")
    assert status_of("convert", shards, out, "--config", hf) == 0
    said, wanted = capsys.readouterr().err, "somebody" if where == "run" else "nobody"
    assert jinja2.Template((out / "chat_template.jinja").read_text()).render() == f"{wanted} asks"
    why = {"torn": f"{tmp_path}/rm/config.yaml", "alone": f"{shards} is in no run's folder"}
    assert ("note: the chat template is that of" in said) == (where != "run")
    assert why.get(where, "") in said


def test_a_reward_models_shards_are_converted_and_verified_with_the_model_that_training_began_from(
    reward_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, out = reward_model / "shards", tmp_path / "out"
    spec = TinySizes(tie_embeddings=True)  # a policy's config.json may say it; a score is of no token
    policy = make_tiny_model(spec, tmp_path / "policy", 1)
    assert status_of("convert", shards, out, "--config", policy) == 0
    (check,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("check it: ")]
    assert status_of(*check.removeprefix("check it: rl-megatron ").split()) == 0
    wanted = load_file(reward_model / "hf" / "model.safetensors")
    found = AutoModelForSequenceClassification.from_pretrained(out)
    assert found.config.num_labels == 1
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(wanted.pop(name), tensor), name
    assert not wanted
    assert torch.equal(found.score.weight, load_file(out / "model.safetensors")["score.weight"])


def test_a_critic_starts_from_shards_of_its_sizes_alone(reward_model: Path, tmp_path: Path) -> None:
    """These have no config.json, as the critic/ of a checkpoint."""
    wide = make_tiny_model(TinySizes(hidden_size=96), tmp_path, 0)
    for model, refused in ((reward_model / "hf", False), (wide, True)):
        policy = tmp_path / f"policy-{refused}"
        shutil.copytree(model, policy)
        config = json.loads((policy / "config.json").read_text())
        (policy / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3MoeForCausalLM"]}))
        keys = ("learner.ep=1", "algorithm=ppo", f"model.path={policy}")
        given = load_config("tiny_cpu", [*keys, f"algorithm.critic.path={reward_model / 'shards'}"])
        found = [one.text for one in check(Subject(given, for_job=False)) if one.kind == "problem"]
        assert [one.partition("/")[0] for one in found] == ["algorithm.critic.path="] * refused, found
        assert all("is no checkpoint of a critic of the policy's sizes" in one for one in found)
