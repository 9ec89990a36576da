"""The cells of the matrix: models by mechanism, layouts and features, and a seeded choice that has each pair of them.

Pairs that the rules of the configuration refuse are in no cell.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from rl_megatron.config.learner_checks import problems, sparse_problem
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape
from rl_megatron.weights.layouts.families import megatron_layout, read_shape
from tests.family_models import DENSE, MODELS, config_of

MECHANISMS = ("qwen2", "qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_5_moe_stacked", "gpt_oss", "qwen3_next")
"""Tied and dense; norms of heads; shared experts; latent attention; experts in one tensor; windows and sinks; delta
nets."""
WITH_DRAFTS = ("glm4_moe", "deepseek_v3", "qwen3_next", "hy_v3", "glm4_moe_tied")
"""Models whose folders have a draft layer that has a formula."""
STACKED = ("qwen3_5_moe_stacked",)
"""Models whose experts are in one tensor a layer in some files and not in others: here they are."""
SPARSE = ("deepseek_v32", "glm_moe_dsa")
"""Models that attend to the keys that an indexer chooses: fewer than most of the texts have."""
TIED = "_tied"
"""Behind the name of a model whose output layer is the embedding."""
MAX_TOKENS, SEQUENCES = 120, 5  # of a micro-batch
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "one": {},
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "pp2-vpp2": {"pp": 2, "vpp": 2},
    "ep2": {"ep": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "cp2": {"cp": 2},
    "tp2-pp2-ep2": {"tp": 2, "pp": 2, "ep": 2, "stage_layers": "1+3"},
}
ONCE: Mapping[str, Mapping[str, Any]] = {"pp2-vpp2-dp2": {"pp": 2, "vpp": 2, "dp": 2}}
"""Layouts of the cells that name them, and of no pair."""
BALANCE = {"aux_loss": 0.5, "seq_aux_loss": 2.0, "global_aux_loss": 1.5, "z_loss": 0.25}
UNCLIPPED = {"optimizer": {"clip_grad": 0.0, "eps": 0.1}}
"""Buckets sum a norm in another order, and clipping would multiply gradients by it. Steps are about as long."""
ON_GPU = {"device": "cuda", "layers": "torch"}
"""By the rules; a cell pretends that the host's memory is a GPU's."""
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "recompute": {"recompute": {"uniform": 1}},
    "recompute experts": {"recompute": {"parts": ["moe"]}},
    "overlap": {"overlap": {"gradients": True, "parameters": True}, **UNCLIPPED},
    "overlap gradients": {"overlap": {"gradients": True}, **UNCLIPPED},
    "overlap experts": {"overlap": {"shared_experts": True}},
    "float32 head": {"head_dtype": "float32"},
    "padding": {"padding": {"tokens": "64,96,120", "sequences": SEQUENCES}},
    "lora": {"lora": {"rank": 4, "alpha": 12.0}},
    "draft": {"draft": {"train": True}},
    "frozen routers": {"router": {"frozen": True}},
    "balance": {"router": BALANCE},
    "biases": {"router": {"bias_update_rate": 0.125}},
    "muon": {"optimizer": {"name": "muon"}},
    "replay": {},
    "offload": {"offload": {"activations": ["attention", "moe"], "while_sampling": "optimizer"}, **ON_GPU},
    "critic": {},
    "own critic": {},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 gradients": {"gradient_dtype": "bfloat16"},
}
APART = (
    *({"overlap", one} for one in ("overlap gradients", "muon")),  # the latter by megatron-core
    *({"critic", one} for one in ("own critic", "draft", "lora")),  # which are of policies
    *({"own critic", one} for one in ("overlap", "overlap gradients", "draft", "lora")),  # by rules of algorithms
)
"""Features that exclude each other, of which the learner's own rules say nothing."""
MOST = 4  # features of a cell
NEUTRAL = (
    "recompute",
    "recompute experts",
    "overlap",
    "overlap gradients",
    "overlap experts",
    "float32 head",
    "padding",
    "offload",
)
"""Features of which a checkpoint says nothing: who goes on does without them."""
BITWISE = ("overlap", "overlap gradients", "draft")
"""Features that change no bit of the model's own loss and weights."""
OPTIMIZER = {"eps": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5}
"""By which a step of AdamW is a smooth function of the gradient, whose norm is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a cell may be from its oracle."""

    moved: float  # of the way that a tensor has moved
    said: float  # a loss, a norm or another metric, of itself
    scored: float  # logits, log-probs and entropies
    rounds: float = 0.0  # of what a tensor loses where it is rounded to bfloat16
    told: float = 1e-5  # a metric near 0


SUMS = Tolerance(moved=2e-3, said=2e-4, scored=2e-4)
"""For a model in float32: its sums have another order than the oracle's."""
CHUNKS = Tolerance(moved=4e-2, said=4e-3, scored=5e-4)
"""For delta nets, which transformers computes by chunks."""
ROUNDED = Tolerance(moved=0.2, said=0.15, scored=0.5, rounds=1.1, told=0.05)
"""For bfloat16, which rounds each product, and weights once. The oracle is in float32."""
SUMMED = replace(ROUNDED, moved=0.25, said=0.2)
"""For gradients that are rounded to bfloat16 after each micro-batch, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A model that steps and saves in one layout, and goes on in that and in another, ``then``."""

    model: str
    layout: str
    then: str
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.model}, {self.layout}, then {self.then}" + "".join(f", {name}" for name in self.features)

    @property
    def learner(self) -> LearnerSection:
        """The keys of the first layout."""
        return section(self.layout, self.features).model_copy(update={"device": "cpu"})

    @property
    def plain(self) -> LearnerSection:
        """The keys of the first layout without the features `BITWISE`."""
        others = [name for name in self.features if name not in BITWISE]
        return section(self.layout, others).model_copy(update={"device": "cpu", "optimizer": self.learner.optimizer})

    @property
    def tolerance(self) -> Tolerance:
        """How far it may be from its oracle."""
        if "bfloat16" in self.features:
            return SUMMED if "bfloat16 gradients" in self.features else ROUNDED
        return SUMS if shape_of(self.model).delta is None else CHUNKS

    @property
    def resumed(self) -> LearnerSection:
        """The keys of the layout ``then``."""
        same = {"optimizer": self.learner.optimizer}
        return section(self.then, held_in_checkpoints(self.features)).model_copy(update=same)


def held_in_checkpoints(features: Sequence[str]) -> tuple[str, ...]:
    """The features that a checkpoint is of."""
    return tuple(name for name in features if name not in NEUTRAL)


def has_values(features: Collection[str]) -> bool:
    """Whether the learner has a value layer."""
    return "critic" in features or "own critic" in features


def _cell(model: str, layout: str, then: str, *features: str) -> Cell:
    return Cell(model=model, layout=layout, then=then, features=features)


FIRST = (
    _cell("qwen2", "dp2", "tp2", "overlap", "float32 head", "padding"),
    _cell("qwen3_moe", "tp2", "pp2", "recompute", "balance"),
    _cell("glm4_moe", "tp2-ep2", "cp2", "overlap experts", "biases", "draft"),
    _cell("deepseek_v3", "pp2-vpp2", "ep2", "recompute experts", "replay"),
    _cell("gpt_oss", "cp2", "one", "padding", "balance"),
    _cell("qwen3_next", "ep2", "tp2-ep2", "recompute", "lora"),
    _cell("qwen3_5_moe_stacked", "tp2-pp2-ep2", "dp2", "frozen routers", "replay", "own critic"),
    _cell("deepseek_v3", "one", "pp2", "biases", "draft"),
    _cell("glm4_moe", "pp2", "pp2-vpp2", "lora", "replay"),
    _cell("qwen3_moe", "tp2", "pp2", "critic", "offload"),
    _cell("qwen3_moe", "pp2-vpp2-dp2", "tp2-pp2-ep2", "overlap", "frozen routers"),
    _cell("qwen3_moe", "dp2", "tp2-ep2", "overlap gradients", "muon"),
    _cell("qwen2", "dp2", "tp2", "overlap", "float32 head", "bfloat16", "bfloat16 gradients"),
    _cell("glm4_moe", "ep2", "pp2", "overlap gradients", "replay", "bfloat16", "muon"),
    _cell("glm_moe_dsa", "tp2-ep2", "pp2", "recompute"),
    _cell("deepseek_v32", "pp2-vpp2", "tp2", "recompute experts", "padding"),
)
"""Cells that have each mechanism, layout and feature: ``make test`` runs them alone."""


def section(layout: str, features: Collection[str]) -> LearnerSection:
    """Raises ValidationError for what one section refuses."""
    keys: dict[str, Any] = {"max_tokens_per_micro_batch": MAX_TOKENS, "optimizer": OPTIMIZER}
    for one in ((LAYOUTS | ONCE)[layout], *(FEATURES[name] for name in features)):
        for key, value in one.items():
            keys[key] = {**keys.get(key, {}), **value} if isinstance(value, dict) else value
    return LearnerSection.model_validate(keys)


def named(model: str) -> tuple[str, dict[str, Any]]:
    """A model's name in `tests.family_models`, and the settings that differ from it."""
    if model in SPARSE:  # with so many heads hardly any two keys have the score 0, of which one is chosen
        return model, {"index_topk": 8, "index_n_heads": 16}
    return (model.removesuffix(TIED), {"tie_word_embeddings": True}) if model.endswith(TIED) else (model, {})


@cache
def shape_of(model: str) -> ModelShape:
    """The sizes of the text model, without its weights."""
    with TemporaryDirectory() as folder:
        name, more = named(model)
        drafts = {"num_nextn_predict_layers": 1} if model in WITH_DRAFTS else {}
        config_of(name, **more, **drafts).save_pretrained(folder)
        return replace(read_shape(Path(folder)), stacked_experts=model in STACKED)


@cache
def refused(model: str, layout: str, features: frozenset[str]) -> bool:
    """Whether a rule refuses the cell, or the model lacks what the feature is of."""
    shape = shape_of(model)
    if ("draft" in features and model not in WITH_DRAFTS) or ("replay" in features and not shape.num_experts):
        return True
    if any(features >= both for both in APART):
        return True
    if "bfloat16" in features:  # only dense models, and experts that are replayed, stay near an oracle: FIRST has both
        return True
    try:
        learner = section(layout, features)
        megatron_layout(shape, learner.dims, stages=learner.stages)
    except (ValidationError, ConfigError):
        return True
    if sparse_problem(learner, shape) is not None:
        return True
    return next(problems(learner, replace(shape, num_draft_layers=learner.draft.train)), None) is not None


def pairs_of(model: str, layout: str, features: Collection[str]) -> set[frozenset[str]]:
    """The pairs that a cell has; of a model and a layout each has one."""
    return {frozenset(pair) for pair in itertools.combinations((model, layout, *features), 2)}


def with_features(model: str, layout: str, first: Sequence[str], missing: set[frozenset[str]]) -> tuple[str, ...]:
    """The features ``first`` and those that add most of the pairs that are ``missing``."""
    chosen = list(first)
    while len(chosen) < MOST:
        had = len(missing & pairs_of(model, layout, chosen))
        gains = {name: len(missing & pairs_of(model, layout, [*chosen, name])) - had for name in FEATURES}
        order = sorted((name for name in gains if gains[name] > 0), key=gains.__getitem__, reverse=True)
        best = next((name for name in order if not refused(model, layout, frozenset([*chosen, name]))), None)
        if best is None:
            break
        chosen.append(best)
    return tuple(chosen)


def resumed_in(model: str, layout: str, features: Sequence[str], number: int) -> str:
    """A layout that goes on with the cell's checkpoint; over all cells each one in turn."""
    names = list(LAYOUTS)
    turn = (names[(number + names.index(layout)) % len(names)] for number in range(number, number + len(names)))
    return next(one for one in turn if not refused(model, one, frozenset(held_in_checkpoints(features))))


def cover() -> Iterator[Cell]:
    """Each mechanism in each layout, each feature with each of both and with each other one; then other families."""
    missing = {pair for model in MECHANISMS for layout in LAYOUTS for pair in pairs_of(model, layout, FEATURES)}
    order = [one for one in itertools.product(MECHANISMS, LAYOUTS) if not refused(*one, frozenset())]
    random.Random(1).shuffle(order)
    for cell in FIRST:
        missing -= pairs_of(cell.model, cell.layout, cell.features)
    yield from FIRST
    chosen = []
    for model, layout in order:
        if frozenset((model, layout)) not in missing:
            continue
        chosen.append((model, layout, with_features(model, layout, (), missing)))
        missing -= pairs_of(*chosen[-1])
    for pair in sorted(missing, key=sorted):  # where a cell can have it
        first = tuple(sorted(pair & FEATURES.keys()))
        of_pair = ((m, n) for m, n in order if pair & {m, n} == pair - {*first} and not refused(m, n, frozenset(first)))
        if pair in missing and (found := next(of_pair, None)):
            chosen.append((*found, with_features(*found, first, missing)))
            missing -= pairs_of(*chosen[-1])
    for model in [*sorted(MODELS.keys() - {*MECHANISMS}), "glm4_moe_tied"]:
        layout = {"glm4_moe_tied": "pp2", **dict.fromkeys(DENSE, "tp2")}.get(model, "tp2-ep2")
        chosen.append((model, layout, ("draft",) if model in WITH_DRAFTS else ()))
    for number, (model, layout, features) in enumerate(chosen):
        yield Cell(model=model, layout=layout, then=resumed_in(model, layout, features, number), features=features)
