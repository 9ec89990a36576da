"""``weights.transport``: one key for how weights reach an engine in the learner's processes, and servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.runs.folder import mirror_path
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.weights import CARRIED, CUDA_IPC, FILE, PROCESS_GROUP
from rl_megatron.errors import ConfigError
from rl_megatron.weights.checks.libraries import DEFAULTS, FIELDS
from rl_megatron.weights.transports import engine_ends

REPO = Path(__file__).resolve().parents[2]
WRITTEN = {"dpo_tiny", "reward_tiny", "sft_tiny"}  # which have no servers
RECIPES = sorted(path.stem for path in (REPO / "conf").glob("*.yaml") if path.stem not in WRITTEN)
SERVED = ["rollout=vllm"]


def problems(overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny_cpu", overrides)
    return str(caught.value).splitlines()


def test_the_code_has_every_direct_kind_and_compares_what_it_needs() -> None:
    assert {*engine_ends.TRANSPORTS} == {kind.name for kind in (PROCESS_GROUP, CUDA_IPC, CARRIED)}
    assert not FILE.direct
    assert set(PROCESS_GROUP.compared("cuda")) == {"nccl", "torch", *DEFAULTS}
    assert {name for kind in (PROCESS_GROUP, CUDA_IPC, CARRIED) for name in kind.compared("cuda")} == set(FIELDS)
    assert not any(kind.compared("cpu") for kind in (PROCESS_GROUP, CUDA_IPC, CARRIED))
    assert [kind.backend("cuda") for kind in (PROCESS_GROUP, CUDA_IPC, CARRIED)] == ["nccl", "gloo", "nccl"]
    assert PROCESS_GROUP.backend("cpu") == "gloo"


KINDS = {
    "deepseek_v3": "process_group",
    "deepseek_v3_colocated": "carried",
    "kimi_k2": "process_group",
    "kimi_k2_colocated": "carried",
    "qwen3_235b_a22b": "process_group",
    "qwen3_235b_a22b_colocated": "carried",
    "qwen3_30b_a3b": "cuda_ipc",
    "qwen3_30b_a3b_80gb": "cuda_ipc",
    "qwen3_30b_a3b_disaggregated": "process_group",
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_direct_is_the_kind_that_fits_a_recipe(recipe: str, launcher: str) -> None:
    config = load_config(recipe, ["model.path=/given", f"run.launcher={launcher}"])
    assert (config.weights.transport == "direct") == (recipe in KINDS)
    assert config.transport.name == KINDS.get(recipe, "process_group")  # of engines in the learner's ranks


ON_GPUS, DIRECT = ["rollout=vllm", "learner.device=cuda"], "weights.transport=direct"


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ([], "process_group"),  # on further GPUs of this machine
        (["rollout.server.memory_fraction=0.3"], "carried"),
        (["rollout.server.memory_fraction=0.3", "rollout.server.tp=2"], "cuda_ipc"),
        (["rollout.server.memory_fraction=0.3", "rollout.server.tp=2", "slurm.nodes=2"], "carried"),
        (["run.launcher=slurm", "rollout.server.tp=2"], "cuda_ipc"),
        (["run.launcher=slurm"], "carried"),
        (["run.launcher=slurm", "slurm.engines.nodes=1"], "process_group"),
        (["rollout.server.addresses=http://a:1", "run.launcher=slurm"], "process_group"),
        (["learner.device=cpu"], "process_group"),
        (["learner.device=cpu", "run.launcher=slurm", "rollout.server.tp=2"], "carried"),
        (["learner.device=cpu", "rollout.server.colocated=true", "rollout.server.tp=2"], "carried"),
        (["learner.device=cpu", "rollout=local"], "process_group"),
    ],
)
def test_direct_depends_on_the_gpus_that_servers_have(keys: list[str], kind: str) -> None:
    assert load_config("tiny_cpu", [*ON_GPUS, DIRECT, *keys]).transport.name == kind


def test_servers_on_other_nodes_have_their_file_in_the_runs_folder_or_where_the_key_says(tmp_path: Path) -> None:
    given = ["model.path=/given", "run.launcher=slurm"]
    assert mirror_path(load_config("deepseek_v3", given), tmp_path).parent.parent == tmp_path
    elsewhere = load_config("deepseek_v3", [*given, "weights.folder=/fast"])
    assert mirror_path(elsewhere, tmp_path).parent.parent == Path("/fast")


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


@pytest.mark.parametrize("value", ["my_package.moves:Copies", "a:b"])
def test_own_code_is_refused_with_what_there_is(value: str) -> None:
    assert problems([f"weights.transport={value}"]) == [
        f"weights.transport='{value}': must be 'auto', 'file' or 'direct'; no code of your own moves weights"
    ]


def test_the_in_process_engine_loads_no_file() -> None:
    assert problems(["weights.transport=file"]) == [
        "weights.transport=file is for servers, but rollout.engine=local samples in the learner's processes; set "
        "weights.transport=auto"
    ]


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


def test_each_rank_of_servers_on_the_learners_gpus_has_one_of_its_own() -> None:
    given = [*ON_GPUS, DIRECT, "run.launcher=slurm", "slurm.nodes=2", "rollout.server.tp=2"]
    load_config("tiny_cpu", given)
    (many,) = problems([*given, "rollout.server.replicas=2"])
    assert many.startswith(
        "weights.transport=direct needs a GPU of the learner's 2 for each of the servers' ranks, and they are 4; lower"
    )


def test_servers_that_take_turns_on_gpus_leave_room_for_the_learners_state() -> None:
    given = [*SERVED, "learner.device=cuda", "rollout.server.colocated=true"]
    (problem,) = problems(given)
    assert problem.endswith("stay; set rollout.server.memory_fraction to a share that they leave")
    load_config("tiny_cpu", [*given, "rollout.server.memory_fraction=0.5"])
    load_config("tiny_cpu", [*given, "rollout.server.addresses=http://a:1"])  # their own matter


def test_quantised_weights_are_for_servers_on_gpus_that_the_run_starts() -> None:
    given = ["rollout.server.quantization=fp8"]
    (*rest, last), key = problems(given), "rollout.server.quantization=fp8"
    assert last.startswith(f"{key} does nothing: rollout.engine=local samples in the learner's processes")
    attached = [*SERVED, "rollout.server.addresses=http://a:1"]
    (device, dtype, addresses) = problems([*given, *attached])
    assert rest == [device, dtype]
    assert "need GPUs, but learner.device=cpu; set rollout.server.quantization=none" in device
    assert dtype.endswith("learner.dtype=float32; set learner.dtype=bfloat16")
    assert "rollout.server.addresses=http://a:1 are running ones, whose format it cannot see" in addresses


@pytest.mark.parametrize("transport", ["auto", "file", "direct"])
def test_quantised_weights_go_over_every_transport_as_others_do(transport: str) -> None:
    given = [*ON_GPUS, f"weights.transport={transport}", "learner.dtype=bfloat16"]
    plain = load_config("tiny_cpu", given)
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
            ["weights.folder=/fast"],
            "weights.folder=/fast does nothing: rollout.engine=local samples in the learner's processes, and only "
            "servers use it; leave it out, or set it to its default, null",
        ),
        (
            ["weights.meeting_host=a"],
            "weights.meeting_host=a does nothing: rollout.engine=local samples in the learner's processes, and only "
            "servers use it; leave it out, or set it to its default, null",
        ),
        (
            [*SERVED, "weights.meeting_host=a"],
            "weights.meeting_host=a does nothing: weights.transport=auto is a file here, and weights.transport=direct "
            "reads it; leave it out, or set it to its default, null",
        ),
    ],
)
def test_a_key_that_the_transport_does_not_read_is_refused(given: list[str], reason: str) -> None:
    assert problems(given) == [reason]


def test_keys_that_act_with_servers_are_taken() -> None:
    """Whatever the transport, their file is filled: for an export, and for a server that comes back."""
    keys = ["weights.delta=true", "weights.bucket_mb=8", "weights.folder=/fast"]
    load_config("tiny_cpu", [*SERVED, *keys])
    load_config("tiny_cpu", [*SERVED, *keys, DIRECT, "weights.meeting_host=a"])
