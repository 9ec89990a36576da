"""The reward model: a tiny random classifier against its own forward, one text at a time."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from rl_megatron.config.sections.reward import RewardSection
from rl_megatron.errors import ConfigError
from rl_megatron.rewards.classifiers import in_process
from rl_megatron.rewards.classifiers.in_process import ClassifierReward
from rl_megatron.rewards.registry import resolve_reward
from rl_megatron.rewards.scoring import CallLimit
from rl_megatron.types import Prompt
from tests.completions import completion

DONE = completion((1,))
PROMPT = Prompt(id="p", text="a b ", token_ids=(1,), answer="")
WORDS = ["[pad]", "[unk]", "a", "b", "c", "d", "e", "U"]
TEXTS = ["c", "a b c d e", "", "d d d d d d d d d d d d d d", "e a"]


def make(
    folder: Path, kind: type = LlamaForSequenceClassification, chat: bool = False, seed: int = 0, **options: Any
) -> Path:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    kind(LlamaConfig(vocab_size=8, max_position_embeddings=12, **sizes, **options)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "[unk]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[pad]", unk_token="[unk]")
    if chat:
        tokenizer.chat_template = "{% for m in messages %}U {{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def score(folder: Path, **model: Any) -> list[float]:
    section = RewardSection(function=f"hf:{folder}", model=model)
    return [one.total for one in asyncio.run(resolve_reward(section)(PROMPT, [DONE] * len(TEXTS), TEXTS))]


def expected(folder: Path, ids: list[list[int]]) -> torch.Tensor:
    model = LlamaForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.cat([model(torch.tensor([row])).logits for row in ids])


def ids_of(text: str, last: int = 12) -> list[int]:
    return [WORDS.index(word) for word in text.split()][-last:]


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_batches_give_what_each_text_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    monkeypatch.setattr(in_process, "_BATCH_SIZE", batch_size)
    folder = make(tmp_path, num_labels=1, pad_token_id=0)
    wanted = expected(folder, [ids_of(PROMPT.text + text) for text in TEXTS])[:, 0]
    torch.testing.assert_close(torch.tensor(score(folder)), wanted)
    assert len(set(wanted.tolist())) == len(TEXTS)


@pytest.mark.parametrize("pad", [None, "c"], ids=["no padding token", "its padding token ends texts"])
def test_without_padding_in_its_config_a_text_is_read_at_its_last_token(tmp_path: Path, pad: str | None) -> None:
    """As transformers reads one text alone; with the tokenizer's padding it would be read before its end."""
    folder = make(tmp_path, num_labels=1)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["pad_token"] = pad
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "c"}))
    wanted = expected(folder, [ids_of(PROMPT.text + text) for text in TEXTS])[:, 0]
    torch.testing.assert_close(torch.tensor(score(folder)), wanted)


async def test_a_group_that_is_given_up_ends_with_its_batch_and_none_is_computed_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without padding in its config each batch chooses one, which transformers reads at the end of a forward pass."""
    folder = make(tmp_path, num_labels=1)
    forward, batches = LlamaForSequenceClassification.forward, list[threading.Thread]()
    inside, most, entered, go_on = 0, 0, threading.Event(), threading.Event()

    def watched(*arguments: Any, **named: Any) -> Any:
        nonlocal inside, most
        batches.append(threading.current_thread())
        inside += 1
        most = max(most, inside)
        if len(batches) == 1:
            entered.set()
            go_on.wait()
        found = forward(*arguments, **named)
        inside -= 1
        return found

    wanted = expected(folder, [ids_of(PROMPT.text + text) for text in TEXTS])[:, 0]
    monkeypatch.setattr(LlamaForSequenceClassification, "forward", watched)
    monkeypatch.setattr(in_process, "_BATCH_SIZE", 2)
    reward = resolve_reward(RewardSection.model_validate({"function": f"hf:{folder}"}))
    late = asyncio.ensure_future(reward(PROMPT, [DONE] * len(TEXTS), TEXTS))
    await asyncio.to_thread(entered.wait)
    late.cancel()
    await asyncio.wait([late])
    then = asyncio.ensure_future(reward(PROMPT, [DONE] * len(TEXTS), TEXTS))
    await asyncio.sleep(0)
    go_on.set()
    found = [one.total for one in await then]
    batches[0].join()
    torch.testing.assert_close(torch.tensor(found), wanted)
    assert (most, batches.count(batches[0])) == (1, 1)


async def test_a_group_waits_for_others_without_its_time_limit(tmp_path: Path) -> None:
    reward = ClassifierReward(make(tmp_path, num_labels=1), RewardSection().model, key="reward")
    await reward._turn.acquire()
    async with CallLimit(60.0) as limit:
        asked = asyncio.create_task(reward(PROMPT, [DONE], ["c"]))
        await asyncio.sleep(0)
        assert not limit.runs
        reward._turn.release()
        scored = [one.total for one in await asked]
    torch.testing.assert_close(scored, expected(tmp_path, [ids_of("a b c")])[:, 0].tolist())


def test_several_models_are_weighed_and_each_ones_score_is_kept(tmp_path: Path) -> None:
    folders = {name: make(tmp_path / name, num_labels=1, pad_token_id=0, seed=at) for at, name in enumerate("xy")}
    weights = {"x": 2.0, "y": -0.5}
    parts = {name: {"function": f"hf:{folder}", "weight": weights[name]} for name, folder in folders.items()}
    reward = resolve_reward(RewardSection.model_validate({"parts": parts}))
    found = asyncio.run(reward(PROMPT, [DONE] * len(TEXTS), TEXTS))
    ids = [ids_of(PROMPT.text + text) for text in TEXTS]
    x, y = (expected(folder, ids)[:, 0] for folder in folders.values())
    assert (x - y).abs().min() > 1e-3
    torch.testing.assert_close(torch.tensor([one.total for one in found]), 2 * x - 0.5 * y)
    torch.testing.assert_close(
        torch.tensor([[one.parts["x"], one.parts["y"]] for one in found]), torch.stack([x, y], 1)
    )


def test_a_label_is_read_as_its_probability_and_the_end_of_a_long_text_counts(tmp_path: Path) -> None:
    id2label = {0: "bad", 1: "ok", 2: "good"}
    folder = make(tmp_path, id2label=id2label, label2id={"bad": 0, "ok": 1, "good": 2}, pad_token_id=0)
    wanted = expected(folder, [ids_of(PROMPT.text + text, last=3) for text in TEXTS]).softmax(-1)[:, 2]
    torch.testing.assert_close(torch.tensor(score(folder, label="good", max_tokens=3)), wanted)
    for label, message in (
        (None, "it has 3 labels; set reward.model.label to one of bad, ok, good"),
        ("fine", "has the labels bad"),
    ):
        with pytest.raises(ConfigError, match=message):
            score(folder, label=label)


def test_a_chat_template_wraps_both_turns(tmp_path: Path) -> None:
    folder = make(tmp_path, chat=True, num_labels=1, pad_token_id=0)
    wanted = expected(folder, [ids_of(f"U {PROMPT.text} U {text} ") for text in TEXTS])[:, 0]
    torch.testing.assert_close(torch.tensor(score(folder, chat_template=True)), wanted)


def test_what_is_no_reward_model_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.function=hf:.*nothing: it has no config\.json"):
        resolve_reward(f"hf:{tmp_path / 'nothing'}")
    with pytest.raises(ConfigError, match=r"classifier; to download .*: hf download Org/Judge-1 --local"):
        resolve_reward("hf:Org/Judge-1")
    headless = make(tmp_path / "language", LlamaForCausalLM, num_labels=1)
    with pytest.raises(ConfigError, match=r"lack score.weight, so these weights would be random"):
        resolve_reward(f"hf:{headless}")
    folder = make(tmp_path / "good", num_labels=1)
    with pytest.raises(ConfigError, match=r"has no chat template; set it to false"):
        score(folder, chat_template=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for template, said in (
        ([{"name": name, "template": "U"} for name in ("rag", "tools")], "ValueError: .*multiple chat templates .*rag"),
        ("{{ raise_exception('one turn alone') }}", "TemplateError: one turn alone"),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        with pytest.raises(ConfigError, match=rf"hf:.*its chat template fails at a question and an answer: {said}"):
            score(folder, chat_template=True)
    with pytest.raises(ConfigError, match=r"reward\.model\.max_tokens=13: .* reads at most 12"):
        score(folder, max_tokens=13)
