"""What a node's memory must hold, and its GPUs that are shared; hours of a run that took them."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launcher.build.model import starting_folder
from launcher.build.roles import RunParts
from launcher.build.trained import trained_model
from launcher.commands import train
from launcher.commands.evaluate import measure_model
from launcher.commands.submit import resolve_job
from launcher.preflight.checks import preflight
from launcher.preflight.subject import Finding, PreflightContext
from launcher.runs.stop import StopSignal
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from rl_megatron.features.quantize.encoding import ENCODINGS
from rl_megatron.models.named import NAMED
from rl_megatron.models.tiny import TinySizes, tiny_shape
from rl_megatron.observability.progress import Progress
from rl_megatron.rewards.classifiers.on_ranks import RewardModels
from rl_megatron.weights.layouts.families import hf_layout
from rl_megatron.weights.layouts.layout import float32_in_files
from rl_megatron.weights.layouts.learner import learner_layout
from rl_megatron.weights.routes.mirror import Mirror
from tests.unit.launcher.commands import program
from tests.unit.launcher.test_memory import QWEN_30B, QWEN_80GB, QWEN_APART, RECIPES, folder_of
from tests.unit.launcher.test_spent import ROWS
from tools.planner import checks
from tools.planner.memory import bytes_by_rank, copied_by_rank, copies_bytes, filled_bytes, save_cost

APART = ("rollout.server.colocated=false", "learner.offload.while_sampling=null")
FP8 = "rollout.server.quantization=fp8"
WAITS, COPIES = "checkpoint.async_save=false", ("weights.transport=direct",)


def found_of(*keys: str, for_job: bool) -> list[Finding]:
    subject = PreflightContext(
        load_config(QWEN_80GB, ["model.path=/models/given", "run.launcher=slurm", *keys]), for_job
    )
    subject.__dict__["shape"] = NAMED["qwen3-30b-a3b"]  # without the model's folder
    return list(checks.memory(subject))


@pytest.mark.parametrize(
    ("has_gb", "asked", "for_job", "message"),
    [
        (300, None, False, "needs 369.4 GB of a node's memory for what the learner keeps off its GPUs, but this mach"),
        (400, None, False, None),
        (300, "350G", True, None),
        (300, "340G", True, "needs 369.4 GB of a node's memory for what the learner keeps off its GPUs, but slurm."),
        (300, "0", True, "not known"),
        (300, None, True, "not known"),
    ],
)
def test_a_node_without_the_memory_that_leaves_gpus_is_told_so(
    has_gb: int, asked: str | None, for_job: bool, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """369.4 GB: 8 ranks of 43 GiB, which is what tests/unit/launcher/test_memory.py computes by hand."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=has_gb * 10**9))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=has_gb * 10**9))
    found = found_of(*([f"slurm.memory_per_node={asked}"] if asked else []), WAITS, for_job=for_job)
    if message == "not known":
        expected = [("unchecked", "that a node has 369 GB of memory for learner.offload")]
        assert [(one.kind, one.text) for one in found] == expected
    else:
        told = [one.text for one in found if one.kind == "problem"]
        assert [message in text and "learner.offload.while_sampling=optimizer" in text for text in told] == (
            [True] if message else []
        )


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_job_of_a_recipe_asks_for_the_memory_that_it_needs(recipe: str) -> None:
    config = load_config(recipe, ["model.path=/models/given", "run.launcher=slurm"])
    subject = PreflightContext(config, for_job=True)
    subject.__dict__["shape"] = NAMED[str(config.model.name)]
    assert [one.text for one in checks.memory(subject) if one.kind == "problem"] == []


def test_copies_of_what_is_saved_by_hand() -> None:
    """14 bytes a parameter over the first of each data-parallel group, and 12 for the shards of what two share out;
    each expert is one rank's alone."""
    config = load_config(QWEN_80GB, ["model.path=/models/given", "run.launcher=slurm"])
    experts, vocab = 48 * 128 * 3 * 768 * 2048, 2 * 151936 * 2048
    dense = vocab + 48 * (2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 128 * 2048)
    shape = NAMED["qwen3-30b-a3b"]
    assert copies_bytes(config, shape) == pytest.approx(14 * (experts + dense) + 12 * dense, rel=0.003)  # routers
    assert copies_bytes(load_config(QWEN_80GB, ["model.path=/models/given", "run.launcher=slurm", WAITS]), shape) == 0
    assert save_cost(config, shape).max_kept == 3  # two are kept
    rules = ("train.steps=400", "checkpoint.every=20", "checkpoint.keep_best=2")
    kept = load_config(QWEN_80GB, ["model.path=/models/given", "run.launcher=slurm", *rules])
    assert save_cost(kept, shape).max_kept == 2 + 2 + 1  # newest, best, and the one being written
    assert "more after a resume" not in save_cost(config, shape).describe_disk()
    more = save_cost(kept, shape).total * 2 / 1e9
    assert f"; {more:,.1f} GB more after a resume that measures accuracy" in save_cost(kept, shape).describe_disk()


@pytest.mark.parametrize(
    ("asked", "keys", "kind", "text"),
    [
        ("420G", (WAITS,), None, ""),  # 451 GB
        (
            "390G",
            (WAITS,),
            "problem",
            r"weights.folder=/dev/shm needs 61\.1 GB of a node's memory for the file of weights besides 369\.4 GB for "
            r"learner\.offload, but slurm\.memory_per_node=390G asks for 418\.8 GB; .* set weights.folder to a folder",
        ),
        ("390G", (WAITS, "weights.transport=direct"), None, ""),
        ("390G", (WAITS, "weights.folder=/shared/weights"), None, ""),
        ("840G", (), None, ""),
        ("800G", (), "problem", r"for copies of what is saved besides 369\.4 GB for learner\.offload and 61\.1 GB for"),
        ("0", (WAITS,), "unchecked", r"has 430 GB of memory for learner\.offload and weights\.folder=/dev/shm"),
        ("840G", COPIES, None, ""),  # 902 GB
        ("700G", COPIES, "problem", r"446\.9 GB .* saved besides 369\.4 GB for learner\.offload, but .*_save=false:"),
        ("0", COPIES, "unchecked", r"that a node has 816 GB of memory for learner\.offload and checkpoint\.async_save"),
    ],
)
def test_copies_of_what_is_saved_and_the_file_in_a_nodes_memory_count(
    asked: str, keys: tuple[str, ...], kind: str | None, text: str
) -> None:
    """61.1 GB: the model's 30.5 billion parameters in bfloat16, which servers read at each push."""
    found = found_of("weights.transport=file", f"slurm.memory_per_node={asked}", *keys, for_job=True)
    found = [one for one in found if keys != COPIES or "async_save" in one.text]
    assert [one.kind for one in found] == ([kind] if kind else [])
    assert all(re.search(text, one.text) for one in found)


@pytest.mark.parametrize(
    ("has_gb", "keys", "said"),
    [
        (0.067, ("weights.transport=file",), "needs 61.1 GB for the file of weights, but /dev/shm has 0.1 GB here; "),
        (60, ("weights.transport=file",), "docker run --shm-size=57g; in Kubernetes"),
        (60, ("weights.transport=direct",), "needs 61.1 GB at the run's end, and when a server is restarted for the"),
        (
            60,
            (FP8, "weights.transport=file"),
            "needs 92.2 GB for the file of weights, but",
        ),  # with 61.1 before they are
        (62, ("weights.transport=file",), None),
        (0, ("weights.transport=file",), None),  # a tmpfs of size=0 has no limit
        (0.067, ("weights.folder=/shared/weights",), None),
        (0.067, (*APART, "slurm.engines.nodes=1", "weights.transport=auto"), None),  # it is in the run's folder
        (0.067, ("run.launcher=ray",), None),  # on other machines
    ],
)
def test_a_file_of_weights_that_cannot_fit_in_dev_shm_is_told_before_the_run(
    has_gb: float, keys: tuple[str, ...], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has 64 MB there by default."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=10**13))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=int(has_gb * 10**9)))
    found = [one.text for one in found_of(*keys, for_job=False) if one.kind == "problem"]
    assert len(found) == (said is not None), found
    assert all(text.startswith("weights.folder=/dev/shm needs ") and str(said) in text for text in found)
    assert not [one for one in found_of(*keys, for_job=True) if one.kind == "problem"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("quantization", ["none", "fp8", "int8"])
def test_the_files_of_a_node_are_as_large_as_counted(tmp_path: Path, ranks: int, quantization: str) -> None:
    keys = ("rollout=vllm", f"learner.dp={ranks}", "learner.ep=1", f"rollout.server.quantization={quantization}")
    config, shape = (
        load_config("tiny_cpu", [*keys, "learner.dtype=bfloat16", "learner.device=cuda"]),
        tiny_shape(TinySizes()),
    )
    path, known = tmp_path / "w" / "model.safetensors", tmp_path / "config.json"
    known.write_text("{}")
    kind, float32 = ENCODINGS[config.rollout.server.quantization], float32_in_files(hf_layout(shape))
    Mirror.make(path, hf_layout(shape).local_shapes(0), torch.bfloat16, known, kind, float32=float32, writers=ranks)
    files = [*path.parent.glob("*.safetensors")]
    assert len(files) == 1 + (ranks > 1 and kind is not None)
    counted = sum(file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    assert filled_bytes(config, shape) == counted


def test_each_pipeline_stage_saves_what_it_holds_itself() -> None:
    """Stages of 30 and of 18 layers: 2 bytes of each parameter, and 12 of its optimizer's state."""
    keys = ["learner.tp=1", "learner.ep=1", "learner.etp=1", "learner.pp=2", "learner.stage_layers=30+18"]
    config, shape = load_config("tiny_cpu", ["learner.dtype=bfloat16", *keys]), NAMED["qwen3-30b-a3b"]
    layout = learner_layout(config, shape)
    held = {rank: 14 * sum(map(prod, layout.local_shapes(rank).values())) for rank in range(2)}
    assert bytes_by_rank(config, shape) == copied_by_rank(config, shape) == held
    kl = config.algorithm.kl.model_copy(update={"coefficient": 0.1, "reference_update_rate": 0.5})
    config = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl": kl})})
    follows = {rank: count * 18 // 14 for rank, count in held.items()}  # and 4 of a reference that follows
    assert bytes_by_rank(config, shape) == copied_by_rank(config, shape) == follows
    assert bytes_by_rank(config, shape, "critic") == held
    assert held[0] > 1.5 * held[1]


@pytest.mark.parametrize(
    ("address", "folder", "seen"),
    [
        ("http://192.0.2.1:1", "/dev/shm/mine", False),
        ("http://[2001:db8::1]:1", "/dev/shm/mine", False),
        ("http://0.0.0.0:1", "/dev/shm/mine", True),
        ("http://[::ffff:127.0.0.1]:1", "/dev/shm/mine", True),
        ("http://127.1:1", "/dev/shm/mine", True),  # a name that the system resolves
        ("http://nowhere.invalid:1", "/dev/shm/mine", True),  # not known: the run says so
        (f"http://127.0.0.1:1,http://{socket.gethostname()}:2", "/dev/shm/mine", True),
        ("http://192.0.2.1:1", "/shared", True),
        ("http://192.0.2.1:1", "null", True),
    ],
)
def test_a_file_in_this_machines_memory_is_refused_for_servers_elsewhere(address: str, folder: str, seen: bool) -> None:
    keys = ["rollout=vllm", f"rollout.server.addresses={address}", f"weights.folder={folder}"]
    found = [
        one.text
        for one in checks.memory(PreflightContext(load_config("tiny_cpu", keys), for_job=False))
        if one.kind == "problem"
    ]
    told = f"weights.folder={folder} is in the memory of a node, which the servers of rollout.server.addresses at"
    assert [one.startswith(told) for one in found] == [True] * (not seen)


def test_a_login_node_says_nothing_of_where_servers_of_a_job_are() -> None:
    keys = ["rollout=vllm", "rollout.server.addresses=http://192.0.2.1:1", "weights.folder=/dev/shm/mine"]
    found = checks.memory(PreflightContext(load_config("tiny_cpu", keys), for_job=True))
    assert not [one.text for one in found if one.kind == "problem"]


def test_eval_refuses_a_file_that_servers_cannot_read_or_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("tiny_cpu", [f"model.cache_dir={tmp_path / 'models'}"])
    keys = ["rollout=vllm", "rollout.server.addresses=http://127.0.0.1:1", "weights.folder=/dev/shm/mine"]

    def refused(*more: str) -> str:
        target = trained_model(starting_folder(config), None, [*keys, *more])
        with pytest.raises(ConfigError) as raised:
            asyncio.run(measure_model(target, None))
        return str(raised.value)

    assert "addresses at 192.0.2.1 do not see; give a folder that all see" in refused(
        "rollout.server.addresses=http://192.0.2.1:1"
    )
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1000))
    assert re.match(
        r"weights\.folder=/dev/shm/mine needs 0\.000630 GB for the file of weights, but /dev/shm ", refused()
    )


# What a GPU must hold that the learner shares with servers, and whether it shares one: by closed forms.
@pytest.mark.parametrize(
    ("gpus", "keys", "shared"),
    [
        (8, ("slurm.gpus_per_node=8",), False),
        (8, ("slurm.gpus_per_node=0",), False),
        (8, ("slurm.gpus_per_node=6", "slurm.engines.nodes=1"), False),
        (8, ("slurm.gpus_per_node=6",), False),
        (6, ("slurm.gpus_per_node=8",), True),
        (6, ("slurm.gpus_per_node=0",), True),
        (6, ("slurm.gpus_per_node=6", "slurm.engines.nodes=1"), True),
        (0, ("slurm.gpus_per_node=8",), False),  # a machine whose GPUs are not known is as the keys say
        (0, ("slurm.gpus_per_node=7",), True),
    ],
)
def test_on_one_machine_servers_share_gpus_where_ranks_leave_too_few(
    gpus: int, keys: tuple[str, ...], shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six ranks and a server of two: it has 0.85 of each of its GPUs, with which the learner's part does not fit."""
    program(tmp_path / "nvidia-smi", "#!/bin/sh\n" + "".join(f"echo 'GPU {i}: H100'\n" for i in range(gpus)))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    given = ["run.launcher=local", f"model.path={folder_of(tmp_path)}", "slurm.engines.nodes=0", *keys]
    config = load_config(QWEN_APART, given)
    found = [one.text for one in checks.memory(PreflightContext(config, for_job=False)) if one.kind == "problem"]
    assert any("Largest: engine" in text for text in found) == shared


# What GPUs must hold, and the recipes that are made to fit: published sizes, closed forms, one refusal a term.
def test_a_recipe_wants_its_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.name=qwen3-30b-a3b with model\.path=null: .*; set model\.path"):
        load_config(QWEN_30B, [])
    fits = resolve_job(load_config(QWEN_30B, [f"model.path={folder_of(tmp_path)}"]))
    assert "memory: up to 112.5 GB a GPU (rank 0), most of it: optimizer" in fits.describe()
    other = load_config(QWEN_30B, [f"model.path={folder_of(tmp_path, num_hidden_layers=94)}"])
    with pytest.raises(ConfigError, match="num_layers 94 instead of 48"):
        preflight(other).raise_problems()
    with pytest.raises(ConfigError, match=r"model\.name=qwen4: not a known model; known: qwen3-30b-a3b"):
        preflight(load_config(QWEN_30B, [f"model.path={tmp_path}", "model.name=qwen4"])).raise_problems()


# Hours and tokens of a run against hand-made rows.
@pytest.mark.parametrize(
    ("signals", "finished", "requeued", "reported"),
    [
        (["SIGUSR1"], False, True, False),  # the job's time is up, which a long run's report may take
        (["SIGTERM"], False, False, False),  # to its ranks: preemption
        (["SIGINT"], False, False, True),
        (["SIGUSR1"], True, False, True),  # in the last step
        ([], True, False, True),
    ],
)
def test_a_run_whose_job_ends_soon_makes_no_report(
    signals: list[str], finished: bool, requeued: bool, reported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def saved(parts: RunParts, _: Progress, stop: StopSignal, *__: object) -> bool:
        for name in signals:
            stop.forward(name)
        (parts.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return finished

    for name, value in {"ID": "7", "NODELIST": "here"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    monkeypatch.setattr("launcher.hosts.slurm.allocation._hosts", lambda *_: ("here",))  # asks scontrol
    monkeypatch.setattr(train, "_train", saved)
    config = load_config("tiny_cpu", ["run.launcher=slurm", "run.name=r", f"run.dir={tmp_path}"])
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT)}
    try:
        asyncio.run(train.run_training(config, lambda *_: 0.0, RewardModels(), resume=False))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (tmp_path / "r/jobs/7-0/requeue").is_file() == requeued
    assert (tmp_path / "r/report.html").is_file() == reported
