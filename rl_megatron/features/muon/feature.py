"""``learner.optimizer.name=muon``: matrices that are stepped by their orthogonalized momentum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from rl_megatron.feature import Feature, Keywords
from rl_megatron.rules import Excludes, On
from rl_megatron.section import Section

if TYPE_CHECKING:
    from rl_megatron.config.sections.learner import LearnerSection
    from rl_megatron.models.shape import ModelShape


class MuonSection(Section):
    """The setting of ``name=muon`` only."""

    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the update of a matrix [rows, columns]: 0.2 sqrt(max(rows, columns)), so that learning rates of AdamW
    fit (Moonlight, arXiv:2502.16982), or sqrt(max(1, rows / columns)) (kellerjordan.github.io/posts/muon), like
    torch.optim.Muon. AdamW's parameters have the same learning rate."""


class MuonKeys(Section):
    """The feature's section of keys of the optimizer."""

    muon: MuonSection = MuonSection()


def _problems(learner: LearnerSection, shape: ModelShape | None) -> Iterator[str]:
    """Yields an error if its setting is set without it."""
    section = learner.optimizer
    assert isinstance(section, MuonKeys)
    if section.name != "muon" and section.muon.model_dump(exclude_defaults=True):
        yield (
            f"learner.optimizer.muon.scale with learner.optimizer.name={section.name} would have no effect; "
            "set learner.optimizer.name=muon, or leave it out"
        )


def _megatron(learner: LearnerSection, shape: ModelShape) -> Keywords:
    section = learner.optimizer
    assert isinstance(section, MuonKeys)
    return Keywords(optimizer={"muon_scale_mode": section.muon.scale} if section.name == "muon" else {})


FEATURE = Feature(
    name="muon",
    keys={"learner.optimizer": MuonKeys},
    may_change=frozenset({"learner.optimizer.muon"}),
    learner_rules=(
        Excludes(one=On("learner.lora.rank"), other=On("learner.optimizer.name", "muon"),
                 why="Muon needs whole matrices", fix="leave one of them out"),
    ),
    problems=_problems,
    megatron=_megatron,
    work=lambda learner, *_: {"muon": learner.optimizer.name == "muon"},
    optimizer="rl_megatron.features.muon.learner:LayerWise",
)  # fmt: skip
