"""A machine's calibration: fits against known curves, the formulas' new terms by hand, and the file's checks."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

from rl_megatron.errors import ConfigError
from rl_megatron.models.experts import MAX_DENSE_WASTE_FLOPS
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.scaling.constants import FITTED, MEMORY, PRIOR
from rl_megatron.scaling.flops import Peak
from rl_megatron.scaling.hardware import GPUS
from rl_megatron.scaling.machines import embedded
from rl_megatron.scaling.machines.calibration import (
    Attended,
    Calibration,
    Curves,
    Decoded,
    Grouped,
    LearnerProbe,
    MachineEntry,
    MachineLoad,
    ModelSizes,
    Moved,
    Product,
    machine_named,
    read_calibration,
    write_calibration,
)
from rl_megatron.scaling.machines.fitting import fit_load, fit_messages, fit_products, fit_steps, least, probe_work
from rl_megatron.scaling.time import LearnerWork, step_seconds, step_terms
from rl_megatron.types import ParallelDims

SIZES = ModelSizes(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=8, chosen=2, width=32, vocabulary=259)
WIDE = SIZES.model_copy(update={"hidden": 256, "width": 192, "layers": 3})
ENTRY = MachineEntry(
    flops=1e11,
    memory_rate=10,
    link=1,
    tile=8,
    attention=0.2,
    passes=40,
    plain=0.9,
    host=8e-4,
    fixed=5e-3,
    backward=2.6,
    operation=2e-5,
    each_expert=2e-4,
    latency=1e-3,
    inside=2,
    adam=1.5,
    logits=3,
    decode_layer=2e-4,
    decode_token=3e-4,
    decode_products=1.2,
)
NOTHING = replace(
    PRIOR,
    gemm=1,
    attention=1,
    power=0,
    tile=0,
    passes=0,
    inside=0,
    links=1,
    host=0,
    imbalance=1,
    fixed=0,
    adam=0,
    age=0,
)
FREE = replace(GPUS["h100"], hbm=1e15, nvlink=1e15, network=1e15, measured=Peak(names=(), bfloat16=1e15, float8=None))


def products(rate: float, tile: float, operation: float, backward: float) -> list[Product]:
    """Products of a machine whose seconds are those of a written law."""
    out = []
    for rows in (16, 64, 256, 1024, 4096):
        for wide, deep in ((64, 192), (256, 256), (512, 1536)):
            narrow = min(wide, deep)
            seconds = 2 * rows * wide * deep / rate * (1 + tile / rows) * (1 + tile / narrow) + operation
            out.append(Product(rows=rows, wide=wide, deep=deep, forward=seconds, both=seconds * (1 + backward)))
    return out


def test_a_fit_of_products_finds_the_law_that_made_them() -> None:
    found = fit_products(products(1.3e11, 12.0, 3e-5, 2.7))
    assert found == pytest.approx((1.3e11, 12.0, 3e-5, 2.7), rel=0.01)


def test_it_does_so_from_noisy_seconds_with_one_that_is_far_off() -> None:
    draws = np.random.default_rng(0)
    noisy = [
        p.model_copy(update={"forward": p.forward * float(np.exp(draws.normal(0, 0.05))), "both": p.both})
        for p in products(1.3e11, 12.0, 3e-5, 2.7)
    ]
    noisy[4] = noisy[4].model_copy(update={"forward": 6 * noisy[4].forward})
    rate, _, operation, _ = fit_products(noisy)
    assert (rate, operation) == pytest.approx((1.3e11, 3e-5), rel=0.15)


def test_a_fit_of_messages_finds_latency_and_rate() -> None:
    rows = [Moved(ranks=2, num_bytes=n, seconds=2e-4 + n / 1.5e9) for n in (2**12, 2**16, 2**20, 2**22)]
    assert fit_messages(rows) == pytest.approx((2e-4, 1.5e9), rel=0.01)
    assert fit_messages([]) == (0.0, 1e12)


def test_least_is_the_least_squares_line_in_logarithms() -> None:
    """numpy's polyfit of the logarithms is the oracle, for errors below Huber's bend."""
    x = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    y = 3 * x**1.5 * np.exp([0.02, -0.03, 0.01, 0.04, -0.04])
    slope, offset = np.polyfit(np.log(x), np.log(y), 1)
    found = least(lambda at: at[0] * x ** at[1], np.array([1.0, 1.0]), y, width=1e3)
    assert found == pytest.approx([np.exp(offset), slope], rel=1e-4)


def probes(machine: Calibration, ranks: int, layouts: list[tuple[int, int]]) -> list[LearnerProbe]:
    gpu, out = machine.gpu(ranks), []
    for sizes, tokens, micro_batches in ((SIZES, 512, 1), (SIZES, 4096, 1), (WIDE, 2048, 2)):
        for dp, ep in layouts:
            for layers in (1, 4):
                for experts in (8, 16):
                    probe = LearnerProbe(
                        sizes=sizes.model_copy(update={"layers": layers, "experts": experts}),
                        tokens=tokens,
                        length=64,
                        micro_batches=micro_batches,
                        dp=dp,
                        ep=ep,
                        train=1,
                        score=1,
                    )
                    work = probe_work(probe, gpu, "float32")
                    seconds = {"train": step_seconds(work), "score": step_seconds(replace(work, scored=True))}
                    out.append(probe.model_copy(update=seconds))
    return out


def calibrated(ranks: int = 2, entry: MachineEntry = ENTRY) -> Calibration:
    curves = Curves(
        ranks=ranks,
        products=tuple(products(1e11, 8.0, 2e-5, 2.6)),
        grouped=(Grouped(experts=8, rows=16, hidden=64, width=32, forward=1, both=3),),
        attention=(Attended(tokens=2048, length=128, heads=8, head_dim=32, both=3.5 * 2 * 8 * 64 * 64 * 2048 / 2e10),),
        memory=(Moved(ranks=1, num_bytes=1 << 24, seconds=2 * 2**24 / 1e10),),
        all_to_all=tuple(Moved(ranks=2, num_bytes=n, seconds=2.5e-4 + n / 0.9e9) for n in (4096, 2**20, 2**22)),
        all_gather=tuple(Moved(ranks=2, num_bytes=n, seconds=2.5e-4 + n / 1e9) for n in (4096, 2**20, 2**22)),
        probes=(LearnerProbe(sizes=SIZES, tokens=64, length=64, micro_batches=1, train=1, score=1),),
        process_bytes=400_000_000,
    )
    load = MachineLoad(curves=curves, entry=entry)
    return Calibration(
        name="a machine",
        date="2026-11-22",
        device="cpu",
        dtype="float32",
        threads=1,
        memory=12,
        versions={"torch": "2.13.0"},
        alone=load.model_copy(update={"curves": curves.model_copy(update={"ranks": 1})}),
        together=load,
    )


def test_the_fit_of_a_synthetic_machine_predicts_steps_of_models_that_it_has_not_seen() -> None:
    machine = calibrated()
    curves = machine.alone.curves.model_copy(update={"probes": tuple(probes(machine, 1, [(1, 1)]))})
    found = fit_load(curves, device="cpu", dtype="float32").entry
    assert (found.flops, found.tile, found.memory_rate) == pytest.approx((1e11, 8, 10), rel=0.02)
    assert (found.host, found.each_expert, found.logits) == pytest.approx((8e-4, 2e-4, 3), rel=0.1)
    other = LearnerProbe(
        sizes=WIDE.model_copy(update={"hidden": 512, "width": 64, "layers": 6, "experts": 32}),
        tokens=2000,
        length=100,
        micro_batches=2,
        train=1,
        score=1,
    )
    ours = calibrated(entry=found)
    here, there = (step_seconds(probe_work(other, m.gpu(1), "float32")) for m in (ours, machine))
    assert here == pytest.approx(there, rel=0.04)


def test_the_seconds_that_a_layers_messages_take_beside_their_bytes_are_fitted_to_steps_over_ranks() -> None:
    machine = calibrated()
    split = probes(machine, 2, [(2, 2)])
    without = replace(machine.gpu(2), constants=replace(machine.gpu(2).constants, latency=0.0))
    assert fit_steps(without, split, "float32", {"latency": 3e-4})["latency"] == pytest.approx(1e-3, rel=0.03)


def test_what_a_dispatch_takes_beside_bare_messages_is_fitted_to_steps_over_ranks() -> None:
    """Steps in which a token's way to its experts takes three times the bare all-to-all's bytes: it is permuted."""
    machine = calibrated(entry=ENTRY.model_copy(update={"plain": 0.3}))
    alike = probes(machine, 2, [(2, 1), (2, 2)])
    curves = machine.load(2).curves.model_copy(update={"probes": tuple(alike)})
    found = fit_load(curves, device="cpu", dtype="float32").entry
    assert found.plain == pytest.approx(0.3, rel=0.1)
    other = alike[-1].model_copy(update={"tokens": 3000, "sizes": WIDE.model_copy(update={"hidden": 384, "layers": 5})})
    ours = calibrated(entry=found)
    here, there = (step_seconds(probe_work(other, m.gpu(2), "float32")) for m in (ours, machine))
    assert here == pytest.approx(there, rel=0.05)


def terms(constants: dict[str, float], **more: object) -> dict[str, float]:
    """Seconds of Qwen3-30B-A3B's step on a machine that has nothing but ``constants``."""
    work = LearnerWork(
        shape=NAMED["qwen3-30b-a3b"],
        dims=ParallelDims(dp=4, ep=4),
        gpu=replace(FREE, constants=replace(NOTHING, **constants)),
        tokens=4096,
        length=4096,
        micro_batches=3,
        precision="float32",
        **more,  # type: ignore[arg-type]
    )
    return step_terms(work)


def test_launches_add_up_where_none_hides_behind_the_device() -> None:
    """48 layers, 3 micro-batches; the backward pass launches twice as much as the forward pass; 32 experts a rank."""
    assert terms({"host": 1e-3, "ahead": 1})["host"] == pytest.approx(48 * 3 * 3 * 1e-3, rel=1e-6)
    assert terms({"host": 1e-3, "ahead": 1}, scored=True)["host"] == pytest.approx(48 * 3 * 1e-3, rel=1e-6)
    assert terms({"each_expert": 1e-4, "ahead": 1})["host"] == pytest.approx(48 * 3 * 3 * 32e-4, rel=1e-6)


def test_each_product_costs_an_operation_and_its_backward_pass_more() -> None:
    """Of a layer: queries with keys and values, the output, the router; two of each of 32 experts; the output layer."""
    free, with_cost = terms({"backward": 2.5}), terms({"backward": 2.5, "operation": 1.0})
    more = {name: with_cost[name] - free[name] for name in ("linears", "experts", "output layer")}
    assert more["linears"] == pytest.approx(48 * 3 * 3 * 3.5, rel=1e-6)
    assert more["experts"] == pytest.approx(48 * 3 * 64 * 3.5, rel=1e-6)
    assert more["output layer"] == pytest.approx(3 * 3.5, rel=1e-6)


def test_a_pass_without_gradients_is_the_forward_pass_alone() -> None:
    both, alone = terms({}), terms({}, scored=True)
    assert both["linears"] == pytest.approx(3 * alone["linears"])
    assert both["attention"] == pytest.approx(3.5 * alone["attention"])
    assert not {"optimizer", "fixed", "gradients, parameters"} & alone.keys()


def test_messages_cost_their_latency_each_way_and_elements_of_float32_four_bytes() -> None:
    """Each of 4096 tokens goes to 8 experts, of which three quarters are on other ranks, there and back; with it a
    probability of 4 bytes one way, and once the counts of 128 experts of 4 ranks, of 8 bytes."""
    slow = replace(FREE, nvlink=1.0, domain=8)
    found = step_terms(
        LearnerWork(
            shape=NAMED["qwen3-30b-a3b"],
            dims=ParallelDims(dp=4, ep=4),
            gpu=replace(slow, constants=replace(NOTHING, latency=0.5)),
            tokens=4096,
            length=4096,
            micro_batches=1,
            precision="float32",
        )
    )
    each_way = (2 * prod((4096, 8, 2048, 4)) + prod((4096, 8, 4))) * 0.75 / 1e9 + 0.5
    assert found["all-to-all"] == pytest.approx(48 * (2 * each_way + prod((4, 128, 8)) / 1e9), rel=1e-9)


def test_the_embedded_engine_computes_all_experts_up_to_the_models_own_bound() -> None:
    assert embedded._DENSE_WASTE_FLOPS == MAX_DENSE_WASTE_FLOPS


def test_a_token_of_the_embedded_engine_costs_its_layers_and_its_products() -> None:
    """Products of 4 rows by hand: of a layer 2·4·64·(128 + 64 + 8 + 2·8·32 + 8·32) FLOPs, all experts computed."""
    gpu = replace(FREE, measured=Peak(names=(), bfloat16=1e-3, float8=None), constants=NOTHING)  # 1e9 FLOP/s
    flops = 2 * (2 * 4 * 64 * (128 + 64 + 8 + 2 * 8 * 32 + 8 * 32)) + 2 * 4 * 64 * 259
    found = embedded.decode_seconds(SIZES.shape, gpu, ENTRY, 4, 0)
    assert found == pytest.approx(2 * 2e-4 + 3e-4 + 1.2 * flops / 1e9, rel=1e-3)
    assert Decoded(sizes=SIZES, rows=4, context=1, seconds=1).sizes.shape.num_experts == 8


def test_layers_of_hybrids_and_of_latents_have_their_own_products_and_what_they_keep() -> None:
    """Qwen3-Next-80B-A3B: 12 of 48 layers attend, with 2 heads of keys and values of 256 numbers; delta nets have 16
    heads of keys and 32 of values, of 128. DeepSeek-V3 has 128 heads of 192 numbers, and 3 layers without experts."""
    still = replace(FREE, measured=Peak(names=(), bfloat16=1.0, float8=None), constants=NOTHING)  # 1e12 FLOP/s
    slow = replace(still, hbm=1e-3, measured=Peak(names=(), bfloat16=1e30, float8=None))
    hybrid, latent = NAMED["qwen3-next-80b-a3b"], NAMED["deepseek-v3"]

    def read(shape: ModelShape, context: float) -> float:
        weights = embedded.decode_parts(shape, slow, 1, 0)
        return (embedded.decode_parts(shape, slow, 1, context) - weights) * 1e6 * MEMORY

    assert read(hybrid, 1000) == pytest.approx(4 * 12 * 2 * 2 * 256 * 1000, rel=1e-6)
    assert read(latent, 1000) == pytest.approx(4 * 61 * 2 * 128 * 192 * 1000, rel=1e-6)
    assert read(replace(latent, windows=(100, 0) + (100,) * 59), 1000) == pytest.approx(
        4 * 2 * 128 * 192 * (60 * 100 + 1000), rel=1e-6
    )
    stateless = replace(hybrid, delta_layers=(), delta=None)
    states = 36 * 2 * 4 * (32 * 128 * 128 + 8192 * 3)
    few = {"num_experts": 0, "dense_width": 1, "shared_width": 0, "vocab_size": 1}
    mixers = [embedded.decode_parts(replace(s, **few), slow, 1, 0) * 1e6 * MEMORY for s in (hybrid, stateless)]
    columns = 36 * 2048 * (8192 + 4096 + 64 + 4096 - (3 * 16 + 2 * 2) * 256)  # a delta net's beside attention's
    rows = 36 * (2 * 2048 + 12352 + 4096 - 2 * 2048 - 9216 - 4096)  # in and out of their products
    assert mixers[0] - mixers[1] == pytest.approx(states + 4 * (columns + rows), rel=1e-3)
    up = 1536 * 128 * 192 + 512 * 128 * 256
    attention = 7168 * (1536 + 512 + 64) + up + 128 * 128 * 7168
    experts = 58 * (7168 * 256 + 3 * 7168 * 2048 * (1 + 1.5 * 8))  # padded
    flops = 2 * 256 * (61 * attention + 3 * 3 * 7168 * 18432 + experts + 7168 * 129280)
    assert embedded.decode_parts(latent, still, 256, 0) * 1e12 == pytest.approx(flops, rel=1e-6)


def test_a_calibration_is_read_as_it_was_written_and_is_a_hardware_entry(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    write_calibration(path, calibrated())
    assert read_calibration(path) == calibrated()
    assert [file.name for file in tmp_path.iterdir()] == ["machine.json"]
    gpu = machine_named(str(path), 2)
    assert (gpu.peak.bfloat16, gpu.memory, gpu.domain, gpu.constants.host) == (pytest.approx(0.1), 12, 2, 8e-4)
    assert machine_named("h100", 2).constants is FITTED


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format"),
        ({"threads": 0}, "threads"),
        ({"device": "tpu"}, "device"),
        ({"extra": 1}, "extra"),
        ({"alone": {}}, r"alone\.curves"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused_by_the_key_that_is_wrong(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**calibrated().model_dump(mode="json"), **change}))
    with pytest.raises(ConfigError, match=f"machine.json: not a calibration: {words}"):
        read_calibration(path)


def test_a_torn_or_missing_file_and_more_ranks_than_were_measured_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    with pytest.raises(ConfigError, match="--calibrate FILE writes one"):
        machine_named(str(path), 1)
    path.write_text(calibrated().model_dump_json()[:500])
    with pytest.raises(ConfigError, match="not a calibration"):
        machine_named(str(path), 1)
    with pytest.raises(ConfigError, match="holds for 2 ranks at once, and 4 compute here"):
        calibrated().gpu(4)
