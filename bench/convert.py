"""Time the conversion of a random Qwen3-MoE between Hugging Face and megatron files, and its memory, beside ``cp -r``.

    python -m bench.convert [--gb 2 4 8] [--dir FOLDER] [--repeats 3] [--mbridge-gb 4]
    python -m bench.convert --gb 1 --families deepseek_v32 glm_moe_dsa kimi_k25 glm4_moe_lite hy_v3 olmoe qwen3_next

Each conversion runs in its own process on files in the page cache (*warm*), or after the page cache was dropped
(*cold*, as root). ``cp -r`` of the same bytes runs before each, and both times include the sync that makes the result
durable. Peak memory is the most resident memory of the process, including the mapped pages of its input. Families are
measured warm, in turns with a Qwen3-MoE of as many layers with experts: what one takes for a gigabyte over what that
takes, in seconds, and in seconds of processors, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from bench.results import parse, write
from rl_megatron.models.json_files import tensor_names
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.weights.bytes.dtypes import DType
from rl_megatron.weights.bytes.mapped import header_bytes
from rl_megatron.weights.checkpoints.megatron import total_bytes
from rl_megatron.weights.layouts.families import hf_layout, read_shape
from tests.family_models import config_of

BASELINE = "qwen3_moe"
LAYER_GB = 0.62
BAR = 1.25
SHARD_BYTES = 2 * 10**9


LATENTS: Mapping[str, Any] = {
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "intermediate_size": 6144,
}
DELTA: Mapping[str, Any] = {
    "num_experts": 64,
    "shared_expert_intermediate_size": 768,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": None,
}
SIZES: Mapping[str, Mapping[str, Any]] = {
    **{key: {**LATENTS, "first_k_dense_replace": 1} for key in ("deepseek_v32", "glm_moe_dsa", "kimi_k25")},
    "glm4_moe_lite": LATENTS,
    "hy_v3": {"num_experts": 64, "intermediate_size": 6144},
    "olmoe": {"num_experts": 64, "intermediate_size": 768},
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_stacked"), DELTA),
}
"""Of families of `tests.family_models` that are measured, beside the baseline's sizes; as published but for what is
narrower here."""
OF_LAYERS: Mapping[str, Callable[[int], Mapping[str, Any]]] = {
    "glm_moe_dsa": lambda layers: {"indexer_types": (["full", "shared"] * layers)[:layers]},
    **dict.fromkeys(("glm4_moe_lite", "hy_v3"), lambda n: {"mlp_layer_types": ["dense"] + ["sparse"] * (n - 1)}),
}
ALL_WITH_EXPERTS = ("olmoe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_stacked")


def make_model(folder: Path, gigabytes: float, family: str = BASELINE) -> None:
    """Write a Hugging Face folder of random bfloat16 bytes: config and tokenizer of a tiny model, other sizes."""
    tiny = make_tiny_model(TinySizes(), folder.parent / "tiny", seed=0)
    shutil.copytree(tiny, folder)
    (folder / "model.safetensors").unlink()
    changed = {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_hidden_layers": max(1, round(gigabytes / LAYER_GB)),
        "vocab_size": 32000,
        "dtype": "bfloat16",
    }
    if family == BASELINE:
        config = json.loads((folder / "config.json").read_text())
        experts = {key: 64 for key in ("num_experts", "num_local_experts") if key in config}
        (folder / "config.json").write_text(json.dumps({**config, **changed, **experts}))
    else:
        layers = max(1, round(gigabytes / LAYER_GB)) + (family not in ALL_WITH_EXPERTS)
        own = OF_LAYERS[family](layers) if family in OF_LAYERS else {}
        config_of(family, **{**changed, **SIZES[family], **own, "num_hidden_layers": layers}).save_pretrained(folder)
    write_weights(folder, stacked=family.endswith("_stacked"))


def write_weights(folder: Path, *, stacked: bool) -> None:
    """Write the tensors of the folder's config.json, with a layer's experts one by one or ``stacked`` in one tensor."""
    shapes = list(hf_layout(replace(read_shape(folder), stacked_experts=stacked)).local_shapes(0).items())
    files: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    free = SHARD_BYTES
    for name, shape in shapes:
        size = 2 * prod(shape)
        if size > free:
            files.append([])
            free = SHARD_BYTES
        files[-1].append((name, shape))
        free -= size
    drawn = np.random.default_rng(0).integers(0, 1 << 16, 32 << 20, dtype=np.uint16)
    noise = (drawn & 0xBFFF).tobytes()  # below 2 in size: a converter refuses what is no number
    weight_map = {}
    for i, tensors in enumerate(files, 1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        weight_map.update({tensor: name for tensor, _ in tensors})
        with (folder / name).open("wb") as file:
            file.write(header_bytes([(tensor, DType.BF16, shape) for tensor, shape in tensors]))
            left = sum(2 * prod(shape) for _, shape in tensors)
            while left:
                left -= file.write(noise[: min(left, len(noise))])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def timed(work: Callable[[], object], *, cold: bool) -> float:
    """Return the seconds of ``work`` and the following sync."""
    os.sync()
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    began = time.perf_counter()
    work()
    os.sync()
    return time.perf_counter() - began


COMMAND = ("-m", "launcher", "convert")


def run(*arguments: str | Path) -> tuple[float, float]:
    """Run python with ``arguments`` to its end; return its seconds of processors and its peak resident MiB."""
    child = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise RuntimeError(f"{arguments} ended with exit status {child.returncode}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def measure(direction: str, source: Path, out: Path, repeats: int, *, cold: bool) -> tuple[float, float, float]:
    """Median seconds of ours and of cp -r, and our peak MiB."""
    ours: list[float] = []
    theirs: list[float] = []
    peaks: list[float] = []
    copy = out.with_name("copy")
    for _ in range(repeats):
        theirs.append(timed(partial(subprocess.run, ["cp", "-r", source, copy], check=True), cold=cold))
        shutil.rmtree(copy)
        shutil.rmtree(out, ignore_errors=True)
        ours.append(timed(lambda: peaks.append(run(*COMMAND, source, out)[1]), cold=cold))
    return statistics.median(ours), statistics.median(theirs), max(peaks)


def mbridge(direction: str, source: Path, out: Path) -> tuple[float, float]:
    """Seconds of mbridge, through a model in memory, and its peak MiB; once, warm."""
    peaks: list[float] = []
    command = ("-m", "bench.mbridge_convert", direction, source, out)
    seconds = timed(lambda: peaks.append(run(*command)[1]), cold=False)
    return seconds, peaks[0]


def families(options: argparse.Namespace) -> list[dict[str, object]]:
    """Print a Markdown table of families beside the baseline; ratios are medians of pairs."""
    rows: list[dict[str, object]] = []
    print(
        "| family | GB | tensors | direction | Qwen3-MoE, s/GB | ours | ratio | CPU | ours | ratio | bar | MiB | load |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for family in options.families:
        with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
            folders = {name: Path(scratch) / name for name in (BASELINE, family)}
            for name, folder in folders.items():
                folder.mkdir()
                make_model(folder / "hf", options.gb[0], name)
            sizes = {name: total_bytes(folder / "hf") / 1e9 for name, folder in folders.items()}
            count = len(tensor_names(folders[family] / "hf"))
            for direction, source, out in (("to_megatron", "hf", "megatron"), ("to_hf", "megatron", "back")):
                wall, cpu, peaks = ({name: list[float]() for name in folders} for _ in range(3))
                for number in range(options.repeats):
                    for name, folder in sorted(folders.items(), reverse=bool(number % 2)):  # neither is always first
                        shutil.rmtree(folder / out, ignore_errors=True)
                        used: list[tuple[float, float]] = []
                        work = partial(converted, direction, folder / source, folder / out, used)
                        wall[name].append(timed(work, cold=False) / sizes[name])
                        cpu[name].append(used[0][0] / sizes[name])
                        peaks[name].append(used[0][1])
                peak = max(peaks[family])
                told = " | ".join(f"{figure:.2f}" for kind in (wall, cpu) for figure in beside(kind, family))
                end = f"{BAR} | {peak:.0f} | {os.getloadavg()[0]:.0f} |"
                print(f"| {family} | {sizes[family]:.1f} | {count} | {direction} | {told} | {end}", flush=True)
                rows.append({"family": family, "gb": sizes[family], "direction": direction, "bar": BAR, "mib": peak})
                rows[-1] |= {"wall": wall, "cpu": cpu}
    return rows


def converted(direction: str, source: Path, out: Path, used: list[tuple[float, float]]) -> None:
    """Convert, and add what it `used`."""
    used.append(run(*COMMAND, source, out))


def beside(seconds: Mapping[str, list[float]], family: str) -> tuple[float, float, float]:
    """Medians of the baseline's and the family's seconds, and of the ratios of pairs."""
    usual, own = seconds[BASELINE], seconds[family]
    ratios = [b / a for a, b in zip(usual, own, strict=True)]
    return statistics.median(usual), statistics.median(own), statistics.median(ratios)


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[2, 4, 8])
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mbridge-gb", type=float, default=4, help="largest model that mbridge converts as well")
    parser.add_argument("--families", nargs="+", default=[], help="of tests.family_models; beside Qwen3-MoE alone")
    options = parse(parser)
    if options.families:
        write(options, families(options))
        return
    rows: list[dict[str, object]] = []
    print("| GB | direction | cache | cp -r and sync, s | ours, s | ratio | wanted | MiB | mbridge, s | its MiB |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for gigabytes in options.gb:
        with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
            hf, megatron, back = (Path(scratch) / name for name in ("hf", "megatron", "back"))
            make_model(hf, gigabytes)
            size = total_bytes(hf) / 1e9
            for cold in (False, True):
                for direction, source, out in (("to_megatron", hf, megatron), ("to_hf", megatron, back)):
                    ours, theirs, peak = measure(direction, source, out, options.repeats, cold=cold)
                    cache, ratio = "cold" if cold else "warm", ours / theirs
                    times = f"{theirs:.2f} | {ours:.2f} | {ratio:.2f}"
                    theirs_too = "| |"
                    if gigabytes <= options.mbridge_gb and not cold:
                        needed, held = mbridge(direction, source, Path(scratch) / f"mbridge_{direction}")
                        theirs_too = f"{needed:.2f} | {held:.0f} |"
                    row = f"| {size:.1f} | {direction} | {cache} | {times} | 1.5 | {peak:.0f} | {theirs_too}"
                    print(row, flush=True)
                    rows.append({"gb": size, "direction": direction, "cache": cache, "cp": theirs, "ours": ours})
                    rows[-1] |= {"ratio": ratio, "bar": 1.5, "mib": peak}
    write(options, rows)


if __name__ == "__main__":
    main()
