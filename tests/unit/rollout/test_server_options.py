"""Which options of engines a user may give to servers."""

from __future__ import annotations

import re

import pytest

from launcher.preflight.sizes import check
from launcher.preflight.subject import Subject
from launcher.servers.engines import SERVERS, engine_problems
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from rl_megatron.models.named import NAMED

MOE = NAMED["qwen3-235b-a22b"]


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
        "--host 0.0.0.0",
        "--host=0.0.0.0",
        "--hos 0.0.0.0",
        "--ho 0.0.0.0",
        "--port 80",
        "--api-key k",
        "--api_key=k",
        "--admin-api-key k",
        "--grpc",
        "--grpc-port 9",
        "--smg-grpc-mode",
        "--uds s",
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
def test_options_bring_no_code_of_strangers_and_replace_nothing_of_the_runs(
    engine: str, option: str, said: str
) -> None:
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
        ("sglang", "SGLANG_SIMULATE_ACC_LEN=2", "it accepts drafted tokens that the model did not sample"),
        ("vllm", "VLLM_USE_RUST_FRONTEND=1", "its server asks for no token; unset it"),
        ("vllm", "VLLM_DP_SIZE=2", "rollout.server.dp sets it; use that key"),
        ("vllm", "VLLM_BATCH_INVARIANT=1", "rollout.server.batch_invariant sets it; use that key"),
    ],
)
def test_variables_do_not_what_options_may_not(
    engine: str, given: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("tiny_cpu", [f"rollout={engine}"])
    name, value = given.split("=")
    (problem,) = engine_problems(config, SERVERS[engine](MOE), MOE, {name: value})
    assert problem.startswith(f"{given} in the environment of servers: {said}")
    for off in ("", "0", "False"):
        assert not engine_problems(config, SERVERS[engine](MOE), MOE, {name: off})
    attached = load_config("tiny_cpu", [f"rollout={engine}", "rollout.server.addresses=http://node:1"])
    assert not engine_problems(attached, SERVERS[engine](MOE), MOE, {name: value})
    monkeypatch.setenv(name, value)
    assert problem in [one.text for one in check(Subject(config=config, for_job=False))]
    monkeypatch.delenv(name)
    job = load_config("tiny_cpu", [f"rollout={engine}", f"slurm.environment.{name}='{value}'"])
    assert problem in [one.text for one in check(Subject(config=job, for_job=True))]
