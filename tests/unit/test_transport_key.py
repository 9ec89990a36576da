"""``weights.transport``: one key for how weights reach an engine in the learner's processes, and servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch.distributed as dist

from launcher.runs.folder import mirror_path, versions_folder
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.weights import TRANSPORT_KINDS, WeightsSection
from rl_megatron.errors import ConfigError
from rl_megatron.weights.checks.libraries import DEFAULTS, FIELDS
from rl_megatron.weights.plans.plan import Plan
from rl_megatron.weights.transports import connect, engine_ends

REPO = Path(__file__).resolve().parents[2]
WRITTEN = {"dpo_tiny", "reward_tiny", "sft_tiny"}  # which have no servers
RECIPES = sorted(path.stem for path in (REPO / "conf").glob("*.yaml") if path.stem not in WRITTEN)
SERVED = ["rollout=vllm"]
OWN = "my_package.moves:Copies"


def problems(overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny_cpu", overrides)
    return str(caught.value).splitlines()


def test_the_configuration_and_both_tables_of_code_have_the_same_transports() -> None:
    allowed, _ = get_args(WeightsSection.model_fields["transport"].annotation)
    assert set(get_args(allowed)) == {"auto", *TRANSPORT_KINDS}
    assert set(connect.TRANSPORTS) == {name for name, kind in TRANSPORT_KINDS.items() if kind.reaches(served=False)}
    assert set(engine_ends.TRANSPORTS) == {name for name, kind in TRANSPORT_KINDS.items() if kind.direct}
    alike = {name: kind.compared("cuda") for name, kind in TRANSPORT_KINDS.items() if kind.compared("cuda")}
    assert set(alike["process_group"]) == {"nccl", "torch", *DEFAULTS}
    assert {name for names in alike.values() for name in names} == set(FIELDS)
    assert all(TRANSPORT_KINDS[name].direct for name in alike)
    assert not any(kind.compared("cpu") for kind in TRANSPORT_KINDS.values())
    sections = WeightsSection.model_fields.keys() - {"transport", "push"}
    assert sections == {key for kind in TRANSPORT_KINDS.values() for key in kind.reads(served=True) | kind.keys}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_fill_the_mirror_over_the_process_group(recipe: str) -> None:
    config = load_config(recipe, ["model.path=/given", "rollout=vllm"])
    section = config.weights.filling(served=config.rollout.served)
    assert (section.transport, section.verify, section.delta) == ("process_group", True, False)
    assert section.bucket_mb == (
        64 if recipe in {"calculator", "distill_tiny", "guess", "tiny_cpu", "gsm8k_tiny", "qwen3_30b_a3b_80gb"} else 256
    )


def test_servers_on_other_nodes_have_their_file_in_the_runs_folder_or_where_the_key_says(tmp_path: Path) -> None:
    given = ["model.path=/given", "run.launcher=slurm"]
    assert mirror_path(load_config("deepseek_v3", given), tmp_path).parent.parent == tmp_path
    elsewhere = load_config("deepseek_v3", [*given, "weights.folder=/fast"])
    assert mirror_path(elsewhere, tmp_path).parent.parent == Path("/fast")


def test_runs_with_one_folder_have_versions_of_their_own_there(tmp_path: Path) -> None:
    """So none reads, or removes, what another wrote."""
    (tmp_path / "shared").mkdir()  # as `claim_folder` does
    config = load_config("tiny_cpu", ["weights.transport=file", f"weights.folder={tmp_path / 'shared'}"])
    rest: dict[str, Any] = {"moves": Plan(stretches=()), "src": {}, "dst": {}, "timeout_seconds": 1.0}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for run, version in (("a", 7), ("b", 7), ("a", 8)):
            folder = versions_folder(config, tmp_path / run)
            connect.make_transport(connect.Ends(section=config.weights, folder=folder, **rest)).move(version)
    finally:
        dist.destroy_process_group()
    places = {run: versions_folder(config, tmp_path / run).relative_to(tmp_path / "shared") for run in "ab"}
    found = {path.relative_to(tmp_path / "shared") for path in tmp_path.rglob("version_*")}
    assert found == {places["a"] / "version_000008", places["b"] / "version_000007"}
    assert versions_folder(load_config("tiny_cpu", []), tmp_path) == tmp_path / "weights"


@pytest.mark.parametrize("name", [*TRANSPORT_KINDS, OWN])
def test_servers_file_is_filled_over_the_process_group_or_by_own_code(name: str) -> None:
    section = WeightsSection.model_validate({"transport": name})
    assert section.filling(served=False).transport == name
    assert section.filling(served=True).transport == (OWN if name == OWN else "process_group")
    direct = name in {"process_group", "shared_memory", "cuda_ipc", "carried"}
    assert section.kind(served=True).direct == direct
    assert [section.kind(served=True).backend(device) for device in ("cpu", "cuda")] == [
        "gloo",
        "nccl" if name in {"process_group", "carried"} else "gloo",
    ]


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("rollout.server.transport=file", "weights.transport"),
        ("rollout.server.meeting_host=10.0.0.1", "weights.meeting_host"),
        ("rollout.server.weights_dir=/fast", "weights.folder"),
    ],
)
def test_keys_that_moved_are_refused_with_their_new_name(key: str, new: str) -> None:
    name, _, value = key.partition("=")
    assert problems([*SERVED, key]) == [f"{name}={value!r}: no such key; it is called {new}"]


def test_disk_is_refused_with_its_new_name() -> None:
    assert problems(["weights.transport=disk"]) == ["weights.transport='disk': must be 'file', the new name of 'disk'"]


def test_memory_is_of_one_process() -> None:
    (many,) = problems(["weights.transport=memory"])
    assert many.startswith("weights.transport=memory copies within one process, but the learner has 2; set")
    load_config("tiny_cpu", ["weights.transport=memory", "learner.ep=1"])
    assert problems([*SERVED, "weights.transport=memory", "learner.ep=1"]) == [
        "weights.transport=memory copies within one process, but rollout.engine=vllm samples in servers, which are "
        "processes of their own; set weights.transport=process_group or shared_memory or cuda_ipc or carried or file, "
        "or auto"
    ]


@pytest.mark.parametrize("engine", ["local", "vllm"])
def test_memory_that_two_processes_map_is_of_one_machine_and_one_kind(engine: str) -> None:
    given = [f"rollout={engine}", "run.launcher=slurm", "slurm.nodes=2"]
    given += [] if engine == "local" else ["slurm.engines.nodes=1"]
    (memory, machine) = problems([*given, "weights.transport=cuda_ipc"])
    start = "weights.transport=cuda_ipc"
    assert memory == f"{start} moves memory of cuda, but learner.device=cpu; set weights.transport=auto"
    away = "slurm.nodes=2" + ("" if engine == "local" else " and slurm.engines.nodes=1")
    assert machine == f"{start} stays on one machine, but {away}; set weights.transport=process_group"
    assert problems([*given, "weights.transport=shared_memory"]) == [machine.replace("cuda_ipc", "shared_memory")]
    load_config("tiny_cpu", [f"rollout={engine}", "weights.transport=shared_memory"])
    load_config("tiny_cpu", [f"rollout={engine}", "weights.transport=cuda_ipc", "learner.device=cuda"])


def test_servers_on_the_learners_nodes_have_a_file_or_get_nodes_of_their_own() -> None:
    given = [*SERVED, "run.launcher=slurm", "slurm.nodes=2", "weights.transport=shared_memory"]
    (problem,) = problems(given)
    assert problem.endswith(
        "slurm.nodes=2; give servers nodes of their own (slurm.engines.nodes) and set weights.transport"
        "=process_group, or set weights.transport=carried, or auto, a file in each node's memory"
    )


def test_a_nodes_own_memory_is_no_folder_for_servers_on_other_nodes() -> None:
    given = [*SERVED, "run.launcher=slurm", "weights.folder=/dev/shm/mine"]
    (problem,) = problems([*given, "slurm.engines.nodes=1"])
    assert problem.startswith("weights.folder=/dev/shm/mine is in each node's own memory, and the learner's ranks can")
    load_config("tiny_cpu", [*given, "slurm.nodes=2", "rollout.server.replicas=2"])


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ((), "file"),
        (("slurm.engines.nodes=1",), "process_group"),
        (("slurm.engines.nodes=1", "weights.folder=/fast"), "file"),
        (("slurm.engines.nodes=1", "weights.delta=true"), "file"),
        (("slurm.engines.nodes=1", "weights.transport=file"), "file"),
        (("slurm.engines.nodes=1", "run.launcher=local"), "file"),
        (("rollout.server.addresses=http://a:1",), "file"),
    ],
)
def test_auto_goes_straight_into_servers_on_nodes_of_their_own(keys: tuple[str, ...], kind: str) -> None:
    assert load_config("tiny_cpu", [*SERVED, "run.launcher=slurm", *keys]).transport.name == kind


def test_weights_are_carried_to_servers_on_the_learners_own_nodes() -> None:
    key, job = "weights.transport=carried", ["run.launcher=slurm", "slurm.nodes=2"]
    assert problems([key]) == [
        f"{key} hands weights on to servers, but rollout.engine=local samples in the learner's processes; set "
        "weights.transport=auto"
    ]
    load_config("tiny_cpu", [*SERVED, *job, key, "rollout.server.colocated=true", "rollout.server.replicas=4"])
    (apart,) = problems([*SERVED, *job, key, "slurm.engines.nodes=1"])
    assert apart == (
        f"{key} needs servers on the learner's own nodes, but slurm.engines.nodes=1 are for servers alone; set "
        "weights.transport=process_group"
    )
    (many,) = problems([*SERVED, *job, key, "learner.device=cuda", "rollout.server.tp=2", "rollout.server.replicas=2"])
    assert many.startswith(
        f"{key} needs a GPU of the learner's 2 for each of the servers' ranks, and they are 4; lower"
    )


def test_servers_that_take_turns_get_no_weights_over_nccl() -> None:
    given = [*SERVED, "rollout.server.colocated=true", "rollout.server.memory_fraction=0.5"]
    load_config("tiny_cpu", given)
    for device, other in (("cpu", "shared_memory"), ("cuda", "cuda_ipc")):
        (problem,) = problems([*given, f"learner.device={device}", "weights.transport=process_group"])
        wanted = "process_group needs an accelerator for each rank; set weights.transport=file or "
        assert problem.endswith(f"{wanted}{other} or carried")
        load_config("tiny_cpu", [*given, f"learner.device={device}", "weights.transport=carried"])
        load_config("tiny_cpu", [*given, f"learner.device={device}", f"weights.transport={other}"])


def test_servers_that_take_turns_on_gpus_leave_room_for_the_learners_state() -> None:
    given = [*SERVED, "learner.device=cuda", "rollout.server.colocated=true"]
    (problem,) = problems(given)
    assert problem.endswith("stay; set rollout.server.memory_fraction to a share that they leave")
    load_config("tiny_cpu", [*given, "rollout.server.memory_fraction=0.5"])
    load_config("tiny_cpu", [*given, "rollout.server.addresses=http://a:1"])  # their own matter


def test_quantised_weights_are_for_servers_on_gpus_that_the_run_starts() -> None:
    given = ["rollout.server.quantization=fp8", "weights.transport=process_group"]
    (*rest, last), key = problems(given), "rollout.server.quantization=fp8"
    assert last.startswith(f"{key} does nothing: rollout.engine=local samples in the learner's processes")
    attached = [*SERVED, "rollout.server.addresses=http://a:1"]
    (device, dtype, addresses) = problems([*given, *attached])
    assert rest == [device, dtype]
    assert "need GPUs, but learner.device=cpu; set rollout.server.quantization=none" in device
    assert dtype.endswith("learner.dtype=float32; set learner.dtype=bfloat16")
    assert "rollout.server.addresses=http://a:1 are running ones, whose format it cannot see" in addresses


@pytest.mark.parametrize("transport", ["auto", *(name for name, kind in TRANSPORT_KINDS.items() if kind.direct)])
def test_quantised_weights_go_over_every_transport_as_others_do(transport: str) -> None:
    given = [*SERVED, f"weights.transport={transport}", "learner.dtype=bfloat16"]
    given += ["learner.device=cuda"] if transport != "shared_memory" else []
    plain = load_config("tiny_cpu", given)
    if transport == "shared_memory":
        (problem,) = problems([*given, "rollout.server.quantization=fp8"])
        assert "need GPUs" in problem
        return
    quantised = load_config("tiny_cpu", [*given, "rollout.server.quantization=fp8"])
    assert quantised.transport == plain.transport


@pytest.mark.parametrize("kind", ["nvfp4", "MXFP8", "int4"])
def test_formats_of_fewer_bits_are_refused_by_name(kind: str) -> None:
    (problem,) = problems([*SERVED, f"rollout.server.quantization={kind}"])
    assert problem == (
        f"rollout.server.quantization={kind!r}: must be 'none', 'fp8' (128 x 128 blocks) or 'int8': {kind.upper()} "
        "cannot be quantised at a push"
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            ["weights.transport=shared_memory", "weights.delta=true"],
            "weights.delta=true does nothing: weights.transport=shared_memory does not read it, process_group does; "
            "leave it out, or set it to its default, false",
        ),
        (
            ["weights.transport=file", "weights.bucket_mb=8"],
            "weights.bucket_mb=8 does nothing: weights.transport=file does not read it, process_group or cuda_ipc "
            "does; leave it out, or set it to its default, 64",
        ),
        (
            ["weights.folder=/fast"],
            "weights.folder=/fast does nothing: weights.transport=process_group does not read it, file does; leave it "
            "out, or set it to its default, null",
        ),
        (
            ["weights.meeting_host=a"],
            "weights.meeting_host=a does nothing: rollout.engine=local samples in the learner's processes, and only "
            "servers use it; leave it out, or set it to its default, null",
        ),
        (
            [*SERVED, "weights.meeting_host=a"],
            "weights.meeting_host=a does nothing: weights.transport=file does not read it, process_group or "
            "shared_memory or cuda_ipc or carried does; leave it out, or set it to its default, null",
        ),
    ],
)
def test_a_key_that_the_transport_does_not_read_is_refused(given: list[str], reason: str) -> None:
    assert problems(given) == [reason]


def test_keys_that_act_with_servers_are_taken() -> None:
    """Whatever the transport, their file is filled: for an export, and for a server that comes back."""
    keys = ["weights.delta=true", "weights.bucket_mb=8", "weights.verify=false", "weights.folder=/fast"]
    load_config("tiny_cpu", [*SERVED, *keys])
    load_config("tiny_cpu", [*SERVED, *keys, f"weights.transport={OWN}"])
    load_config("tiny_cpu", [*SERVED, *keys, "weights.transport=shared_memory", "weights.meeting_host=a"])
