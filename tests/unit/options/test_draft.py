"""``learner.draft``: what is refused, and the bytes that the plan counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from launcher.preflight import model_files
from launcher.preflight.subject import Found, Subject
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.models.named import NAMED
from rl_megatron.options.table import problems
from rl_megatron.scaling.parameters import elements
from rl_megatron.weights.layouts.families import megatron_layout
from tests.draft_models import save_with_drafts, save_with_qwens_draft
from tests.family_models import save_model

DEEPSEEK = NAMED["deepseek-v3"]


def told(**keys: Any) -> str:
    learner = LearnerSection.model_validate({"draft": {"train": True}, **keys})
    return "\n".join(problems(learner, DEEPSEEK))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"lora": {"rank": 4}}, "learner.lora.rank=4"),
        ({"optimizer": {"name": "muon"}}, "learner.optimizer.name=muon"),
        ({"fp8": "blockwise"}, "learner.fp8=blockwise"),
        ({"cuda_graphs": True}, "learner.cuda_graphs=true"),
        ({"layers": "my_layers:layer"}, "learner.layers=my_layers:layer"),
    ],
)
def test_what_knows_no_draft_layer_is_refused_by_name(keys: dict[str, Any], named: str) -> None:
    assert f"learner.draft.train=true with {named}" in told(**keys)


def test_models_without_one_layer_and_keys_without_effect_are_refused() -> None:
    assert told() == ""
    learner = LearnerSection.model_validate({"draft": {"train": True}})
    for count in (0, 2):
        found = "\n".join(problems(learner, replace(DEEPSEEK, draft_layers=count)))
        assert f"the model has {count} draft layers" in found
    assert "draft layer of model_type='deepseek_v32' has an indexer" in "\n".join(
        problems(learner, NAMED["deepseek-v3.2"])
    )
    idle = LearnerSection.model_validate({"draft": {"learning_rate_factor": 2.0}})
    assert "learning_rate_factor without learner.draft.train=true" in "\n".join(problems(idle))


def test_the_plan_counts_the_parameters_of_the_published_layer() -> None:
    """DeepSeek-V3's README: 685 billion on the hub, of which 671 are the model's; the others are 11.5 of the layer's
    own and its copies of embedding and output matrix."""
    with_layer = elements(megatron_layout(replace(DEEPSEEK, drafts=True)), 0).both
    own = with_layer - elements(megatron_layout(DEEPSEEK), 0).both
    copies = 2 * DEEPSEEK.vocab_size * DEEPSEEK.hidden_size
    assert own == pytest.approx(11.5e9, rel=0.01)
    assert with_layer + copies == pytest.approx(685e9, rel=1e-3)


def test_a_matrix_of_a_draft_layers_own_is_told_before_a_run(tmp_path: Path) -> None:
    """As conversions tell it."""
    tensors = save_with_drafts("glm4_moe", folder := tmp_path / "hf")
    config = load_config("tiny_cpu", ["learner.draft.train=true", f"model.path={folder}"])

    def notes() -> list[Found]:
        return [one for one in model_files.check(Subject(config, for_job=False)) if "is no copy of" in one.text]

    assert not notes()
    (own,) = [name for name in tensors if name.endswith("shared_head.head.weight")]
    save_file({**tensors, own: tensors[own] + 1}, folder / "model.safetensors", {"format": "pt"})
    (said,) = notes()
    assert said.kind == "note"
    assert f"{own} is no copy of lm_head.weight, which the draft layer reads in its place" in said.text


def test_a_draft_layer_that_the_files_lack_is_told_before_a_run(tmp_path: Path) -> None:
    """config.json may say nothing of it, as Qwen3-Next's does not."""
    save_model("qwen3_next", tmp_path / "without")
    save_with_qwens_draft("qwen3_next", tmp_path / "with")
    for name, lacks in (("without", True), ("with", False)):
        config = load_config("tiny_cpu", ["learner.draft.train=true", f"model.path={tmp_path / name}"])
        said = [one.text for one in model_files.check(Subject(config, for_job=False))]
        told = f"learner.draft.train=true, but no tensor in model.path={tmp_path / name} is of a draft layer"
        assert any(text.startswith(told) for text in said) == lacks
