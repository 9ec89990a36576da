"""Jobs on pairs of conversations: losses, gradients and weights of DPO, of KTO on single answers and of a reward model
are those of transformers and AdamW of torch; a stopped and resumed run is equal to the bit; and a reward model trained
here rewards a run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from rl_megatron.config.sections.reward import RewardModelSection
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.observability.metrics import deterministic
from rl_megatron.rewards.classifiers.in_process import ClassifierReward
from rl_megatron.types import Prompt
from tests.e2e.processes import Place, Run
from tests.e2e.test_sft import SIGN, prepared_with
from tests.e2e.trl_values import assert_as_trl
from tests.unit.launcher.commands import Said
from tests.unit.observability.report_pages import Page

SIZE, ROWS, STEPS, RATE = 6, 18, 3, 1e-3
BETA, CENTRING = 0.3, 0.05
Messages = list[dict[str, str]]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def pair(rng: random.Random, number: int) -> dict[str, object]:
    """Half of them have a turn before, which both conversations begin with."""
    before = [said("user", "1+1?"), said("assistant", "It is 2.")] if rng.random() < 0.5 else []
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    asked = [*before, said("user", f"{a}+{b}?")]
    return {
        "good": [*asked, said("assistant", f"It is {a + b}.")],
        "bad": [*asked, said("assistant", rng.choice([f"It is {a + b + rng.randint(1, 9)}, I think.", "No."]))],
        "apart": rng.choice([0, 0.5, 1]),
        "id": number,
    }


def prepared(place: Place) -> Path:
    """The model; beside it the data."""
    rng, counts = random.Random(0), {"train": ROWS, "eval": 7}
    files = {name: [pair(rng, number) for number in range(counts[name])] for name in counts}
    for name, rows in files.items():
        pq.write_table(pa.Table.from_pylist(rows), place.folder / f"{name}.parquet", row_group_size=ROWS // 2)
    answers = {f"{name}_kto": [answer(rng, row) for row in rows] for name, rows in files.items()}
    return prepared_with(place, files | answers)


def answer(rng: random.Random, row: dict[str, object]) -> dict[str, object]:
    """One of a pair, in TRL's form."""
    label = rng.random() < 0.5
    whole = row["good" if label else "bad"]
    assert isinstance(whole, list)
    return {"prompt": whole[:-1], "completion": whole[-1:], "label": label}


@pytest.fixture(scope="module")
def model(place: Place) -> Path:
    return prepared(place)


def keys(model: Path, job: str, *more: str) -> tuple[str, ...]:
    return (
        *("--config", f"{job.removesuffix('_model')}_tiny", f"model.path={model}", "data.type=files"),
        *(f"data.train={TRAIN[job]}", "data.eval=eval.jsonl", "data.fields.messages=good", "data.fields.rejected=bad"),
        *(f"{job}.batch_size={SIZE}", f"{job}.max_tokens=256", f"train.steps={STEPS}", f"train.learning_rate={RATE}"),
        *("train.lr_decay=none", "eval.every=1", "learner.threads=1", "log.sinks=[]"),
        *("learner.optimizer.clip_grad=0.5", "learner.optimizer.weight_decay=0.1", SIGN, *more),
    )


TRAIN = {"dpo": "train.parquet", "reward_model": "train.jsonl"}
DPO = ("checkpoint.every=2", f"dpo.beta={BETA}")
KTO = (
    *(*DPO, "dpo.loss=kto", "dpo.desirable_weight=1.5", "dpo.undesirable_weight=0.75", "data.train=train_kto.jsonl"),
    *("data.eval=eval_kto.jsonl", "data.fields.messages=completion", "data.fields.context=prompt"),
    "data.fields.rejected=null",
)
WEIGHTS = {True: 1.5, False: 0.75}
REWARD = ("checkpoint.every=2", "data.fields.margin=apart", f"reward_model.centring={CENTRING}")


@pytest.fixture(scope="module")
def dpo(place: Place, model: Path) -> Run:
    return place.fork_alone("dpo", *keys(model, "dpo", *DPO)).finish()


@pytest.fixture(scope="module")
def kto(place: Place, model: Path) -> Run:
    return place.fork_alone("kto", *keys(model, "dpo", *KTO)).finish()


@pytest.fixture(scope="module")
def reward(place: Place, model: Path) -> Run:
    return place.fork_alone("reward", *keys(model, "reward_model", *REWARD)).finish()


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def order() -> list[int]:
    """Rows in the order of an epoch with seed 0, by numpy's generator."""
    return [int(row) for row in np.random.default_rng([0, 0]).permutation(ROWS)]


def text(messages: Messages) -> str:
    return "".join(f"{m['role']}:{m['content']}{'<eos>' * (m['role'] == 'assistant')}\n" for m in messages)


def answer_logprob(
    model: PreTrainedModel, tokenizer: Callable[..., dict[str, list[int]]], whole: Messages
) -> torch.Tensor:
    """Of the last message with its end, by the letters of the template: a byte is a token."""
    ids = tokenizer(text(whole), add_special_tokens=False)["input_ids"][:-1]  # without the line's end
    count = len(tokenizer(whole[-1]["content"] + "<eos>", add_special_tokens=False)["input_ids"])
    logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logprobs[torch.arange(len(ids) - 1 - count, len(ids) - 1), ids[-count:]].sum()


class Dpo:
    """The mean over pairs of -log sigmoid(beta * margin of log pi/ref), of transformers' models."""

    def __init__(self, folder: Path) -> None:
        self.model, self.frozen = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def margin(self, row: dict[str, object]) -> torch.Tensor:
        with torch.no_grad():
            frozen = [answer_logprob(self.frozen, self.tokenizer, row[side]) for side in ("good", "bad")]  # type: ignore[arg-type]
        good, bad = (answer_logprob(self.model, self.tokenizer, row[side]) for side in ("good", "bad"))  # type: ignore[arg-type]
        return BETA * (good - frozen[0] - bad + frozen[1])

    def margins(self, rows: list[dict[str, object]]) -> torch.Tensor:
        return torch.stack([self.margin(row) for row in rows])

    def loss(self, rows: list[dict[str, object]]) -> torch.Tensor:
        return -logsigmoid(self.margins(rows)).mean()


class Kto(Dpo):
    """TRL's loss with z0 of each part of a batch's size; of a lone row it is 0."""

    def ratio(self, prompt: object, completion: object) -> torch.Tensor:
        with torch.no_grad():
            frozen = answer_logprob(self.frozen, self.tokenizer, [*prompt, *completion])  # type: ignore[misc]
        return answer_logprob(self.model, self.tokenizer, [*prompt, *completion]) - frozen  # type: ignore[misc]

    def point(self, rows: list[dict[str, object]]) -> float:
        """z0: each prompt with the answer of the row before it."""
        with torch.no_grad():
            found = [self.ratio(row["prompt"], rows[n - 1]["completion"]).item() for n, row in enumerate(rows)]
        return max(0.0, sum(found) / len(found)) if len(rows) > 1 else 0.0

    def margins(self, rows: list[dict[str, object]]) -> torch.Tensor:
        found = []
        for part in (rows[start : start + SIZE] for start in range(0, len(rows), SIZE)):
            point = self.point(part)
            for row in part:
                gap = BETA * (self.ratio(row["prompt"], row["completion"]) - point)
                found.append(gap if row["label"] else -gap)
        return torch.stack(found)

    def loss(self, rows: list[dict[str, object]]) -> torch.Tensor:
        weights = torch.tensor([WEIGHTS[bool(row["label"])] for row in rows])
        return (weights * (1 - self.margins(rows).sigmoid())).mean()


class Reward:
    """A sequence classifier of transformers, whose score starts at 0."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
        self.model.score.weight.data.zero_()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def scores(self, row: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
        good, bad = (
            self.model(torch.tensor([self.tokenizer(text(row[side]), add_special_tokens=False)["input_ids"]])).logits[
                0, 0
            ]  # type: ignore[arg-type]
            for side in ("good", "bad")
        )
        return good, bad

    def margins(self, rows: list[dict[str, object]]) -> torch.Tensor:
        return torch.stack([good - bad for good, bad in map(self.scores, rows)])

    def loss(self, rows: list[dict[str, object]]) -> torch.Tensor:
        found = []
        for row in rows:
            good, bad = self.scores(row)
            found.append(-logsigmoid(good - bad - float(row["apart"])) + CENTRING * (good + bad).square())  # type: ignore[arg-type]
        return torch.stack(found).mean()


@pytest.mark.parametrize(("job", "oracle"), [("dpo", Dpo), ("kto", Kto), ("reward", Reward)])
def test_losses_gradients_and_weights_are_those_of_transformers_and_adamw(
    place: Place, model: Path, job: str, oracle: type[Dpo] | type[Reward], request: pytest.FixtureRequest
) -> None:
    run, known = request.getfixturevalue(job), oracle(model)
    own, rows = "_kto" if job == "kto" else "", run.rows()
    train, held_out = (read(place.folder / f"{name}{own}.jsonl") for name in ("train", "eval"))
    vectors = [p for p in known.model.parameters() if p.ndim == 1]  # norms' weights, which do not decay
    others = [p for p in known.model.parameters() if p.ndim > 1]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for step in range(STEPS + 1):
        with torch.no_grad():
            margins = known.margins(held_out)
            assert rows[step]["eval/loss"] == pytest.approx(float(known.loss(held_out)), rel=1e-5)
            assert rows[step]["eval/preference_margin"] == pytest.approx(float(margins.mean()), rel=1e-3, abs=1e-6)
            assert rows[step]["eval/preference_accuracy"] == pytest.approx(float((margins > 0).double().mean()))
        if step == STEPS:
            break
        batch = [train[number] for number in order()[SIZE * step : SIZE * (step + 1)]]
        if isinstance(known, Kto):
            assert rows[step + 1]["kl/reference"] == pytest.approx(known.point(batch), rel=1e-4, abs=1e-5)
        optimizer.zero_grad()
        loss = known.loss(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(known.model.parameters(), 0.5)
        assert rows[step + 1]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert rows[step + 1]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        optimizer.step()
    exported = type(known.model).from_pretrained(run.folder / f"hf_step_{STEPS:06d}", dtype=torch.float32)
    for name, tensor in exported.state_dict().items():
        torch.testing.assert_close(tensor, known.model.state_dict()[name], rtol=0, atol=2e-4)


@pytest.mark.parametrize("job", ["dpo", "reward"])
def test_losses_and_gradient_norms_of_all_steps_are_those_of_trl(job: str, request: pytest.FixtureRequest) -> None:
    assert_as_trl(job.replace("reward", "reward_model"), request.getfixturevalue(job).rows()[1:])


@pytest.mark.parametrize(("job", "own"), [("dpo", set()), ("reward", {"Reward model score"})])
def test_its_report_has_the_held_out_loss_of_each(job: str, own: set[str], request: pytest.FixtureRequest) -> None:
    charts = Page(request.getfixturevalue(job).folder / "report.html").charts()
    assert charts["Held-out loss"]["series"][0]["x"] == [*range(STEPS + 1)]
    assert {"Held-out preference margin", "Preference margin", "Gradient norm", *own} <= charts.keys()


def test_in_another_layout_single_answers_are_learned_alike(place: Place, model: Path, kto: Run) -> None:
    """Each sequence, and what its z0 is estimated on, is in two parts, on ranks that have a part of every matrix."""
    layout = ("learner.tp=2", "learner.cp=2", "learner.ep=1", "learner.max_tokens_per_micro_batch=520")
    run = place.fork_alone("kto-layout", *keys(model, "dpo", *KTO, *layout)).finish()
    for row, wanted in zip(run.rows(), kto.rows(), strict=True):
        for name in ("loss", "grad_norm", "kl/reference", "eval/loss", "preference/margin"):
            assert row.get(name, 0) == pytest.approx(wanted.get(name, 0), rel=2e-4, abs=1e-5), (name, row["step"])
    assert max(row.get("kl/reference", 0) for row in kto.rows()) > 0


@pytest.mark.parametrize(
    ("job", "more", "name"),
    [("dpo", DPO, "dpo"), ("dpo", KTO, "kto"), ("reward_model", REWARD, "reward")],
    ids=["dpo", "kto", "reward_model"],
)
def test_a_run_that_is_killed_and_resumed_is_equal_to_the_bit(
    place: Place, model: Path, job: str, more: tuple[str, ...], name: str, request: pytest.FixtureRequest
) -> None:
    """At step 2, when step 3's rows were drawn, which are drawn again. Then the reference has ranks of its own."""
    whole, apart = request.getfixturevalue(name), ("roles.reference=separate",) if job == "dpo" else ()
    place.copy(whole, f"{name}-killed", until=2)
    again = place.fork_alone(f"{name}-killed", *keys(model, job, *more, *apart), resume=True).finish()
    assert "resuming from" in again.text()
    assert ("2 reference processes" in again.text()) == (job == "dpo")
    assert [deterministic(row) for row in again.rows()] == [deterministic(row) for row in whole.rows()]
    last = f"hf_step_{STEPS:06d}/model.safetensors"
    assert (again.folder / last).read_bytes() == (whole.folder / last).read_bytes()


async def test_an_exported_reward_model_scores_texts_as_its_run_did(place: Place, reward: Run) -> None:
    """By the classifier that ``reward.function=hf:`` is, on the held-out conversations."""
    section = RewardModelSection(chat_template=False)
    judge = ClassifierReward(reward.folder / f"hf_step_{STEPS:06d}", section, key="reward.function")
    rows = read(place.folder / "eval.jsonl")
    nothing = Prompt(id="p", text="", token_ids=(), answer="")
    texts = [[text(row["good"]), text(row["bad"])] for row in rows]  # type: ignore[arg-type]
    margins = [good - bad for good, bad in [[one.total for one in await judge(nothing, [], pair)] for pair in texts]]
    found = sum(margins) / len(margins)
    assert reward.rows()[-1]["eval/preference_margin"] == pytest.approx(found, rel=1e-4)


def test_an_exported_reward_model_has_the_variables_that_its_texts_had(reward: Run) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reward.folder / f"hf_step_{STEPS:06d}")
    shown = tokenizer.apply_chat_template([said("user", "1+1?"), said("assistant", "2")], tokenize=False)
    assert shown == "user:1+1?\nassistant:2<eos>\n"


KEEPS = """
import json

def keeps(prompt, completions, texts):
    if len(completions) > 1 and prompt.id != "made-up":
        with open("kept.jsonl", "a") as file:
            for one in completions:
                file.write(json.dumps([list(map(int, prompt.token_ids)), one.token_ids.tolist()]) + "\\n")
    return [float(sum(one.token_ids) % 2) for one in completions]
"""


def test_a_critic_begins_with_the_scores_of_a_reward_model(place: Place, model: Path, reward: Run) -> None:
    """The mean over sampled tokens of transformers' scores of what stands before them. Each of two stages has two parts
    of every matrix."""
    (place.folder / "keeping.py").write_text(KEEPS)
    (judge,) = reward.folder.glob("hf_step_*")
    run = place.fork(
        "critic",
        *("algorithm=ppo", "reward.function=keeping:keeps", f"model.path={model}", f"algorithm.critic.path={judge}"),
        *("warm_start.steps=0", "train.steps=1", "train.minibatches=1", "eval.every=0", "learner.tp=2", "learner.pp=2"),
    ).finish()
    classifier: Any = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32)
    values: list[float] = []
    for prompt, completion in read(place.folder / "kept.jsonl"):  # type: ignore[misc]
        with torch.no_grad():
            hidden = classifier.model(torch.tensor([prompt + completion])).last_hidden_state[0]
        values += classifier.score(hidden)[len(prompt) - 1 : -1, 0].tolist()
    (row,) = (row for row in run.rows() if row["step"])
    assert abs(sum(values) / len(values)) > 1e-3
    assert row["critic/value_mean"] == pytest.approx(sum(values) / len(values), rel=1e-4, abs=1e-6)


def test_a_classifier_is_no_policy(reward: Run, capsys: pytest.CaptureFixture[str]) -> None:
    refused = Said("train", capsys)("--check", f"model.path={reward.folder / f'hf_step_{STEPS:06d}'}", status=1)
    assert "is a sequence classifier, which scores texts; job=rl needs a model with an output layer" in refused
    refused = Said("eval", capsys)(str(reward.folder), status=1)
    assert "job=reward_model: its model scores texts and samples none" in refused


KEYS = (
    *("--config", "reward_tiny", "learner.ep=1", "train.lr_decay=none", "data.num_eval=16"),
    *("eval.every=1", "checkpoint.every=1", "log.sinks=[]"),
)
LAYOUTS = (("learner.tp=2", "learner.cp=2"), ("learner.pp=2", "learner.dp=2", "learner.ep=2"), ())


def test_every_layout_trains_the_same_reward_model_from_the_checkpoint_of_another(place: Place) -> None:
    """Of a model whose embedding is tied to the output layer that it loses: two steps in each of two layouts, and two
    in one process."""
    tied = (*KEYS, f"model.path={make_tiny_model(TinySizes(tie_embeddings=True), place.cache, 0)}")
    alone = place.fork_alone("alone", *tied, f"train.steps={2 * len(LAYOUTS)}").finish()
    for number, layout in enumerate(LAYOUTS):
        run = place.fork_alone("layouts", *tied, *layout, f"train.steps={2 * number + 2}", resume=number > 0).finish()
        assert ("resuming from" in run.text()) == (number > 0)
    for row, wanted in zip(run.rows(), alone.rows(), strict=True):
        for name in ("loss", "grad_norm", "eval/loss", "eval/preference_margin"):
            assert row.get(name, 0) == pytest.approx(wanted.get(name, 0), rel=2e-4, abs=1e-6), (name, row["step"])
