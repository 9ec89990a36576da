"""Routes, bytes and seconds of pushes and checkpoints: over every recipe, against closed forms, and by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import get_args

import pytest

from launcher.servers.degrees import served_bytes
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.rollout import ServerSection
from rl_megatron.config.sections.slurm import SpeedsSection
from rl_megatron.config.sections.weights import NODE_MEMORY
from rl_megatron.errors import ConfigError
from rl_megatron.features.quantize.encoding import ENCODINGS
from rl_megatron.features.quantize.formats import FORMATS
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.models.tiny import TinySizes, tiny_shape
from rl_megatron.placement.files import file_writer_ranks, weights_folder
from rl_megatron.placement.routes import engine_nodes, find_route
from rl_megatron.types import ParallelDims
from rl_megatron.weights.formats.schemes import is_quantized
from rl_megatron.weights.layouts.families import hf_layout
from rl_megatron.weights.layouts.layout import Layout, float32_in_files
from rl_megatron.weights.layouts.learner import engine_layout, learner_layout
from rl_megatron.weights.layouts.tables.grouped_query import HF_QWEN3_MOE, MEGATRON_QWEN3_MOE
from rl_megatron.weights.plans.plan import plan
from rl_megatron.weights.routes import engine_ends
from tests.small_models import SMALL_MOE
from tests.unit.launcher.test_memory import QWEN_30B, QWEN_235B
from tools.planner.estimates import Cost, Links, broadcast_cost, estimate, floor_seconds, plan_cost, push_cost
from tools.planner.memory import WINDOW_LAYERS, bytes_by_rank, check_memory, save_cost, server_weights

REPO = Path(__file__).resolve().parents[3]
WRITTEN = {"dpo_tiny", "reward_tiny", "sft_tiny"}  # which push none
RECIPES = sorted(path.stem for path in (REPO / "conf").glob("*.yaml") if path.stem not in WRITTEN)
ENGINES = sorted(path.stem for path in (REPO / "conf" / "rollout").glob("*.yaml"))
LINK_SPEEDS = ("network", "nvlink", "node_file", "storage_node", "storage")
SHAPE = tiny_shape(TinySizes(head_dim=32))
APART = "slurm.engines.nodes=0"
WITHOUT_SERVERS = (  # what the in-process engine needs of a recipe with servers
    *(APART, "learner.offload.while_sampling=null", "weights.transport=auto"),
)
BY_ADDRESS = (  # of running servers, whose degrees nobody states
    *("rollout.server.addresses=http://engine1:8000,http://engine2:8000", "slurm.engines.nodes=0"),
    *("rollout.server.replicas=1", "rollout.server.tp=1", "rollout.server.memory_fraction=null"),
)
WHOLE = ("norm", "mlp.gate.weight")  # of each engine rank, whatever its degrees


@pytest.fixture
def at_speeds(tmp_path: Path) -> Callable[..., str]:
    """The key whose file has these speeds, beside an H100's."""

    def key(**speeds: float) -> str:
        file = tmp_path / f"{'_'.join(f'{name}_{value}' for name, value in speeds.items())}.yaml"
        file.write_text("".join(f"{name}: {value}\n" for name, value in ({"like": "h100"} | speeds).items()))
        return f"slurm.speeds.gpu={file}"

    return key


def job(name: str, *keys: str) -> RunConfig:
    return load_config(name, ["model.path=/given", "run.launcher=slurm", *keys])


def tiny(*keys: str) -> RunConfig:
    return load_config("tiny_cpu", ["run.launcher=slurm", *keys])


def named(config: RunConfig) -> ModelShape:
    return NAMED[str(config.model.name)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_no_recipe_pushes_through_a_shared_file_system(recipe: str, engine: str) -> None:
    config = job(recipe, f"rollout={engine}", *(WITHOUT_SERVERS if engine == "local" else ()))
    route = find_route(config)
    assert not route.shared, route
    assert route.name == config.transport.name
    if engine == job(recipe).rollout.engine:
        assert list(estimate(config, named(config) if config.model.name else SHAPE).warnings()) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_fits_the_gpus_that_it_names_servers_and_the_layers_that_arrive_included(recipe: str) -> None:
    config = job(recipe)
    most = check_memory(config, named(config) if config.model.name else SHAPE)
    assert (most is None) == (config.slurm.gpu_memory_gb is None)


THROUGH_STORAGE = {
    "servers on nodes of their own": (QWEN_235B, "weights.transport=file"),
    "servers on all nodes of the learner and a folder given": (
        *(QWEN_30B, "weights.transport=auto", "slurm.nodes=2", "learner.dp=4", "rollout.server.replicas=2"),
        "weights.folder=/fast",
    ),
    "servers elsewhere": (QWEN_235B, "weights.transport=auto", *BY_ADDRESS),
}


@pytest.mark.parametrize("case", THROUGH_STORAGE)
def test_a_file_that_several_nodes_read_is_on_a_shared_file_system_and_warned_of(case: str) -> None:
    config = job(*THROUGH_STORAGE[case])
    found = estimate(config, named(config) if config.model.name else SHAPE)
    assert (found.push.route.shared, found.push.route.name) == (True, "shared_file")
    (warning,) = found.warnings()
    assert warning.startswith("each push of weights goes through a file in ")
    assert ", on a shared file system: " in warning


def engines_bytes(tp: int, replicas: int, each: int) -> tuple[int, int]:
    """Closed form: all bytes that engine ranks need, and the first one's, from Hugging Face's tensors."""
    tensors = hf_layout(SHAPE).local_shapes(0)
    whole = sum(prod(size) for name, size in tensors.items() if any(part in name for part in WHOLE))
    everything, vocabulary = sum(map(prod, tensors.values())), 2 * SHAPE.vocab_size * SHAPE.hidden_size
    rows = -(-SHAPE.vocab_size // (8 * tp)) * 8  # the last rank's padding is nobody's
    first = (everything - whole - vocabulary) // tp + whole + 2 * min(rows, SHAPE.vocab_size) * SHAPE.hidden_size
    return (everything + (tp - 1) * whole) * replicas * each, first * each


@pytest.mark.parametrize(("tp", "replicas"), [(1, 1), (2, 1), (2, 3)])
def test_a_straight_push_moves_what_engine_ranks_hold(tp: int, replicas: int, at_speeds: Callable[..., str]) -> None:
    keys = ["slurm.engines.nodes=3", "weights.transport=direct", at_speeds(network=2)]
    config = tiny("rollout=vllm", *keys, f"rollout.server.tp={tp}", f"rollout.server.replicas={replicas}")
    (hop,) = push_cost(config, SHAPE).hops
    assert (hop.total, hop.received) == engines_bytes(tp, replicas, 4)
    assert hop.total / 2 <= hop.sent <= 1.05 * hop.total / 2  # two learner ranks share the work
    assert hop.seconds == max(hop.sent, hop.received) / 2e9
    assert "2 between nodes" in hop.speed


@pytest.mark.parametrize(("dp", "pp", "replicas"), [(2, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_stages_and_whole_experts_are_in_a_server_once(dp: int, pp: int, replicas: int) -> None:
    """Closed form: the attention and all else beside experts is in each of a server's dp replicas."""
    tensors = hf_layout(SHAPE).local_shapes(0)
    experts = sum(prod(size) for name, size in tensors.items() if ".experts." in name)
    rest = sum(map(prod, tensors.values())) - experts
    degrees = [f"rollout.server.{key}={value}" for key, value in (("dp", dp), ("ep", dp), ("pp", pp))]
    keys = ["slurm.engines.nodes=2", "rollout.server.nodes=2", f"rollout.server.replicas={replicas}", *degrees]
    config = tiny("rollout=vllm", "weights.transport=direct", *keys)
    assert engine_nodes(config) == [1] * (dp * pp // 2) + [2] * (dp * pp // 2) + ([1] * 2 + [2] * 2) * (replicas - 1)
    (hop,) = push_cost(config, SHAPE).hops
    assert hop.total == 4 * replicas * (dp * rest + experts)


@pytest.mark.parametrize(("pp", "layers"), [(4, (23, 24, 24, 23)), (5, (19, 19, 19, 19, 18)), (3, (31, 32, 31))])
def test_stages_of_servers_have_the_layers_that_vllm_gives_them(pp: int, layers: tuple[int, ...]) -> None:
    """94 layers by vLLM 0.32.0's rule: those left over go to the stages before the last."""
    keys = [f"rollout.server.pp={pp}", "rollout.server.nodes=1", "rollout.server.tp=1", "rollout.server.replicas=1"]
    assert engine_layout(job(QWEN_235B, "rollout=vllm", *keys), NAMED["qwen3-235b-a22b"]).stages == layers


@pytest.mark.parametrize(("learner", "replicas"), [("learner.dp=2", 2), ("learner.ep=2", 2), ("learner.ep=2", 4)])
def test_carriers_get_what_they_lack_from_each_other(learner: str, replicas: int) -> None:
    """Closed form: each lacks the experts of the other, for each server on its node, and nothing where it has all."""
    keys = ["slurm.nodes=2", "learner.ep=1", learner, f"rollout.server.replicas={replicas}"]
    config = tiny("rollout=vllm", "weights.transport=direct", "rollout.server.colocated=true", *keys)
    experts = sum(prod(size) for name, size in hf_layout(SHAPE).local_shapes(0).items() if ".experts." in name)
    lacks = 4 * experts // 2 * replicas if learner == "learner.ep=2" else 0
    (hop,) = push_cost(config, SHAPE).hops
    assert (hop.total, hop.received, hop.sent) == (lacks, lacks // 2, lacks // 2)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_straight_push_of_quantised_weights_moves_their_bytes(kind: str) -> None:
    """Closed form: into a server of one rank goes what its file would hold; half of it from each of two ranks."""
    keys = ("rollout=vllm", "learner.device=cuda", "learner.dtype=bfloat16", "slurm.engines.nodes=1")
    plain = tiny(*keys, "weights.transport=direct")
    config = tiny(*keys, "weights.transport=direct", f"rollout.server.quantization={kind}")
    (hop,) = push_cost(config, SHAPE).hops
    assert hop.total == hop.received == served_bytes(config, SHAPE) == server_weights(config, SHAPE)
    assert hop.total / 2 <= hop.sent <= 0.6 * hop.total
    assert hop.total < 0.8 * push_cost(plain, SHAPE).hops[0].total


def test_a_push_to_the_same_node_is_as_fast_as_that_nodes_memory(at_speeds: Callable[..., str]) -> None:
    keys = ("run.launcher=local", "rollout=vllm", "weights.transport=direct", at_speeds(node_file=3))
    (hop,) = push_cost(load_config("tiny_cpu", keys), SHAPE).hops
    assert hop.seconds == max(hop.sent, hop.received) / 3e9
    assert hop.speed == "3 GB/s a rank inside a node"


def test_the_235b_recipe_gets_its_weights_in_a_second_and_not_in_minutes(at_speeds: Callable[..., str]) -> None:
    config = job(QWEN_235B)
    (straight,) = push_cost(config, NAMED["qwen3-235b-a22b"]).hops
    assert straight.received / 1e9 == pytest.approx(59.0, abs=0.05)  # an eighth of 470 GB, and norms
    assert straight.seconds == straight.received / 50e9
    filled, written, read = push_cost(job(QWEN_235B, "weights.transport=file"), named(config)).hops
    model = 2 * 235_093_634_560  # as published
    assert filled.received == pytest.approx(model * (1 - 1 / 96), rel=0.01)
    assert (written.total, read.total, read.received) == (model, 4 * model, model)  # one replica a node
    assert (written.seconds, read.seconds) == (model / 5e9, model / 5e9)
    slow = push_cost(job(QWEN_235B, "weights.transport=file", at_speeds(storage=8)), named(config)).hops
    assert slow[2].seconds == 4 * model / 8e9


def test_servers_of_one_node_read_the_whole_file_each(at_speeds: Callable[..., str]) -> None:
    config = tiny("rollout=vllm", "rollout.server.replicas=3", at_speeds(node_file=2))
    model = 4 * sum(prod(size) for size in hf_layout(SHAPE).local_shapes(0).values())
    written, read = push_cost(config, SHAPE).hops  # the two learner ranks hold all that they write
    assert (written.total, written.sent, written.seconds) == (model, model / 2, model / 4e9)
    assert (read.total, read.received, read.seconds) == (3 * model, model, model / 2e9)


@pytest.mark.parametrize("server", ["rollout.server.replicas=2", "rollout.server.tp=2"])
def test_each_node_of_servers_has_a_file_that_its_own_ranks_write(server: str) -> None:
    """Closed form: of two nodes of two ranks each lacks the experts of the other."""
    keys = ["slurm.nodes=2", "learner.ep=4", "learner.dp=4", server]
    keys += ["rollout.server.nodes=2"] if server.endswith("tp=2") else []
    config, tensors = tiny("rollout=vllm", *keys), hf_layout(SHAPE).local_shapes(0)
    model, experts = (4 * sum(prod(size) for n, size in tensors.items() if part in n) for part in ("", ".experts."))
    filled, written, read = push_cost(config, SHAPE).hops
    assert (filled.total, filled.received, filled.sent) == (experts, experts // 4, experts // 4)
    assert (written.total, written.sent, read.total, read.received) == (2 * model, model / 2, 2 * model, model)


def test_servers_by_address_have_unknown_ranks_and_the_senders_bound_the_push() -> None:
    (hop,) = push_cost(job(QWEN_235B, *BY_ADDRESS), NAMED["qwen3-235b-a22b"]).hops
    assert (hop.total, hop.seconds) == (2 * 2 * 235_093_634_560, hop.total / 96 / 50e9)
    assert hop.received == 0
    assert hop.speed.endswith("for the senders; the receivers' shares are not known")


@pytest.mark.parametrize("kind", ENCODINGS)
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
def test_a_file_has_the_bytes_that_the_writer_of_it_makes_room_for(name: str, kind: str) -> None:
    config, shape = job(QWEN_30B, *[f"rollout.server.quantization={kind}", "weights.transport=file"]), NAMED[name]
    hf, expected = hf_layout(shape), 0
    float32 = float32_in_files(hf)
    for tensor, size in hf.local_shapes(0).items():
        if kind == "none" or not is_quantized(tensor, size):
            expected += prod(size) * (4 if tensor in float32 else 2)
        else:
            rows, columns = size
            expected += rows * columns + 4 * (rows if kind == "int8" else -(-rows // 128) * -(-columns // 128))
    assert served_bytes(config, shape) == expected


def test_every_format_and_every_engine_is_known() -> None:
    assert get_args(ServerSection.model_fields["quantization"].annotation) == tuple(ENCODINGS) == ("none", *FORMATS)
    assert set(WINDOW_LAYERS) == set(ENGINES) - {"local"}
    assert engine_ends._BUCKET_BYTES == 64 * 2**20


@pytest.mark.parametrize(
    "keys", [("learner.dp=4",), ("learner.tp=2", "learner.ep=2", "learner.dp=2"), ("learner.ep=1", "learner.pp=2")]
)
def test_engines_in_the_learners_ranks_get_what_these_lack(keys: Sequence[str], at_speeds: Callable[..., str]) -> None:
    config = tiny(*keys, at_speeds(node_file=4))
    (hop,) = push_cost(config, SHAPE).hops
    moves = plan(learner_layout(config, SHAPE), hf_layout(SHAPE, ParallelDims(dp=config.learner.dims.world_size)))
    into = Counter[int]()
    for (_, receiver), elements in moves.traffic().items():
        into[receiver] += 4 * elements
    assert hop.total == pytest.approx(into.total(), rel=0.02)  # the last vocabulary rows are padded
    assert hop.received == pytest.approx(max(into.values()), rel=0.02)
    assert hop.seconds == hop.received / 4e9


@pytest.mark.parametrize("recipe", ["qwen3_30b_a3b", "qwen3_235b_a22b"])
def test_a_checkpoint_is_14_bytes_a_parameter(recipe: str) -> None:
    config = job(recipe)
    found, parameters = save_cost(config, named(config)), prod([served_bytes(config, named(config))]) // 2
    assert 14 * parameters <= found.total <= 1.003 * 14 * parameters  # norms and routers count on each tp rank


def test_the_first_of_a_data_parallel_group_writes_its_part_of_a_checkpoint() -> None:
    config = tiny("learner.ep=2", "learner.dp=4", "slurm.nodes=2")
    tensors = hf_layout(SHAPE).local_shapes(0)
    experts = sum(prod(size) for name, size in tensors.items() if ".experts." in name)
    dense = sum(map(prod, tensors.values())) - experts + (-SHAPE.vocab_size % 8 * 2 * SHAPE.hidden_size)
    assert bytes_by_rank(config, SHAPE) == {0: 16 * (dense + experts // 2), 1: 16 * experts // 2}
    found = save_cost(config, SHAPE)
    assert (found.total, found.by_node) == (16 * (dense + experts),) * 2  # both ranks are on the first node
    spread = save_cost(tiny("learner.ep=2", "slurm.nodes=2"), SHAPE)
    assert (spread.total, spread.by_node) == (found.total, 16 * (dense + experts // 2))
    critic = save_cost(tiny("learner.ep=2", "slurm.nodes=2", "algorithm=ppo"), SHAPE)
    assert (critic.total, critic.by_node) == (2 * spread.total, 2 * spread.by_node)


def test_the_floor_of_a_step_by_hand() -> None:
    config = job(QWEN_30B)
    active, tokens = NAMED["qwen3-30b-a3b"].active_parameters, 64 * 16 * (1024 + 7168)
    assert 3.0e9 < active < 3.4e9  # 3.3 B, of which the embedding multiplies nothing
    scores = 3 * 4 * 128 * 32 * 48 * (8192 * 8193 / 2) * 64 * 16  # of 32 heads in 48 layers, with the keys before
    assert floor_seconds(config, named(config)) == pytest.approx((6 * active * tokens + scores) / (8 * 989.5e12))
    assert estimate(tiny(), SHAPE).step is None
    adapted = job(QWEN_30B, "learner.lora.rank=8", "learner.lora.targets=attention")
    lora = 6 * 48 * 8 * 2 * (2048 + 4096 + 2048 + 512)  # inputs and outputs of queries and output, keys and values
    assert floor_seconds(adapted, named(adapted)) * 8 * 989.5e12 == pytest.approx((4 * active + lora) * tokens + scores)


def test_a_job_that_leaves_less_than_a_step_is_noted() -> None:
    usual = estimate(config := job(QWEN_30B), named(config))
    ends = usual.step.seconds
    for seconds, found in ((math.ceil(ends), []), (math.ceil(ends) - 1, [f"a step takes {ends:,.0f} s"])):
        config = job(QWEN_30B, f"slurm.signal_seconds={seconds}")
        warnings = estimate(config, named(config)).warnings()
        assert [warning.partition(", more than")[0] for warning in warnings] == found


@pytest.mark.parametrize("key", [*SpeedsSection.model_fields, *LINK_SPEEDS])
def test_each_speed_acts(key: str, at_speeds: Callable[..., str]) -> None:
    floor = (QWEN_30B, "slurm.speeds.gpu=null")
    shared = (QWEN_235B, "weights.transport=file")
    runs = ((QWEN_235B,), floor, (QWEN_30B, "weights.transport=auto"), shared)

    def seconds(*more: str) -> list[tuple[float, ...]]:
        found = [estimate(config := job(*run, *more), named(config)) for run in runs]
        return [(one.push.seconds, one.step.seconds if one.step else 0) for one in found]

    if key in LINK_SPEEDS:
        assert seconds(at_speeds(**{key: 1})) != seconds(at_speeds())
    else:
        assert seconds(f"slurm.speeds.{key}={'h20' if key == 'gpu' else 1}") != seconds()


def test_plans_and_layouts_that_do_not_fit_are_refused_as_the_learners() -> None:
    with pytest.raises(ConfigError, match="learner: ep = 3 does not divide"):
        push_cost(tiny("learner.ep=3"), SHAPE)


# What the bytes of a push cross, and where servers find files of weights.
ONE_NODE = "a node's loopback, to the learner rank beside each of the servers' ranks"


@pytest.mark.parametrize(
    ("keys", "route"),
    [
        (("rollout=vllm",), "a file in /dev/shm, on one node"),
        (("rollout=vllm", "weights.folder=/fast"), "a node's loopback and then through a file in /fast, on one node"),
        (
            ("rollout=vllm", "rollout.server.addresses=http://localhost:1,http://127.0.0.1:2"),
            "a file in /dev/shm, on one node",
        ),
        (
            ("rollout=vllm", "slurm.nodes=2"),  # the server is on the first
            "a node's loopback and the network and then through a file in /dev/shm, on one node",
        ),
        (
            ("rollout=vllm", "slurm.nodes=2", "rollout.server.replicas=2", "weights.folder=/dev/shm/x"),
            "a node's loopback and the network and then through a file in /dev/shm/x on each of 2 nodes",
        ),
        (("rollout=vllm", "weights.transport=direct", "run.launcher=local"), ONE_NODE),
        (("rollout=vllm", "weights.transport=direct", "slurm.engines.nodes=1"), "the network"),
        (
            ("rollout=vllm", "weights.transport=direct", "slurm.nodes=2", "rollout.server.replicas=2"),
            "a node's loopback and the network, to the learner rank beside each of the servers' ranks",
        ),
        (("slurm.nodes=2",), "a node's loopback and the network"),
        (("learner.device=cuda", "slurm.gpus_per_node=2", "weights.transport=direct"), "NVLink"),
    ],
)
def test_the_route_says_what_bytes_cross(keys: Sequence[str], route: str) -> None:
    found = find_route(tiny(*keys))
    assert found.describe() == route
    assert not found.shared


@pytest.mark.parametrize(
    ("addresses", "folder"),
    [
        ("http://10.0.0.7:8000", None),
        ("http://localhost:1,http://node7:8000", None),
        ("http://[::1]:1,http://127.0.0.1:2", NODE_MEMORY),
    ],
)
def test_servers_by_address_find_their_weights_in_the_runs_folder(addresses: str, folder: Path | None) -> None:
    """They do not see this machine's /dev/shm."""
    config = tiny("rollout=sglang", f"rollout.server.addresses={addresses}")
    assert weights_folder(config) == folder
    assert file_writer_ranks(config) == [range(2 if folder else 1)]


def test_a_run_on_this_machine_has_its_file_here() -> None:
    assert not find_route(load_config("tiny_cpu", ["rollout=vllm", "weights.transport=file"])).shared
    assert not find_route(tiny("rollout=vllm", "weights.folder=/dev/shm/x")).shared


# What a plan, and the usual broadcast, cost over given links.
HF = Layout(table=HF_QWEN3_MOE, shape=SMALL_MOE).local_shapes(0)
MODEL = sum(prod(shape) for shape in HF.values())
EXPERTS = sum(prod(shape) for name, shape in HF.items() if ".experts." in name)
BYTES, LINKS = 2, Links(nic=100.0, nvlink=1000.0, per_node=2)


def costs(dims: ParallelDims, engines: int) -> tuple[Cost, Cost]:
    """Ours and the usual way, into full copies in processes of their own behind the learner's."""
    learner = Layout(table=MEGATRON_QWEN3_MOE, shape=SMALL_MOE, dims=dims)
    target = Layout(table=HF_QWEN3_MOE, shape=SMALL_MOE, dims=ParallelDims(dp=engines))
    placement = {rank: dims.world_size + rank for rank in range(engines)}
    moves = plan(learner, target, placement=placement)
    return (plan_cost(moves, BYTES, LINKS), broadcast_cost(learner, placement.values(), BYTES, LINKS))


def test_two_replicas_feed_two_engines_at_the_speed_of_a_port() -> None:
    ours, usual = costs(ParallelDims(dp=2), 2)
    assert (ours.bytes_within_nodes, ours.bytes_across_nodes) == (0, 2 * MODEL * BYTES)
    assert ours.received == {2: MODEL * BYTES, 3: MODEL * BYTES}
    assert max(ours.sent.values()) <= 1.05 * MODEL * BYTES
    assert ours.bound == max(ours.sent.values()) / LINKS.nic
    assert (usual.bytes_within_nodes, usual.bytes_across_nodes) == (
        MODEL * BYTES,
        MODEL * BYTES,
    )  # one copy enters the node, one is passed on
    assert usual.expected == usual.bound == MODEL * BYTES / LINKS.nic


def test_a_gather_costs_what_each_rank_lacks() -> None:
    _, usual = costs(ParallelDims(ep=2, dp=2), 1)
    assert usual.bytes_within_nodes == EXPERTS * BYTES  # half of the experts into each of two ranks of one node
    gather, push = EXPERTS / 2 * BYTES / LINKS.nvlink, MODEL * BYTES / LINKS.nic
    assert (usual.bound, usual.expected) == pytest.approx((push, gather + push))
    _, usual = costs(ParallelDims(ep=4, dp=4), 1)
    near, far = EXPERTS // 4, EXPERTS // 2  # a node has half of the experts, a rank a quarter
    assert (usual.bytes_within_nodes, usual.bytes_across_nodes) == (4 * near * BYTES, (4 * far + MODEL) * BYTES)
    assert usual.received[0] == (near + far) * BYTES
    gather = max(near * BYTES / LINKS.nvlink, far * BYTES / LINKS.nic)
    assert usual.expected == pytest.approx(gather + MODEL * BYTES / LINKS.nic)


def test_the_expected_time_counts_waiting_in_rounds() -> None:
    ours, _ = costs(ParallelDims(pp=2), 2)
    first, second = (ours.sent[rank] / 2 / LINKS.nic for rank in (0, 1))
    assert (first + second) * LINKS.nic == MODEL * BYTES
    # rounds: 0 to 2 and 1 to 3; then 0 to 3 and 1 to 2, where each waits for the larger half of the model
    assert ours.expected == pytest.approx(2 * max(first, second))
    assert ours.bound == pytest.approx(max(2 * first, 2 * second, first + second))


def test_engines_inside_the_node_use_its_links() -> None:
    learner = Layout(table=MEGATRON_QWEN3_MOE, shape=SMALL_MOE, dims=ParallelDims(ep=2, dp=2))
    moves = plan(learner, Layout(table=HF_QWEN3_MOE, shape=SMALL_MOE, dims=ParallelDims(dp=2)))
    ours = plan_cost(moves, BYTES, LINKS)
    assert (ours.bytes_within_nodes, ours.bytes_across_nodes) == (EXPERTS * BYTES, 0)
    assert ours.expected == ours.bound == pytest.approx(EXPERTS / 2 * BYTES / LINKS.nvlink)


def test_sizes_that_would_be_printed_as_0_are_left_out() -> None:
    lines = list(estimate(tiny(), SHAPE).lines())
    assert lines[0].endswith(", or a checkpoint: less than 0.1 GB")
    assert not [line for line in lines if "0.0 GB" in line]
