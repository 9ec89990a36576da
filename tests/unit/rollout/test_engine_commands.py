"""The commands that start servers on several GPUs and nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from launcher.servers.degrees import degree_problems
from launcher.servers.engines import SERVERS
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from tests.unit.rollout.test_engine_routes import OPTIONS

MOE = NAMED["qwen3-235b-a22b"]
TWO_NODES = replace(OPTIONS, nodes=2, head="10.0.0.1", host="10.0.0.2", node=1, port=20000, slots=64, routes=False)


def options_of(engine: str, **degrees: int) -> Mapping[str, str]:
    """By option of the command, the word behind it."""
    words = SERVERS[engine](MOE).command(replace(TWO_NODES, **degrees)).arguments
    return {word: after for word, after in zip(words, (*words[1:], ""), strict=True) if word.startswith("--")}


def test_vllm_counts_ranks_of_a_dp_replica_and_sglang_those_of_a_stage() -> None:
    of = options_of("vllm", tp=4, dp=2, ep=8)
    assert (of["--tensor-parallel-size"], of["--data-parallel-size"], of["--max-num-seqs"]) == ("4", "2", "32")
    assert (of["--nnodes"], of["--node-rank"], of["--master-addr"]) == ("2", "1", "10.0.0.1")
    assert "--enable-expert-parallel" in of
    assert "--headless" in of
    of = options_of("sglang", tp=4, dp=2, ep=8)
    assert (of["--tp-size"], of["--dp-size"], of["--ep-size"], of["--max-running-requests"]) == ("8", "2", "8", "64")
    assert (of["--nnodes"], of["--node-rank"], of["--dist-init-addr"]) == ("2", "1", "10.0.0.1:20001")
    assert "--enable-dp-attention" in of


def test_the_first_node_alone_answers_requests() -> None:
    assert options_of("vllm", node=0)["--api-server-count"] == "1"
    assert "--headless" not in options_of("vllm", node=0)
    assert "--nnodes" not in options_of("vllm", nodes=1, node=0)
    assert "--nnodes" not in options_of("sglang", nodes=1, node=0)


@pytest.mark.parametrize(
    ("engine", "extra", "said"),
    [
        ("vllm", "-tp=8", r"has -tp=8, which rollout\.server\.tp sets; use that key"),
        ("vllm", "--headless", r"has --headless, which rollout\.server\.nodes sets"),
        ("vllm", "--enable-eplb", r"has --enable-eplb, which moves experts between ranks"),
        ("sglang", "--ep", r"has --ep, which rollout\.server\.ep sets"),
        ("sglang", "--enable-dp-attention", r"which rollout\.server\.dp sets"),
    ],
)
def test_degrees_have_one_key(engine: str, extra: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SERVERS[engine](MOE).command(replace(TWO_NODES, extra=(extra,)))


def test_what_engines_cannot_do_is_told() -> None:
    with pytest.raises(ConfigError, match=r"server\.pp=2: a stage of SGLang 0\.5\.21 hands a push on to the next"):
        options_of("sglang", pp=2)
    for keys, said in (
        (
            ("rollout.server.tp=2", "rollout.server.dp=2", "rollout.server.ep=2"),
            r"set rollout\.server\.ep=tp\*dp=4, or 1",
        ),
        (
            ("rollout.server.tp=3", "rollout.server.nodes=2"),
            r"nodes=2 does not divide its tp\*pp\*dp = 3\*1\*1 = 3 GPUs",
        ),
        (("rollout.server.addresses=http://a:1", "rollout.server.dp=2"), r"leave out rollout\.server\.dp=2"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config("tiny_cpu", ["rollout=vllm", *keys])


def test_a_model_without_experts_has_replicas_instead() -> None:
    config = load_config("tiny_cpu", ["rollout=vllm", "rollout.server.dp=2", "rollout.server.ep=2"])
    assert degree_problems(config, MOE) == []
    dense = replace(MOE, num_experts=0, family="qwen3")
    dp, ep = degree_problems(config, dense)
    assert "nothing is shared between replicas of its attention; raise rollout.server.replicas instead" in dp
    assert "rollout.server.ep=2: model_type='qwen3' has no experts" in ep
