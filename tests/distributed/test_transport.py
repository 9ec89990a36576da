"""The process-group transport on real gloo processes, against checkpoints and shards cut by torch itself."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from launcher.processes.guards import held_ports
from rl_megatron.errors import SyncError, WeightError
from rl_megatron.types import ParallelDims
from rl_megatron.weights.layouts.layout import Layout
from rl_megatron.weights.layouts.tables.qwen3_moe import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.plan import Plan, plan
from rl_megatron.weights.routes import rendezvous
from rl_megatron.weights.routes.delta import DeltaTransport
from rl_megatron.weights.routes.group import ProcessGroupTransport, Transport
from tests.distributed.ranks import run_ranks
from tests.small_models import SMALL_MOE

SHAPE = SMALL_MOE  # other modules put theirs in its place
BUCKET_BYTES = 40  # a row of the hidden size fits (32 bytes), one of the attention output does not (64)


def _process(rank: int, world_size: int, port: int, body: Callable[[int, Path], None], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    try:
        body(rank, folder)
    finally:
        dist.destroy_process_group()


def spawn(world_size: int, body: Callable[[int, Path], None], folder: Path) -> None:
    with held_ports("127.0.0.1") as port:
        run_ranks(_process, world_size, world_size, port, body, folder)


def hf_tensors(version: int) -> dict[str, Tensor]:
    """The same on every process, other numbers for each version."""
    generator = torch.Generator().manual_seed(version)
    shapes = Layout(table=HF_QWEN3_MOE, shape=SHAPE).local_shapes(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def megatron_tensors(hf: dict[str, Tensor], dims: ParallelDims, rank: int) -> dict[str, Tensor]:
    """A rank's shards, cut without the table: two stages of one layer, tp over attention and vocabulary, ep experts."""
    inner = dims.tp * dims.dp
    stage, tp, ep = rank // inner, rank % dims.tp, rank % inner % dims.ep
    out: dict[str, Tensor] = {}
    vocab = lambda x: torch.nn.functional.pad(x, (0, 0, 0, -len(x) % (8 * dims.tp))).chunk(dims.tp)[tp]  # noqa: E731
    if stage == 0:
        out["embedding.word_embeddings.weight"] = vocab(hf["model.embed_tokens.weight"])
    if stage == dims.pp - 1:
        out["output_layer.weight"] = vocab(hf["lm_head.weight"])
        out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    for layer in torch.arange(SHAPE.num_layers).chunk(dims.pp)[stage].tolist():
        p, q = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        groups = [hf[p + f"self_attn.{x}_proj.weight"].chunk(SHAPE.num_kv_heads) for x in "qkv"]
        qkv = torch.cat([torch.cat(group) for group in zip(*groups, strict=True)])
        out[q + "self_attention.linear_qkv.weight"] = qkv.chunk(dims.tp)[tp]
        out[q + "self_attention.linear_qkv.layer_norm_weight"] = hf[p + "input_layernorm.weight"]
        out[q + "self_attention.q_layernorm.weight"] = hf[p + "self_attn.q_norm.weight"]
        out[q + "self_attention.k_layernorm.weight"] = hf[p + "self_attn.k_norm.weight"]
        out[q + "self_attention.linear_proj.weight"] = hf[p + "self_attn.o_proj.weight"].chunk(dims.tp, 1)[tp]
        out[q + "pre_mlp_layernorm.weight"] = hf[p + "post_attention_layernorm.weight"]
        out[q + "mlp.router.weight"] = hf[p + "mlp.gate.weight"]
        for e in torch.arange(SHAPE.num_experts).chunk(dims.ep)[ep].tolist():
            gate, up, down = (hf[p + f"mlp.experts.{e}.{x}_proj.weight"] for x in ("gate", "up", "down"))
            out[q + f"mlp.experts.linear_fc1.weight{e}"] = torch.cat([gate, up])
            out[q + f"mlp.experts.linear_fc2.weight{e}"] = down
    return {name: tensor.clone() for name, tensor in out.items()}


def push_plan(dims: ParallelDims, engines: int) -> Plan:
    source = Layout(table=MEGATRON_QWEN3_MOE, shape=SHAPE, dims=dims)
    return plan(source, Layout(table=HF_QWEN3_MOE, shape=SHAPE, dims=ParallelDims(dp=engines)))


def over_gloo(moves: Plan, src: dict[str, Tensor], dst: dict[str, Tensor], *, verify: bool = True) -> Transport:
    return ProcessGroupTransport(moves, src=src, dst=dst, bucket_bytes=BUCKET_BYTES, verify=verify)


def changes_only(moves: Plan, src: dict[str, Tensor], dst: dict[str, Tensor]) -> Transport:
    return DeltaTransport(moves, src=src, dst=dst, bucket_bytes=4 * BUCKET_BYTES)


def check_push(
    rank: int,
    dims: ParallelDims,
    engines: int,
    dtype: torch.dtype,
    connect: Callable[[Plan, dict[str, Tensor], dict[str, Tensor]], Transport],
    device: str = "cpu",
) -> None:
    """Two versions through one transport into ``engines`` processes that are learners as well; routers stay float32."""
    moves = push_plan(dims, engines)
    src = {name: tensor.to(device) for name, tensor in megatron_tensors(hf_tensors(0), dims, rank).items()}
    shapes = Layout(table=HF_QWEN3_MOE, shape=SHAPE).local_shapes(0)

    def dtype_of(name: str) -> torch.dtype:
        return torch.float32 if name.endswith("mlp.gate.weight") else dtype

    dst = {}
    if rank < engines:
        dst = {n: torch.full(size, torch.nan, dtype=dtype_of(n), device=device) for n, size in shapes.items()}
    transport = connect(moves, src, dst)
    for version in (1, 2):
        for name, tensor in megatron_tensors(hf_tensors(version), dims, rank).items():
            src[name].copy_(tensor)
        update = transport.move(version)
        wanted = hf_tensors(version)
        for name, tensor in dst.items():
            assert torch.equal(tensor.cpu(), wanted[name].to(dtype_of(name))), name
        crossed = sum(
            torch.Size([stop - start for start, stop in t.dst_box]).numel() * dtype_of(t.dst_param).itemsize
            for t in moves.receives(rank)
            if t.src_rank != t.dst_rank
        )
        assert (update.version, update.num_bytes) == (version, crossed)
    transport.close()


def _two(rank: int, folder: Path) -> None:
    for connect in (over_gloo, changes_only):
        check_push(rank, ParallelDims(ep=2, dp=2), 2, torch.float32, connect)
        check_push(rank, ParallelDims(pp=2), 1, torch.bfloat16, connect)
    globals()["SHAPE"] = replace(SHAPE, hidden_size=9)  # no bucket in bfloat16 ends at a word
    check_push(rank, ParallelDims(ep=2, dp=2), 2, torch.bfloat16, partial(over_gloo, verify=False))


def _four(rank: int, folder: Path) -> None:
    check_push(rank, ParallelDims(tp=2, pp=2, ep=2), 4, torch.float32, over_gloo)
    check_push(rank, ParallelDims(tp=2, ep=4, dp=2), 3, torch.bfloat16, over_gloo)


@pytest.mark.parametrize(("world_size", "body"), [(2, _two), (4, _four)])
def test_engines_hold_each_version_exactly(world_size: int, body: Callable[[int, Path], None], tmp_path: Path) -> None:
    spawn(world_size, body, tmp_path)


def _one_process(rank: int, folder: Path) -> None:
    check_push(rank, ParallelDims(), 1, torch.float32, over_gloo)
    check_push(rank, ParallelDims(), 1, torch.bfloat16, over_gloo)
    transport = ProcessGroupTransport(
        push_plan(ParallelDims(), 1), src=megatron_tensors(hf_tensors(0), ParallelDims(), 0), dst=hf_tensors(1)
    )
    assert transport.move(0).num_bytes == 0


def test_one_process_copies_and_sends_nothing(tmp_path: Path) -> None:
    spawn(1, _one_process, tmp_path)


def _misfits(rank: int, folder: Path) -> None:
    dims = ParallelDims(ep=2, dp=2)
    src, dst = megatron_tensors(hf_tensors(0), dims, rank), hf_tensors(0)
    if rank == 1:
        src["decoder.final_layernorm.weight"] = torch.zeros(9)
        del src["decoder.layers.1.mlp.experts.linear_fc1.weight2"]
        dst["model.layers.2.mlp.gate.weight"] = torch.zeros(4, 8)
    with pytest.raises(WeightError) as caught:
        ProcessGroupTransport(push_plan(dims, 2), src=src, dst=dst)
    assert sorted(str(caught.value).splitlines()) == [
        "rank 1: destination tensor model.layers.2.mlp.gate.weight is written by no transfer; "
        "leave it out or add it to the layout",
        "rank 1: source tensor decoder.final_layernorm.weight has shape (9,), the plan's layout says (8,)",
        "rank 1: source tensor decoder.layers.1.mlp.experts.linear_fc1.weight2 is missing; "
        "the plan needs it with shape (12, 8)",
    ]


def test_every_process_hears_of_one_processs_misfits(tmp_path: Path) -> None:
    spawn(2, _misfits, tmp_path)


# Messages between the processes of a group, over gloo.
def words_main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    assert rendezvous.gather(f"of {rank}", None) == ["of 0", "of 1"]
    if rank == 1:
        os._exit(0)
    with pytest.raises(SyncError, match="a process of the group was lost: "):
        rendezvous.gather("anybody there?", None)
    os._exit(0)


def test_a_process_that_is_lost_is_told_as_a_sync_that_failed(tmp_path: Path) -> None:
    run_ranks(words_main, 2, tmp_path)


# Reduce-scatter and all-gather of buffers between ranks on CPUs, through memory that they share or by sends.
SHARD, ROUNDS = 40, 10  # a shard is exchanged in pieces of 64 bytes at most


def exchange_main(rank: int, size: int, memory: str, folder: Path) -> None:
    from rl_megatron.learner.cpu import exchange

    exchange.NODE_MEMORY = folder / str(rank) if memory == "apart" else folder / "memory"
    exchange.NODE_MEMORY.mkdir(exist_ok=True)
    exchange.SHARED_BYTES = 1 << 60 if memory == "no room" else 64 * 2 * size**2
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size + 1)
    group = dist.new_group([*range(1, size + 1)])  # whose ranks have other numbers in the world
    if rank:
        for number in range(ROUNDS):
            check(group, together(exchange.reduce_scatter), together(exchange.all_gather), number)
        assert (exchange._shared_by(group) is not None) is (memory == "shared" and size > 1)
        assert not [*exchange.NODE_MEMORY.iterdir()]
    dist.barrier()
    dist.destroy_process_group()
    del group
    gc.collect()
    assert not exchange._SHARED  # another world's ranks share other memory


def together(call: Any) -> Any:
    """As megatron calls it for several buckets, which has torch put all-reduces and gathers off until the end."""

    def calls(*buffers: torch.Tensor, group: dist.ProcessGroup) -> None:
        with _coalescing_manager(group, async_ops=False):
            call(*buffers, group=group)

    return calls


def check(group: dist.ProcessGroup, reduce_scatter: Any, all_gather: Any, number: int) -> None:
    size, mine = group.size(), group.rank()
    numbers = torch.arange(size * SHARD, dtype=torch.float32) + number
    for in_place in (True, False):
        buffer = numbers * 10.0**mine
        own = buffer.chunk(size)[mine] if in_place else torch.empty(SHARD)
        reduce_scatter(own, buffer, group=group)
        wanted = numbers.chunk(size)[mine] * sum(10.0**rank for rank in range(size))
        assert torch.equal(own, wanted)
        whole = torch.full((size * SHARD,), -1.0)
        if in_place:
            own = whole.chunk(size)[mine].copy_(own)
        all_gather(whole, own, group=group)
        assert torch.equal(whole, numbers * sum(10.0**rank for rank in range(size)))


@pytest.mark.parametrize(
    ("size", "memory"), [(1, "shared"), (2, "shared"), (3, "shared"), (3, "apart"), (2, "no room")]
)
def test_each_rank_gets_its_shards_sum_and_all_get_all_shards(size: int, memory: str, tmp_path: Path) -> None:
    run_ranks(exchange_main, size + 1, size, memory, tmp_path)
