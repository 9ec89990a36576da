"""Reward models, references and critics on ranks: which are refused, and the ranks and nodes that they take."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import jinja2
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from launcher.build.model import starting_shape
from launcher.preflight.model_files import check
from launcher.preflight.subject import PreflightContext
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.placement.ranks import extra_role_nodes, ranks_by_role
from rl_megatron.rewards.classifiers.on_ranks import RewardModels, local_reward
from rl_megatron.rewards.registry import resolve_rewards
from rl_megatron.rewards.scoring import score
from rl_megatron.types import Prompt
from tests.completions import completion
from tests.unit.launcher.commands import status_of
from tools.planner.memory import footprints

JUDGE = ("reward.function=ranks:judge", "reward_models.judge.path=tests")


def loaded(*keys: str) -> RunConfig:
    return load_config("tiny_cpu", list(keys))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder with the config.json of a classifier with one label."""
    folder = tmp_path_factory.mktemp("judge")
    shutil.copytree(make_tiny_model(TinySizes(), folder, 0), folder / "scores")
    return scoring(folder / "scores")


def scoring(folder: Path, **keys: object) -> Path:
    """``folder``, as a classifier's, with other ``keys`` in its config.json."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Qwen3MoeForSequenceClassification"], "id2label": {"0": "score"}, **keys}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def copied(judge: Path, to: Path, **keys: object) -> Path:
    shutil.copytree(judge, to / "copy")
    return scoring(to / "copy", **keys)


def refusals(config: RunConfig) -> list[str]:
    return [found.text for found in check(PreflightContext(config, for_job=False)) if found.kind == "problem"]


def problems(path: Path, *keys: str) -> list[str]:
    return refusals(loaded(*JUDGE, f"reward_models.judge.path={path}", *keys))


def resolved(path: Path, *keys: str) -> None:
    config = loaded(*JUDGE, f"reward_models.judge.path={path}", *keys)
    resolve_rewards(config.reward, {}, None, RewardModels(config.reward_models))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (JUDGE[:1], "reward.function=ranks:judge: reward_models has none; give reward_models.judge.path"),
        (JUDGE[1:], "reward_models.judge: no reward uses it; set reward.function=ranks:judge"),
        ((*JUDGE, "reward_models.other.path=tests"), "reward_models.other: no reward uses it"),
        ((*JUDGE, "reward.model.label=good"), "reward.model.label=good does nothing"),
        ((*JUDGE, "roles.layouts.reward_jugde.tp=2"), "has this role; allowed: reward_judge"),
        ((*JUDGE, "roles.layouts.reward_judge.vpp=2"), "vpp=2 with roles.layouts.reward_judge.pp=1: chunks need"),
        (
            (*JUDGE, "eval.sets.long.max_new_tokens=9000"),
            "score of rollout.max_prompt_tokens=16 and eval.sets.long.max_new_tokens=9000; raise the first, or set "
            "reward.model.max_tokens=8192",
        ),
        (("job=sft", "reward_models.judge.path=tests"), "job=sft does not read it"),
    ],
)
def test_what_does_not_fit_is_refused(keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(*keys)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "keys",
    [
        ("eval.sets.long.reward.function=math_verify",),
        ("eval.sets.long.environment.function=calculator", "eval.sets.long.environment.max_tokens=9000"),
        ("reward.model.max_tokens=8192",),
        ("eval.sets.long.reward.function=ranks:judge", "eval.sets.long.reward.model.max_tokens=8192"),
    ],
)
def test_a_set_of_long_completions_is_taken_where_no_model_reads_more_than_a_micro_batch(keys: tuple[str, ...]) -> None:
    loaded(*JUDGE, "eval.sets.long.max_new_tokens=9000", *keys)


class Lengths:
    """Scores a text by the number of its tokens."""

    max_tokens = 20

    async def __call__(self, texts: Sequence[Sequence[int]], /) -> list[float]:
        return [float(len(text)) for text in texts]


@pytest.mark.parametrize("chat", ["true", "false"])
def test_a_text_longer_than_a_micro_batch_is_cut(judge: Path, chat: str, caplog: pytest.LogCaptureFixture) -> None:
    """By what a chat template adds, here, or by a tokenizer unlike the policy's."""
    config = loaded(*JUDGE, f"reward_models.judge.path={judge}", f"reward.model.chat_template={chat}")
    models = RewardModels(config.reward_models)
    models.loaded["judge"] = Lengths()
    reward = resolve_rewards(config.reward, {}, None, models)
    prompt, texts = Prompt(id="p", text="12+34=", token_ids=(1, 2), answer="46"), ["46", "a longer answer: 46"]
    scored = [asyncio.run(score(reward, prompt, [completion((1,))] * 2, texts, limit=60.0)) for _ in range(2)]
    assert [one.total for group in scored for one in group] == [20.0 if chat == "true" else 8.0, 20.0] * 2
    (said,) = [line.getMessage() for line in caplog.records]
    assert "reads the last learner.max_tokens_per_micro_batch=20, and so of all" in said


def test_each_has_ranks_and_nodes_of_its_own_or_is_in_the_commands_process() -> None:
    keys = ("reward_models.other.path=tests", "eval.sets.sums.reward.function=ranks:other")
    config = loaded(*JUDGE, *keys, "roles.layouts.reward_judge.tp=4", "reward.model.max_tokens=8")
    assert ranks_by_role(config) == {"learner": 2, "reward_judge": 4, "reward_other": 2}
    assert extra_role_nodes(config) == {"reward_judge": 2, "reward_other": 1}
    config = loaded(
        "reward_models.judge.path=tests", "reward.parts.judge.function=ranks:judge", "reward.parts.format=2"
    )
    assert local_reward(config.reward, config.reward_models).functions == {"judge": "hf:tests", "format": "format"}
    config = loaded(*JUDGE)
    assert local_reward(config.reward, config.reward_models).function == "hf:tests"


def test_a_folder_that_ranks_can_score_with_is_taken(judge: Path) -> None:
    assert problems(judge) == []
    resolved(judge)


def test_a_folder_that_ranks_cannot_score_with_is_refused_before_the_run(judge: Path, tmp_path: Path) -> None:
    key = "reward_models.judge.path="
    (said,) = problems(make_tiny_model(TinySizes(), tmp_path, 0))
    assert re.match(f"{key}.* is no sequence classifier, so it has no score", said)
    for number, (model_type, why) in enumerate([("gpt2", "model_type='gpt2' is not supported"), (None, "supported")]):
        (said,) = problems(copied(judge, tmp_path / str(number), model_type=model_type))
        assert why in said
    (said,) = problems(judge, "roles.layouts.reward_judge.ep=16")
    assert f"{key}{judge}: roles.layouts.reward_judge: ep = 16 does not divide" in said
    (said,) = problems(copied(judge, tmp_path / "small", vocab_size=128))
    assert "its tokenizer has a token 258, but its embedding 128 rows; give the tokenizer" in said
    bare = copied(judge, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    assert f"{key}{bare}: it has no tokenizer" in problems(bare)[0]


def test_what_transformers_knows_of_a_folder_is_refused_as_the_reward_is_found(judge: Path, tmp_path: Path) -> None:
    two = copied(judge, tmp_path, id2label={"0": "bad", "1": "good"})
    with pytest.raises(ConfigError, match="has 2 labels, and ranks score by one alone"):
        resolved(two)
    plain = copied(judge, tmp_path / "plain")
    tokenizer = AutoTokenizer.from_pretrained(judge)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    resolved(judge, "reward.model.chat_template=true")
    with pytest.raises(ConfigError, match=r"chat_template=true, but the tokenizer of .* has no chat template"):
        resolved(plain, "reward.model.chat_template=true")
    with pytest.raises(ConfigError, match=r"reward\.function=ranks:judge: reward_models has none; give one"):
        resolve_rewards(loaded(*JUDGE).reward, {})


# A reference or a critic of one's own: which a preflight refuses, and what a reference of another size needs on ranks
# of its own.
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


@pytest.mark.parametrize(("reference", "more"), [("like it", ()), ("like it", (OWN_RANKS,)), ("wide", (OWN_RANKS,))])
def test_a_reference_that_can_score_is_taken(folders: dict[str, Path], reference: str, more: tuple[str, ...]) -> None:
    assert refusals(config_of(folders, reference, *more)) == []


@pytest.mark.parametrize(
    ("policy", "reference", "more", "said"),
    [
        ("policy", "wide", (), "hidden_size, num_experts, num_layers differ from the policy's, but the same ranks"),
        ("policy", "wide", (OWN_RANKS, "learner.ep=8"), "learner: ep = 8 does not divide 4 experts"),
        ("policy", "long", (OWN_RANKS,), "= 22 is more than the model's max_position_embeddings=16; lower"),
        ("large vocabulary", "wide", (OWN_RANKS,), "has 259 tokens, fewer than the policy's 300"),
    ],
)
def test_a_reference_that_cannot_score_is_refused(
    folders: dict[str, Path], policy: str, reference: str, more: tuple[str, ...], said: str
) -> None:
    (problem,) = refusals(config_of(folders, reference, *more, policy=policy))
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
    found = refusals(load_config("tiny_cpu", ["run.name=x", *KL, f"model.path={folders['policy']}", *keys]))
    said = f"samples, is more than max_position_embeddings={positions} of algorithm.kl.teachers.t.path={teacher}"
    assert [said in one for one in found] == [True] * (not taken)


def test_a_classifier_has_no_log_probs_to_compare_with(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "classifier"
    shutil.copytree(folders["like it"], folder)
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(known | {"architectures": ["Qwen3MoeForSequenceClassification"]}))
    (found,) = refusals(config_of(folders | {"scores": folder}, "scores"))
    assert found.startswith(f"algorithm.kl.reference={folder} is a sequence classifier")
    with pytest.raises(ConfigError, match=r"model\.path=.*classifier is a sequence classifier, which scores texts"):
        starting_shape(load_config("tiny_cpu", ["run.name=x", f"model.path={folder}"]))
    assert starting_shape(load_config("reward_tiny", ["run.name=x", f"model.path={folder}"])).has_score_head
    assert not refusals(load_config("reward_tiny", ["run.name=x", f"model.path={folders['policy']}"]))


def test_a_reward_model_that_nothing_could_load_is_refused(tmp_path: Path) -> None:
    from transformers import Glm4MoeConfig

    settings = Glm4MoeConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    settings.architectures = ["Glm4MoeForCausalLM"]
    settings.save_pretrained(tmp_path)
    found = refusals(load_config("reward_tiny", ["run.name=x", f"model.path={tmp_path}"]))
    assert any("transformers has no sequence classifier for model_type='glm4_moe'" in one for one in found)


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
    weights, others = refusals(config_of({**folders, "other": folder}, "other"))
    assert weights.startswith("algorithm.kl.reference: ")
    assert others.endswith(
        "2 of the policy's 259 tokens have other ids, like 'a', 97 and 98; give a model with the same tokenizer"
    )
    (found,) = refusals(config_of({**folders, "none": tmp_path / "none"}, "none"))
    missing = f"there is no such folder, as seen from {Path.cwd()}"
    assert found.startswith(f"algorithm.kl.reference={tmp_path}/none: {missing}; give")


def critic_of(folders: dict[str, Path], path: Path) -> RunConfig:
    keys = ("run.name=x", "learner.ep=1", "algorithm=ppo", f"model.path={folders['policy']}")
    return load_config("tiny_cpu", [*keys, f"algorithm.critic.path={path}"])


def classifier_of(folder: Path, out: Path, **changed: object) -> Path:
    """The folder as a sequence classifier's, with other settings in its config.json."""
    shutil.copytree(folder, out)
    known = json.loads((out / "config.json").read_text())
    named = {"architectures": ["Qwen3MoeForSequenceClassification"]}
    (out / "config.json").write_text(json.dumps(known | named | changed))
    return out


def test_a_critic_starts_from_a_policy_or_a_reward_model_of_its_sizes(folders: dict[str, Path], tmp_path: Path) -> None:
    tied = make_tiny_model(TinySizes(tie_embeddings=True), tmp_path / "tied", 0)
    for path in (folders["like it"], classifier_of(folders["like it"], tmp_path / "scores"), tied):
        assert refusals(critic_of(folders, path)) == []


def test_a_critic_of_other_sizes_or_of_no_folder_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """As built it would have the policy's layers, rotary angles and norms, and silently drop what does not fit."""
    deep = make_tiny_model(TinySizes(num_layers=3), tmp_path / "deep", 0)
    other = classifier_of(folders["like it"], tmp_path / "other", rms_norm_eps=0.5)
    for path, apart in ((classifier_of(deep, tmp_path / "deep_scores"), "num_layers"), (other, "norm_eps")):
        (found,) = refusals(critic_of(folders, path))
        assert found.startswith(f"algorithm.critic.path={path}: its {apart} differ from the policy's, but a critic")
    (found,) = refusals(critic_of(folders, tmp_path / "none"))
    assert found.startswith(f"algorithm.critic.path={tmp_path}/none: it has neither config.json nor .metadata; give")
    checkpoints, after = tmp_path / "runs" / "x" / "checkpoints", critic_of(folders, tmp_path / "none")
    after = after.model_copy(update={"run": after.run.model_copy(update={"dir": tmp_path / "runs"})})
    (checkpoints / "step_000002.old").mkdir(parents=True)
    (checkpoints / "step_notes").mkdir()
    (checkpoints / "step_000001").touch()
    assert refusals(after) == [found]
    (checkpoints / "step_000002").mkdir()
    assert refusals(after) == []
    (other / "model.safetensors").unlink()
    assert [found for found in refusals(critic_of(folders, other)) if found.startswith("algorithm.critic.path: ")]


def test_ranks_of_a_teacher_hold_its_weights_and_not_the_policys(folders: dict[str, Path]) -> None:
    config = config_of(folders, "wide", OWN_RANKS)
    own = {m.role: m.terms for m in footprints(config, starting_shape(config))}
    alone = load_config("tiny_cpu", ["run.name=x", "learner.ep=1", f"model.path={folders['wide']}"])
    (teacher,) = footprints(alone, starting_shape(alone))
    assert own["reference"]["parameters"] == teacher.terms["parameters"] > own["learner"]["parameters"]


# A reward model's shards, which have no config.json, converted with that of a classifier or of a policy.
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
    pairs = ["data.type=files", "data.train=a", "data.eval=b", "data.fields.messages=good", "data.fields.rejected=bad"]
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
    assert status_of("convert", shards, out, "--config", make_tiny_model(spec, tmp_path / "policy", 1)) == 0
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
        found = [one.text for one in check(PreflightContext(given, for_job=False)) if one.kind == "problem"]
        assert [one.partition("/")[0] for one in found] == ["algorithm.critic.path="] * refused, found
        assert all("is not a checkpoint of a critic with the policy's sizes" in one for one in found)
