"""A teacher of another size, on ranks of its own or behind a server: its log-probs and what they make of a loss are
transformers'. Of its whole distribution three steps are TRL's, and a run that was stopped and resumed is equal to the
bit to one that was not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_megatron.models.tiny import TinySizes, make_tiny_model
from tests.e2e.processes import TINY, Place, Run
from tests.e2e.served_teacher import serving
from tests.e2e.trl_values import STEPS, assert_as_trl, stored
from tests.exposure import check_secrets, check_sockets, family
from tests.unit.observability.report_pages import Page

KEEPS = '''
import json, time
from pathlib import Path

def keeps(prompt, completions, texts):
    """Nothing is rewarded; what is sampled to train on is kept. A test may hold it."""
    while Path("hold").exists() and prompt.id != "made-up":
        Path("holding").touch()
        time.sleep(0.01)
    if len(completions) > 1 and prompt.id != "made-up":
        with open("sampled.jsonl", "a") as file:
            for one in completions:
                file.write(json.dumps([list(map(int, prompt.token_ids)), one.token_ids.tolist()]) + "\\n")
    return [0.0] * len(completions)
'''
GIVEN = (
    *("reward.function=keeping:keeps", "rollout.dynamic_sampling=off", "eval.every=0"),
    *("learner.ep=1", "warm_start.steps=0"),
)
OF_RANKS = ("roles.reference=separate", "roles.layouts.reference.tp=2", "algorithm.kl.reference={teacher}")
WHOLE = (
    *(*GIVEN, *OF_RANKS, "algorithm=gkd", "algorithm.kl.top_k=300", "algorithm.kl.beta=0.5", "train.minibatches=1"),
    *("algorithm.aggregation=token_mean", "train.lr_decay=none", "train.learning_rate=1e-3", f"train.steps={STEPS}"),
)
"""Of a teacher's distribution over all tokens, of which each counts as much as another."""
Sampled = list[list[list[int]]]
"""Prompt and completion of each."""


def models_of(place: Place) -> tuple[Path, Path]:
    """The student, and a teacher of other sizes."""
    wide = TinySizes(hidden_size=96, num_layers=3, num_experts=4, expert_width=48)
    return make_tiny_model(TinySizes(), place.cache, 0), make_tiny_model(wide, place.cache, 5)


def begin_to_keep(place: Place) -> None:
    """What is sampled from now on."""
    (place.folder / "keeping.py").write_text(KEEPS)
    for left in ("sampled.jsonl", "holding"):
        (place.folder / left).unlink(missing_ok=True)


def kept(place: Place) -> Sampled:
    return [json.loads(line) for line in (place.folder / "sampled.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def served(place: Place) -> Iterator[tuple[str, ...]]:
    """Keys of a teacher that a server serves which asks for a key; {name} is what the run calls it."""
    _, teacher = models_of(place)
    (key := place.folder / "teacher.key").write_text("key-of-the-teacher")
    key.chmod(0o600)
    with serving(teacher, key) as url:
        given = {"server": url, "path": teacher, "engine": "tests.e2e.served_teacher:Transformers", "token_file": key}
        yield tuple(f"algorithm.kl.teachers.{{name}}.{name}={value}" for name, value in given.items())


def taught(place: Place, name: str, *keys: str) -> tuple[dict[str, Any], Sampled, list[torch.nn.Module]]:
    """Row of a student's only step, what it sampled, and the models of student and teacher. Nobody else can reach the
    run, or read the server's key in it."""
    folders = models_of(place)
    begin_to_keep(place)
    (hold := place.folder / "hold").touch()
    run = place.fork_alone(name, *TINY, *GIVEN, f"model.path={folders[0]}", "train.steps=1", *keys)
    run.until((place.folder / "holding").exists, "what is sampled")
    processes = family(run.process.pid)
    assert set(check_sockets(processes)) <= {"A learner rank"}
    check_secrets(processes, run.folder, secrets=[(place.folder / "teacher.key").read_text()])
    hold.unlink()
    run.finish()
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]
    (row,) = (row for row in run.rows() if row["step"])
    return row, kept(place), models


def distil(place: Place, name: str, *, resume: bool = False) -> Run:
    student, teacher = models_of(place)
    keys = [key.format(teacher=teacher) for key in (*WHOLE, f"model.path={student}")]
    return place.fork(name, *keys, resume=resume)


@pytest.fixture(scope="module")
def whole(place: Place) -> tuple[Run, Sampled]:
    """A distillation that nobody stops, and what it sampled."""
    begin_to_keep(place)
    return distil(place, "whole").finish(), kept(place)


def test_losses_and_gradient_norms_of_all_steps_are_those_of_trl(whole: tuple[Run, Sampled]) -> None:
    run, sampled = whole
    wanted, size = stored("gkd")["sampled"], len(sampled) // STEPS
    assert [sorted(sampled[i * size : (i + 1) * size]) for i in range(STEPS)] == wanted
    assert_as_trl("gkd", [row | {"loss": row["loss/kl"]} for row in run.rows() if row["step"]])


def test_its_report_has_the_divergence_of_every_step(whole: tuple[Run, Sampled]) -> None:
    page = Page(whole[0].folder / "report.html")
    for name in ("Loss", "KL to reference"):
        assert page.charts()[name]["series"][0]["x"] == [*range(1, STEPS + 1)]
    assert "KL loss (as Loss)" in page.text


def test_a_run_that_is_killed_and_resumed_is_equal_to_the_bit(place: Place, whole: tuple[Run, Sampled]) -> None:
    run, _ = whole
    place.copy(run, "killed", until=2)
    again = distil(place, "killed", resume=True).finish()
    assert "resuming from" in again.text()
    assert again.record() == run.record()
    last = f"hf_step_{STEPS:06d}/model.safetensors"
    assert (again.folder / last).read_bytes() == (run.folder / last).read_bytes()


def prompt_keys(name: str, form: str) -> tuple[str, ...]:
    """Keys that have a teacher read a prompt of its own."""
    given = {"prompt": form, "max_prompt_tokens": 24}
    return tuple(f"algorithm.kl.teachers.{name}.{key}={value}" for key, value in given.items())


def behind_the_answer(prompt: list[int], form: str) -> list[int]:
    """The prompt that a teacher reads in place of such as ``37+08=``, whose answer is 540: its digits from the last."""
    asked = bytes(prompt).decode().rstrip("=")
    numbers = asked.split("+")
    return [*form.format(prompt=asked, answer=f"{sum(map(int, numbers)):0{len(numbers[0]) + 1}}"[::-1]).encode()]


def test_each_token_is_judged_by_teachers_of_all_places_weighed_some_behind_prompts_of_their_own(
    place: Place, served: tuple[str, ...]
) -> None:
    """The policy itself, which reads the answer; a wider and deeper model on ranks under tensor parallelism, and behind
    a server, with prompts of their own and without; and the student's own weights in two stages."""
    forms = {
        "me": "{answer} {prompt}=",
        "near": "{prompt} is {answer}, {prompt}=",
        "wide": "{prompt}={answer}\n{prompt}=",
    }
    weights = {"me": 1, "near": 2, "wide": 3, "plain": 4, "like_it": 5}
    student, teacher = models_of(place)
    keys = (
        *(key.format(name=name) for name in ("wide", "plain") for key in served),
        *(f"algorithm.kl.teachers.near.path={teacher}", "roles.layouts.teacher_near.tp=2"),
        *(f"algorithm.kl.teachers.like_it.path={student}", "roles.layouts.teacher_like_it.pp=2"),
        *(f"algorithm.kl.teachers.{name}.weight={weight}" for name, weight in weights.items()),
        *(key for name, form in forms.items() for key in prompt_keys(name, form)),
    )
    row, sampled, (policy, wide) = taught(place, "distilled", "algorithm=distill", *keys)
    found = []
    for prompt, completion in sampled:
        of_all = [
            weight
            * logprobs(
                policy if name in ("me", "like_it") else wide,
                behind_the_answer(prompt, forms[name]) if name in forms else prompt,
                completion,
            )
            for name, weight in weights.items()
        ]
        found.append(sum(of_all) / sum(weights.values()) - logprobs(policy, prompt, completion))
    tokens = np.concatenate(found)
    np.testing.assert_allclose(row["advantage/mean"], tokens.mean(), rtol=1e-4)
    np.testing.assert_allclose(row["advantage/std"], tokens.std(), rtol=1e-4)  # that of each token
    np.testing.assert_allclose(row["kl/reference"], -np.mean([one.mean() for one in found]), rtol=1e-4)
    assert row["kl/reference"] > 0.02 < row["grad_norm"]
    assert row["reward/mean"] == 0


def test_the_tokens_that_each_sources_teacher_names_are_learnt_from(place: Place, served: tuple[str, ...]) -> None:
    """Of three tokens and a bucket, KL(student‖teacher): a model on ranks, the same behind a server, and the policy
    itself, which reads the answer, each judge sums of another length. The gradient's norm is autograd's."""
    digits, form = {"near": 1, "wide": 2, "me": 3}, "{answer}. {prompt}="
    keys = (
        *(key.format(name="wide") for key in served),
        f"algorithm.kl.teachers.near.path={models_of(place)[1]}",
        *prompt_keys("me", form),
        *(f"algorithm.kl.teachers.{name}.sources=[of_{name}]" for name in digits),
        *(f"data.sources.of_{name}.{key}" for name in digits for key in ("type=arithmetic", "num_eval=9")),
        *(f"data.sources.of_{name}.digits={count}" for name, count in digits.items()),
        *("algorithm.kl.top_k=3", "algorithm.kl.beta=1", "algorithm.aggregation=token_mean", "train.minibatches=1"),
    )
    row, sampled, (student, wide) = taught(
        place, "named", "algorithm=gkd", "data=mixture", "rollout.prompts_per_step=6", *keys
    )
    student.get_input_embeddings().padding_idx = None
    found: dict[str, list[torch.Tensor]] = {name: [] for name in digits}
    for prompt, completion in sampled:
        (name,) = (name for name, count in digits.items() if len(prompt) == 2 * count + 2)
        read = behind_the_answer(prompt, form) if name == "me" else prompt
        with torch.no_grad():
            teacher = logits(student if name == "me" else wide, read, completion).softmax(-1)
        best = teacher.topk(3).indices
        p, q = (
            torch.cat([x.gather(1, best), 1 - x.gather(1, best).sum(1, keepdim=True)], 1)
            for x in (logits(student, prompt, completion).softmax(-1), teacher)
        )
        found[name].append((p * (p / q).log()).sum(1))
    assert all(len(of) == 8 and torch.cat(of).mean() > 1e-3 for of in found.values())
    loss = torch.cat([one for of in found.values() for one in of]).mean()
    loss.backward()
    norm = torch.stack([one.grad.norm() for one in student.parameters() if one.grad is not None]).norm()
    np.testing.assert_allclose(row["loss/kl"], loss.item(), rtol=1e-4)
    np.testing.assert_allclose(row["grad_norm"], norm.item(), rtol=1e-4)
    assert row["reward/mean"] == 0


def logits(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """[T, V] where a completion's tokens were sampled, float64."""
    found: torch.Tensor = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return found.double()


def logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> np.ndarray:
    """Log-probs [T] of a completion's tokens."""
    with torch.no_grad():
        return logits(model, prompt, completion).log_softmax(-1)[range(len(completion)), completion].numpy()
