"""Fine-tuning on conversations: its losses, gradients and weights are those of transformers and AdamW of torch, and a
run that was stopped and resumed is equal to the bit to one that was not."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

from rl_megatron.models.tiny import TOKENIZER_SIZE, TinySizes, make_tiny_model
from rl_megatron.observability.history import headline_figures, load_runs
from rl_megatron.observability.metrics import deterministic
from tests.e2e.processes import Place, Run
from tests.e2e.trl_values import assert_as_trl
from tests.family_models import save_model
from tests.unit.launcher.commands import Said
from tests.unit.observability.report_pages import Page

# Conversations to train on, and a tiny model whose chat template ends their turns.
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}{{ sign }}{{ m['content'] }}"
    "{{ '<eos>' if m['role'] == 'assistant' else '' }}\n"
    "{% endfor %}{{ 'assistant' ~ sign if add_generation_prompt else '' }}"
)
SIGN = "model.template_variables.sign=':'"
"""The key of a run that has what stands between a role and its words."""


def prepared_with(place: Place, files: Mapping[str, Sequence[Mapping[str, object]]]) -> Path:
    """The model's folder, whose template ends turns with its end-of-sequence token; beside it a .jsonl file of the rows
    of each name."""
    folder = place.folder / "model"
    shutil.copytree(make_tiny_model(TinySizes(), place.cache, 0), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"split_special_tokens": False}))
    for name, rows in files.items():
        (place.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


SIZE, ROWS, STEPS, RATE = 6, 20, 5, 3e-3


def conversation(rng: random.Random) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "You add."}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 3)):
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        messages += [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]
    return messages


def prepared(place: Place) -> Path:
    """The model; beside it the data."""
    rng, counts = random.Random(0), {"train": ROWS, "eval": 9}
    return prepared_with(
        place, {name: [{"messages": conversation(rng), "id": n} for n in range(counts[name])] for name in counts}
    )


@pytest.fixture(scope="module")
def model(place: Place) -> Path:
    return prepared(place)


def keys(model: Path, *more: str) -> tuple[str, ...]:
    return (
        *("--config", "sft_tiny", f"model.path={model}", "data.type=files", "data.train=train.jsonl"),
        *("data.eval=eval.jsonl", "data.fields.messages=messages", f"sft.batch_size={SIZE}", "sft.max_tokens=256"),
        *(f"train.learning_rate={RATE}", "eval.every=1", "learner.threads=1", "log.sinks=[]"),
        *("learner.optimizer.clip_grad=0.5", "learner.optimizer.weight_decay=0.1", SIGN, *more),
    )


@pytest.fixture(scope="module")
def run(place: Place, model: Path) -> Run:
    """One pass and a half over the data, on two ranks of experts."""
    return place.fork_alone("whole", *keys(model, "sft.epochs=1.5", "checkpoint.every=2")).finish()


def tokens_of(model: Path, messages: list[dict[str, str]]) -> tuple[list[int], list[bool]]:
    """Tokens, and whether each is an answer's, by the letters of the template: a byte is a token."""
    tokenizer, tokens, is_answer = AutoTokenizer.from_pretrained(model), list[int](), list[bool]()
    for message in messages:
        answer = message["role"] == "assistant"
        for text, learned in (
            (f"{message['role']}:", False),
            (message["content"] + "<eos>" * answer, answer),
            ("\n", False),
        ):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens += ids
            is_answer += [learned] * len(ids)
    return tokens, is_answer


def length(model: Path, messages: list[dict[str, str]]) -> int:
    """Tokens that are trained on: the last line's end is none."""
    return len(tokens_of(model, messages)[0]) - 1


def loss_of(reference: PreTrainedModel, model: Path, batch: list[list[dict[str, str]]]) -> torch.Tensor:
    """The mean over all answers' tokens of the batch, each conversation alone."""
    total, count = torch.zeros(()), 0
    for messages in batch:
        tokens, is_answer = tokens_of(model, messages)
        logprobs = reference(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        mask = torch.tensor(is_answer[1:])
        total = total - logprobs[range(len(mask)), tokens[1:]][mask].sum()
        count += int(mask.sum())
    return total / count


def read(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def order() -> list[int]:
    """Rows in the order of two epochs with seed 0, by numpy's generator."""
    return [int(row) for epoch in (0, 1) for row in np.random.default_rng([0, epoch]).permutation(ROWS)]


def test_losses_gradients_and_weights_are_those_of_transformers_and_adamw(place: Place, model: Path, run: Run) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    vectors = [p for p in reference.parameters() if p.ndim == 1]  # norms' weights, which do not decay
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": [p for p in reference.parameters() if p.ndim > 1]}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    train, held_out = read(place.folder / "train.jsonl"), read(place.folder / "eval.jsonl")
    rows: list[dict[str, Any]] = run.rows()
    assert [(row["phase"], row["step"]) for row in rows] == [("sft", step) for step in range(STEPS + 1)]
    with torch.no_grad():
        assert rows[0]["eval/loss"] == pytest.approx(float(loss_of(reference, model, held_out)), rel=1e-5)
    for step, row in enumerate(rows[1:]):
        batch = [train[n] for n in order()[SIZE * step : SIZE * (step + 1)]]
        rate = RATE * (STEPS - step) / STEPS
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(reference, model, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert norm > 0.5
        optimizer.step()
        with torch.no_grad():
            held = float(loss_of(reference, model, held_out))
        assert row["eval/loss"] == pytest.approx(held, rel=1e-4)
        assert row["eval/perplexity"] == pytest.approx(np.exp(held), rel=1e-3)
        assert row["tokens/train"] >= sum(sum(tokens_of(model, messages)[1]) for messages in batch)
        assert row["learning_rate"] == pytest.approx(rate)
    assert headline_figures(load_runs([run.folder])[0])["steps"] == str(STEPS)  # and not of train.steps
    exported = AutoModelForCausalLM.from_pretrained(run.folder / f"hf_step_{STEPS:06d}", dtype=torch.float32)
    for name, tensor in exported.state_dict().items():
        torch.testing.assert_close(tensor, reference.state_dict()[name], rtol=0, atol=2e-4)
    with torch.no_grad():
        assert float(loss_of(exported, model, held_out)) == pytest.approx(rows[-1]["eval/loss"], rel=1e-5)


def test_losses_and_gradient_norms_of_all_steps_are_those_of_trl(run: Run) -> None:
    assert_as_trl("sft", run.rows()[1:])


def test_its_report_has_the_held_out_loss_of_each(run: Run) -> None:
    charts = Page(run.folder / "report.html").charts()
    assert charts["Held-out loss"]["series"][0]["x"] == [*range(STEPS + 1)]
    assert {"Held-out perplexity", "Loss", "Gradient norm"} <= charts.keys()


@pytest.mark.parametrize(
    ("name", "loader", "more", "aside", "still", "on_long"),
    [
        ("qwen3_5_moe_stacked", AutoModelForImageTextToText, {}, ("model.visual.",), "", "drop"),
        ("glm_moe_dsa", AutoModelForCausalLM, {"index_topk": 24, "index_n_heads": 16}, (), ".indexer.", "drop"),
        ("kimi_k25", AutoModelForImageTextToText, {}, ("vision_tower.", "mm_projector."), "", "cut"),
        ("hy_v3", AutoModelForCausalLM, {}, (), "expert_bias", "cut"),
    ],
)
def test_other_families_learn_and_their_export_is_transformers_by_the_names_that_were_read(
    name: str,
    loader: type[Any],
    more: dict[str, int],
    aside: tuple[str, ...],
    still: str,
    on_long: str,
    place: Place,
    model: Path,
) -> None:
    """``aside`` stays out of an export, and what has ``still`` in its name is there to the bit. Conversations longer
    than all that are held out are cut or left out, and counted."""
    folder = place.folder / name
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    save_model(name, folder, vocab_size=TOKENIZER_SIZE, max_position_embeddings=256, **more)
    shutil.copy(model / "generation_config.json", folder)
    held_out, train = read(place.folder / "eval.jsonl"), read(place.folder / "train.jsonl")
    most = max(map(partial(length, model), held_out))
    given = ("learner.tp=2", "sft.epochs=3", "checkpoint.every=0", f"sft.max_tokens={most}", f"sft.on_long={on_long}")
    run = place.fork_alone(f"run-{name}", *keys(folder, *given)).finish()
    rows, out = run.rows(), run.folder / "hf_step_000010"
    losses = [row["eval/loss"] for row in rows]
    assert losses[-1] < 0.8 * losses[0]
    held, given_model = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
    assert given_model.keys() - held.keys() == {n for n in given_model if aside and n.startswith(aside)}
    assert all(torch.equal(held[n], given_model[n]) for n in given_model if still and still in n)
    exported = loader.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        found = float(loss_of(exported, folder, held_out))
    assert found == pytest.approx(losses[-1], rel=1e-5)
    long = sum(length(model, train[n]) > most for n in order()[:SIZE])
    assert 0 < long < SIZE
    dropped, cut = rows[1]["data/dropped"], rows[1]["data/truncated"]
    assert dropped + cut == long
    assert (cut > 0) == (on_long == "cut")


def test_a_run_that_is_killed_and_resumed_is_equal_to_the_bit(place: Place, model: Path, run: Run) -> None:
    """At step 4, when the last one's rows were drawn, which are drawn again."""
    place.copy(run, "killed", until=4)
    again = place.fork_alone("killed", *keys(model, "sft.epochs=1.5", "checkpoint.every=2"), resume=True).finish()
    assert "resuming from" in again.text()
    wanted = [deterministic(row) for row in run.rows()]
    assert [deterministic(row) for row in again.rows()] == wanted
    last = f"hf_step_{STEPS:06d}/model.safetensors"
    assert (again.folder / last).read_bytes() == (run.folder / last).read_bytes()


def test_a_run_on_conversations_is_not_evaluated_by_samples(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    refused = Said("eval", capsys)(str(run.folder), status=1)
    assert "conversations have no answers to compare samples with; give a configuration" in refused
