"""A model that is served to evaluation tools: the openai client, and transformers' own forward as the oracle."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl_megatron.config.run import TinyModelSection
from rl_megatron.models.tiny import TOKENIZER_SIZE, make_tiny_model
from rl_megatron.rollout.endpoint.open_app import OpenApplication
from rl_megatron.rollout.endpoint.open_shapes import CompletionRequest
from rl_megatron.rollout.endpoint.server import HttpServer
from rl_megatron.rollout.local.batched import InThisProcess
from rl_megatron.rollout.local.engine import LocalEngine
from rl_megatron.weights.checkpoints.safetensors_io import HFFolder, read_boxes
from rl_megatron.weights.layouts.families import hf_layout, read_shape

KEY, EOS, LENGTH = "0123456789abcdef", 257, 64


@dataclass
class Open:
    """A served model, a client of it, and transformers' model of the same folder."""

    app: OpenApplication
    url: str
    oracle: Any
    tokenizer: Any

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key=KEY, max_retries=0)

    def logprobs(self, text: str) -> torch.Tensor:
        """Of all tokens at each place of a text."""
        with torch.no_grad():
            return self.oracle(torch.tensor([self.tokenizer(text)["input_ids"]])).logits[0].log_softmax(-1)

    def post(self, path: str, body: object = None, key: str = KEY) -> tuple[int, str]:
        asked = urllib.request.Request(
            self.url.removesuffix("/v1") + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {key}"},
        )
        try:
            with urllib.request.urlopen(asked) as said:
                return said.status, said.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    folder = make_tiny_model(TinyModelSection(), tmp_path_factory.mktemp("models"), 3)
    shape, tokenizer = read_shape(folder), AutoTokenizer.from_pretrained(folder)
    engine = LocalEngine(shape, slots=8, dtype=torch.float32, device="cpu", max_length=LENGTH)
    read_boxes(HFFolder(folder), hf_layout(shape), hf_layout(shape), 0, engine.tensors)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ready, over = threading.Event(), threading.Event()
    found: list[Open] = []

    async def serve() -> None:
        sampling = InThisProcess(engine)
        app = OpenApplication(
            engine=sampling,
            scorer=sampling,
            tokenizer=tokenizer,
            stop_token_ids=(EOS,),
            max_length=LENGTH,
            key=KEY,
        )
        server = HttpServer(app)
        found.append(Open(app, server.listen(), oracle, tokenizer))
        ready.set()
        await asyncio.to_thread(over.wait)
        await server.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    yield found[0]
    over.set()
    thread.join()


def test_log_probs_of_a_prompt_are_transformers(served: Open) -> None:
    texts = ["12+34=640", "a longer text of letters"]
    said = served.client.completions.create(
        model="any", prompt=texts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1
    )
    for text, choice in zip(texts, said.choices, strict=True):
        ids, oracle, told = served.tokenizer(text)["input_ids"], served.logprobs(text), choice.logprobs
        assert told is not None
        assert told.token_logprobs is not None
        assert told.top_logprobs is not None
        assert told.tokens is not None
        assert told.token_logprobs[0] is None
        assert told.tokens[: len(ids)] == list(text)
        assert len(told.tokens) == len(ids) + 1  # the one that was sampled, which lm-eval leaves out
        own = oracle[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(told.token_logprobs[1:-1]), own, rtol=0, atol=1e-4)
        most = torch.tensor([max(top.values()) for top in told.top_logprobs[1:-1] if top])
        torch.testing.assert_close(most, oracle[:-1].amax(-1), rtol=0, atol=1e-4)
        assert told.token_logprobs[-1] == pytest.approx(oracle[-1].amax().item(), abs=1e-4)


def test_greedy_answers_are_transformers_and_end_before_a_stop_text(served: Open) -> None:
    ids = served.tokenizer("12+34=")["input_ids"]
    out = served.oracle.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    text = served.tokenizer.decode([token for token in out if token != EOS])
    ask = {"model": "any", "prompt": "12+34=", "max_tokens": 12, "temperature": 0}
    said = served.client.completions.create(**ask)
    assert said.choices[0].text == text
    stop = text[3:5]
    assert said.usage is not None
    assert said.usage.completion_tokens == len(out)
    (cut,) = served.client.completions.create(**ask, stop=["never there", stop]).choices
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")
    told = [ids, served.tokenizer("99+99=")["input_ids"]]
    both = served.client.completions.create(**{**ask, "prompt": told}).choices
    assert [one.index for one in both] == [0, 1]
    assert both[0].text == text


def test_chat_answers_follow_the_models_template_and_samples_are_repeatable(served: Open) -> None:
    messages: Any = [{"role": "user", "content": "1+1"}]
    prompt = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ask: Any = {"model": "any", "max_tokens": 6, "temperature": 1.0, "n": 3, "seed": 5}
    chat = served.client.chat.completions.create(messages=messages, logprobs=True, **ask)
    plain = served.client.completions.create(prompt=prompt, logprobs=0, **ask)
    texts = [one.message.content for one in chat.choices]
    assert texts == [one.text for one in plain.choices]
    assert len(set(texts)) == 3
    told, own = chat.choices[0].logprobs, plain.choices[0].logprobs
    assert told is not None
    assert own is not None
    assert own.top_logprobs is None
    assert [token.logprob for token in told.content or ()] == own.token_logprobs
    other = served.client.chat.completions.create(messages=messages, **{**ask, "seed": 6})
    assert [one.message.content for one in other.choices] != texts


def test_limits_of_the_request_are_those_sampled_with(served: Open) -> None:
    ask: Any = {"model": "any", "prompt": "7+7=", "max_tokens": 8, "temperature": 3.0, "n": 2}
    greedy = served.client.completions.create(**{**ask, "temperature": 0}).choices[0].text
    for limit in ({"top_k": 1}, {"min_p": 1.0}):
        said = served.client.completions.create(**ask, extra_body=limit)
        assert {one.text for one in said.choices} == {greedy}
    assert {one.text for one in served.client.completions.create(**ask, top_p=1e-6).choices} == {greedy}


def test_a_chat_shows_what_a_run_shows_or_is_refused(served: Open) -> None:
    """The template writes the first letter of a role and the content, and passes over one role."""
    tokenizer, before = served.app.tokenizer, served.app.tokenizer.chat_template
    said = {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]}
    source = "{{% for m in messages if m.role != '{}' %}}{{{{ m.role[0] + m.content }}}}{{% endfor %}}"
    least = {"max_tokens": 1, "temperature": 0}

    def asked(passed_over: str, role: str) -> tuple[int, str]:
        tokenizer.chat_template, served.app.renderer = source.format(passed_over), None
        body = {"messages": [{"role": role, "content": "be"}, said], **least}
        return served.post("/v1/chat/completions", body)

    try:
        for passed_over, role, shown in (("?", "developer", "d"), ("developer", "developer", "s"), ("?", "tool", "t")):
            told = json.loads(asked(passed_over, role)[1])
            plain = json.loads(served.post("/v1/completions", {"prompt": f"{shown}beu1+1", **least})[1])
            assert told["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
            assert told["usage"] == plain["usage"]
        status, text = asked("tool", "tool")
        assert (status, "passes over message 1, of the role 'tool'" in text) == (400, True)
        tokenizer.chat_template, served.app.renderer = None, None
        status, text = served.post("/v1/chat/completions", {"messages": [said]})
        assert (status, "has no chat template; give it one" in text) == (400, True)
        assert served.post("/v1/completions", {"prompt": "a", **least})[0] == 200
    finally:
        tokenizer.chat_template, served.app.renderer = before, None


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/completions", {"prompt": "a", "stream": True}, 400, "stream=True is not supported"),
        ("/v1/completions", {"prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty=0.5"),
        ("/v1/completions", {"prompt": []}, 400, "none of them empty"),
        ("/v1/completions", {"prompt": [[]]}, 400, "none of them empty"),
        ("/v1/completions", {"prompt": [1, [2]]}, 400, "tokens beside texts or lists"),
        ("/v1/completions", {"prompt": [1, TOKENIZER_SIZE]}, 400, f"token {TOKENIZER_SIZE} is not in [0, 259)"),
        ("/v1/completions", {"prompt": [-1]}, 400, "token -1 is not in"),
        ("/v1/completions", {"prompt": "a" * LENGTH, "max_tokens": 1}, 400, "are over the model's 64"),
        ("/v1/completions", {"prompt": "a" * 65, "max_tokens": 0, "echo": True, "logprobs": 1}, 400, "the model's 64"),
        ("/v1/completions", {"prompt": "a", "n": 1000}, 400, "n`"),
        ("/v1/completions", {"prompt": "a", "min_tokens": 5}, 400, "unknown field `min_tokens`"),
        ("/v1/completions", {"prompt": "a", "guided_regex": "[0-9]"}, 400, "unknown field `guided_regex`"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user"}], "chat_template_kwargs": {"enable_thinking": False}},
            400,
            "chat_template_kwargs={'enable_thinking': False} is not supported here; leave it out",
        ),
        ("/v1/completions", {"prompt": "a", "logprobs": 5}, 400, "logprobs=5"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "temperature": 1}, 400, "the sampled token's alone"),
        ("/v1/completions", {"prompt": "a", "logprobs": 0, "stop": "b"}, 400, "logprobs with stop"),
        ("/v1/chat/completions", {"messages": [], "model": "x"}, 400, "give at least one"),
        ("/v1/chat/completions", {"messages": [{"content": "no role"}]}, 400, "each with a role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "message 1 has content [{'type': 'image_url'}]; it must be a text, or a list of texts",
        ),
        ("/v1/embeddings", {}, 404, "there is no '/v1/embeddings'"),
        ("/v1/models", {}, 405, "takes GET, not POST"),
    ],
)
def test_what_is_not_done_is_refused_with_the_reason(
    served: Open, path: str, body: object, status: int, said: str
) -> None:
    code, text = served.post(path, body)
    assert code == status
    assert said in text.replace('\\"', '"')


def test_a_chat_that_is_too_long_is_refused_and_spoils_no_other(served: Open) -> None:
    """Without a limit of its own it would have what the model's length leaves, which is less than nothing."""
    bodies = [
        {"messages": [{"role": "user", "content": text}], "temperature": 0} for text in ("1+1=", "1" * 2 * LENGTH)
    ]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda body: served.post("/v1/chat/completions", body), bodies * 4))
    assert [status for status, _ in answers] == [200, 400] * 4
    assert f"and 0 more are over the model's {LENGTH}" in answers[1][1]


def test_only_the_key_opens_it_and_busy_servers_say_so(served: Open) -> None:
    assert [served.post(path)[0] for path in ("/health", "/v1/models")] == [200, 200]
    for key in ("", "0123456789abcdee", KEY + "0"):
        assert served.post("/health", key=key)[0] == 401
    served.app.running += 1024
    try:
        assert served.post("/v1/completions", {"prompt": "a"})[0] == 429
    finally:
        served.app.running -= 1024
    served.app.scorer, scorer = None, served.app.scorer
    try:
        status, said = served.post("/v1/completions", {"prompt": "ab", "echo": True, "logprobs": 1, "temperature": 0})
    finally:
        served.app.scorer = scorer
    assert (status, "does not score prompts" in said) == (400, True)


def test_keys_that_change_nothing_of_an_answer_are_taken(served: Open) -> None:
    body = {"prompt": "1", "max_tokens": 1, "user": "me", "metadata": {}, "store": False, "stream_options": None}
    assert served.post("/v1/completions", body)[0] == 200


def test_requests_that_are_scored_at_once_have_seeds_and_names_of_their_own(served: Open) -> None:
    body = {"prompt": "1+1=", "max_tokens": 20, "echo": True, "logprobs": 0}
    with ThreadPoolExecutor(4) as threads:
        answers = [
            json.loads(said) for _, said in threads.map(lambda _: served.post("/v1/completions", body), range(4))
        ]
    assert len({answer["id"] for answer in answers}) == 4
    assert len({answer["choices"][0]["text"] for answer in answers}) > 1


def test_at_another_start_only_requests_with_a_seed_repeat(served: Open) -> None:
    def seeds(request: CompletionRequest) -> list[int]:
        """Of two requests after a start."""
        app = OpenApplication(
            engine=served.app.engine,
            scorer=None,
            tokenizer=served.tokenizer,
            stop_token_ids=(),
            max_length=LENGTH,
            key=KEY,
        )
        return [app._request(request, (1,), 4, f"{number} 0").params.seed for number in (1, 2)]

    free, fixed = CompletionRequest(prompt="x"), CompletionRequest(prompt="x", seed=5)
    assert len({*seeds(free), *seeds(free)}) == 4
    assert len({*seeds(fixed), *seeds(fixed)}) == 1
