"""The commands that start servers, the options that a user may give them, and what they say of themselves."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from typing_extensions import override

from launcher.preflight.sizes import check
from launcher.preflight.subject import PreflightContext
from launcher.servers.engines import SERVERS, engine_problems, longest_sequence
from launcher.servers.pool import ServerChecks
from rl_megatron.agents.source import RequestBatcher
from rl_megatron.config.io import load_config
from rl_megatron.config.rules import find_problems
from rl_megatron.engines import engine as gauges
from rl_megatron.engines.adapter import Adapter, EngineGauges, ServerInfo, StartOptions, normalize_options
from rl_megatron.engines.answers import continuation_request
from rl_megatron.engines.engine import GaugePoller
from rl_megatron.engines.http import AttemptFailed, Server
from rl_megatron.engines.local import adapter as wire
from rl_megatron.engines.local.adapter import EmbeddedAdapter
from rl_megatron.engines.replicas import Event, ReplicaSet
from rl_megatron.engines.sglang.adapter import SGLangAdapter
from rl_megatron.engines.vllm.adapter import VLLMAdapter
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED
from rl_megatron.models.shape import ModelShape
from rl_megatron.observability import timeline
from rl_megatron.types import Prompt
from rl_megatron.weights.push.trust import Probe
from tests.completions import completion, drawn
from tests.scripted_engine import Scripted, sampler, trajectories
from tests.unit.rollout.test_engine_routes import ASKED, OPTIONS
from tests.unit.rollout.test_engine_servers import Words

MOE, LATENT = NAMED["qwen3-235b-a22b"], NAMED["deepseek-v3"]
SAMPLED_SET = ("eval.sets.hard.samples=64", "eval.sets.hard.temperature=1")
TWO_NODES = replace(
    OPTIONS,
    num_nodes=2,
    head_address="10.0.0.1",
    host="10.0.0.2",
    node_rank=1,
    port=20000,
    max_num_seqs=64,
    features={},
)


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
    assert options_of("vllm", node_rank=0)["--api-server-count"] == "1"
    assert "--headless" not in options_of("vllm", node_rank=0)
    assert "--nnodes" not in options_of("vllm", num_nodes=1, node_rank=0)
    assert "--nnodes" not in options_of("sglang", num_nodes=1, node_rank=0)


@pytest.mark.parametrize("option", ["--schedule-low-priority-values-first", "--schedule-low"])
def test_sglang_does_not_take_lower_priorities_first(option: str) -> None:
    with pytest.raises(ConfigError, match=r"its cache adds 1 where its scheduler overlaps, and ends"):
        SERVERS["sglang"](MOE).command(replace(TWO_NODES, extra_options=(option,)))


def test_names_of_options_have_hyphens_however_they_are_given() -> None:
    """vLLM's parser takes underscores too, so that a refused option would pass; what follows a name is a value."""
    given = "--enable_eplb --tensor_parallel_size=4 --hf-overrides.rope_scaling.a_b 1 --load_format a_b -tp 2"
    wanted = "--enable-eplb --tensor-parallel-size=4 --hf-overrides.rope_scaling.a_b 1 --load-format a_b -tp 2"
    assert normalize_options(given) == tuple(wanted.split())


def test_vllm_has_a_place_for_each_completion_of_a_request() -> None:
    """vLLM refuses a request for more completions than a replica decodes at once."""
    options = replace(TWO_NODES, max_num_seqs=64, dp=8, ep=TWO_NODES.tp * 8)
    assert "--max-num-seqs 8 " in " ".join(SERVERS["vllm"](MOE).command(replace(options, max_completions=8)).arguments)
    with pytest.raises(ConfigError, match=r"slots=64 .* is 8 sequences .* up to 16 .*; set rollout\.slots=128 or more"):
        SERVERS["vllm"](MOE).command(replace(options, max_completions=16))
    SERVERS["sglang"](MOE).command(replace(options, max_completions=16))  # it gets them one by one


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
    assert load_config("tiny_cpu", ["rollout=vllm", "rollout.group_size=16", *keys]).max_completions == most


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
    assert _last(replace(options, extra_options=("--watchdog-timeout", "9")), "--watchdog-timeout") == "9"


@pytest.mark.parametrize(
    ("shape", "changes", "kernels"),
    [
        (MOE, {}, "triton"),
        (LATENT, {"dtype": "bfloat16"}, "triton"),
        (MOE, {"extra_options": ("--moe-runner-backend", "flashinfer_cutlass")}, "flashinfer_cutlass"),
        (MOE, {"extra_options": ("--moe-a2a-backend=deepep",)}, None),  # which has kernels of its own
        (MOE, {"extra_options": ("--moe-a2a", "deepep")}, None),
        (MOE, {"quantization": "fp8"}, None),
        (MOE, {"device": "cpu"}, None),
        (replace(MOE, num_experts=0, family="qwen3"), {}, None),
        (replace(MOE, family="gpt_oss"), {}, None),
    ],
)
def test_sglangs_experts_can_be_written_to(shape: ModelShape, changes: dict[str, Any], kernels: str | None) -> None:
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
        ("sglang", LATENT, ("--attention-backend=flashinfer",), r"'deepseek_v3' that does not .* fa3, fa4, triton"),
        ("sglang", MOE, ("--attention-b", "torch_native"), "with --attention-backend torch_native"),
        ("sglang", MOE, ("--decode-attention-backend", "torch_native"), "--decode-attention-backend torch_native: "),
        ("sglang", MOE, ("--attention-backend=fa3", "--attention-backend=torch_native"), "backend torch_native"),
        ("sglang", MOE, ("--attention-backend", "torch_native"), "set one of them, or leave it to SGLang"),
    ],
)
def test_other_attention_is_refused(engine: str, shape: ModelShape, extra: tuple[str, ...], said: str | None) -> None:
    problem = SERVERS[engine](shape).batch_problem(extra)
    assert re.search(said, problem) if said else problem == ""


def test_an_engine_without_such_a_mode_says_so() -> None:
    assert "the adapter of Words has no such mode" in Words().batch_problem(())


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((), r"rollout\.engine=local: this engine samples in the learner's processes with torch's products"),
        (("rollout=vllm",), r"with learner\.device=cpu: the engines' kernels for it need GPUs"),
        (("rollout=vllm", "rollout.server.addresses=http://a:1"), r"addresses=http://a:1: it is for servers that the"),
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
        (("rollout=vllm", INVARIANT), r"engine=vllm and .*: ranks of one NCCL group that choose"),
        (("rollout=sglang", "rollout.server.tp=2", INVARIANT), r"engine=sglang and .*: ranks of one NCCL group that"),
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

        async def post_sampling(self, path: str, body: Any, form: Any) -> list[Any]:
            bodies.append(body)
            return []

    request = replace(ASKED, num_completions=3)
    nothing = completion((), finish="abort", spans=())
    for one in (request, request, *(continuation_request(request, nothing, place) for place in range(3))):
        asyncio.run(SERVERS["sglang"](MOE).generate(cast(Any, Said()), one, "id"))
    seeds = [tuple(params["sampling_seed"] for params in body["sampling_params"]) for body in bodies]
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *(seed for rest in seeds[2:] for seed in rest)}) == 6
    assert all(0 <= seed < 2**63 for given in seeds for seed in given)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "local"])
def test_servers_get_stop_texts_and_what_finds_them(engine: str) -> None:
    adapter: Adapter = EmbeddedAdapter(MOE) if engine == "local" else SERVERS[engine](MOE)
    bodies = list[Any]()

    class Said:
        priorities, salt = False, None

        async def post_sampling(self, path: str, body: Any, form: Any) -> list[Any]:
            bodies.append(json.loads(json.dumps(body)))
            return []

    for stop in (("</a>", "\n\n"), ()):
        asked = replace(ASKED, params=replace(ASKED.params, stop=stop))
        asyncio.run(adapter.generate(cast(Any, Said()), asked, "id"))
    with_stop, without = bodies
    if engine == "local":
        assert [wire.decode_request(body)[1].params.stop for body in bodies] == [("</a>", "\n\n"), ()]
    elif engine == "vllm":
        given = {"stop": ["</a>", "\n\n"], "include_stop_str_in_output": True, "skip_special_tokens": False}
        assert given.items() <= with_stop["sampling_params"].items()
        assert [body["sampling_params"]["detokenize"] for body in bodies] == [True, False]
    else:
        given = {"stop": ["</a>", "\n\n"], "no_stop_trim": True}
        assert all(given.items() <= one.items() for one in with_stop["sampling_params"])
        assert not any("stop" in one for one in without["sampling_params"])
    commands = [
        adapter.command(replace(OPTIONS, stops=stops, device="cpu", features={})).arguments for stops in (True, False)
    ]
    finds = {"sglang": "--tokenizer-path", "local": "--tokenizer"}.get(engine)
    assert [finds is None or finds in one for one in commands] == [True, finds is None]
    if engine == "sglang":
        assert ["--skip-tokenizer-init" in one for one in commands] == [False, True]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (['rollout.stop=""'], "must be text that is not empty"),
        (["rollout.stop=['</a>']"], "must be one text or a JSON list"),
        ([f"rollout.stop={json.dumps(['a'] * 33)}"], "must be at most 32 of them"),
        ([f"rollout.stop={'a' * 257}"], "must be text of at most 256 characters"),
        (["rollout.stop=a", "rollout.ignore_eos=true"], "ignore_eos ends no completion early"),
        (["rollout=vllm", "rollout.stop=a", "train.route_flips=true"], "vLLM finds stop texts outside of its engine"),
    ],
)
def test_stop_texts_that_engines_cannot_find_are_refused(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", keys)
    assert load_config("tiny_cpu", ['rollout.stop=["</a>", "\\n"]']).rollout.stop == ("</a>", "\n")
    assert load_config("tiny_cpu", ["rollout.stop=</a>"]).rollout.stop == ("</a>",)


def test_a_top_p_that_log_probs_leave_out_is_found_by_the_check() -> None:
    for engine, said in (("sglang", ["rollout.top_p=0.9: SGLang computes log-probs before it leaves"]), ("vllm", [])):
        config = load_config("tiny_cpu", [f"rollout={engine}", "rollout.top_p=0.9"])
        found = [one.text for one in check(PreflightContext(config, False)) if "top_p" in one.text]
        assert [one[:57] for one in found] == [one[:57] for one in said]


def test_what_engines_cannot_do_is_told() -> None:
    with pytest.raises(ConfigError, match=r"server\.pp=2: a stage of SGLang 0\.5\.21 hands a push on to the next"):
        options_of("sglang", pp=2)
    for keys, said in (
        (("rollout.server.tp=2", "rollout.server.dp=2", "rollout.server.ep=2"), r"set rollout\.server\.ep=tp\*dp=4"),
        (("rollout.server.tp=3", "rollout.server.nodes=2"), r"nodes=2 does not divide its tp\*pp\*dp = 3\*1\*1 = 3"),
        (("rollout.server.addresses=http://a:1", "rollout.server.dp=2"), r"a:1 with rollout\.server\.dp=2: these"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config("tiny_cpu", ["rollout=vllm", *keys])


def test_a_model_without_experts_has_replicas_instead() -> None:
    config = load_config("tiny_cpu", ["rollout=vllm", "rollout.server.dp=2", "rollout.server.ep=2"])
    assert find_problems(config, "shape", MOE) == []
    dp, ep = find_problems(config, "shape", replace(MOE, num_experts=0, family="qwen3"))
    assert "replicas of its attention share nothing; raise rollout.server.replicas instead" in dp
    assert "rollout.server.ep=2 with shape.family=qwen3" in ep


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
    told = ServerInfo(version="1", dtype=config.learner.dtype, architecture="", max_length=100, problems=())
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
    ((module, given),) = re.findall(rf"-m (rl_megatron\.engines\.{engine}\.server) (.*)", page)
    own = SERVERS[engine](MOE).command(replace(OPTIONS, features={}, tp=8, dtype="bfloat16")).arguments
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


# Which options of engines a user may give to servers.
@pytest.mark.parametrize(
    ("engine", "extra", "said"),
    [
        ("vllm", "-tp=8", r"has -tp=8, which rollout\.server\.tp sets; use that key"),
        ("vllm", "-t=8", r"has -t=8, which rollout\.server\.tp sets; use that key"),
        ("vllm", "-n2", r"has -n2, which rollout\.server\.nodes sets"),
        ("vllm", "--tensor-par", r"has --tensor-par, which rollout\.server\.tp sets"),
        ("vllm", "-q", r"has -q, which rollout\.server\.quantization sets; use that key"),
        ("vllm", "-qfp8", r"has -qfp8, which rollout\.server\.quantization sets"),
        ("vllm", "--quantization-config.linear=fp8", r"which rollout\.server\.quantization sets; use that key"),
        ("vllm", "--hf-overrides.quantization_config.bits=4", r"which rollout\.server\.quantization sets"),
        ("vllm", r'--hf-overrides={"quantization_\u0063onfig":{}}', r"which rollout\.server\.quantization sets"),
        ("vllm", '--hf-over={"quantization_config": {}}', r"which rollout\.server\.quantization sets"),
        ("sglang", "--modelopt-quant", r"which rollout\.server\.quantization sets"),
        ("sglang", "--quantize-and-serve", r"which rollout\.server\.quantization sets"),
        ("sglang", "--rl-quant-profile", r"which rollout\.server\.quantization sets"),
        ("sglang", "--kt-weight-path", r"no push reaches them; leave it out"),
        ("vllm", "-sc", r"which rollout\.server\.draft_tokens has a server use; set that"),
        ("vllm", "-s.method=ngram", r"which rollout\.server\.draft_tokens has a server use"),
        ("vllm", "--spec-method", r"which rollout\.server\.draft_tokens has a server use"),
        ("vllm", "--api-server-count=2", r"its request may be in another; leave it out"),
        ("vllm", "-asc", r"its request may be in another; leave it out"),
        ("sglang", "--tokenizer-worker-num", r"its processes ask for no token, and have no path for aborts"),
        ("sglang", "--json-model-override-args", r"no end-of-sequence token of the model's ends a completion"),
        ("sglang", "--preferred-sampling-params", r"sampled by what they do not say, as log-probs would not be"),
        ("vllm", "--headless", r"has --headless, which rollout\.server\.nodes sets"),
        ("vllm", "--enable-eplb", r"has --enable-eplb: it moves experts between ranks"),
        ("sglang", "--enable-eplb", r"has --enable-eplb: it moves experts between ranks"),
        ("vllm", "-dpl", r"has -dpl, which rollout\.server\.nodes sets"),
        ("vllm", "--data-parallel-start-rank=1", r"which rollout\.server\.nodes sets"),
        ("vllm", "-dpn", r"answer for some of its replicas, and the run knows of no other"),
        ("vllm", "--data-parallel-hybrid-lb", r"answer for some of its replicas"),
        ("vllm", "-dpe", r"answer for some of its replicas"),
        ("vllm", "--data-parallel-multi", r"answer for some of its replicas"),
        ("vllm", "--enable-elastic-ep", r"it moves experts between ranks"),
        ("sglang", "--elastic-ep-backend", r"pushes go to those of its start"),
        ("sglang", "--ep-num-redundant-experts", r"where a rank has an expert twice"),
        ("vllm", "--speculative-config={}", r"which rollout\.server\.draft_tokens has a server use; set that"),
        ("sglang", "--speculative-algorithm", r"which rollout\.server\.draft_tokens has a server use; set that"),
        ("sglang", "--specul", r"which rollout\.server\.draft_tokens has a server use"),
        ("sglang", "--nccl-init-addr", r"which rollout\.server\.nodes sets"),
        ("sglang", "--ep", r"has --ep, which rollout\.server\.ep sets"),
        ("sglang", "--enable-dp-attention", r"which rollout\.server\.dp sets"),
    ],
)
def test_degrees_have_one_key(engine: str, extra: str, said: str) -> None:
    assert re.search(said, SERVERS[engine](MOE).options_problem((extra,)))
    assert not SERVERS[engine](MOE).options_problem(("--seed", "-1", "--enforce-eager", "--hf-overrides.x", "1"))


@pytest.mark.parametrize(
    "option",
    [
        *("--host 0.0.0.0", "--host=0.0.0.0", "--hos 0.0.0.0", "--ho 0.0.0.0", "--port 80", "--api-key k"),
        *("--api_key=k", "--admin-api-key k", "--grpc", "--grpc-port 9", "--smg-grpc-mode", "--uds s"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_options_decide_neither_who_reaches_a_server_nor_by_which_key(engine: str, option: str) -> None:
    said = r"without --[a-z-]+: the run gives each server its address"
    with pytest.raises(ConfigError, match=said) as refused:
        load_config("tiny_cpu", [f"rollout={engine}", f"rollout.server.options=--seed 1 {option}"])
    load_config("tiny_cpu", [f"rollout={engine}", "rollout.server.options=--seed 1 --h"])
    assert "rollout.server.options=" in str(refused.value)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--trust-remote-code", "it runs code that a model's folder brings; leave it out, or install the code"),
        ("--trust_remote_code", "it runs code that a model's folder brings"),
        ("--trust-r", "it runs code that a model's folder brings"),
        ("--config engine.yaml", "a file of options would replace what the run starts a server with"),
        ("--config=engine.yaml", "a file of options would replace"),
        ("--enable-custom-logit-processor", "requests could bring code"),
        ("--middleware mine.Open", "the run gives each server its model, what loads it, and what asks for the token"),
        ("--load-format auto", "the run gives each server its model"),
        ("--model-path other", "the run gives each server its model"),
        ("--max-num-seqs 4", r"rollout\.slots sets it; use that key"),
        ("--context-length=99", r"rollout\.max_prompt_tokens and max_new_tokens set it"),
        ("--dtype auto", r"learner\.dtype sets it"),
        ("--dt auto", r"learner\.dtype sets it"),
        ("--weight-transfer-config.backend nccl", "the run gives each server its model"),
        ("--mem-fraction-static 0.5", r"rollout\.server\.memory_fraction sets it"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_options_bring_no_code_of_strangers_and_replace_none_of_a_run(engine: str, option: str, said: str) -> None:
    name = re.split("[=. ]", option)[0].replace("_", "-")
    with pytest.raises(ConfigError, match=rf"options='--seed 1 .*: must be without {name}: {said}"):
        load_config("tiny_cpu", [f"rollout={engine}", f"rollout.server.options=--seed 1 {option}"])


@pytest.mark.parametrize("option", ["--config-format hf", "--language-model-only", "--fp8-gemm-backend triton", "-O3"])
def test_other_options_are_taken(option: str) -> None:
    load_config("tiny_cpu", ["rollout=vllm", f"rollout.server.options={option}"])


@pytest.mark.parametrize(
    ("engine", "given", "said"),
    [
        ("sglang", "SGLANG_GRPC_PORT=40000", "the server of gRPC that it opens asks for no token; unset it"),
        ("sglang", "SGLANG_RUST_SERVER=true", "its server asks for no token; unset it"),
        ("sglang", "SGLANG_RETURN_ORIGINAL_LOGPROB=1", "log-probs would be those of temperature 1"),
        ("sglang", "SGLANG_MAX_NEW_TOKENS_LIMIT=64", "rollout.max_new_tokens is the limit; use that key"),
        ("sglang", "SGLANG_SIMULATE_ACC_LEN=2", "it accepts proposed tokens that the model did not sample"),
        ("vllm", "VLLM_USE_RUST_FRONTEND=1", "its server asks for no token; unset it"),
        ("vllm", "VLLM_DP_SIZE=2", "rollout.server.dp sets it; use that key"),
        ("vllm", "VLLM_BATCH_INVARIANT=1", "rollout.server.batch_invariant sets it; use that key"),
    ],
)
def test_variables_do_no_more_than_options(engine: str, given: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("tiny_cpu", [f"rollout={engine}"])
    name, value = given.split("=")
    (problem,) = engine_problems(config, SERVERS[engine](MOE), MOE, {name: value})
    assert problem.startswith(f"{given} in the environment of servers: {said}")
    for off in ("", "0", "False"):
        assert not engine_problems(config, SERVERS[engine](MOE), MOE, {name: off})
    attached = load_config("tiny_cpu", [f"rollout={engine}", "rollout.server.addresses=http://node:1"])
    assert not engine_problems(attached, SERVERS[engine](MOE), MOE, {name: value})
    monkeypatch.setenv(name, value)
    assert problem in [one.text for one in check(PreflightContext(config=config, for_job=False))]
    monkeypatch.delenv(name)
    job = load_config("tiny_cpu", [f"rollout={engine}", f"slurm.environment.{name}='{value}'"])
    assert problem in [one.text for one in check(PreflightContext(config=job, for_job=True))]


# What servers say of themselves, in the timeline: asked in turn, off the hot path, and never the end of a run.
SHAPE = NAMED["qwen3-30b-a3b"]
Said = list[tuple[str, str, dict[str, float]]]

METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:generation_tokens_total{engine="0",model_name="m"} 1.0e+06
vllm:generation_tokens_total{engine="1",model_name="m"} 2.0
"""
LOADS = {
    "loads": [
        {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5, "gen_throughput": 100.5},
        {"num_running_reqs": 4, "num_waiting_reqs": 0, "token_usage": 0.0, "gen_throughput": 1.0},
    ]
}


class Answers(Server):
    """A server whose answers are known."""

    def __init__(self, answer: object) -> None:
        super().__init__("http://127.0.0.1:9", token=None, timeout_seconds=1)
        self.answer = answer

    @override
    async def text(self, path: str) -> str:
        assert path == "/metrics"
        return str(self.answer)

    @override
    async def get(self, path: str) -> object:
        assert path == "/v1/loads"
        return self.answer


async def test_vllm_and_sglang_say_it_over_all_of_their_ranks() -> None:
    """By their formats: Prometheus's text, of vLLM 0.32.0; the JSON of SGLang 0.5.21's /v1/loads."""
    vllm, sglang = await VLLMAdapter(SHAPE).gauges(Answers(METRICS)), await SGLangAdapter(SHAPE).gauges(Answers(LOADS))
    assert vllm == EngineGauges(running=7, waiting=5, cache=0.375, tokens=1_000_002)
    assert sglang == EngineGauges(running=7, waiting=1, cache=0.25, tokens_per_second=101.5)


class Busy(Words):
    """Says what the ``say`` of a server is."""

    def __init__(self, say: dict[str, Callable[[], EngineGauges]]) -> None:
        super().__init__()
        self.say, self.asked = say, list[str]()

    @override
    async def gauges(self, server: Server) -> EngineGauges:
        self.asked.append(server.url)
        if server.url == "http://hangs":
            await asyncio.Event().wait()
        return self.say[server.url]()


def followed(adapter: Busy, urls: list[str], turns: int, dead: int | None = None) -> Said:
    """What is kept of servers that are asked every 2 ms, until there were so many questions or no more come."""
    timeline.taken()

    async def run() -> None:
        replicas = ReplicaSet("words", [Server(url, token=None, timeout_seconds=1) for url in urls])
        if dead is not None:
            replicas.all[dead].apply(Event.DIED, "of this test")
        in_turn = GaugePoller(adapter, replicas, 0.002)
        async with in_turn.polling():
            for _ in range(5000):
                if len(adapter.asked) >= turns:
                    break
                await asyncio.sleep(0.002)

    asyncio.run(run())
    return [(lane.process, name, dict(said or {})) for lane, name, _, _, said in timeline.taken()[0]]


def test_servers_are_asked_in_turn_and_one_that_is_dead_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred times as many are asked no more often. Speeds are differences of counts by the time between them."""
    at = 0

    def now() -> int:
        nonlocal at
        at += 10**9
        return at

    monkeypatch.setattr(timeline, "now", now)
    made = iter(range(0, 10_000, 500))
    adapter = Busy(
        {
            "http://a": lambda: EngineGauges(running=2, waiting=1, tokens=next(made)),
            "http://b": lambda: EngineGauges(running=0, waiting=0, cache=0.25, tokens_per_second=7.0),
            "http://c": lambda: EngineGauges(running=9, waiting=9),
        }
    )
    kept = followed(adapter, ["http://a", "http://b", "http://c"], 4, dead=2)
    assert adapter.asked[:4] == ["http://a", "http://b"] * 2
    # a's clock: its requests at 1 s, counted at 2 s; b takes 3 to 6 s; again requests at 7 s, counted at 8 s
    assert kept[:5] == [
        ("replica 0", "requests", {"running": 2, "waiting": 1}),
        ("replica 1", "requests", {"running": 0, "waiting": 0}),
        ("replica 1", "cache", {"share": 0.25}),
        ("replica 1", "tokens", {"per_second": 7.0}),
        ("replica 0", "requests", {"running": 2, "waiting": 1}),
    ]
    assert kept[5] == ("replica 0", "tokens", {"per_second": pytest.approx(500 / 6, abs=0.1)})


def test_one_that_fails_or_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "_LIMIT_SECONDS", 0.01)

    def fails() -> EngineGauges:
        raise AttemptFailed("503")

    adapter = Busy({"http://fails": fails, "http://a": lambda: EngineGauges(running=1, waiting=0)})
    kept = followed(adapter, ["http://fails", "http://hangs", "http://a"], 6)
    assert adapter.asked[:6] == ["http://fails", "http://hangs", "http://a"] * 2
    assert kept[0] == ("replica 2", "requests", {"running": 1, "waiting": 0})


def test_an_answer_of_another_form_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def another() -> EngineGauges:
        raise KeyError("num_requests_running")

    adapter = Busy({"http://a": another})
    with caplog.at_level(logging.WARNING):
        assert followed(adapter, ["http://a"], 1) == []
    assert adapter.asked == ["http://a"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "the timeline has no load of servers: http://a: KeyError('num_requests_running')"


# What the timeline has of requests for completions.
def test_each_turn_of_an_environment_is_a_generation() -> None:
    engine = Scripted(lambda text: "!12" if ":" in text else "?3*4")
    timeline.taken()
    prompt = Prompt(id="3*4", text="3*4=", token_ids=(1,), answer="12")
    found = asyncio.run(sampler(RequestBatcher(engine)).groups(drawn([prompt], 1)))
    kept = [(lane.process, said) for lane, name, _, _, said in timeline.taken()[0] if name == "generate" and said]
    assert {process for process, _ in kept} == {"sampling"}
    assert sorted(str(said["request"]) for _, said in kept) == sorted(one.id for one in engine.asked)
    turns = [turn for one in trajectories(found) for chain in one.chains for turn in chain.turns]
    assert sum(int(said["tokens"]) for _, said in kept) == sum(turn.stop - turn.start for turn in turns)
