"""The tiny model is a true Hugging Face folder, made once, whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, _publish, make_tiny_model
from rl_megatron.weights.layouts.families import read_shape

SPEC = TinySizes(hidden_size=16, num_heads=2, head_dim=8, num_experts=4, expert_width=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(SPEC, tmp_path_factory.mktemp("cache"), 3)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_it_loads_with_transformers_and_has_the_sizes_asked_for(folder: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    shape = read_shape(folder)
    assert (shape.hidden_size, shape.num_experts, shape.expert_width, shape.vocab_size) == (16, 4, 8, 259)
    assert model.generation_config.eos_token_id == 257


def test_no_token_starts_at_zero(folder: Path) -> None:
    """The norm behind it would make 1 / sqrt(eps) = 1,000 of the gradient of the first that is sampled."""
    sizes = weights(folder)["model.embed_tokens.weight"].norm(dim=1)
    assert sizes.min() > 0.3 * sizes.mean()


def test_it_is_made_once_and_its_name_tells_seed_sizes_and_vocabulary_apart(folder: Path) -> None:
    cache = folder.parent
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert make_tiny_model(SPEC, cache, 3) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    others = {
        make_tiny_model(SPEC, cache, 4),
        make_tiny_model(replace(SPEC, num_layers=1), cache, 3),
        make_tiny_model(SPEC, cache, 3, vocab_size=512),
    }
    assert len(others | {folder}) == 4
    assert sorted(cache.iterdir()) == sorted(others | {folder}), "nothing half-made is left"


def test_weights_follow_the_seed_and_leave_the_global_generator_alone(folder: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    again, other = make_tiny_model(SPEC, tmp_path, 3), make_tiny_model(SPEC, tmp_path, 4)
    assert torch.equal(before, torch.get_rng_state())
    first = weights(folder)
    assert all(torch.equal(value, first[name]) for name, value in weights(again).items())
    assert any(not torch.equal(value, first[name]) for name, value in weights(other).items())


def test_a_larger_vocabulary_has_ids_the_tokenizer_never_uses(tmp_path: Path) -> None:
    folder = make_tiny_model(SPEC, tmp_path, 0, vocab_size=512)
    assert read_shape(folder).vocab_size == 512
    assert len(AutoTokenizer.from_pretrained(folder)) == 259
    with pytest.raises(ConfigError, match="vocab_size=258 is less than the tokenizer's 259"):
        make_tiny_model(SPEC, tmp_path, 0, vocab_size=258)


def make_at_once(start: Any, cache: Path, said: Path) -> None:
    start.wait()
    said.write_text(str(make_tiny_model(TinySizes(), cache, 0)))


def test_the_folder_of_a_faster_process_stands(tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    _publish(tmp_path / "mine", tmp_path / "theirs")
    assert [path.name for path in (tmp_path / "theirs").iterdir()] == ["theirs"]
    with pytest.raises(FileNotFoundError):
        _publish(tmp_path / "mine", tmp_path / "no_parent" / "theirs")


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_any_text_is_its_utf8_bytes_and_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["<eos>", " a  b ", "e\u0301", "a .", "\r\n", "don 't", "<pad><bos>"])
def test_text_that_others_change_stays(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_follow_the_bytes(tokenizer: PreTrainedTokenizerBase) -> None:
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (256, 257, 258)
    assert len(tokenizer) == 259
    assert tokenizer.decode([*b"ok", 257, 256], skip_special_tokens=True) == "ok"


def test_the_chat_template_marks_roles(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "user: hi\nassistant: "
