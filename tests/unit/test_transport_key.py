"""``weights.transport``: one key for how weights reach an engine in the learner's processes, and servers."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from launcher.runs.folder import mirror_path
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.weights import TRANSPORT_KINDS, WeightsSection
from rl_megatron.errors import ConfigError
from rl_megatron.weights.transports import connect, engine_ends

REPO = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (REPO / "conf").glob("*.yaml"))
SERVED = ["rollout=vllm"]
OWN = "my_package.moves:Copies"


def problems(overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny_cpu", overrides)
    return str(caught.value).splitlines()


def test_the_configuration_and_both_tables_of_code_have_the_same_transports() -> None:
    allowed, _ = get_args(WeightsSection.model_fields["transport"].annotation)
    assert set(get_args(allowed)) == {"auto", *TRANSPORT_KINDS}
    assert set(connect.TRANSPORTS) == set(TRANSPORT_KINDS)
    assert set(engine_ends.TRANSPORTS) == {name for name, kind in TRANSPORT_KINDS.items() if kind.direct}
    sections = WeightsSection.model_fields.keys() - {"transport"}
    assert sections == {key for kind in TRANSPORT_KINDS.values() for key in kind.reads(served=True) | kind.keys}


@pytest.mark.parametrize("engine", ["local", "vllm", "sglang"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_fill_the_engine_over_the_process_group_and_servers_through_a_file(recipe: str, engine: str) -> None:
    none = ["slurm.engines.nodes=0", "weights.folder=null"] if engine == "local" else []
    config = load_config(recipe, [f"rollout={engine}", "model.path=/given", *none])
    assert config.transport.name == ("process_group" if engine == "local" else "file")
    section = config.weights.filling(served=config.rollout.served)
    assert (section.transport, section.verify, section.delta) == ("process_group", True, False)
    assert section.bucket_mb == (64 if recipe in {"tiny_cpu", "gsm8k_tiny"} else 256)


def test_the_recipe_whose_servers_are_elsewhere_has_its_file_where_they_see_it(tmp_path: Path) -> None:
    config = load_config("deepseek_v3", ["model.path=/given"])
    assert mirror_path(config, tmp_path).parent.parent == Path("runs/weights")


@pytest.mark.parametrize("name", [*TRANSPORT_KINDS, OWN])
def test_servers_file_is_filled_over_the_process_group_or_by_own_code(name: str) -> None:
    section = WeightsSection.model_validate({"transport": name})
    assert section.filling(served=False).transport == name
    assert section.filling(served=True).transport == (OWN if name == OWN else "process_group")
    direct = name in {"process_group", "shared_memory", "cuda_ipc"}
    assert section.kind(served=True).direct == direct
    assert [section.kind(served=True).backend(device) for device in ("cpu", "cuda")] == [
        "gloo",
        "nccl" if name == "process_group" else "gloo",
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
        "processes of their own; set weights.transport=process_group or shared_memory or cuda_ipc or file, or auto"
    ]


@pytest.mark.parametrize("engine", ["local", "vllm"])
def test_memory_that_two_processes_map_is_of_one_machine_and_one_kind(engine: str) -> None:
    given = [f"rollout={engine}", "run.launcher=slurm", "slurm.nodes=2"]
    given += [] if engine == "local" else ["slurm.engines.nodes=1"]
    (memory, machine) = problems([*given, "weights.transport=cuda_ipc"])
    start = "weights.transport=cuda_ipc"
    assert memory == f"{start} moves memory of cuda, but learner.device=cpu; set weights.transport=auto"
    away = "slurm.nodes=2" + ("" if engine == "local" else " and slurm.engines.nodes=1")
    assert machine == f"{start} stays on one machine, but {away}; set weights.transport=auto"
    assert problems([*given, "weights.transport=shared_memory"]) == [machine.replace("cuda_ipc", "shared_memory")]
    load_config("tiny_cpu", [f"rollout={engine}", "weights.transport=shared_memory"])
    load_config("tiny_cpu", [f"rollout={engine}", "weights.transport=cuda_ipc", "learner.device=cuda"])


def test_servers_that_take_turns_get_no_weights_over_nccl() -> None:
    given = [*SERVED, "rollout.server.colocated=true"]
    load_config("tiny_cpu", given)
    for device, other in (("cpu", "shared_memory"), ("cuda", "cuda_ipc")):
        (problem,) = problems([*given, f"learner.device={device}", "weights.transport=process_group"])
        wanted = "process_group needs an accelerator for each rank; set weights.transport=file or "
        assert problem.endswith(wanted + other)
        load_config("tiny_cpu", [*given, f"learner.device={device}", f"weights.transport={other}"])
    load_config("tiny_cpu", ["rollout.server.colocated=true", "weights.transport=process_group"])


def test_quantised_weights_are_for_servers_on_gpus_that_read_a_file() -> None:
    given = ["rollout.server.quantization=fp8", "weights.transport=process_group"]
    (first, *rest), key = problems(given), "rollout.server.quantization=fp8"
    assert first == f"{key}, but rollout.engine=local samples in the learner's processes; set it to none"
    attached = [*SERVED, "rollout.server.addresses=http://a:1"]
    (device, dtype, transport, addresses) = problems([*given, *attached])
    assert rest == [device, dtype]
    assert "need GPUs, but learner.device=cpu; set rollout.server.quantization=none" in device
    assert dtype.endswith("learner.dtype=float32; set learner.dtype=bfloat16")
    assert transport.endswith("sends the learner's own shards; set weights.transport=file")
    assert "rollout.server.addresses=http://a:1 are running ones, whose format it cannot see" in addresses


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
            "shared_memory or cuda_ipc does; leave it out, or set it to its default, null",
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
