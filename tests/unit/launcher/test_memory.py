"""What GPUs must hold, also beside servers, and what a rank says of a full one: published sizes and closed forms."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from launcher.preflight.sizes import size_problems
from launcher.wire import Setup
from launcher.worker.models import remember, with_memory_notes
from launcher.worker.process import _machines
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import GB, ConfigError, gigabytes
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape, Rope
from rl_megatron.placement.names import LEARNER
from rl_megatron.placement.ranks import make_placement, placeholder_nodes
from rl_megatron.placement.seats import gpus_on_learner_nodes, local_server_placements, server_placements
from rl_megatron.weights.layouts.families import megatron_layout
from rl_megatron.weights.layouts.learner import elements, learner_layout
from tests.unit.launcher.commands import status_of
from tools.planner.memory import (
    CHANGES,
    Footprint,
    check_memory,
    footprints,
    fullest,
    host_bytes,
    pinned,
    server_window,
)

CONF = Path(__file__).parents[3] / "conf"
RECIPES = {  # name: GPUs of the learner, and of servers that have their own
    "qwen3_30b_a3b": (8, 0),
    "qwen3_30b_a3b_80gb": (8, 0),
    "qwen3_30b_a3b_async": (8, 8),
    "qwen3_235b_a22b": (128, 0),
    "qwen3_235b_a22b_async": (64, 64),
    "deepseek_v3": (320, 0),
    "deepseek_v3_async": (256, 256),
    "kimi_k2": (480, 0),
    "kimi_k2_async": (512, 512),
}
LARGE = Path(__file__).parents[2] / "large"  # layouts of large models whose numbers tests know, unlike recipes
QWEN_30B = str(LARGE / "qwen3_30b_a3b.yaml")
QWEN_80GB = str(LARGE / "qwen3_30b_a3b_80gb.yaml")
QWEN_APART = str(LARGE / "qwen3_30b_a3b_disaggregated.yaml")
QWEN_235B = str(LARGE / "qwen3_235b_a22b.yaml")
QWEN_235B_SHARED = str(LARGE / "qwen3_235b_a22b_colocated.yaml")
DEEPSEEK = str(LARGE / "deepseek_v3.yaml")
DEEPSEEK_SHARED = str(LARGE / "deepseek_v3_colocated.yaml")
KIMI = str(LARGE / "kimi_k2.yaml")
QWEN3 = {  # the fields of the published config.json that its reader wants
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def recipe(name: str, *keys: str) -> tuple[RunConfig, ModelShape]:
    config = load_config(name, ["model.path=/models/given", *keys])
    return config, NAMED[str(config.model.name)]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("deepseek-v3", 671_026_419_200 - 58 * 256),  # without its routers' biases, which are buffers
        ("kimi-k2", 1_026_408_232_448 - 60 * 384),
    ],
)
def test_parameters_are_as_many_as_published(name: str, published: int) -> None:
    assert elements(megatron_layout(NAMED[name]), 0).both == published


def test_qwen3_has_the_parameters_of_its_closed_form() -> None:
    s = NAMED["qwen3-30b-a3b"]
    attention = s.hidden_size * s.head_dim * (2 * s.num_heads + 2 * s.num_kv_heads) + 2 * s.head_dim
    expert = 3 * s.hidden_size * s.expert_width
    layer = attention + 2 * s.hidden_size + s.num_experts * (expert + s.hidden_size)
    found = elements(megatron_layout(s), 0)
    assert found.both == 2 * s.vocab_size * s.hidden_size + s.num_layers * layer + s.hidden_size
    assert found.experts == s.num_layers * s.num_experts * expert


def test_sizes_that_differ_are_told_apart() -> None:
    assert gigabytes(0, 61.07e9) == ["0.0 GB", "61.1 GB"]
    assert gigabytes(1.2e5, 6.7e4) == ["0.00012 GB", "0.00007 GB"]
    assert gigabytes(80.04e9, 80e9) == ["80.04 GB", "80.00 GB"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fills_its_gpus_and_no_more(name: str) -> None:
    config, shape = recipe(name)
    d, slurm = config.learner.dims, config.slurm
    learner, engines = RECIPES[name]
    assert d.world_size == learner == slurm.nodes * slurm.gpus_per_node
    assert engines == slurm.engines.nodes * slurm.gpus_per_node
    assert slurm.gpus_per_node % d.tp == 0
    server = config.rollout.server
    assert server.count * server.ranks == (engines or learner)  # every GPU samples, and each for one server
    assert slurm.gpu_memory_gb == (141 if name == "qwen3_30b_a3b" else 80)
    layout = learner_layout(config, shape)  # heads, kv heads, experts, vocabulary and layers divide
    assert sum(layout.stages or (shape.num_layers,)) == shape.num_layers
    most = check_memory(config, shape)
    assert most is not None
    assert 0.4 * slurm.gpu_memory_gb * GB < most.total < slurm.gpu_memory_gb * GB  # type: ignore[operator]
    assert {term: held for term, held in most.terms.items() if held < 0} == {}


@pytest.mark.parametrize("name", RECIPES)
def test_the_table_of_recipes_says_what_their_fullest_gpu_holds(name: str) -> None:
    page = (CONF.parent / "docs" / "cluster.md").read_text(encoding="utf-8")
    (said,) = re.findall(rf"^\| `{name}` \|.* (\d+) GB \|$", page, re.M)
    assert int(said) == round(fullest(*recipe(name)).total / GB)


@pytest.mark.parametrize("name", RECIPES)
def test_all_ranks_together_hold_the_model_once_for_each_copy(name: str) -> None:
    config, shape = recipe(name)
    d, layout = config.learner.dims, learner_layout(config, shape)
    whole, parts = elements(megatron_layout(shape), 0), [elements(layout, stage) for stage in range(d.pp)]
    assert sum(part.experts for part in parts) * d.ep * d.etp == whole.experts
    cut = sum(part.dense for part in parts) * d.tp
    assert whole.dense <= cut < 1.01 * d.tp * whole.dense  # norms and routers are whole on each rank
    state = [m.terms["optimizer"] for m in footprints(config, shape) if m.rank % (d.tp * d.cp * d.dp) == 0]
    each = 12 - 8 * config.learner.offload.optimizer  # bytes that stay on GPUs: the moments may not
    assert sum(state) * d.tp * d.cp * d.dp == pytest.approx(each * (whole.experts + cut))  # once, but what tp repeats


@pytest.mark.parametrize(
    ("name", "without", "keys"),
    [
        (
            QWEN_80GB,
            "rollout.server.colocated=false rollout.server.memory_fraction=0.35 learner.offload.while_sampling=null",
            "learner.dp=4 learner.ep=16 slurm.nodes=2 rollout.server.replicas=2",
        ),
        (
            QWEN_APART,
            "learner.offload.optimizer=0 learner.layers=auto",
            "learner.tp=4 learner.pp=1 learner.ep=8 learner.dp=2 slurm.gpus_per_node=8 rollout.server.tp=8",
        ),
    ],
)
def test_what_8_gpus_hold_only_with_moments_on_the_host_16_hold_without(name: str, without: str, keys: str) -> None:
    with pytest.raises(ConfigError, match="Largest: optimizer"):
        check_memory(*recipe(name, *without.split()))
    config, shape = recipe(name, *without.split(), *keys.split())
    assert check_memory(config, shape) is not None
    assert (config.slurm.nodes + config.slurm.engines.nodes) * config.slurm.gpus_per_node == 16


def test_a_machine_of_8_gpus_has_6_for_the_learner_and_2_for_its_server() -> None:
    config, _ = recipe(QWEN_APART)
    assert [seat.gpus for seat in local_server_placements(config, 8)] == [(6, 7)]


def test_each_term_grows_with_what_its_advice_names() -> None:
    config, shape = recipe(QWEN_235B)
    was, last = fullest(config, shape).terms, footprints(config, shape)[-1].terms

    def now(*keys: str) -> Footprint:
        return fullest(*recipe(QWEN_235B, *keys))

    assert now("learner.offload.optimizer=0.5").terms["optimizer"] < was["optimizer"]
    assert now("learner.recompute.uniform=null").terms["activations"] > 5 * was["activations"]
    gradients = 2 * 2 * 4096 * 1536 * 128 / 8  # of the gate, up and down of a rank's experts in a layer
    half = now("learner.max_tokens_per_micro_batch=8192").terms["activations"]
    assert was["activations"] / 2 < half < was["activations"] / 2 + gradients  # which do not grow with tokens
    assert now("algorithm.kl.coefficient=0.1").terms["reference"] == was["parameters"]
    follows = now("algorithm.kl.coefficient=0.1", "algorithm.kl.reference_update_rate=0.1")
    assert follows.terms["reference"] == 2 * was["parameters"]  # in float32, beside parameters in bfloat16
    assert now("algorithm=ppo").terms["critic"] == was["parameters"] + was["gradients"] + was["optimizer"]
    assert now("weights.bucket_mb=512").terms["weight push"] == 2 * was["weight push"]
    config, shape = recipe(QWEN_235B, "learner.max_tokens_per_micro_batch=8192")
    assert last["logits"] / 2 <= footprints(config, shape)[-1].terms["logits"] < last["logits"]
    assert was.keys() == CHANGES.keys()


def test_a_separate_critic_and_reference_leave_the_learners_gpus_and_fill_their_own() -> None:
    keys = ("algorithm=ppo", "algorithm.kl.coefficient=0.1", "rollout.server.memory_fraction=0.3")
    beside = footprints(*recipe(QWEN_30B, *keys))
    apart = footprints(*recipe(QWEN_30B, *keys, "roles.critic=separate", "roles.reference=separate"))
    bare = footprints(*recipe(QWEN_30B, keys[-1]))
    by_role = {role: [m.terms for m in apart if m.role == role] for role in ("learner", "critic", "reference")}
    assert by_role["learner"] == [m.terms for m in bare]
    (critic,), (reference,) = by_role["critic"], by_role["reference"]
    trained = ("parameters", "gradients", "optimizer")
    assert sum(critic[term] for term in trained) == beside[0].terms["critic"]
    assert reference["parameters"] == beside[0].terms["reference"]
    assert {term for term in CHANGES if reference[term]} == {"parameters", "activations", "logits", "reserved"}
    assert critic["logits"] == critic["engine"] == critic["weight push"] == 0
    assert reference["activations"] < critic["activations"]


def test_a_role_in_a_layout_of_its_own_needs_what_it_would_beside_a_learner_of_that_layout() -> None:
    keys = ("algorithm=ppo", "algorithm.kl.coefficient=0.1", "rollout.server.memory_fraction=0.3")
    keys += ("roles.critic=separate", "roles.reference=separate", "slurm.nodes=2")
    layouts = {"critic": {"pp": 4, "ep": 4, "dp": 4}, "reference": {"tp": 2, "ep": 8, "dp": 8}}
    plain = {"tp": 1, "pp": 1, "ep": 1, "cp": 1}  # what keys of a layout are that are not given
    own = [f"roles.layouts.{role}.{key}={value}" for role, sizes in layouts.items() for key, value in sizes.items()]
    mixed = footprints(*recipe(QWEN_30B, *keys, "learner.dp=16", *own))
    learner = footprints(*recipe(QWEN_30B, *keys, "learner.dp=16"))
    assert [m for m in mixed if m.role == "learner"] == [m for m in learner if m.role == "learner"]
    for role, sizes in layouts.items():
        alike = footprints(*recipe(QWEN_30B, *keys, *(f"learner.{k}={n}" for k, n in (plain | sizes).items())))
        found = [m for m in mixed if m.role == role]
        expected = [(m.rank, m.stage, m.terms) for m in alike if m.role == role]
        assert [(m.rank, m.stage, m.terms) for m in found] == expected
        assert len(found) == sizes.get("pp", 1)


def test_terms_by_hand() -> None:
    config, shape = recipe(QWEN_30B, "algorithm=ppo", "rollout.server.memory_fraction=0.3")
    (policy, *_) = (m.terms for m in footprints(config, shape))
    lacks = 151936 // 4 * 2048 - (2048 + 1)  # tp 4; a row of weights and a bias
    trained = sum(policy[term] for term in ("parameters", "gradients", "optimizer"))
    assert trained - policy["critic"] == lacks * (2 + 4 + 12 / 2)  # dp 2 shares the optimizer's state
    keys = ("learner.gradient_dtype=bfloat16", "learner.max_tokens_per_micro_batch=8192")
    terms = fullest(*recipe(QWEN_30B, *keys)).terms
    copies = terms["optimizer"] / 12 * 4  # of the parameters that the rank steps
    assert terms["step"] == pytest.approx(copies - terms["activations"] - terms["logits"])
    assert fullest(*recipe(QWEN_30B, keys[1])).terms["step"] == 0
    assert [pinned(size) for size in (0, 1, 4096, 4097, 3 * 2**29)] == [0, 1, 4096, 8192, 2**31]
    config, shape = recipe(QWEN_APART)
    # Of an expert 2 * 768 * 2048 and 768 * 2048 numbers: 12 and 6 MiB in float32, for which 16 and 8 are pinned.
    whole = shape.num_layers * shape.num_experts * 3 * 768 * 2048
    assert host_bytes(config, shape) == pytest.approx(whole * (8 + 2 * 4 * 16 / 12), rel=0.1)  # other weights are few
    tokens, vocab, chunk, hidden = 16384, 129280 // 4, 1024, 7168
    logits, chunks, states = 2 * 2 * tokens * vocab, 2 * 4 * chunk * vocab, 2 * 2 * tokens * hidden
    for layers, of_weight in (("auto", 2 * vocab * hidden), ("torch", 0)):  # torch frees logits before that
        config, shape = recipe(DEEPSEEK, f"learner.layers={layers}")
        assert footprints(config, shape)[-1].terms["logits"] == logits + chunks + states + of_weight
    assert footprints(config, shape)[0].terms["logits"] == 0


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (QWEN_30B, ("slurm.gpu_memory_gb=80",), r"rank 0 needs 96\.6 GB .* Largest: optimizer; .* raise slurm\."),
        (QWEN_30B, ("rollout.server.memory_fraction=0.05",), r"memory_fraction=0\.05 .* less than the 7\.6 GB"),
        (
            QWEN_235B,
            ("slurm.engines.nodes=0",),
            r"Largest: engine; let .* turns \(rollout\.server\.co.*=optimizer\), lower rollout\.server\..* scale M",
        ),
        (QWEN_235B, ("rollout.server.tp=4",), r"memory_fraction=0\.9 .* less than the 117\.5 GB"),
        (
            QWEN_235B,
            ("rollout=vllm", "rollout.server.memory_fraction=0.98"),
            r"vllm takes 0\.98 of slurm\.gpu_memory_gb=80 .* needs 2\.2 GB more to receive layers; lower the fraction",
        ),
        (QWEN_235B, ("learner.recompute.uniform=null",), r"Largest: activations; set learner\.recompute\.uniform"),
    ],
)
def test_what_does_not_fit_is_told_with_the_key_to_change(name: str, keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_memory(*recipe(name, *keys))


def test_learner_and_servers_that_take_turns_are_counted_apart() -> None:
    """By hand: 8 GPUs of 141 GB, half of each an engine's; what has no copy on the host is gradients."""
    turns = ("rollout.server.colocated=true", "rollout.server.memory_fraction=0.5", "weights.transport=file")
    apart = fullest(*recipe(QWEN_30B)).terms
    weights, state = apart["parameters"], apart["optimizer"]
    assert apart["gradients"] == 2 * weights
    room, pushed = 141 * GB, apart["reserved"] + 4 * 256 * 2**20
    for level, stays in (("null", 3 * weights + state), ("gradients", weights + state), ("optimizer", weights)):
        config, shape = recipe(QWEN_30B, *turns, f"learner.offload.while_sampling={level}")
        sums = {found.phase: found.total for found in footprints(config, shape) if found.rank == 0}
        assert sums["sampling"] == pytest.approx(stays + 0.5 * room + pushed)
        busy = apart["activations"] + apart["logits"]
        assert sums["training"] == pytest.approx(3 * weights + state + busy + 2e9 + pushed)  # 2 GB: asleep
        slabs = (state // 2**30 + 1) * 2**30  # state is 42.7 GiB: the last slab is rounded up to 1 GiB
        assert host_bytes(config, shape) == (8 * slabs if level == "optimizer" else 0)
        float8 = footprints(*recipe(QWEN_30B, *turns, f"learner.offload.while_sampling={level}", "learner.fp8=mxfp8"))
        (copies,) = (one.terms["fp8 weights"] for one in float8 if one.rank == 0 and one.phase == "sampling")
        assert (copies > 0) is (level == "null")
    assert recipe_fits(*turns, "rollout.server.memory_fraction=0.85", "learner.offload.while_sampling=optimizer")
    with pytest.raises(ConfigError, match=r"GB while servers sample \(.* or set learner\.offload\.while_sampling=opt"):
        recipe_fits(*turns, "rollout.server.memory_fraction=0.85", "learner.offload.while_sampling=gradients")


def recipe_fits(*keys: str) -> bool:
    return check_memory(*recipe(QWEN_30B, *keys)) is not None


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ((), 0.0),  # SGLang receives in place
        (("rollout=vllm", "weights.transport=file"), 0.0),
        (("rollout=vllm",), 3 / 8),
        (("rollout=vllm", "rollout.server.tp=4", "rollout.server.pp=2"), 3 / 4),
        (("rollout=vllm", "rollout.server.tp=4", "rollout.server.dp=2", "rollout.server.ep=8"), None),
    ],
)
def test_layers_arrive_in_a_few_times_their_share_of_a_gpu(keys: tuple[str, ...], window: float | None) -> None:
    """Qwen3-235B by hand: q, o of 8192, k, v of 512, 128 experts of 3 * 1536, a router, norms; embedding and head."""
    config, shape = recipe(QWEN_235B, *keys)
    experts = 2 * 128 * 3 * 4096 * 1536
    dense = 2 * (4096 * (2 * 8192 + 2 * 512 + 128) + 2 * 4096 + 2 * 128)
    outside = 2 * (2 * 151936 * 4096 + 4096)
    if window is None:  # attention is repeated on both dp replicas, experts are not
        assert server_window(config, shape) == 3 * experts / 8 + (3 * dense + outside) / 4
    else:
        assert server_window(config, shape) == window * (experts + dense) + window / 3 * outside


def folder_of(tmp_path: Path, **changes: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | changes))
    return tmp_path


def test_a_degree_that_does_not_fit_is_told_as_the_learners() -> None:
    with pytest.raises(ConfigError, match=r"^learner: ep = 3 does not divide 128 experts; lower ep$"):
        learner_layout(load_config("tiny_cpu", ["learner.ep=3"]), NAMED["qwen3-30b-a3b"])
    config, shape = recipe(QWEN_30B, "slurm.gpu_memory_gb=null")
    assert check_memory(config, replace(shape, num_layers=480)) is None


def test_plan_shows_a_column_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("plan", "--config", DEEPSEEK) == 0
    said = capsys.readouterr().out
    assert "deepseek_v3.yaml: GB on the fullest GPU of each pipeline stage, 256 GPUs in all" in said
    together = next(line for line in said.splitlines() if "together" in line)
    config, shape = recipe(DEEPSEEK)
    assert len(together.split("│")) == 2 + 1 + config.learner.dims.pp
    assert f"{fullest(config, shape).total / GB:.1f}" in together
    assert "It fits in slurm.gpu_memory_gb=80." in said


def test_plan_says_whose_layers_it_counts_and_what_the_others_need(capsys: pytest.CaptureFixture[str]) -> None:
    kept = ("learner.recompute.uniform=null", "slurm.gpu_memory_gb=1000")

    def said(*keys: str) -> str:
        status_of("plan", "--config", QWEN_30B, *kept, *keys)
        return capsys.readouterr().out

    here, torchs = said(), said("learner.layers=torch")
    most = re.search(r"TransformerEngine's layers.* with torch's the fullest GPU needs ([\d.]+) GB", here)
    assert most is not None
    (together,) = (re.findall(r"[\d.]+", line) for line in torchs.splitlines() if "together" in line)
    assert most[1] == max(together, key=float)
    assert most[1] not in re.findall(r"together .*", here)[0]
    assert "The activations are those of torch's layers." in torchs


SHAPE = NAMED["qwen3-30b-a3b"]


def told(config: RunConfig, shape: ModelShape) -> str:
    return "\n".join(found.text for found in size_problems(config, shape))


def test_what_the_learner_cannot_build_is_told_before_a_process_starts() -> None:
    config = RunConfig()
    assert told(config, SHAPE) == ""
    assert told(config, replace(SHAPE, rope=Rope(kind="yarn"))) == ""
    assert told(config, replace(SHAPE, family="mixtral", qk_norm=None)) == ""
    biased = replace(SHAPE, expert_bias=True)
    cut = RunConfig.model_validate({"learner": {"tp": 2, "etp": 2}, "rollout": {"engine": "vllm"}})
    assert told(cut, SHAPE) == ""
    assert "learner.etp=2: experts with biases cannot be sharded" in told(cut, biased)
    few = replace(SHAPE, router=replace(SHAPE.router, score="sigmoid"), normalize_top_k=False)
    assert "a sigmoid router with num_experts_per_tok=8 and norm_topk_prob=False" in told(RunConfig(), few)
    one = replace(SHAPE, experts_per_token=1)
    assert "num_experts_per_tok=1 of 128 experts with norm_topk_prob=True" in told(RunConfig(), one)
    assert told(RunConfig(), replace(one, normalize_top_k=False)) == ""
    assert told(RunConfig(), replace(one, num_experts=1)) == ""


@pytest.mark.parametrize("replay", ["r2", "r3"])
def test_routes_of_a_model_without_experts_are_refused(replay: str) -> None:
    config = RunConfig.model_validate({"algorithm": {"routing_replay": replay}})
    assert told(config, SHAPE) == ""
    dense = replace(SHAPE, family="qwen3", num_experts=0, experts_per_token=0, expert_width=0, dense_width=4096)
    assert re.search(rf"routing_replay={replay} with shape.family=qwen3: it has no experts.*=off", told(config, dense))


def test_flips_and_noise_of_routes_that_a_model_has_not_are_refused() -> None:
    dense = replace(SHAPE, family="qwen3", num_experts=0, experts_per_token=0, expert_width=0, dense_width=4096)
    one = replace(SHAPE, num_experts=1, experts_per_token=1)
    flips = RunConfig.model_validate({"train": {"route_flips": True}})
    assert "train.route_flips=true with shape.family=qwen3: it has no experts" in told(flips, dense)
    noise = RunConfig.model_validate({"rollout": {"router_noise": 0.25}})
    assert "rollout.router_noise=0.25 with shape.num_experts=1: it changes nothing; leave it out" in told(noise, one)
    assert told(noise, SHAPE) == told(flips, SHAPE) == told(flips, one) == ""


def test_longer_sequences_than_an_indexer_chooses_whole_are_refused_where_ranks_share_them() -> None:
    shape, sizes = NAMED["deepseek-v3.2"], {"max_prompt_tokens": 49, "max_new_tokens": 2000}
    said = "rollout.max_prompt_tokens=49 + rollout.max_new_tokens=2000 = 2049 is more than index_topk=2048"
    said += " of model_type='deepseek_v32': with learner.cp=2 ranks share a sequence"
    sets = {"eval": {"sets": {"long": {"max_new_tokens": 9000}}}}
    for engine in ("local", "vllm"):
        rollout = {**sizes, "engine": engine}
        assert "index_topk" not in told(RunConfig.model_validate({"rollout": rollout, **sets}), shape)
        cut = {"learner": {"cp": 2, "dp": 1}, **sets}
        assert said in told(RunConfig.model_validate({**cut, "rollout": rollout}), shape)
        few = RunConfig.model_validate({**cut, "rollout": {**rollout, "max_prompt_tokens": 48}})
        assert "index_topk" not in told(few, shape)


def test_a_pipeline_chunk_that_begins_with_keys_of_another_is_refused_for_long_sequences() -> None:
    """As GLM-5.2's layers, of which one in four has an indexer."""
    shape = replace(NAMED["glm-5"], indexer=replace(NAMED["glm-5"].indexer, layers=(0, 1, 2, *range(6, 78, 4))))
    long = {"max_prompt_tokens": 49, "max_new_tokens": 5000, "engine": "vllm"}
    said = "index_topk=2048 of model_type='glm_moe_dsa': layer 39, the first of a pipeline chunk, takes the keys"
    for stages, refused in ((None, True), ("38+40", False), ("42+36", False), ("40+38", True)):
        learner = {"pp": 2, "stage_layers": stages}
        found = told(RunConfig.model_validate({"learner": learner, "rollout": long}), shape)
        assert ("index_topk" in found) is refused, stages
        assert stages is not None or said in found
    few = RunConfig.model_validate({"learner": {"pp": 2}, "rollout": {"max_prompt_tokens": 48, "max_new_tokens": 2000}})
    assert "index_topk" not in told(few, shape)


# What a GPU must hold that the learner shares with servers, and whether it shares one: by closed forms.
@pytest.mark.parametrize(
    ("keys", "servers"),
    [
        (("rollout.server.replicas=2",), [2] * 8),
        (("rollout.server.tp=2", "rollout.server.replicas=6"), [2, 2, 2, 2, 1, 1, 1, 1]),
        (("rollout.server.replicas=3",), [3] * 8),
        (("rollout.server.replicas=4", "slurm.nodes=2", "learner.dp=4"), [2] * 16),
        (("slurm.engines.nodes=1", "weights.transport=direct", "rollout.server.tp=4"), [0]),
    ],
)
def test_every_server_on_a_gpu_takes_its_part_of_it(keys: tuple[str, ...], servers: list[int]) -> None:
    """In turns each keeps 2 GB while the learner trains; the fullest GPU has the most servers."""
    job, share = ("run.launcher=slurm", "weights.transport=file", *keys), 0.1
    config, shape = recipe(QWEN_30B, *job, f"rollout.server.memory_fraction={share}")
    found = footprints(config, shape)
    assert [m.terms["engine"] for m in found] == pytest.approx([n * share * 141 * GB for n in servers])
    assert fullest(config, shape).terms["engine"] == max(m.terms["engine"] for m in found)
    if config.slurm.engines.nodes:
        return
    turns = ("rollout.server.colocated=true", f"rollout.server.memory_fraction={share}")
    training = [m for m in footprints(*recipe(QWEN_30B, *job, *turns)) if m.phase == "training"]
    assert [m.terms["engine"] for m in training] == [n * 2e9 for n in servers]


def test_servers_that_leave_the_learner_nothing_of_a_gpu_are_refused_whatever_its_size() -> None:
    keys = ("rollout.server.replicas=4", "slurm.gpu_memory_gb=null")
    with pytest.raises(ConfigError, match=r"memory_fraction=0\.25 for each of 4 servers on a GPU .* nothing; lower it"):
        check_memory(*recipe(QWEN_30B, *keys, "rollout.server.memory_fraction=0.25"))
    assert check_memory(*recipe(QWEN_30B, *keys, "rollout.server.memory_fraction=0.24")) is None


@pytest.mark.parametrize(("replicas", "here", "servers"), [(8, 8, 1), (16, 8, 2), (2, 6, 0), (2, 8, 0), (8, None, 0)])
def test_a_server_on_a_gpu_of_a_separate_role_takes_its_part(replicas: int, here: int | None, servers: int) -> None:
    """The critic's two ranks are the fullest, on GPUs 4 and 5 of one machine. In turns they keep all but
    activations there."""
    keys = ("algorithm=ppo", "roles.critic=separate", "learner.dp=4", "learner.ep=4", "learner.tp=1", "learner.pp=1")
    keys += ("roles.layouts.critic.dp=2", "roles.layouts.critic.ep=2", "rollout.server.tp=1", "weights.transport=file")
    keys += ("run.launcher=local", "slurm.gpu_memory_gb=500", f"rollout.server.replicas={replicas}")
    config, shape = recipe(QWEN_30B, *keys, "rollout.server.memory_fraction=0.2")
    most = fullest(config, shape, here)
    assert (most.role, most.terms["engine"]) == ("critic", servers * 0.2 * 500 * GB)
    turns = recipe(QWEN_30B, *keys, "rollout.server.memory_fraction=0.2", "rollout.server.colocated=true")
    apart = fullest(*turns, here)
    assert (apart.phase, apart.terms["engine"]) == ("sampling" if servers else "", most.terms["engine"])
    assert most.total - apart.total == (most.terms["activations"] + most.terms["logits"] if servers else 0)
    if servers > 1:
        with pytest.raises(ConfigError, match=r"critic rank 0 needs 516\.\d GB .* Largest: engine; lower rollout"):
            check_memory(config, shape, here)


def test_the_advice_for_the_engine_in_the_learners_processes_lowers_it() -> None:
    keys = ("rollout=local", "run.launcher=slurm")
    with pytest.raises(ConfigError, match="Largest: engine; ") as caught:
        check_memory(*recipe(QWEN_30B, *keys))
    said = str(caught.value).partition("Largest: engine; ")[2]
    assert said == "lower rollout.slots or rollout.max_new_tokens, or take servers (rollout=vllm, sglang)"
    was = fullest(*recipe(QWEN_30B, *keys)).terms["engine"]
    for lower in ("rollout.slots=16", "rollout.max_new_tokens=512", "rollout=vllm"):
        assert fullest(*recipe(QWEN_30B, *keys, lower)).terms["engine"] < 0.6 * was


EIGHT = ("run.launcher=slurm", "learner.device=cuda", "learner.tp=4", "learner.ep=4", "slurm.gpus_per_node=8")
EIGHT += ("rollout=vllm", "rollout.server.tp=2", "rollout.server.memory_fraction=0.3")


def test_a_rank_has_the_gpu_of_its_place_on_its_node(tmp_path: Path) -> None:
    """Also where ranks are fewer than GPUs: servers have each node's GPUs from the first on."""
    keys = (*EIGHT, "slurm.nodes=2", "slurm.ntasks_per_node=4", "learner.dp=2")
    config = load_config("tiny_cpu", [*keys, "rollout.server.replicas=4"])
    nodes = placeholder_nodes(config)[LEARNER]
    placement = make_placement(config, nodes)
    each = {"ranks_per_node": placement.ranks_per_node, "rendezvous": ""}
    setup = Setup(config=config, model_folder=tmp_path, run_folder=tmp_path, **each)
    ranks = {(placement.rank_node(rank), setup.gpu_index(rank)): rank for rank in range(8)}
    assert [gpu for _, gpu in ranks] == [0, 1, 2, 3] * 2
    beside = [[ranks[seat.node, gpu] for gpu in seat.gpus] for seat in server_placements(config, nodes, ())]
    assert beside == gpus_on_learner_nodes(config) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    more = load_config("tiny_cpu", [*keys, "rollout.server.replicas=8"])
    assert gpus_on_learner_nodes(more)[1:4] == [
        [2, 3],
        [12, 13],
        [14, 15],
    ]  # GPUs without a rank are behind the 8 ranks


def test_more_ranks_than_gpus_on_a_node_are_refused() -> None:
    config = load_config("tiny_cpu", [*EIGHT, "slurm.ntasks_per_node=16", "learner.dp=4"])
    with pytest.raises(ConfigError, match=r"ntasks_per_node=16 is more than slurm\.gpus_per_node=8: NCCL .*; lower it"):
        make_placement(config, ("a",))


# What a rank says whose GPU is full, by a stand-in for what CUDA reports.
MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}


def rank_of(folder: Path, *keys: str) -> Setup:
    """Of a Qwen3-30B-A3B on eight GPUs."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = load_config(QWEN_30B, [f"model.path={folder}", *keys])
    return Setup(config=config, model_folder=folder, run_folder=folder / "run", rendezvous="file:///none")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch as on a GPU of 80 GB: it holds 70 GB, of which 61.25 are allocated, and others 8."""
    told = {"is_available": True, "mem_get_info": (2 * GB, 80 * GB), "memory_reserved": 70 * GB}
    told |= {"memory_allocated": 61.25 * GB, "max_memory_allocated": 69 * GB}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda **_: {"segments": [], "device_traces": [[]]})


def notes_of(setup: Setup, rank: int = 3) -> list[str]:
    with pytest.raises(torch.OutOfMemoryError) as found, with_memory_notes(setup, rank):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")
    return list(found.value.__notes__)


@pytest.mark.usefixtures("full")
def test_the_plans_terms_stand_beside_what_is_allocated_and_a_snapshot_is_left(tmp_path: Path) -> None:
    setup = rank_of(tmp_path, "profile.memory=true")
    setup.run_folder.mkdir()
    plan, largest, now, snapshot = notes_of(setup)
    (own,) = {one.total: one for one in footprints(setup.config, NAMED["qwen3-30b-a3b"]) if one.rank == 3}.values()
    terms = ", ".join(f"{name} {size / GB:.3g}" for name, size in own.terms.items() if size)
    assert plan == f"the plan of its GPU, {own.total / GB:.3g} GB: {terms}"
    assert largest.startswith(f"the largest, {own.largest}: ")
    assert now == (
        "now: 61.2 GB allocated of 70.0 that torch holds, 69.0 at most; 8.0 by others and outside of torch, of 80.0"
    )
    path = tmp_path / "run" / "profile" / "out_of_memory_rank-3.pickle"
    assert snapshot == f"a snapshot of what was allocated where, for pytorch.org/memory_viz: {path}"
    assert pickle.loads(path.read_bytes()) == {"segments": [], "device_traces": [[]]}


@pytest.mark.usefixtures("full")
def test_a_folder_that_takes_no_snapshot_and_one_without_a_plan_are_told(tmp_path: Path) -> None:
    setup = rank_of(tmp_path, "profile.memory=true")
    (tmp_path / "run").write_text("a file in its place")
    (tmp_path / "config.json").write_text("{}")
    unplanned, _, unwritten = notes_of(setup)
    assert unplanned.startswith("there is no plan of its GPU beside: ")
    assert unwritten.startswith(f"no snapshot: {tmp_path}/run/profile/")
    assert notes_of(rank_of(tmp_path))[-1].startswith("profile.memory=true writes a snapshot")


NCCL = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.29.7\nLast error:\nCuda failure 2 "


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    ("error", "full_of"),
    [
        (torch.distributed.DistBackendError(f"{NCCL}'out of memory'"), True),
        (torch.distributed.DistBackendError(f"{NCCL}'invalid argument'"), False),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), False),
    ],
)
def test_libraries_that_allocate_beside_torch_fill_a_gpu_too(tmp_path: Path, error: Exception, full_of: bool) -> None:
    """Their errors get the same lines, and are the run's fault like torch's own, not the machine's."""
    with pytest.raises(type(error)) as found, with_memory_notes(rank_of(tmp_path), 3):
        raise error
    notes = getattr(found.value, "__notes__", [])
    assert [note.partition(",")[0] for note in notes[:1]] == ["the plan of its GPU"] * full_of
    assert _machines(error) is not full_of


def test_allocations_are_remembered_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history_impl", lambda *a, **k: given.append((a, k)))
    remember()
    assert given == [(("all",), {"max_entries": 200_000})]


def test_the_plan_has_an_indexers_keys_where_sequences_are_longer_than_its_choice() -> None:
    """Of DeepSeek-V3.2: 128 float32 numbers of each of 61 layers and of each column."""
    shape = NAMED["deepseek-v3.2"]
    assert shape.indexer is not None
    without = replace(shape, indexer=replace(shape.indexer, top_k=10**6))
    for prompt, added in ((48, 0), (49, 61 * 128 * 4 * 2049)):
        keys = [f"rollout.max_prompt_tokens={prompt}", "rollout.max_new_tokens=2000", "model.path=."]
        one, two = (load_config("tiny_cpu", [*keys, f"rollout.slots={slots}"]) for slots in (1, 2))
        row, plain = (fullest(two, m).terms["engine"] - fullest(one, m).terms["engine"] for m in (shape, without))
        assert row - plain == added
