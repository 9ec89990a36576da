"""The commands that start servers on several GPUs and nodes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from launcher.servers.checks import ServerChecks
from launcher.servers.degrees import degree_problems
from launcher.servers.engines import SERVERS, longest_sequence
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.rollout.servers.adapter import Description, StartOptions, words_of
from rl_megatron.rollout.servers.answers import rest_of
from rl_megatron.rollout.servers.http import Server
from rl_megatron.types import Completion
from rl_megatron.weights.servers.probe import Probe
from tests.unit.rollout.test_engine_routes import ASKED, OPTIONS
from tests.unit.rollout.test_engine_servers import Words

MOE, LATENT = NAMED["qwen3-235b-a22b"], NAMED["deepseek-v3"]
SAMPLED_SET = ("eval.sets.hard.samples=64", "eval.sets.hard.temperature=1")
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


@pytest.mark.parametrize("option", ["--schedule-low-priority-values-first", "--schedule-low"])
def test_sglang_does_not_take_lower_priorities_first(option: str) -> None:
    with pytest.raises(ConfigError, match=r"its cache adds 1 where its scheduler overlaps, and ends"):
        SERVERS["sglang"](MOE).command(replace(TWO_NODES, extra=(option,)))


def test_names_of_options_have_hyphens_however_they_are_given() -> None:
    """vLLM's parser takes underscores too, so that a refused option would pass; what follows a name is a value."""
    given = "--enable_eplb --tensor_parallel_size=4 --hf-overrides.rope_scaling.a_b 1 --load_format a_b -tp 2"
    wanted = "--enable-eplb --tensor-parallel-size=4 --hf-overrides.rope_scaling.a_b 1 --load-format a_b -tp 2"
    assert words_of(given) == tuple(wanted.split())


def test_vllm_has_a_place_for_each_completion_of_a_request() -> None:
    """vLLM refuses a request for more completions than a replica decodes at once."""
    options = replace(TWO_NODES, slots=64, dp=8, ep=TWO_NODES.tp * 8)
    assert "--max-num-seqs 8 " in " ".join(SERVERS["vllm"](MOE).command(replace(options, completions=8)).arguments)
    with pytest.raises(ConfigError, match=r"slots=64 .* is 8 sequences .* up to 16 .*; set rollout\.slots=128 or more"):
        SERVERS["vllm"](MOE).command(replace(options, completions=16))
    SERVERS["sglang"](MOE).command(replace(options, completions=16))  # it gets them one by one


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ((), 16),
        (("train.max_staleness=1",), 1),
        (SAMPLED_SET, 64),
        (("environment.function=calculator", "warm_start.steps=0", *SAMPLED_SET), 1),
    ],
)
def test_a_request_has_a_group_or_all_samples_of_a_problem(keys: tuple[str, ...], most: int) -> None:
    config = load_config("tiny_cpu", ["rollout=vllm", "rollout.group_size=16", *keys])
    assert config.most_completions == most


def test_batch_invariance_is_a_variable_of_vllm_and_an_option_of_sglang() -> None:
    for wanted in (False, True):
        options = replace(TWO_NODES, batch_invariant=wanted)
        vllm, sglang = (SERVERS[engine](MOE).command(options) for engine in ("vllm", "sglang"))
        assert vllm.environment.get("VLLM_BATCH_INVARIANT") == ("1" if wanted else None)
        assert ("--enable-deterministic-inference" in sglang.arguments) is wanted


@pytest.mark.parametrize(("limit", "least"), [(600.0, 2 * 600.0), (7200.0, 2 * 7200.0), (1.0, 300.0)])
def test_sglangs_watchdog_outlives_a_pause_and_a_load(limit: float, least: float) -> None:
    """It counts a pause that keeps running requests as one step, and ends the server after 300 s by itself."""
    options = replace(TWO_NODES, timeout_seconds=limit)
    assert float(_last(options, "--watchdog-timeout") or 0.0) >= least
    assert _last(replace(options, extra=("--watchdog-timeout", "9")), "--watchdog-timeout") == "9"


@pytest.mark.parametrize(
    ("shape", "changes", "kernels"),
    [
        (MOE, {}, "triton"),
        (LATENT, {"dtype": "bfloat16"}, "triton"),
        (MOE, {"extra": ("--moe-runner-backend", "flashinfer_cutlass")}, "flashinfer_cutlass"),
        (MOE, {"extra": ("--moe-a2a-backend=deepep",)}, None),  # which has kernels of its own
        (MOE, {"extra": ("--moe-a2a", "deepep")}, None),
        (MOE, {"quantization": "fp8"}, None),
        (MOE, {"device": "cpu"}, None),
        (replace(MOE, num_experts=0, family="qwen3"), {}, None),
        (replace(MOE, family="gpt_oss"), {}, None),
    ],
)
def test_sglangs_experts_stay_as_a_push_can_write_to_them(
    shape: ModelShape, changes: dict[str, Any], kernels: str | None
) -> None:
    """On Blackwell it would choose flashinfer_trtllm, whose blocks its loader refuses at the first push."""
    assert _last(replace(OPTIONS, **changes), "--moe-runner-backend", shape) == kernels


def _last(options: StartOptions, name: str, shape: ModelShape = MOE) -> str | None:
    """The word behind the last ``name`` of SGLang's command, which argparse takes."""
    words = SERVERS["sglang"](shape).command(options).arguments
    return {word: after for word, after in pairwise(words) if word.startswith("--")}.get(name)


@pytest.mark.parametrize(
    ("engine", "shape", "extra", "said"),
    [
        ("vllm", MOE, ("--attention-backend", "FLASHINFER"), r"backend FLASHINFER: vLLM 0\.32\.0 has no kernel of it"),
        ("vllm", MOE, ("--attention-back", "FLASHINFER"), "with --attention-backend FLASHINFER"),
        ("vllm", MOE, ("--attention-config.backend", "FLASHINFER"), "with --attention-backend FLASHINFER"),
        ("vllm", MOE, ("-ac.backend=FLASHINFER",), "with --attention-backend FLASHINFER"),
        ("vllm", MOE, ("-ac", '{"backend": "FLASHINFER"}'), "with --attention-backend FLASHINFER"),
        ("vllm", MOE, ("-ac.backend", "triton_attn", "-ac.flash_attn_version", "3"), None),
        ("vllm", MOE, ("-ac", '{"flash_attn_version": 3}'), None),
        ("vllm", MOE, ('-ac={"backend":"FLASH_ATTN"}', '-ac={"backend":"FLASHINFER"}'), "attention-backend FLASHINFER"),
        ("vllm", MOE, ('-ac={"backend":"FLASHINFER"}', '-ac={"backend":"FLASH_ATTN"}'), None),
        ("vllm", MOE, ("--attention-backend=triton_attn",), None),
        ("vllm", MOE, (), None),
        ("sglang", MOE, ("--attention-backend=flashinfer",), None),
        (
            "sglang",
            LATENT,
            ("--attention-backend=flashinfer",),
            r"'deepseek_v3' that does not depend .* fa3, fa4, triton",
        ),
        ("sglang", MOE, ("--attention-b", "torch_native"), "with --attention-backend torch_native"),
        ("sglang", MOE, ("--decode-attention-backend", "torch_native"), "--decode-attention-backend torch_native: "),
        ("sglang", MOE, ("--attention-backend=fa3", "--attention-backend=torch_native"), "backend torch_native"),
        ("sglang", MOE, ("--attention-backend", "torch_native"), "set one of them, or leave it to SGLang"),
    ],
)
def test_attention_that_depends_on_the_batch_is_refused(
    engine: str, shape: ModelShape, extra: tuple[str, ...], said: str | None
) -> None:
    problem = SERVERS[engine](shape).batch_problem(extra)
    assert re.search(said, problem) if said else problem == ""


def test_an_engine_without_such_a_mode_says_so() -> None:
    assert "the adapter of Words has no such mode" in Words().batch_problem(())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((), r"rollout\.engine=local samples in the learner's processes with torch's products"),
        (("rollout=vllm",), r"the engines' kernels for it need GPUs, but learner\.device=cpu"),
        (
            ("rollout=vllm", "rollout.server.addresses=http://a:1"),
            r"addresses=http://a:1 are running ones; start those",
        ),
    ],
)
def test_batch_invariance_is_refused_where_no_server_has_it(keys: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", [*keys, "rollout.server.batch_invariant=true"])


ON_GPUS = ("learner.device=cuda", "learner.dtype=bfloat16", "weights.transport=direct")
INVARIANT, DETERMINISTIC = "rollout.server.batch_invariant=true", "learner.deterministic=true"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("rollout=vllm", INVARIANT), r"in this mode vllm sets NCCL's algorithm and channels in its ranks"),
        (("rollout=sglang", "rollout.server.tp=2", INVARIANT), r"in this mode sglang sets NCCL's algorithm"),
        (("rollout=sglang", INVARIANT), None),
        (("rollout=vllm", DETERMINISTIC), r"the learner's ranks choose NCCL's algorithm by NCCL_ALGO, and"),
        (("rollout=vllm", DETERMINISTIC, INVARIANT, "weights.transport=file"), None),
        (("rollout=vllm", DETERMINISTIC, "learner.device=cpu", "learner.dtype=float32"), None),
    ],
)
def test_ranks_that_set_nccl_otherwise_are_no_group_of_one_nccl(keys: tuple[str, ...], said: str | None) -> None:
    """vLLM 0.32.0's utils/nccl.py: NCCL does not compare settings, and ranks that differ in them hang."""
    if said is None:
        load_config("tiny_cpu", [*ON_GPUS, *keys])
        return
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", [*ON_GPUS, *keys])


def test_sglang_gets_another_seed_for_each_completion_of_a_group_and_for_each_rest() -> None:
    """In its deterministic mode equal seeds give equal completions of equal prompts."""
    bodies: list[Any] = []

    class Said:
        priorities, salt = False, None

        async def sampled(self, path: str, body: Any, form: Any) -> list[Any]:
            bodies.append(body)
            return []

    request = replace(ASKED, num_completions=3)
    nothing = Completion(
        token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), finish_reason="abort", spans=()
    )
    for one in (request, request, *(rest_of(request, nothing, place) for place in range(3))):
        asyncio.run(SERVERS["sglang"](MOE).generate(cast(Any, Said()), one, "id"))
    seeds = [tuple(params["sampling_seed"] for params in body["sampling_params"]) for body in bodies]
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *(seed for rest in seeds[2:] for seed in rest)}) == 6
    assert all(0 <= seed < 2**63 for given in seeds for seed in given)


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


def test_options_are_words_and_addresses_are_addresses() -> None:
    with pytest.raises(ConfigError, match=r"options as in a shell: no closing quotation"):
        load_config("tiny_cpu", ["rollout=vllm", "rollout.server.options=--x 'y"])
    for given in ("nonsense", "http://u:p@a:1", "http://a", "ftp://a:1", "http://a:1/v1", "http://a:1,,http://b:2"):
        with pytest.raises(ConfigError, match=r"http://host:port of each server") as refused:
            load_config("tiny_cpu", ["rollout=vllm", f"rollout.server.addresses={given}"])
        assert "token_file is for their token" in str(refused.value)
    load_config("tiny_cpu", ["rollout=vllm", "rollout.server.addresses=http://a:1, https://[::1]:2/"])


@pytest.mark.parametrize(
    ("pool", "page", "longest"), [(60_000, 1, 59_998), (131_072 + 128, 64, 131_072), (600_000, 1, 131_072)]
)
def test_the_longest_sequence_of_sglang_fits_its_cache(pool: int, page: int, longest: int) -> None:
    """It would lower max_new_tokens to what its cache holds, and say that the completion has reached it."""
    info: dict[str, Any] = {"context_length": 131_080, "max_total_num_tokens": pool, "page_size": page}
    said = {
        "/openapi.json": {"paths": {}},
        "/model_info": {"architectures": ["Qwen3MoeForCausalLM"]},
        "/server_info": info | {"version": "0.5.21", "dtype": "bfloat16"},
    }

    class Told(Server):
        async def get(self, path: str) -> Any:
            return said[path]

    told = Told("http://a:1", token=None, timeout_seconds=1.0)
    assert asyncio.run(SERVERS["sglang"](MOE).describe(told)).max_length == longest


def test_a_server_that_holds_no_longest_sequence_is_refused_with_what_to_raise(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load_config("tiny_cpu", ["rollout=sglang"])
    checks = ServerChecks(config=config, adapter=Words(), model_folder=tmp_path, max_length=100)
    told = Description(version="1", dtype=config.learner.dtype, architecture="", max_length=100, problems=())
    checks._raise_misfits([("http://a", told)])
    with pytest.raises(ConfigError, match=r"sequence is 99, by its .*100 is needed: raise .*memory_fraction, tp or dp"):
        checks._raise_misfits([("http://a", replace(told, max_length=99))])


@pytest.mark.parametrize(("each", "positions"), [(8, 4096), (2, 4096), (8, 16)])
def test_the_shortest_sequences_leave_room_behind_a_probe(each: int, positions: int) -> None:
    """vLLM refuses a prompt that fills its length."""
    config = load_config("tiny_cpu", [f"rollout.max_{kind}_tokens={each}" for kind in ("prompt", "new")])
    length = longest_sequence(config, replace(MOE, max_positions=positions))
    probe = Probe.make(vocab_size=50, max_length=length, temperature=1.0, tolerance=1.0)
    assert max(map(len, probe.texts)) < length <= positions


OF_A_RUN = {
    *("--pipeline-parallel-size", "--distributed-executor-backend", "--api-server-count", "--shutdown-timeout"),
    *("--disable-uvicorn-access-log", "--sleep-on-idle"),
}
"""Options of a run's own servers that others need not have."""


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_pages_command_of_a_server_has_the_options_of_a_runs_own(engine: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "engines.md").read_text().replace("\\\n", "")
    ((module, given),) = re.findall(rf"-m (rl_megatron\.rollout\.servers\.{engine}\.server) (.*)", page)
    own = SERVERS[engine](MOE).command(replace(OPTIONS, routes=False, tp=8, dtype="bfloat16")).arguments
    assert module in own
    there = dict(re.findall(r"(--\S+) ?((?!--)'.*?'|(?!--)\S+|)", given))
    wanted = {word: after for word, after in zip(own, (*own[1:], ""), strict=True) if word.startswith("--")}
    assert there.keys() == wanted.keys() - OF_A_RUN
    free = {"--model", "--model-path", "--host", "--port", "--max-model-len", "--context-length"}
    free |= {"--max-num-seqs", "--max-running-requests"}
    for name in there.keys() - free:
        after = "" if wanted[name].startswith("--") else wanted[name]
        if name == "--watchdog-timeout":
            assert float(there[name]) == float(after)
        else:
            assert there[name].strip("'") == after
