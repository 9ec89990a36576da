"""A model's tokenizer is read without its folder's code; variables of its chat template reach every place where a run
applies it, and are refused where nothing reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from launcher.build.data import load_data, read_tokenizer
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.reward import RewardModelSection
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.rewards.classifiers.in_process import classifier_texts
from rl_megatron.weights.formats.hf_folder import copy_companions

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
    config = RunConfig.model_validate({"model": given, "data": data})
    assert load_data(config, model).train[0].text == "hino"


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
    with pytest.raises(ConfigError, match="does nothing: no data has chat_template=true or messages_field"):
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
def test_a_tokenizer_that_is_code_of_the_folder_is_refused(
    model: Path, vocabulary: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        with pytest.raises(
            ConfigError, match=r"never run: save its tokenizer as tokenizer\.json, and leave auto_map out"
        ):
            read_tokenizer(model, {})
    (model / vocabulary).rename(model / "tokenizer.json")
    path.write_text(json.dumps(told))
    assert read_tokenizer(model, {}).decode(read_tokenizer(model, {}).encode("as advised")) == "as advised"
