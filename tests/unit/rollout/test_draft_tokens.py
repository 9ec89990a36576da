"""Speculative decoding by servers: what starts it, what a push sends and counts, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from launcher.servers.engines import SERVERS, engine_problems
from launcher.servers.pool import ServerChecks
from rl_megatron.config.io import load_config
from rl_megatron.config.rules import find_problems
from rl_megatron.engines.adapter import ServerInfo
from rl_megatron.engines.http import AttemptFailed, Server, ServerRefusal
from rl_megatron.engines.sglang.adapter import SGLangAdapter
from rl_megatron.engines.vllm.adapter import VLLMAdapter
from rl_megatron.errors import ConfigError
from rl_megatron.features.draft.engines import Drafts, SGLangDrafts, read_counts
from rl_megatron.models.named import NAMED
from rl_megatron.weights.checks.reports import ChecksumReport, packed_report
from tests.unit.rollout.test_engine_routes import ASKED, OPTIONS
from tests.unit.rollout.test_engine_servers import Asked, Fake, Words, engine_of, push, running

DEEPSEEK = NAMED["deepseek-v3"]
TRAINED = ("rollout=vllm", "learner.draft.train=true", "rollout.server.draft_tokens=1")


@pytest.fixture
def fakes() -> Iterator[list[Fake]]:
    with running(2) as both:
        yield both


def test_vllm_is_told_how_many_tokens_to_propose() -> None:
    for count in (0, 3):
        words = SERVERS["vllm"](DEEPSEEK).command(replace(OPTIONS, features={"draft": count})).arguments
        said = [json.loads(after) for word, after in pairwise(words) if word.endswith("ive-config")]
        assert said == ([{"method": "mtp", "num_speculative_tokens": 3}] if count else [])


def test_sglang_is_told_how_many_tokens_to_propose_and_to_verify_one_more() -> None:
    for count in (0, 3):
        words = SERVERS["sglang"](DEEPSEEK).command(replace(OPTIONS, features={"draft": count})).arguments
        said = {word: after for word, after in pairwise(words) if word.startswith("--speculative")}
        assert said == (
            {
                "--speculative-algorithm": "EAGLE",
                "--speculative-num-steps": "3",
                "--speculative-eagle-topk": "1",
                "--speculative-num-draft-tokens": "4",
            }
            if count
            else {}
        )


def test_a_push_brings_vllm_the_draft_layer_first_and_labels_once(tmp_path: Path) -> None:
    """So that no label says that a server has a version whose draft layer it lacks."""
    for count, starts in ((0, ["/start_weight_update"]), (2, ["/start_draft_weight_update", "/start_weight_update"])):
        server = Holding()
        server.features = {"draft": count}
        adapter = VLLMAdapter(DEEPSEEK)
        asyncio.run(adapter.load(server, tmp_path, 4, private=()))
        assert [path for path, _ in server.asked if path.startswith("/start")] == starts
        infos = [body["update_info"] for path, body in server.asked if path == "/update_weights"]
        assert infos == [{"path": str(tmp_path), "version": 4, "straight": False}] * len(starts)
        labels = [body for path, body in server.asked if path == "/finish_weight_update"]
        assert labels == [{}] * (len(starts) - 1) + [{"weight_version": adapter.labels.candidate(4)}]


def test_a_push_brings_sglang_the_draft_layer_first_and_each_answers_by_itself(tmp_path: Path) -> None:
    """An order to both would have the second overwrite the first's answer. The label and the emptied cache come with
    the model, when the server has both."""
    for count, runners in ((0, ["target"]), (2, ["draft", "target"])):
        server = Asked()
        server.features, server.paused = {"draft": count}, True
        adapter = SGLangAdapter(DEEPSEEK)
        assert len(asyncio.run(adapter.load(server, tmp_path / "weights", 4, private=()))) == 1
        begun = [body["selector"] for path, body in server.asked if path == "/begin_weight_update"]
        sent = [body for path, body in server.asked if path == "/update_weights_from_tensor"]
        assert begun == [body["selector"] for body in sent] == [_order(body)["runner"] for body in sent] == runners
        assert len({_order(body)["answer"] for body in sent}) == len(runners)
        assert [body["weight_version"] for body in sent] == [None] * count.bit_count() + [adapter.labels.candidate(4)]


def _order(body: Mapping[str, Any]) -> dict[str, Any]:
    name, _ = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))[0]
    return dict(json.loads(name))


class Holding(Asked):
    """A server of vLLM, one of whose ranks holds nothing that checksums cover."""

    async def post(self, path: str, body: object = None, *, params: Any = None) -> Any:
        await super().post(path, body, params=params)
        empty = packed_report(ChecksumReport(rows=(), seconds=0.0), ())
        return {"results": [[empty]]} if path == "/collective_rpc" else None


def test_what_vllm_counts_is_read_over_its_ranks() -> None:
    text = "\n".join(
        f'vllm:spec_decode_num_{kind}{{engine="{rank}",model_name="policy"}} {count}'
        for rank in (0, 1)
        for kind, count in (
            ("drafts_total", 9.0),
            ("draft_tokens_total", 20.0 + rank),
            ("accepted_tokens_total", 5.0),
            ("accepted_tokens_per_pos_total", 3.0),
        )
    )
    assert read_counts(text) == (41.0, 10.0)


def test_what_sglangs_answers_count_is_added_up_by_server() -> None:
    """Over the completions of a request, and requests; an answer without proposals has no counts."""
    adapter = SGLangAdapter(DEEPSEEK)
    adapter.labels.start, servers = "t", [Answering([(4, 1), (3, 2)]), Answering([(2, 0)]), Answering([])]
    for server in (servers[0], servers[0], servers[1], servers[2]):
        asyncio.run(adapter.generate(server, replace(ASKED, columns=()), "r"))
    (hooks,) = (one for one in adapter.hooks if isinstance(one, Drafts))
    assert [asyncio.run(hooks.counts(server)) for server in servers] == [(14.0, 6.0), (2.0, 0.0), (0.0, 0.0)]


class Answering(Server):
    """A server of SGLang whose completions count such proposals, and how many were accepted."""

    def __init__(self, counts: Sequence[tuple[int, int]]) -> None:
        super().__init__("http://localhost:1", token=None, timeout_seconds=1.0)
        self._counts = counts

    async def post_sampling(self, path: str, body: object, read: Callable[[bytes], Any]) -> Any:
        told = [{"spec_num_proposed_drafts": a, "spec_num_correct_drafts": b} for a, b in self._counts] or [{}]
        ends = {"output_token_logprobs": [[-1.0, 2, None]], "finish_reason": {"type": "length"}}
        ends["weight_version"] = "1@t"
        return read(json.dumps([{"meta_info": ends | one} for one in told]).encode())


def test_a_server_of_sglang_that_would_sample_from_another_distribution_is_refused() -> None:
    settings = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 2, "speculative_eagle_topk": 1}
    settings |= {"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0}
    hooks = SGLangDrafts("draft", DEEPSEEK)
    assert hooks.described(settings) == (2, [])
    assert hooks.described({"speculative_algorithm": None, "speculative_num_steps": None}) == (0, ())
    for name, other in (("algorithm", "NGRAM"), ("eagle_topk", 4), ("accept_threshold_single", 0.9)):
        _, (said,) = hooks.described(settings | {f"speculative_{name}": other})
        assert said.startswith(f"its speculative_{name} is {other}; start it with ")


class Counting(Drafts):
    """Of servers that have proposed and accepted what a test says."""

    def __init__(self) -> None:
        super().__init__("draft", DEEPSEEK)
        self.said: dict[str, tuple[float, float]] = {}

    @override
    async def counts(self, server: Server) -> tuple[float, float]:
        return self.said[server.url]


async def test_acceptance_is_of_what_servers_proposed_from_push_to_push(fakes: list[Fake]) -> None:
    """Of both together; what one had counted before its first push is left out, as of a server that ran already."""
    engine, out = engine_of(fakes), list[dict[str, float]]()
    engine.adapter.hooks = (hooks := Counting(),)
    for server in engine.servers:
        server.features = {"draft": 1}
    for counts in ([(1000.0, 7.0), (0.0, 0.0)], [(1010.0, 9.0), (30.0, 18.0)], [(1010.0, 9.0), (30.0, 18.0)]):
        hooks.said = {fake.url: count for fake, count in zip(fakes, counts, strict=True)}
        await push(engine, len(out) + 1)
        out.append({name: value for name, value in engine.step_row().items() if name.startswith("draft")})
    assert out == [{}, {"draft/acceptance": 0.5}, {}]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("rollout=local",), r"rollout\.engine=local: this engine decodes one token at a time"),
        (("learner.draft.train=false",), r"layer only if the learner trains it; set learner\.draft\.train=true"),
        (("weights.transport=direct",), r"not its draft layer; set weights\.transport=file"),
        (("rollout.server.quantization=fp8",), r"draft_tokens=1 with rollout\.server\.quantization=fp8"),
        (("rollout.server.pp=2",), r"only the last stage has the draft layer"),
        (("algorithm.routing_replay=r3",), r"draft_tokens=1 with algorithm\.routing_replay=r3"),
        (
            ("eval.sets.hard.min_p=0.1", "eval.sets.hard.temperature=1"),
            r"hard\.min_p=0\.1: with proposals vLLM rejects it, and SGLang ignores it",
        ),
    ],
)
def test_where_no_layer_would_propose_or_none_be_pushed_it_is_refused(keys: tuple[str, ...], said: str) -> None:
    load_config("tiny_cpu", TRAINED)
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", [*TRAINED, *keys])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("learner.device=cpu",), r"rollout\.engine=sglang and learner\.device=cpu: on CPUs SGLang with proposals"),
        (("rollout.server.colocated=true",), r"colocated=true: after a release of memory SGLang restores"),
    ],
)
def test_sglang_is_refused_where_its_layer_or_its_verification_would_be_wrong(keys: tuple[str, ...], said: str) -> None:
    """By the configuration, so that `train --check` says it; not when servers are made."""
    on_gpus = ("rollout=sglang", *TRAINED[1:], "learner.device=cuda")
    load_config("tiny_cpu", on_gpus)
    with pytest.raises(ConfigError, match=said):
        load_config("tiny_cpu", [*on_gpus, *keys])


def test_delta_nets_are_refused_before_servers_are_made() -> None:
    config = load_config("tiny_cpu", TRAINED)
    (said,) = find_problems(config, "shape", NAMED["qwen3-next-80b-a3b"])
    assert said.startswith("rollout.server.draft_tokens=1 with shape.family=qwen3_next: a server would have")
    assert find_problems(config, "shape", DEEPSEEK) == []


def test_an_adapter_without_a_draft_layer_says_so() -> None:
    config = load_config("tiny_cpu", TRAINED)
    (said,) = engine_problems(config, Words(), DEEPSEEK, {})
    assert said == "rollout.server.draft_tokens=1: the adapter of Words starts no draft layer; leave the key out"
    assert not any(engine_problems(config, SERVERS[engine](DEEPSEEK), DEEPSEEK, {}) for engine in ("vllm", "sglang"))


def test_a_server_that_proposes_as_many_as_the_run_says_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = load_config("tiny_cpu", TRAINED)
    checks = ServerChecks(config=config, adapter=SERVERS["vllm"](DEEPSEEK), model_folder=tmp_path, max_length=8)
    told = ServerInfo(version="1", dtype="float32", architecture="", max_length=8, problems=(), features={"draft": 1})
    checks._raise_misfits([("http://a", told)])
    with pytest.raises(ConfigError, match=r"its draft layer proposes 0 tokens at a step, but .*=1; make them"):
        checks._raise_misfits([("http://a", replace(told, features={"draft": 0}))])


# Servers in which a run that was killed left an update of weights open take the next run's.
class Open(Holding):
    """A server with an update that is open: as vLLM and SGLang do, it refuses to begin another, or to end none."""

    def __init__(self) -> None:
        super().__init__()
        self.open = True

    @override
    async def post(self, path: str, body: object = None, *, params: Any = None) -> Any:
        answer = await super().post(path, body, params=params)
        if path in ("/start_weight_update", "/begin_weight_update"):
            if self.open:
                raise AttemptFailed("500: already active") if path[1] == "s" else ServerRefusal("400: already open")
            self.open = True
        elif path in ("/finish_weight_update", "/end_weight_update"):
            if not self.open:
                raise ServerRefusal("400: none is open")
            self.open = False
        elif path == "/collective_rpc" and isinstance(body, dict):
            self.open = self.open and body["method"] != "rl_megatron_end_update"
        return answer


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize("left", [True, False])
def test_the_next_update_is_begun_and_ended(engine: str, tmp_path: Path, *, left: bool) -> None:
    server = Open()
    server.open, server.paused = left, True
    assert len(asyncio.run(SERVERS[engine](DEEPSEEK).load(server, tmp_path / "weights", 4, private=()))) == 1
    assert not server.open
