"""A model's tokenizer is read without its folder's code; variables of its chat template reach every place of a run."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from transformers import AutoConfig

from launcher.build.data import load_data, read_tokenizer
from launcher.build.sampler import environment_sampler, make_sampler
from rl_megatron.agents.source import EnvironmentSampler
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.reward import RewardModelSection
from rl_megatron.environments.protocol import AgentModelClient
from rl_megatron.environments.registry import Agent, EnvironmentFactory
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import CHAT_TEMPLATE, TinySizes, byte_tokenizer, make_tiny_model
from rl_megatron.rewards.classifiers.in_process import classifier_texts
from rl_megatron.rollout.policy_sampler import EvalRequest
from rl_megatron.types import Prompt, RewardResult
from rl_megatron.weights.formats.hf_folder import copy_companions
from tests.completions import drawn
from tests.scripted_engine import EOS, Scripted, trajectories
from tests.unit.rollout.test_environment_source import PROMPTS, Talks, calculates

TEMPLATE = (
    "{% macro shown(m) %}{{ m['content'] }}{% if style is defined %}[{{ style }}]{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ shown(m) }}{% endfor %}"
    "{% if add_generation_prompt %}{% if enable_thinking is defined and enable_thinking is false %}no{% else %}yes"
    "{% endif %}{% endif %}"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = make_tiny_model(TinySizes(), tmp_path, 0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "hiyes"),
        ({"enable_thinking": False}, "hino"),
        ({"enable_thinking": True, "style": 1.5}, "hi[1.5]yes"),
        ({"style": "it's {% x %} \\n"}, "hi[it's {% x %} \\n]yes"),
    ],
)
def test_a_template_is_applied_with_its_variables(model: Path, given: dict[str, bool | str], text: str) -> None:
    tokenizer = read_tokenizer(model, given)
    told = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert told == text


def test_a_runs_prompts_have_them(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "hi", "answer": "x"}\n')
    data = {"type": "files", "train": rows, "eval": rows, "chat_template": True, "on_leak": "keep"}
    given = {"path": model, "template_variables": {"enable_thinking": False}}
    assert load_data(RunConfig.model_validate({"model": given, "data": data}), model).train[0].text == "hino"


@pytest.mark.parametrize("own", [True, False])
def test_an_exported_classifier_reads_the_text_that_it_was_trained_on(model: Path, own: bool, tmp_path: Path) -> None:
    """The template may be in a file of its own; variables of who applies it, as of a run that goes on, come first."""
    if not own:
        (model / "chat_template.jinja").unlink()
        settings = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    trained = read_tokenizer(model, {"style": "it's"}).apply_chat_template(turns, tokenize=False)
    out, again = tmp_path / "out", tmp_path / "again"
    out.mkdir()
    again.mkdir()
    copy_companions(model, out, {"style": "it's"})
    config = AutoConfig.from_pretrained(model)
    texts = classifier_texts(out, RewardModelSection(chat_template=True), config, "reward.function")
    assert trained == "hi[it's]ho[it's]"
    assert texts.rows("hi", ["ho"]) == [texts.tokenizer(trained, add_special_tokens=False)["input_ids"]]
    for tokenizer, given in ((texts.tokenizer, {"style": 2}), (read_tokenizer(out, {"style": 2}), {})):
        assert tokenizer.apply_chat_template(turns, tokenize=False, **given) == "hi[2]ho[2]"
    copy_companions(out, again, {"style": 3})
    assert read_tokenizer(again, {}).apply_chat_template(turns, tokenize=False) == "hi[3]ho[3]"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"enable_thought": False}, "enable_thought=false: the chat template of .* does not read enable_thought"),
        ({"hinking": 1}, "does not read hinking"),
    ],
)
def test_a_variable_that_the_template_does_not_read_is_refused(model: Path, given: dict[str, bool], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_tokenizer(model, given)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template; leave it out"):
        read_tokenizer(model, given)
    several = [{"name": name, "template": "{{ enable_thought }}"} for name in ("default", "rag")]
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": several}))
    with pytest.raises(ConfigError, match=r"has several chat templates \(default, rag\); give it one"):
        read_tokenizer(model, given)


@pytest.mark.parametrize("key", ["a b", "1a", "x%}"])
def test_names_that_are_none_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=r"template_variables"):
        RunConfig.model_validate({"model": {"template_variables": {key: True}}})


def test_variables_without_a_template_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"does nothing: no data has chat_template=true or fields\.messages"):
        load_config("tiny_cpu", ["model.template_variables.enable_thinking=false"])
    environment = ["environment.function=calculator", "environment.template=chat", "environment.max_turns=2"]
    assert "template_variables" not in str(_refused([*environment, "model.template_variables.enable_thinking=false"]))


def _refused(keys: list[str]) -> ConfigError | None:
    try:
        load_config("calculator", keys)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("vocabulary", ["tokenizer.json", "tiktoken.model"])
@pytest.mark.parametrize("kind", ["kimi_k2", "kimi_k25"])  # transformers knows the second
def test_tokenizers_of_code_refused(model: Path, vocabulary: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the user would say yes. tiktoken.model alone is refused even where transformers could read it, as
    another model's."""
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("transformers asked whether to run code"))
    (model / "tokenizer.json").rename(model / vocabulary)
    (model / "config.json").write_text(json.dumps({"model_type": kind}))
    path, code = model / "tokenizer_config.json", {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    told = json.loads(path.read_text()) | {"tokenizer_class": "TikTokenTokenizer"}
    path.write_text(json.dumps(told | {"auto_map": code}))
    (model / "tokenization_kimi.py").write_text("raise SystemExit('it was run')")
    if (kind, vocabulary) != ("kimi_k25", "tokenizer.json"):
        with pytest.raises(ConfigError, match=r"never run: save its tokenizer as tokenizer\.json, and leave auto_map"):
            read_tokenizer(model, {})
    (model / vocabulary).rename(model / "tokenizer.json")
    path.write_text(json.dumps(told))
    assert read_tokenizer(model, {}).decode(read_tokenizer(model, {}).encode("as advised")) == "as advised"


# The source of trajectories as a run builds it: a chat template's rows, and what the run says of the template.
KEYS = (
    *("environment.template=chat", "environment.max_turns=2", "rollout.group_size=2", "warm_start.steps=0"),
    "rollout.max_prompt_tokens=40",
)
TALKS = EnvironmentFactory(Talks)
SHOWS_TOOLS = "{{ tools or '' }}" + CHAT_TEMPLATE
REWRITES = "{{ messages | length }}\n" + CHAT_TEMPLATE  # what was read before is another text each turn


def source_of(
    engine: Any, template: str, made: EnvironmentFactory | Agent = TALKS, keys: Sequence[str] = ()
) -> EnvironmentSampler:
    config, tokenizer = load_config("calculator", [*KEYS, *keys]), byte_tokenizer()
    tokenizer.chat_template = template
    data: Any = SimpleNamespace(tokenizer=tokenizer, stop_token_ids=(EOS,))
    return environment_sampler(config, made, engine, data, vocab_size=259)


def test_turns_are_in_one_row_of_a_template_that_appends(caplog: pytest.LogCaptureFixture) -> None:
    engine = Scripted(lambda text: "ab")
    with caplog.at_level(logging.INFO):
        ours = source_of(engine, CHAT_TEMPLATE)
    (record,) = caplog.records
    assert record.levelname == "INFO"  # it shows no thinking, which the tiny model has none of
    assert record.getMessage().startswith("the chat template drops thinking at every turn: 1.50 rows a trajectory")
    found = trajectories(asyncio.run(ours.groups(drawn(PROMPTS[:1], 1))))
    assert [len(one.chains) for one in found] == [1, 1]
    (row,) = found[0].chains
    expected = "user: 3*4=\nassistant: ab\nuser: .\nassistant: ab"
    assert bytes(token for token in row.token_ids.tolist() if token != EOS).decode() == expected
    assert [row.token_ids[turn.start : turn.stop].tolist() for turn in row.turns] == [[*b"ab", EOS]] * 2


def test_turns_ask_for_the_columns_that_the_run_needs_and_evaluations_for_none() -> None:
    engine = Scripted(lambda text: "ab")
    ours = source_of(engine, CHAT_TEMPLATE, keys=["algorithm.routing_replay=r3"])
    asyncio.run(ours.groups(drawn(PROMPTS[:1], 1)))
    assert {one.columns for one in engine.asked} == {("routes",)}
    engine.asked.clear()
    params = ours.params(temperature=1.0)
    asyncio.run(ours.sample_eval(EvalRequest(purpose="x", prompts=PROMPTS[:1], samples=1, params=params)))
    assert {one.columns for one in engine.asked} == {()}


def test_a_template_that_rewrites_what_was_read_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ours = source_of(Scripted(lambda text: "ab"), REWRITES, keys=["environment.max_tokens=99"])
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the chat template rewrites: 2.75 rows a trajectory" in record.getMessage()
    found = trajectories(asyncio.run(ours.groups(drawn(PROMPTS[:1], 1))))
    assert [[len(row.turns) for row in one.chains] for one in found] == [[1, 1]] * 2


@pytest.mark.parametrize(
    ("key", "template", "said"),
    [
        ("environment.tool_parser=hermes", SHOWS_TOOLS, "tool_parser=hermes reads calls with <tool_call>, which"),
        ("environment.tool_parser=hermes", SHOWS_TOOLS + "{# <tool_call> #}", None),
        ("environment.tool_parser=llama3_json", SHOWS_TOOLS, None),
        ("environment.tool_parser=llama3_json", CHAT_TEMPLATE, "llama3_json, but the model's chat template shows no t"),
        ("algorithm.credit=discounted", CHAT_TEMPLATE, "algorithm.credit=discounted goes from token to token, so a"),
        ("environment.thinking=keep", CHAT_TEMPLATE, None),
    ],
)
def test_what_would_go_wrong_later_is_warned_of(
    key: str, template: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    source_of(Scripted(lambda text: "ab"), template, keys=(key,))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == (said is not None)
    assert (said or "") in "".join(warned)


async def asks(task: Prompt, model: AgentModelClient) -> float:
    messages: list[Any] = [{"role": "user", "content": task.text}]
    async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
        said = await client.chat.completions.create(model="policy", messages=messages)
    return float(said.choices[0].message.content == "ab")


class Rewards:
    """Judges what no environment leads."""

    async def __call__(self, prompt: Prompt, completions: Any, texts: Sequence[str]) -> list[RewardResult]:
        return [RewardResult(total=-1.0) for _ in texts]


def test_prompts_of_a_source_with_an_environment_are_led_by_it_and_others_are_judged() -> None:
    products = "data.sources.products"
    of_products = [f"{products}.type=arithmetic", f"{products}.operation=product"]
    led = {"function": "calculator", "template": "plain", "max_tokens": 30, "min_turn_tokens": 4}
    keys = ["data.type=mixture", "data.sources.sums.type=arithmetic", *of_products, "warm_start.steps=0"]
    keys += [f"{products}.environment.{key}={value}" for key, value in led.items()]
    config = load_config("tiny_cpu", [*keys, "rollout.max_new_tokens=12"])
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"group_size": 1})})
    assert config.max_sampled == 30
    engine: Any = Scripted(calculates)
    data: Any = SimpleNamespace(tokenizer=byte_tokenizer(), stop_token_ids=(EOS,))
    ours: Any = make_sampler(config, None, engine, Rewards(), data, vocab_size=259)
    prompts = [
        Prompt(id=f"{source}/{text}", text=text, token_ids=tuple(text.encode()), answer=answer, source=source)
        for source, text, answer in (
            *(("products", "3*4=", "12"), ("sums", "3+4=", "7"), ("products", "5*5=", "25"), ("sums", "5+5=", "10")),
        )
    ]
    params = ours.params(temperature=1.0)
    for found in (
        trajectories(asyncio.run(ours.groups(drawn(prompts)))),
        trajectories(asyncio.run(ours.sample_eval(EvalRequest(prompts=prompts, params=params)))),
    ):
        assert [(one.reward, len(one.turns)) for one in found] == [(1.0, 2), (-1.0, 1)] * 2
        assert [bytes(one.chains[0].token_ids[:4].tolist()).decode() for one in found] == [p.text for p in prompts]
    assert ours.partial_completion(drawn(prompts)[0]) == ()


@pytest.mark.parametrize("given", ["", "intern", "*"])
def test_an_agents_client_asks_its_endpoint_through_no_proxy(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("NO_PROXY", given)
    monkeypatch.setenv("no_proxy", given)
    ours = source_of(Scripted(lambda text: "ab"), CHAT_TEMPLATE, Agent(asks))
    found = trajectories(asyncio.run(ours.groups(drawn(PROMPTS[:1], 1))))
    assert [one.reward for one in found] == [1.0, 1.0]
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"]
    assert os.environ["no_proxy"].startswith(given)
