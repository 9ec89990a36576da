"""Versions of adapters in the real vLLM and SGLang, beside one model: pushed while requests run, each of which ends on
its own; transformers' forward of the merged weights is the oracle. Linears of a dense model: with experts both need
GPUs, but SGLang not for attention alone.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from typing_extensions import override

from launcher.servers.engines import SERVERS
from rl_megatron.config.io import load_config
from rl_megatron.errors import SyncError
from rl_megatron.features.lora.feature import LoraSection
from rl_megatron.features.lora.merging import merge_adapters
from rl_megatron.features.lora.push import ADAPTERS, AdapterFolders, AdapterSync, adapters_folder
from rl_megatron.features.lora.rows import LoraLayouts
from rl_megatron.types import Batch, Completion, Scores, Want, WeightUpdate
from rl_megatron.weights.checkpoints.safetensors_io import RandomWeights
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout, read_shape
from tests.completions import completion
from tests.e2e.processes import REWARDS
from tests.engines.benches import (
    MAX_LENGTH,
    NEW,
    FolderSync,
    ServedBench,
    interpreter,
    logprobs_of,
    request,
    served,
    spare_a_core,
)
from tests.engines.conftest import needs
from tests.engines.learned import save_model
from tests.engines.reads_adapters import TEXT
from tests.engines.test_faults import LIMIT, start
from tests.engines.test_restarts import process_of, until_healthy

LORA = LoraSection(rank=4, alpha=12.0)
KEYS = (
    *(f"learner.lora.rank={LORA.rank}", f"learner.lora.alpha={LORA.alpha}", "learner.lora.targets=attention,mlp"),
    *("weights.push=adapters", "train.max_staleness=1"),
)


@dataclass(kw_only=True)
class AdapterFolder(FolderSync):
    """A learner that is folders: of its model, and of this with each version's adapters merged."""

    base: Path
    writer: AdapterFolders
    lost: str = ""  # a matrix that is written as 0
    is_written: int = 0

    def drawn(self, version: int) -> Mapping[str, Tensor]:
        """The adapters of a version, as after training: no B is 0."""
        sizes = {name: tuple(tensor.shape) for name, tensor in self.writer.tensors.items()}
        source = RandomWeights(self.base, sizes, version)
        return {name: source.read(name, tuple((0, n) for n in size)).mul_(3) for name, size in sizes.items()}

    async def push_extra(self, version: int, *given: Any) -> WeightUpdate:
        self.is_written = version
        for name, tensor in self.drawn(version).items():
            self.writer.tensors[name].copy_(tensor * (name != self.lost))
        self.writer.announce(*given)
        self.writer.serve(version)
        return WeightUpdate(version=version, num_bytes=0, seconds=0.0)

    async def merge(self, *, merged: bool) -> None:
        raise NotImplementedError

    def merged(self, version: int) -> Path:
        """The model of a version, with B A added by hand."""
        folder = self.base.with_name(f"merged-{version}")
        if not folder.exists():
            shutil.copytree(self.base, folder)
            weights, drawn = load_file(self.base / "model.safetensors"), self.drawn(version)
            for name, a in drawn.items():
                if ".lora_A." in name:
                    weight = name.replace(".lora_A.", ".")
                    weights[weight] += LORA.alpha / len(a) * drawn[name.replace("lora_A", "lora_B")] @ a
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    @override
    async def push(self, version: int) -> WeightUpdate:
        self.folder = self.base
        return await super().push(version)

    @override
    async def score(self, batch: Batch, want: frozenset[Want]) -> dict[Want, Scores]:
        self.folder = self.merged(self.is_written)
        return await super().score(batch, want)


@contextmanager
def started(engine: str, folder: Path) -> Iterator[tuple[ServedBench, AdapterFolder, AdapterSync]]:
    sizes = {"intermediate_size": 64, "max_position_embeddings": MAX_LENGTH}  # SGLang pads 48 on CPUs, not the adapters
    model = save_model("qwen2", folder / "model", 1, **sizes)
    (folder / engine).mkdir()
    shape = read_shape(model)
    shapes = LoraLayouts(LORA).file_layout(megatron_layout(shape), hf_layout(shape)).local_shapes(0)
    with served(engine, model, folder / engine, routes=False, more=KEYS) as bench:
        config = LoraLayouts(LORA).described(shape, model)
        writer = AdapterFolders(bench.path, shapes, torch.float32, config)
        learner = AdapterFolder(mirror=bench.sync.mirror, base=model, writer=writer)
        bench.sync = learner
        file = bench.file(bench.engine)
        given = load_config("tiny_cpu", ("rollout=vllm", *KEYS)), bench.engine, learner, file, file
        weights = AdapterSync(*given, bench.trust_of, run="run")
        bench.refit = weights.refit
        yield bench, learner, weights


def check(one: Completion, learner: AdapterFolder, version: int) -> None:
    """All of it is of one version."""
    assert one.spans == ((0, version),)
    right = logprobs_of(learner.merged(version), range(30, 50), one, 1.0)
    torch.testing.assert_close(torch.tensor(one.logprobs), right, atol=1e-4, rtol=0)


def pushed_meanwhile(bench: ServedBench, weights: AdapterSync) -> tuple[int, Completion, Completion]:
    """The version that was pushed under a request, this, which began before, and one that began behind it."""

    async def both(new: int, version: int) -> tuple[Completion, Completion] | None:
        spare_a_core()
        running = asyncio.create_task(bench.engine.generate(request(new=new)))
        await bench.sampling(running)
        await weights.push(version)
        met = not running.done()
        (later,) = await bench.engine.generate(request(new=8))
        (earlier,) = await running
        return (earlier, later) if met else None

    for version, new in enumerate(NEW, start=2):
        if found := bench.run(both(new, version)):
            return version, *found
    raise AssertionError("each time the request was over before the push")


@pytest.mark.parametrize("engine", sorted(SERVERS))
def test_requests_end_on_the_version_that_they_began_with(engine: str, tmp_path: Path) -> None:
    """40 seconds each."""
    needs(engine)
    with started(engine, tmp_path) as (bench, learner, weights):
        update = bench.run(weights.push(1))
        size = (adapters_folder(bench.path, "run-v1") / ADAPTERS).stat().st_size
        assert update.num_bytes > bench.path.stat().st_size + size
        second, earlier, later = pushed_meanwhile(bench, weights)
        check(earlier, learner, second - 1)
        check(later, learner, second)  # of the same prompt: no prefix of another version's cache
        begun = bench.generate(request(new=4))[0][0]
        for version in (second + 1, second + 2):
            update = bench.run(weights.push(version))
            assert update.num_bytes == size
        assert bench.engine.weights.paused_seconds == 0
        assert [one.version for one in weights.servers.held] == [second, second + 1, second + 2]
        check(bench.generate(replace(request(new=12), partial=begun))[0][0], learner, second)
        check(bench.generate(request(new=12))[0][0], learner, second + 2)

        process_of(bench, 0).kill()
        until_healthy(bench, 1)
        check(bench.generate(request(new=12))[0][0], learner, second + 2)
        for named in weights.servers.held:
            said = bench.run(bench.engine.adapter.score(bench.engine.servers[0], TEXT, named))
            right = logprobs_of(learner.merged(named.version), TEXT[:1], completion(TEXT[1:], said), 1.0)
            assert said == pytest.approx(right.tolist(), abs=1e-4)

        learner.lost = next(name for name in learner.writer.tensors if ".lora_B." in name)
        with pytest.raises(SyncError, match=f"version {second + 3} arrived wrong, and is not served"):
            bench.run(weights.push(second + 3))
        check(bench.generate(request(new=12))[0][0], learner, second + 2)


def test_a_run_trains_on_what_sglang_samples_with_its_adapters(tmp_path: Path) -> None:
    """Of a model with experts. The learner, over two ranks, is the oracle of every log-prob; its export has the
    adapters merged. 45 seconds."""
    needs("sglang")
    ways = ("learner.lora.rank=4", "learner.lora.targets=attention", "learner.tp=2", "weights.push=adapters")
    more = ("train.steps=3", "train.learning_rate=0.02", "train.lr_decay=none")
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    rewarded = ("reward.function=my_rewards:even", f"weights.folder={tmp_path}")
    run = start("sglang", tmp_path, *ways, *more, *rewarded)
    try:
        output, _ = run.communicate(timeout=LIMIT)
    finally:
        run.kill()
    assert run.returncode == 0, output
    folder = tmp_path / "runs" / "it"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"]]
    assert all(row["mismatch/logprob_abs_max"] < 1e-4 for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert {row["seconds/pause"] for row in rows} == {0}
    assert len({row["weights/bytes"] for row in rows}) == 1
    (start_file,) = (tmp_path / "runs" / ".cache").rglob("model.safetensors")
    base = load_file(start_file)
    assert rows[0]["weights/bytes"] < 0.1 * sum(t.numel() * t.itemsize for t in base.values())
    merge_adapters(folder / "checkpoints" / "step_000003" / "learner", start_file.parent, tmp_path / "merged")
    merged, exported = (load_file(f / "model.safetensors") for f in (tmp_path / "merged", folder / "hf_step_000003"))
    changed = {name for name in base if not torch.equal(base[name], exported[name])}
    assert changed == {name for name in base if ".self_attn." in name and name.endswith("_proj.weight")}
    for name in base:
        torch.testing.assert_close(merged[name], exported[name], atol=1e-7, rtol=1e-6)


# The folder of adapters that ``rl-megatron convert`` writes, in the real vLLM; transformers is the oracle. Linears of
# a dense model: vLLM's kernels for experts' adapters, and all of SGLang's, need GPUs.
LORA_OF_PROBE = LoraSection(rank=4, alpha=12.0)
NEVER = 600.0


def test_vllm_computes_with_the_adapters_as_transformers_does_with_merged_weights(tmp_path: Path) -> None:
    """15 seconds."""
    needs("vllm")
    model = save_model("qwen2", tmp_path / "model", 1)
    shape = read_shape(model)
    shapes = LoraLayouts(LORA_OF_PROBE).file_layout(megatron_layout(shape), hf_layout(shape)).local_shapes(0)
    drawn = RandomWeights(model, shapes, 3)
    adapters = {name: drawn.read(name, tuple((0, n) for n in size)).mul_(3) for name, size in shapes.items()}
    folder = tmp_path / "adapters"
    folder.mkdir()
    save_file({f"base_model.model.{name}": a for name, a in adapters.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(LoraLayouts(LORA_OF_PROBE).described(shape, model)))
    script, out = Path(__file__).with_name("reads_adapters.py"), tmp_path / "said.json"
    command = [interpreter("vllm"), script, model, folder, "8", out]
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(list(map(str, command)), stdout=log, stderr=log, timeout=NEVER, check=False)
    assert done.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    alone, adapted = json.loads(out.read_text())
    assert alone == pytest.approx(logprobs(model, {}), abs=1e-5)
    assert adapted == pytest.approx(logprobs(model, adapters), abs=1e-5)
    assert max(abs(a - b) for a, b in zip(alone, adapted, strict=True)) > 0.1


def logprobs(folder: Path, adapters: dict[str, torch.Tensor]) -> list[float]:
    """Of `TEXT`, with B A added to the weights by hand."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = load_file(folder / "model.safetensors")
    for name, a in adapters.items():
        if ".lora_A." in name:
            weight = name.replace(".lora_A.", ".")
            weights[weight] += LORA_OF_PROBE.alpha / len(a) * adapters[name.replace("lora_A", "lora_B")] @ a
    model.load_state_dict(weights, strict=False)
    with torch.no_grad():
        said = model(torch.tensor([TEXT])).logits[0].log_softmax(-1)
    return [float(said[place, token]) for place, token in enumerate(TEXT[1:])]
