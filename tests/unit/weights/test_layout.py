from __future__ import annotations

from dataclasses import replace

import pytest

from rl_megatron.errors import ConfigError, WeightError
from rl_megatron.models.shape import ModelShape
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import Layout, ParamSpec, Piece, coordinates, split_layers
from rl_megatron.weights.layouts.tables.qwen3_moe import ENGINE_QWEN3_MOE, HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.plan import plan

SHAPE = ModelShape(
    num_layers=8,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    num_experts=4,
    experts_per_token=2,
    expert_width=6,
    vocab_size=21,
    rope_theta=1e4,
    norm_eps=1e-6,
    normalize_top_k=True,
    tie_embeddings=False,
    max_positions=64,
)
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
    inner = dims.tp * dims.cp * dims.dp
    expert = generator(dims.etp, dims.ep, inner // (dims.ep * dims.etp), 1)
    for axis, groups in (
        ("tp", dense.get_ranks("tp")),
        ("pp", dense.get_ranks("pp")),
        ("ep", expert.get_ranks("ep")),
        ("etp", expert.get_ranks("tp")),
    ):
        for group in groups:
            assert [getattr(coordinates(dims, rank), axis) for rank in group] == list(range(len(group))), axis


STAGES: tuple[tuple[int, ParallelDims, int | None, int | None], ...] = (
    *((8, dims, None, None) for dims in MESHES),
    (94, ParallelDims(pp=4), 23, 23),
    (94, ParallelDims(pp=8), 11, 11),
    (94, ParallelDims(pp=4), 22, None),
    (61, ParallelDims(pp=8), None, 5),
    (61, ParallelDims(pp=16), 3, 2),
    (20, ParallelDims(tp=2, pp=3, vpp=2), 4, 8),
    (94, ParallelDims(pp=4, vpp=2, tp=2), None, 22),
)


@pytest.mark.parametrize(("num_layers", "dims", "first", "last"), STAGES)
def test_layers_are_those_of_megatrons_own_stages(
    num_layers: int, dims: ParallelDims, first: int | None, last: int | None
) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=4,
        pipeline_model_parallel_size=dims.pp,
        virtual_pipeline_model_parallel_size=dims.vpp if dims.vpp > 1 else None,
        pipeline_dtype=None if dims.pp == 1 else "unused",
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    layout = Layout(
        table=MEGATRON_QWEN3_MOE,
        shape=replace(SHAPE, num_layers=num_layers),
        dims=dims,
        stages=split_layers(num_layers, dims.pp, first=first, last=last),
    )
    for stage in range(dims.pp):
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
        ((5, 4), 1, r"stages=\(5, 4\) are 2 stages of 9 layers, but the layout has pp = 2 and 8 layers"),
        ((2, 2, 4), 1, r"3 stages of 8 layers, but the layout has pp = 2"),
        ((8, 0), 1, "each must be a positive multiple of vpp = 1"),
        ((5, 3), 2, "each must be a positive multiple of vpp = 2"),
    ],
)
def test_stages_that_do_not_fit_are_refused(stages: tuple[int, ...], vpp: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout(table=MEGATRON_QWEN3_MOE, shape=SHAPE, dims=ParallelDims(pp=2, vpp=vpp), stages=stages)


@pytest.mark.parametrize(
    ("pp", "first", "last"), [(4, None, None), (4, 95, None), (2, 40, 50), (1, 40, None), (4, 23, 22)]
)
def test_layers_that_cannot_be_shared_are_refused(pp: int, first: int | None, last: int | None) -> None:
    with pytest.raises(ConfigError, match=rf"first={first}, last={last} leave .* of 94 layers"):
        split_layers(94, pp, first=first, last=last)


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

    twice = ParamSpec(name="again", bands=bands, others=lambda _m: ())
    hf = Layout(table=HF_QWEN3_MOE, shape=SHAPE)
    with pytest.raises(WeightError, match=r"model\.norm\.weight: the source holds .* which overlap"):
        plan(Layout(table=[*HF_QWEN3_MOE, twice], shape=SHAPE), hf)


def test_two_destination_ranks_cannot_share_a_process() -> None:
    hf = Layout(table=HF_QWEN3_MOE, shape=SHAPE, dims=ParallelDims(dp=2))
    with pytest.raises(WeightError, match="two destination ranks into one process"):
        plan(hf, hf, placement={0: 0, 1: 0})
