"""A reference or a critic of one's own: which a preflight refuses, and what a reference of another size needs on ranks
of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launcher.build.model import starting_shape
from launcher.preflight.model_files import check
from launcher.preflight.subject import Subject
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.scaling.memory import footprints

KL = ("algorithm=grpo", "algorithm.kl.coefficient=0.1", "learner.ep=1")
OWN_RANKS = "roles.reference=separate"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy, one of its sizes, a wider and deeper teacher, and one with a token more."""
    cache, wide = tmp_path_factory.mktemp("models"), TinySizes(hidden_size=96, num_layers=3, num_experts=4)
    return {
        "policy": make_tiny_model(TinySizes(), cache, 0),
        "like it": make_tiny_model(TinySizes(), cache, 1),
        "wide": make_tiny_model(wide, cache, 0),
        "long": make_tiny_model(TinySizes(max_position_embeddings=16), cache, 0),
        "large vocabulary": make_tiny_model(TinySizes(), cache, 0, vocab_size=300),
    }


def config_of(folders: dict[str, Path], reference: str, *more: str, policy: str = "policy") -> RunConfig:
    own = f"algorithm.kl.reference={folders[reference]}"
    return load_config("tiny_cpu", ["run.name=x", *KL, f"model.path={folders[policy]}", own, *more])


def problems(config: RunConfig) -> list[str]:
    return [found.text for found in check(Subject(config, for_job=False)) if found.kind == "problem"]


@pytest.mark.parametrize(("reference", "more"), [("like it", ()), ("like it", (OWN_RANKS,)), ("wide", (OWN_RANKS,))])
def test_a_reference_that_can_score_is_taken(folders: dict[str, Path], reference: str, more: tuple[str, ...]) -> None:
    assert problems(config_of(folders, reference, *more)) == []


@pytest.mark.parametrize(
    ("policy", "reference", "more", "said"),
    [
        ("policy", "wide", (), "hidden_size, num_experts, num_layers differ from the policy's, whose ranks hold"),
        ("policy", "wide", (OWN_RANKS, "learner.ep=8"), "learner: ep = 8 does not divide 4 experts"),
        ("policy", "long", (OWN_RANKS,), "= 22 is more than the model's max_position_embeddings=16; lower"),
        ("large vocabulary", "wide", (OWN_RANKS,), "has 259 tokens, fewer than the policy's 300"),
    ],
)
def test_a_reference_that_cannot_score_is_refused(
    folders: dict[str, Path], policy: str, reference: str, more: tuple[str, ...], said: str
) -> None:
    (problem,) = problems(config_of(folders, reference, *more, policy=policy))
    assert said in problem
    assert str(folders[reference]) in problem


@pytest.mark.parametrize(("positions", "taken"), [(21, False), (22, False), (23, True)])
def test_a_served_teacher_has_room_for_a_token_behind_the_longest_text(
    folders: dict[str, Path], tmp_path: Path, positions: int, taken: bool
) -> None:
    """Servers score no text without making one, and the longest has 22 tokens."""
    teacher = make_tiny_model(TinySizes(max_position_embeddings=positions), tmp_path, 0)
    of_teacher = {"server": "http://10.0.0.1:8000", "engine": "vllm", "path": teacher}
    keys = [f"algorithm.kl.teachers.t.{key}={value}" for key, value in of_teacher.items()]
    found = problems(load_config("tiny_cpu", ["run.name=x", *KL, f"model.path={folders['policy']}", *keys]))
    said = (
        f"behind each text, is more than max_position_embeddings={positions} of algorithm.kl.teachers.t.path={teacher}"
    )
    assert [said in one for one in found] == [True] * (not taken)


def test_a_classifier_has_no_log_probs_to_compare_with(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "classifier"
    shutil.copytree(folders["like it"], folder)
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | {"architectures": ["Qwen3MoeForSequenceClassification"]}))
    (found,) = problems(config_of(folders | {"scores": folder}, "scores"))
    assert found.startswith(f"algorithm.kl.reference={folder} is a sequence classifier")
    with pytest.raises(ConfigError, match=r"model\.path=.*classifier is a sequence classifier, which scores texts"):
        starting_shape(load_config("tiny_cpu", ["run.name=x", f"model.path={folder}"]))
    scored = starting_shape(load_config("reward_tiny", ["run.name=x", f"model.path={folder}"]))
    assert scored.scores
    assert not problems(load_config("reward_tiny", ["run.name=x", f"model.path={folders['policy']}"]))


def test_a_reward_model_that_nothing_could_load_is_refused(tmp_path: Path) -> None:
    from transformers import Glm4MoeConfig

    settings = Glm4MoeConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    settings.architectures = ["Glm4MoeForCausalLM"]
    settings.save_pretrained(tmp_path)
    found = problems(load_config("reward_tiny", ["run.name=x", f"model.path={tmp_path}"]))
    assert any("transformers has no sequence classifier of model_type='glm4_moe'" in one for one in found)


def test_a_reference_with_other_tokens_or_without_weights_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    for file in folders["like it"].iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    tokens = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokens["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    weights, others = problems(config_of({**folders, "other": folder}, "other"))
    assert weights.startswith("algorithm.kl.reference: ")
    assert others.endswith(
        "2 of the policy's 259 tokens have other ids, as 'a', 97 and 98; give a model of the same tokenizer"
    )
    (found,) = problems(config_of({**folders, "none": tmp_path / "none"}, "none"))
    missing = f"there is no such folder, as seen from {Path.cwd()}"
    assert found.startswith(f"algorithm.kl.reference={tmp_path}/none: {missing}; give")


def critic_of(folders: dict[str, Path], path: Path) -> RunConfig:
    keys = ("run.name=x", "learner.ep=1", "algorithm=ppo", f"model.path={folders['policy']}")
    return load_config("tiny_cpu", [*keys, f"algorithm.critic.path={path}"])


def scoring(folder: Path, out: Path, **changed: object) -> Path:
    """The folder as a sequence classifier's, with other settings in its config.json."""
    shutil.copytree(folder, out)
    known = json.loads((out / "config.json").read_text())
    named = {"architectures": ["Qwen3MoeForSequenceClassification"]}
    (out / "config.json").write_text(json.dumps(known | named | changed))
    return out


def test_a_critic_starts_from_a_policy_or_a_reward_model_of_its_sizes(folders: dict[str, Path], tmp_path: Path) -> None:
    tied = make_tiny_model(TinySizes(tie_embeddings=True), tmp_path / "tied", 0)
    for path in (folders["like it"], scoring(folders["like it"], tmp_path / "scores"), tied):
        assert problems(critic_of(folders, path)) == []


def test_a_critic_of_other_sizes_or_of_no_folder_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """As built it would have the policy's layers, rotary angles and norms, and silently drop what does not fit."""
    deep = make_tiny_model(TinySizes(num_layers=3), tmp_path / "deep", 0)
    other = scoring(folders["like it"], tmp_path / "other", rms_norm_eps=0.5)
    for path, apart in ((scoring(deep, tmp_path / "deep_scores"), "num_layers"), (other, "norm_eps")):
        (found,) = problems(critic_of(folders, path))
        assert found.startswith(f"algorithm.critic.path={path}: its {apart} differ from the policy's, which the critic")
    (found,) = problems(critic_of(folders, tmp_path / "none"))
    assert found.startswith(f"algorithm.critic.path={tmp_path}/none: it has neither config.json nor .metadata; give")
    checkpoints, after = tmp_path / "runs" / "x" / "checkpoints", critic_of(folders, tmp_path / "none")
    after = after.model_copy(update={"run": after.run.model_copy(update={"dir": tmp_path / "runs"})})
    (checkpoints / "step_000002.old").mkdir(parents=True)
    (checkpoints / "step_notes").mkdir()
    (checkpoints / "step_000001").touch()
    assert problems(after) == [found]
    (checkpoints / "step_000002").mkdir()
    assert problems(after) == []
    (other / "model.safetensors").unlink()
    assert [found for found in problems(critic_of(folders, other)) if found.startswith("algorithm.critic.path: ")]


def test_ranks_of_a_teacher_hold_its_weights_and_not_the_policys(folders: dict[str, Path]) -> None:
    config = config_of(folders, "wide", OWN_RANKS)
    own = {m.role: m.terms for m in footprints(config, starting_shape(config))}
    alone = load_config("tiny_cpu", ["run.name=x", "learner.ep=1", f"model.path={folders['wide']}"])
    (teacher,) = footprints(alone, starting_shape(alone))
    assert own["reference"]["parameters"] == teacher.terms["parameters"] > own["learner"]["parameters"]
