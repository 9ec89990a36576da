"""The model of each role and its layout over the role's ranks: what each rank holds and trains, and its work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from rl_megatron.config.beside import frozen_folders, scoring_roles, with_role_keys
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.learner import LearnerSection
from rl_megatron.errors import ConfigError
from rl_megatron.feature import active, adapter_layouts
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.families import find_family, megatron_layout, read_shape
from rl_megatron.weights.layouts.layout import Layout, ParamSpec


def learner_layout(config: RunConfig, shape: ModelShape) -> Layout:
    """The layout of a model of ``shape`` over the learner's ranks. Raises ConfigError that names each size that a
    degree does not divide."""
    learner = config.learner
    try:
        return megatron_layout(shape, learner.dims, stages=learner.stages)
    except ConfigError as error:  # its text is for any layout and names no configuration key
        raise ConfigError("\n".join(f"learner: {line}" for line in str(error).splitlines())) from error


def role_layout(config: RunConfig, shape: ModelShape, role: str) -> Layout:
    """The layout of the model of ``role`` over its ranks, where the policy has ``shape``. Raises like `role_shape`."""
    try:
        return learner_layout(config.for_role(role), role_shape(config, shape, role))
    except ConfigError as error:
        raise ConfigError(with_role_keys(config, role, str(error))) from error


def job_shape(config: RunConfig, shape: ModelShape) -> ModelShape:
    """The sizes of the model that a run trains which starts from a model of ``shape``. Raises ConfigError for a model
    that scores where log-probs are trained."""
    if config.kind.scores:
        return replace(shape, has_score_head=True, tie_embeddings=False)
    if shape.has_score_head:
        raise ConfigError(
            f"model.path={config.model.path} is a sequence classifier, which scores texts; job={config.job} needs a "
            "model with an output layer: give the one that it was trained from"
        )
    return shape_with_features(config, shape)


def shape_with_features(config: RunConfig, shape: ModelShape) -> ModelShape:
    """``shape`` with what active features add to a policy. Raises ConfigError for a family that one cannot extend."""
    for feature in active(config.learner):
        shape = feature.shape(config.learner, shape)
    return shape


def role_shape(config: RunConfig, shape: ModelShape, role: str, base: Path | None = None) -> ModelShape:
    """Returns the sizes of the model on the ranks of ``role``. A separate reference, teachers and reward models have
    those of their folders, with paths from ``base`` (the working directory). All others have the policy's ``shape``;
    only the policy has draft layers. Raises ConfigError as readers do."""
    folder, key = frozen_folders(config).get(role, (None, ""))
    if folder is None:
        return replace(shape, num_draft_layers=False) if role in ("reference", "critic") else shape
    try:
        found = read_shape((base or Path()) / folder, config.learner.model)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path=", f"{key}=")) from error
    if role in scoring_roles(config):
        if found.has_score_head:
            return found
        raise ConfigError(
            f"{key}={folder} is no sequence classifier, so it has no score; give the folder that job=reward_model "
            "exported, or another ...ForSequenceClassification"
        )
    if found.has_score_head:
        raise ConfigError(
            f"{key}={folder} is a sequence classifier, which has no log-probs to compare with; give a "
            "model with an output layer"
        )
    return found


def engine_layout(config: RunConfig, shape: ModelShape) -> Layout | None:
    """The ranks of the servers that a run starts, by their degrees; None if it is unknown how they cut it."""
    section, table = config.rollout.server, find_family(shape).tables.get("engine")
    if section.addresses is not None or table is None:
        return None
    tp, dp = section.tp, section.dp
    etp = 1 if section.ep > 1 else tp * dp
    dims = ParallelDims(tp=tp, etp=etp, ep=section.ep, pp=section.pp, dp=dp * section.count)
    each, rest = divmod(shape.num_layers, section.pp)  # the rest goes to the last stages but one (vLLM, get_pp_indices)
    stages = tuple(each + (section.pp - 1 - rest <= stage < section.pp - 1) for stage in range(section.pp))
    try:
        return Layout(table=table, shape=shape, dims=dims, stages=stages)
    except ConfigError:  # sizes that the degrees do not divide, which engines pad
        return None


Terms = Mapping[str, float]
"""Bytes that a rank must hold, by purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Parameters of one rank: the optimizer shards ``dense`` ones over dp * cp ranks, ``experts`` over fewer."""

    dense: int
    experts: int

    @property
    def both(self) -> int:
        """Dense and experts' parameters together."""
        return self.dense + self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """The work of a rank of pipeline stage ``stage``, before any feature acts.

    It holds ``parameters`` and trains ``trained_parameters`` of them; ``matrices`` of these are in matrices of layers.
    It computes ``tokens`` of a micro-batch, in sequences of at most ``longest``, in ``layers``. ``inputs`` has the
    elements of each layer's input, and ``largest`` those of the largest parameter."""

    stage: int
    parameters: Elements
    trained_parameters: Elements
    matrices: Elements
    tokens: float
    layers: tuple[int, ...]
    inputs: tuple[float, ...]
    longest: float
    largest: int

    def stepped(self, learner: LearnerSection) -> float:
        """Returns how many of ``trained_parameters`` this rank steps; its data-parallel peers step the others."""
        d, held = learner.dims, self.trained_parameters
        return held.dense / (d.dp * d.cp) + held.experts * d.etp * d.ep / (d.tp * d.cp * d.dp)


def elements(layout: Layout, stage: int, bytes_of: Callable[[str], int] = lambda hf: 1) -> Elements:
    """Number of parameters of one rank of a pipeline stage, padding included.

    With ``bytes_of`` an element of a Hugging Face pattern, their bytes.
    """
    return _stage_elements(layout, bytes_of)[0][stage]


def elements_by_stage(layout: Layout) -> Sequence[Elements]:
    """`elements` of all stages, at the cost of one."""
    return _stage_elements(layout, lambda hf: 1)[0]


def layers_held(layout: Layout, stage: int) -> Iterator[tuple[ParamSpec, tuple[int, ...], int]]:
    """Each row of the table that can be trained, the shape that a rank holds of it, and in how many layers of the
    stage."""
    for spec in layout.rows():
        if not (spec.frozen or spec.keeps_dtype):  # else a buffer
            layers = sum(stage in stages for stages in layout.layer_stages(spec).values())
            yield spec, layout.first_chunk(spec)[0].shape, layers


def _largest(layout: Layout) -> Sequence[int]:
    """Elements of the largest parameter that a rank of each stage holds."""
    most, pp = [0] * layout.dims.pp, layout.dims.pp
    for spec in layout.rows():
        size = 0 if spec.frozen or spec.keeps_dtype else prod(layout.first_chunk(spec)[0].shape)
        for stage in {"first": (0,), "last": (pp - 1,), None: range(pp)}[spec.stage]:
            most[stage] = max(most[stage], size)
    return most


def trained_elements(config: RunConfig, layout: Layout) -> Sequence[Elements]:
    """The trained elements of one rank of each stage: adapters that a feature adds, else without
    ``learner.router.frozen`` all."""
    if (adapters := adapter_layouts(config.learner)) is not None:
        return _stage_elements(adapters.on_ranks(layout), lambda hf: 1)[0]
    return _stage_elements(layout, _trains(config, layout))[0]


def _trains(config: RunConfig, layout: Layout) -> Callable[[str], int]:
    """1 for a Hugging Face pattern that is trained, else 0."""
    frozen = config.learner.router.frozen
    still = {
        layout.first_chunk(spec)[0].hf for spec in layout.rows() if spec.frozen or (frozen and ".router." in spec.name)
    }
    return lambda hf: hf not in still


def _stage_elements(layout: Layout, *bytes_of: Callable[[str], int]) -> Sequence[Sequence[Elements]]:
    """`elements` of each stage by each of ``bytes_of``."""
    counts = [[{False: 0, True: 0} for _ in range(layout.dims.pp)] for _ in bytes_of]
    times: dict[tuple[object, ...], Counter[int]] = {}  # kind of row -> number of its layers by stage
    for spec in layout.rows():
        if spec.keeps_dtype:  # a buffer
            continue
        expert, held = ".experts." in spec.name, layout.first_chunk(spec)[0]  # one of them, or a layer's in one tensor
        each = layout.shape.num_experts // layout.dims.ep if "{expert}" in spec.name else 1
        size = prod(held.shape) * each
        alike = ("{layer}" in spec.name, spec.stage, spec.layers(layout.shape))
        if alike not in times:
            times[alike] = Counter(stage for stages in layout.layer_stages(spec).values() for stage in stages)
        for count, of in zip(counts, bytes_of, strict=True):
            if one := size * of(held.hf):
                for stage, layers in times[alike].items():
                    count[stage][expert] += one * layers
    return [[Elements(dense=one[False], experts=one[True]) for one in count] for count in counts]


def trained_matrices(config: RunConfig, layout: Layout) -> Sequence[Elements]:
    """The part of `trained_elements` of each stage that the optimizer takes for matrices."""
    return _stage_elements(layout, _stepped_as_matrix(config, layout))[0]


def _stepped_as_matrix(config: RunConfig, layout: Layout) -> Callable[[str], int]:
    """1 for a Hugging Face pattern of `trained_matrices`, else 0."""
    rows = [
        (spec.name, layout.first_chunk(spec)[0]) for spec in layout.rows() if "{layer}" in spec.name and not spec.frozen
    ]
    matrices = {held.hf for name, held in rows if _is_matrix(name, held.shape)}
    if config.learner.router.frozen:
        matrices -= {held.hf for name, held in rows if ".router." in name}
    return lambda hf: hf in matrices


def _is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Neither a vector nor the taps of a convolution."""
    return len(shape) > 1 and shape[0] > 1 and "bias" not in name and ".conv1d." not in name


def stage_ranks(config: RunConfig, layout: Layout) -> Sequence[Rank]:
    """The work of one rank of each pipeline stage, for the options."""
    learner, hidden = config.learner, layout.shape.hidden_size
    tokens = learner.max_tokens_per_micro_batch / learner.dims.cp
    kinds = (lambda hf: 1), _trains(config, layout), _stepped_as_matrix(config, layout)
    of_layer, (held, trained, matrices) = _stages(layout), _stage_elements(layout, *kinds)
    if (adapters := adapter_layouts(learner)) is not None:
        trained = _stage_elements(adapters.on_ranks(layout), lambda hf: 1)[0]
        held = [_both(*pair) for pair in zip(held, trained, strict=True)]
    longest = min(config.longest_sequence, learner.max_tokens_per_micro_batch)
    largest = _largest(layout)
    layers = [tuple(n for n, stages in of_layer.items() if stage in stages) for stage in range(layout.dims.pp)]
    return [
        Rank(
            stage=stage,
            parameters=held[stage],
            trained_parameters=trained[stage],
            matrices=matrices[stage],
            tokens=tokens,
            layers=layers[stage],
            inputs=(tokens * hidden / learner.dims.tp,) * len(layers[stage]),
            longest=longest,
            largest=largest[stage],
        )
        for stage in range(layout.dims.pp)
    ]


def _both(one: Elements, other: Elements) -> Elements:
    return Elements(dense=one.dense + other.dense, experts=one.experts + other.experts)


def rank_parameters(s: ModelShape, d: ParallelDims) -> tuple[float, float]:
    """A rank's parameters without and with experts, the mean over stages; norms and biases are left out."""
    sparse, h, each = len(s.moe_layers), s.hidden_size, 3.0 * s.hidden_size
    active = s.active_parameters - sparse * each * s.experts_per_token * s.expert_width
    total = active + (0 if s.tie_embeddings else s.vocab_size * h)
    return total / d.tp / d.pp, sparse * s.num_experts * each * s.expert_width / (d.ep * d.etp) / d.pp


def _stages(layout: Layout) -> Mapping[int, tuple[int, ...]]:
    """The stages of each layer, from a row that all layers have."""
    every = [spec for spec in layout.rows() if "{layer}" in spec.name]
    return max((layout.layer_stages(spec) for spec in every), key=len)
