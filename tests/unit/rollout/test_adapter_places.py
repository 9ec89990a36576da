"""What engines are started with for versions of adapters, what they cannot hold, and which runs are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest

from launcher.preflight.sizes import check
from launcher.preflight.subject import Subject
from launcher.servers.engines import SERVERS, adapter_of, adapter_places, engine_problems
from launcher.servers.pool import ServedEngines
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.rollout.servers.adapter import AdapterPlaces
from rl_megatron.scaling.estimates import estimate
from rl_megatron.scaling.pushes import push_cost, served_bytes
from rl_megatron.weights.layouts.families import hf_layout, megatron_layout
from rl_megatron.weights.layouts.lora import hf_adapters, ranks_of_parts
from tests.unit.rollout.test_engine_commands import TWO_NODES
from tests.unit.rollout.test_engine_servers import Words

MOE, CONF = NAMED["qwen3-30b-a3b"], Path(__file__).parents[3] / "conf"
KEYS = ("rollout=vllm", "learner.lora.rank=12", "weights.push=adapters", "train.max_staleness=2")
DENSE = replace(MOE, num_experts=0, family="qwen3")
ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")


def places(*keys: str, shape: ModelShape = MOE) -> AdapterPlaces:
    found = adapter_places(load_config("tiny_cpu", [*KEYS, *keys]), shape)
    assert found is not None
    return found


def words(engine: str, given: AdapterPlaces | None, device: str = "cuda") -> tuple[Mapping[str, str], str]:
    """By option of the command, the words behind it; and all."""
    arguments = (
        SERVERS[engine](MOE).command(replace(TWO_NODES, adapters=given, device=device, nodes=1, node=0)).arguments
    )
    of, last = dict[str, str](), ""
    for word in arguments:
        if word.startswith("--"):
            last, of[word] = word, ""
        elif last:
            of[last] = f"{of[last]} {word}".strip()
    return of, " ".join(arguments)


def test_there_are_places_for_two_versions_more_than_the_greatest_staleness() -> None:
    found = places("learner.lora.targets=attention")
    assert (found.count, found.modules, found.ranks, found.experts) == (4, ATTENTION, {12}, False)
    assert places("learner.lora.expert_rank=3").ranks == {12, 3}
    assert adapter_places(load_config("tiny_cpu", [*KEYS, "weights.push=merged"]), MOE) is None


def test_engines_get_the_options_of_their_places() -> None:
    of, _ = words("vllm", places("learner.lora.targets=attention"))
    assert {of[key] for key in ("--max-loras", "--max-cpu-loras")} == {"4"}
    assert (of["--max-lora-rank"], of["--lora-target-modules"]) == ("16", " ".join(ATTENTION))
    assert "--lora-target-modules" not in words("vllm", places())[0]  # it has all experts of a layer in one module
    command = SERVERS["vllm"](MOE).command(replace(TWO_NODES, adapters=places()))
    assert command.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    of, _ = words("sglang", places("learner.lora.targets=attention"))
    assert (of["--max-loras-per-batch"], of["--max-lora-rank"]) == ("5", "12")  # and requests without any
    assert (of["--lora-target-modules"], of["--load-format"]) == (" ".join(ATTENTION), "safetensors")
    assert "--lora-backend" not in of
    of, _ = words("sglang", places("learner.lora.targets=attention"), "cpu")
    assert of["--lora-backend"] == "torch_native"
    for engine in SERVERS:
        of, text = words(engine, None)
        assert "lora" not in text
        assert of["--load-format"] == "dummy"


@pytest.mark.parametrize(
    ("engine", "keys", "device", "dp", "said"),
    [
        ("vllm", ("learner.lora.rank=600", "learner.lora.targets=attention"), "cuda", 1, "of rank 512 at most"),
        ("vllm", ("learner.lora.targets=attention",), "cpu", 1, "Triton's kernels, which need a GPU; use a dense"),
        ("sglang", (), "cuda", 1, "one rank and one scale .* given are 1, 12"),
        ("sglang", ("learner.lora.expert_rank=12",), "cpu", 1, "kernels for adapters of experts, which need a GPU"),
        ("sglang", ("learner.lora.targets=attention",), "cuda", 2, "set rollout.server.dp=1"),
    ],
)
def test_what_an_engine_has_no_kernel_for_is_told(
    engine: str, keys: tuple[str, ...], device: str, dp: int, said: str
) -> None:
    problem = SERVERS[engine](MOE).adapter_problem(places(*keys), device, dp)
    assert re.search(said, problem)
    shape = DENSE if engine == "vllm" else MOE
    assert not SERVERS[engine](shape).adapter_problem(places("learner.lora.targets=attention"), device, 1)


def test_a_run_on_such_an_engine_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    for engine, said in ((SERVERS["vllm"](MOE), "computes experts by Triton"), (Words(), "Words holds no adapters")):
        with pytest.raises(ConfigError, match=rf"weights\.push=adapters: .*{said}.*; or set weights\.push=merged"):
            ServedEngines(load_config("tiny_cpu", KEYS), engine, tmp_path, tmp_path, MOE)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("learner.lora.targets=attention",), "weights.push=adapters: model_type='qwen3_moe' has experts: wherever"),
        (("rollout=sglang", "learner.lora.expert_rank=3"), "weights.push=adapters: learner.lora: SGLang 0.5.21 compu"),
        (
            ("rollout=sglang", "learner.lora.targets=attention", "rollout.server.dp=2"),
            "weights.push=adapters: rollout.server.dp=2: with attention's replicas SGLang 0.5.21",
        ),
        (
            (
                *("weights.push=merged", "learner.device=cuda", "learner.dtype=bfloat16"),
                "rollout.server.batch_invariant=true",
                "rollout.server.options='--attention-backend X'",
            ),
            "rollout.server.batch_invariant=true with --attention-backend X: vLLM 0.32.0 has no kernel of it",
        ),
        (("weights.push=merged", "rollout.server.options='-q fp8'"), "rollout.server.options has -q, which"),
        (("rollout=sglang", "learner.lora.targets=attention"), None),
        (("weights.push=merged",), None),
    ],
)
def test_a_job_with_such_keys_is_refused_before_it_is_submitted(keys: tuple[str, ...], said: str | None) -> None:
    found = [one.text for one in check(Subject(load_config("tiny_cpu", [*KEYS, *keys]), for_job=True))]
    assert len(found) == (said is not None)
    assert all(text.startswith(str(said)) for text in found)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("weights.push=adapters", "rollout=vllm"), "without learner.lora.rank: the whole model is trained"),
        ((*KEYS, "rollout=local"), "rollout.engine=local: only vllm and sglang hold adapters"),
        ((*KEYS, "rollout.server.colocated=true", "train.max_staleness=0"), "lose the model, which is pushed once"),
        ((*KEYS, "rollout.server.addresses=http://a:1"), "a run starts its servers with places for its adapters"),
        ((*KEYS, "rollout.server.running_requests=abort"), "running_requests=abort: no push pauses a request"),
    ],
)
def test_runs_that_adapters_beside_a_model_do_not_fit_are_refused(keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", keys)


def recipe(*keys: str) -> RunConfig:
    given = ("data.train=a.jsonl", "data.eval=b.jsonl", "model.path=/models/given", "learner.lora.rank=32")
    apart = ("rollout.server.colocated=false", "learner.offload.while_sampling=null", "rollout=vllm")
    fraction = "rollout.server.memory_fraction=0.5"
    return load_config(str(CONF / "qwen3_30b_a3b_80gb.yaml"), [*given, *apart, fraction, *keys])


def test_a_push_of_adapters_is_planned_by_their_bytes() -> None:
    """They go to the first rank, which writes them, and each of the servers reads them."""
    config = recipe("weights.push=adapters")
    ranks = ranks_of_parts(megatron_layout(MOE), config.learner.lora)
    whole = 2 * sum(map(prod, hf_adapters(hf_layout(MOE), ranks).local_shapes(0).values()))
    gathered, written, read = push_cost(config, MOE).hops
    assert gathered.total < whole
    assert gathered.received == gathered.total
    assert (written.total, read.total) == (whole, whole * config.rollout.server.count)
    assert push_cost(config, MOE).before == served_bytes(config, MOE) > 60 * whole
    lines = list(estimate(config, MOE).lines())
    assert lines[0] == "61.1 GB of frozen weights to each server, once before the first push"
    assert lines[1].startswith("a push of adapters by file, through ")
    assert push_cost(config, MOE).seconds < 0.05 * push_cost(recipe("weights.transport=file"), MOE).seconds


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("rollout=vllm", "rollout.temperature=2.5"), "rollout.temperature=2.5: vLLM 0.32.0 samples at 0.01 to 2, and"),
        (("rollout=vllm", "eval.temperature=0.005"), "eval.temperature=0.005: vLLM"),
        (
            ("rollout=vllm", "eval.sets.hot.temperature=2.5", "eval.sets.plain.limit=2"),
            "eval.sets.hot.temperature=2.5: ",
        ),
        (
            ("rollout=sglang", "rollout.temperature=1e-7"),
            "rollout.temperature=1e-07: SGLang 0.5.21 samples at 1e-06 or",
        ),
        (("rollout=sglang", "eval.temperature=2.5"), None),
        (("rollout=vllm", "eval.temperature=2", "rollout.temperature=0.01"), None),
    ],
)
def test_temperatures_that_the_engine_does_not_sample_at_are_refused(keys: tuple[str, ...], said: str | None) -> None:
    config = load_config("tiny_cpu", keys)
    problems = engine_problems(config, adapter_of(config.rollout.engine, MOE), MOE, {})
    assert [one[: len(said or "")] for one in problems] == ([] if said is None else [said])
