"""Layouts of ranks, and plans between them: volume, balance and cost, also of public models at cluster scale."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from rl_megatron.config.learner_checks import problems
from rl_megatron.config.sections.learner import LearnerSection, layer_counts
from rl_megatron.errors import ConfigError, WeightError
from rl_megatron.learner.keywords import keywords
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import Layout, ParamSpec, Piece, coordinates
from rl_megatron.weights.layouts.tables import deepseek_v3, grouped_query
from rl_megatron.weights.layouts.tables.grouped_query import ENGINE_QWEN3_MOE, HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.plan import plan
from tests.small_models import SMALL_MOE

SHAPE = replace(SMALL_MOE, num_layers=8)
MESHES = (
    ParallelDims(tp=2, cp=2, ep=2, etp=2, dp=2, pp=2),
    ParallelDims(tp=2, ep=4, dp=2, pp=2, vpp=2),
    ParallelDims(tp=1, cp=2, ep=4, dp=4, pp=4, vpp=2),
)


@pytest.mark.parametrize("dims", MESHES)
def test_coordinates_are_those_of_megatrons_own_rank_generator(dims: ParallelDims) -> None:
    from megatron.core.parallel_state import RankGenerator

    def generator(tp: int, ep: int, dp: int, cp: int) -> RankGenerator:
        return RankGenerator(tp=tp, ep=ep, dp=dp, pp=dims.pp, cp=cp, order="tp-cp-ep-dp-pp")

    dense = generator(dims.tp, 1, dims.dp, dims.cp)
    expert = generator(dims.etp, dims.ep, dims.tp * dims.cp * dims.dp // (dims.ep * dims.etp), 1)
    for axis, groups in (
        ("tp", dense.get_ranks("tp")),
        ("pp", dense.get_ranks("pp")),
        ("ep", expert.get_ranks("ep")),
        ("etp", expert.get_ranks("tp")),
    ):
        for group in groups:
            assert [getattr(coordinates(dims, rank), axis) for rank in group] == list(range(len(group))), axis


STAGES: tuple[tuple[int, ParallelDims, str | None], ...] = (
    *((8, dims, None) for dims in MESHES),
    (94, ParallelDims(pp=4), "23+24*2+23"),
    (61, ParallelDims(pp=16), "3+4*14+2"),
    (20, ParallelDims(tp=2, pp=3, vpp=2), "2+4*4+2"),
    (7, ParallelDims(pp=2, vpp=2), "1+3+2+1"),
    (61, ParallelDims(pp=16, vpp=2), "1+2*29+1*2"),
)


@pytest.mark.parametrize(("num_layers", "dims", "counts"), STAGES)
def test_layers_are_those_of_megatrons_own_stages(
    num_layers: int, dims: ParallelDims, counts: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    stages = layer_counts(counts) if counts else None
    learner = LearnerSection(pp=dims.pp, vpp=dims.vpp, stage_layers=counts)
    assert not list(problems(learner))
    names = ("pipeline_model", "virtual_pipeline", "overlap_p2p", "batch_p2p", "deallocate_pipeline")
    given = {key: value for key, value in keywords(learner, SHAPE).model.items() if key.startswith(names)}
    config = TransformerConfig(
        num_layers=num_layers, hidden_size=8, num_attention_heads=4, pipeline_dtype="unused", **given
    )
    layout = Layout(table=MEGATRON_QWEN3_MOE, shape=replace(SHAPE, num_layers=num_layers), dims=dims, stages=stages)
    vpp = dims.vpp if dims.vpp > 1 else None
    monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: vpp)
    for stage in range(dims.pp):
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda stage=stage: stage)
        wanted: set[int] = set()
        for chunk in [None] if dims.vpp == 1 else range(dims.vpp):
            offset = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
            count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
            wanted |= set(range(offset, offset + count))
        names = layout.local_shapes(stage * dims.tp * dims.cp * dims.dp)
        assert {int(name.split(".")[2]) for name in names if name.startswith("decoder.layers.")} == wanted


@pytest.mark.parametrize(
    ("stages", "vpp", "message"),
    [
        ((5, 4), 1, r"stages=\(5, 4\) are 2 numbers of 9 layers, but the layout has pp\*vpp = 2\*1 = 2 and 8 layers"),
        ((2, 2, 4), 1, r"3 numbers of 8 layers, but the layout has pp\*vpp = 2\*1 = 2"),
        ((8, 0), 1, "each must be positive"),
        ((5, 3), 2, r"2 numbers of 8 layers, but the layout has pp\*vpp = 2\*2 = 4"),
    ],
)
def test_stages_that_do_not_fit_are_refused(stages: tuple[int, ...], vpp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout(table=MEGATRON_QWEN3_MOE, shape=SHAPE, dims=ParallelDims(pp=2, vpp=vpp), stages=stages)


def test_a_rank_of_nothing_but_vocabulary_padding_still_has_its_tensor() -> None:
    layout = Layout(table=MEGATRON_QWEN3_MOE, shape=replace(SHAPE, vocab_size=5), dims=ParallelDims(tp=2))
    assert layout.local_shapes(1)["embedding.word_embeddings.weight"] == (8, 8)
    assert [len(slices) for slices in layout.chunks(MEGATRON_QWEN3_MOE[0])] == [1, 0]


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (ParallelDims(pp=3), r"pp\*vpp = 3\*1 = 3 does not divide 8 layers"),
        (ParallelDims(ep=3, dp=3), "ep = 3 does not divide 4 experts"),
        (ParallelDims(etp=4, tp=4, pp=1), "etp = 4 does not divide dim 0 of decoder.*linear_fc1.*, 6"),
        (ParallelDims(tp=4), "tp = 4 does not divide dim 0 of decoder.*linear_qkv.*, 32 in heads of 16"),
        (ParallelDims(ep=2, dp=3), r"ep\*etp = 2\*1 = 2 does not divide tp\*cp\*dp = 1\*1\*3 = 3"),
    ],
)
def test_a_mesh_that_does_not_fit_the_model_is_refused_with_both_numbers(dims: ParallelDims, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout(table=MEGATRON_QWEN3_MOE, shape=SHAPE, dims=dims)


def test_an_engine_may_have_more_ranks_than_key_value_heads_but_not_cut_one() -> None:
    shape = replace(SHAPE, num_heads=12)
    Layout(table=ENGINE_QWEN3_MOE, shape=shape, dims=ParallelDims(tp=4))
    with pytest.raises(ConfigError, match=r"tp = 3 does not divide dim 0 of .*qkv_proj\.weight, 8 in heads of 4"):
        Layout(table=ENGINE_QWEN3_MOE, shape=shape, dims=ParallelDims(tp=3))


def test_a_table_that_holds_rows_in_two_ways_is_refused() -> None:
    def bands(_m: ModelShape, _degree: int) -> tuple[tuple[Piece, ...], ...]:
        return ((Piece(hf="model.norm.weight", start=0, stop=5),),)

    twice = ParamSpec(name="again", bands=bands, other_axes=lambda _m: ())
    hf = Layout(table=HF_QWEN3_MOE, shape=SHAPE)
    with pytest.raises(WeightError, match=r"model\.norm\.weight: the source holds .* which overlap"):
        plan(Layout(table=[*HF_QWEN3_MOE, twice], shape=SHAPE), hf)


def test_two_destination_ranks_cannot_share_a_process() -> None:
    hf = Layout(table=HF_QWEN3_MOE, shape=SHAPE, dims=ParallelDims(dp=2))
    with pytest.raises(WeightError, match="two destination ranks into one process"):
        plan(hf, hf, placement={0: 0, 1: 0})


def test_an_engines_fused_rows_are_in_its_order() -> None:
    fused = {row.name: row.bands(NAMED["deepseek-v3"], 1) for row in deepseek_v3.ENGINE_DEEPSEEK_V3}
    (pieces,) = fused["model.layers.{layer}.self_attn.fused_qkv_a_proj.weight"]
    assert [(piece.hf or "").split(".")[-2] for piece in pieces] == ["q_a_proj", "kv_a_proj_with_mqa"]


# Plans of public models at cluster scale: balance, volume and cost of the plan itself.
LEARNERS = {
    "qwen3-235b-a22b": (ParallelDims(tp=4, pp=8, ep=16, dp=16), "11+12*6+11"),
    "deepseek-v3": (ParallelDims(tp=4, pp=8, ep=32, dp=16), "7+8*6+6"),
    "kimi-k2": (ParallelDims(tp=2, pp=16, ep=16, dp=16), "3+4*14+2"),
}
ENGINES = {
    "full copies": ParallelDims(dp=256),
    "tp8": ParallelDims(tp=8, etp=8, dp=32),
    "dp attention, ep64": ParallelDims(dp=256, ep=64),
}


def layouts(model: str, engine: str) -> tuple[Layout, Layout]:
    shape = NAMED[model]
    dims, counts = LEARNERS[model]
    if shape.latent:
        hf, engines = deepseek_v3.HF_DEEPSEEK_V3, deepseek_v3.ENGINE_DEEPSEEK_V3
        megatron = deepseek_v3.MEGATRON_DEEPSEEK_V3
    else:
        hf, engines, megatron = (
            grouped_query.HF_QWEN3_MOE,
            grouped_query.ENGINE_QWEN3_MOE,
            grouped_query.MEGATRON_QWEN3_MOE,
        )
    table = hf if engine == "full copies" else engines
    return (
        Layout(table=megatron, shape=shape, dims=dims, stages=layer_counts(counts)),
        Layout(table=table, shape=shape, dims=ENGINES[engine]),
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", LEARNERS)
def test_replicas_send_alike_and_receivers_get_what_they_hold(model: str, engine: str) -> None:
    learner, engines = layouts(model, engine)
    ranks, placement = learner.dims.world_size, {r: learner.dims.world_size + r for r in range(256)}
    moves = plan(learner, engines, placement=placement)
    sent, received = [0] * ranks, [0] * 256
    for (a, b), elements in moves.traffic().items():
        sent[a] += elements
        received[b - ranks] += elements
    replicas: dict[object, list[int]] = {}
    for rank in range(ranks):
        replicas.setdefault(coordinates(learner.dims, rank), []).append(sent[rank])
    stages = [sent[start : start + ranks // learner.dims.pp] for start in range(0, ranks, ranks // learner.dims.pp)]
    for group in (*replicas.values(), *stages):
        assert max(group) * len(group) <= 1.05 * sum(group)
    vocab = NAMED[model].vocab_size
    for rank in (0, 101, 255):
        padding, shapes = 0, engines.local_shapes(rank)
        if engine != "full copies":
            each = shapes["lm_head.weight"][0]
            mine = max(0, min(each, vocab - coordinates(engines.dims, rank).tp * each))
            padding = 2 * (each - mine) * NAMED[model].hidden_size
        assert received[rank] == sum(prod(shape) for shape in shapes.values()) - padding


def test_one_engine_is_fed_evenly_too() -> None:
    """Few destinations: a rank's part of the embedding is a sixth of what a rank sends, unless it is cut."""
    learner, _ = layouts("qwen3-235b-a22b", "tp8")
    engine = Layout(table=grouped_query.ENGINE_QWEN3_MOE, shape=learner.shape, dims=ParallelDims(tp=8, etp=8))
    sent = [0] * 512
    for (a, _), elements in plan(learner, engine, placement={r: 512 + r for r in range(8)}).traffic().items():
        sent[a] += elements
    for first in range(0, 512, 64):
        stage = sent[first : first + 64]
        assert max(stage) * 64 <= 1.05 * sum(stage)
