"""A teacher of another size, on ranks of its own or behind a server: its log-probs and what they make of a loss are
transformers'. Of its whole distribution three steps are TRL's, and a run that was stopped and resumed is equal to the
bit to one that was not."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_megatron.models.tiny import TinySizes, make_tiny_model
from tests.e2e.processes import Place, Run
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
OF_SERVER = (
    *("algorithm.kl.teachers.wide.server={url}", "algorithm.kl.teachers.wide.path={teacher}"),
    "algorithm.kl.teachers.wide.engine=tests.e2e.served_teacher:Transformers",
    "algorithm.kl.teachers.wide.token_file={key}",
)
WHOLE = (
    *(*GIVEN, *OF_RANKS, "algorithm=gkd", "algorithm.kl.top_k=300", "algorithm.kl.beta=0.5", "train.minibatches=1"),
    *("algorithm.aggregation=token_mean", "train.lr_decay=none", "train.learning_rate=1e-3", f"train.steps={STEPS}"),
)
"""Of a teacher's distribution over all tokens, of which each counts as much as another."""
PLACES = pytest.mark.parametrize("of", [OF_RANKS, OF_SERVER], ids=["on ranks of its own", "behind a server"])


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


def trained(
    place: Place, name: str, of: tuple[str, ...], *keys: str
) -> tuple[list[dict[str, Any]], list[list[list[int]]], list[torch.nn.Module]]:
    """Rows of a student's run with a teacher of other sizes, what it sampled in the first step, and both models."""
    student, teacher = models_of(place)
    begin_to_keep(place)
    (key := place.folder / "teacher.key").write_text("key-of-the-teacher")
    key.chmod(0o600)
    (hold := place.folder / "hold").touch()
    with serving(teacher, key) if OF_SERVER[0] in of else contextlib.nullcontext("") as url:
        judged = (one.format(teacher=teacher, url=url, key=key) for one in of)
        run = place.fork(
            f"{name}-{len(of)}-{len(keys)}", *GIVEN, f"algorithm={name}", *keys, f"model.path={student}", *judged
        )
        run.until((place.folder / "holding").exists, "what is sampled")
        processes = family(run.process.pid)
        assert set(check_sockets(processes)) <= {"A learner rank"}
        check_secrets(processes, run.folder, secrets=[key.read_text()])
        hold.unlink()
        run.finish()
    sampled = kept(place)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (student, teacher)]
    assert len(sampled) >= 16
    return [row for row in run.rows() if row["step"]], sampled[:16], models


def distil(place: Place, name: str, *, resume: bool = False) -> Run:
    student, teacher = models_of(place)
    keys = [key.format(teacher=teacher) for key in (*WHOLE, f"model.path={student}")]
    return place.fork(name, *keys, resume=resume)


@pytest.fixture(scope="module")
def whole(place: Place) -> tuple[Run, Sampled]:
    """A distillation that nobody stops, and what it sampled."""
    begin_to_keep(place)
    run = distil(place, "whole").finish()
    return run, kept(place)


def test_losses_and_gradient_norms_of_all_steps_are_those_of_trl(whole: tuple[Run, Sampled]) -> None:
    run, sampled = whole
    wanted, size = stored("gkd")["sampled"], len(sampled) // STEPS
    assert [sorted(sampled[i * size : (i + 1) * size]) for i in range(STEPS)] == wanted
    assert_as_trl("gkd", [row | {"loss": row["loss/kl"]} for row in run.rows() if row["step"]])


def test_its_report_has_the_divergence_of_every_step(whole: tuple[Run, Sampled]) -> None:
    charts = Page(whole[0].folder / "report.html").charts()
    for name in ("Loss: KL term", "KL to the reference"):
        assert [label for _, label, _ in charts[name]["points"]] == [f"step {n}" for n in range(1, STEPS + 1)]


def test_a_run_that_is_killed_and_resumed_is_equal_to_the_bit(place: Place, whole: tuple[Run, Sampled]) -> None:
    run, _ = whole
    place.copy(run, "killed", until=2)
    again = distil(place, "killed", resume=True).finish()
    assert "resuming from" in again.text()
    assert again.record() == run.record()
    last = f"hf_step_{STEPS:06d}/model.safetensors"
    assert (again.folder / last).read_bytes() == (run.folder / last).read_bytes()


@PLACES
def test_each_token_of_a_student_is_judged_by_a_wider_and_deeper_teacher(place: Place, of: tuple[str, ...]) -> None:
    rows, first, models = trained(place, "distill", of, "train.steps=2")
    means = [np.mean(np.subtract(*(logprobs(model, *one) for model in models))) for one in first]
    np.testing.assert_allclose(rows[0]["kl/reference"], np.mean(means), rtol=1e-4)
    assert rows[0]["kl/reference"] > 0.1  # they differ
    tokens = np.concatenate([np.subtract(*(logprobs(model, *one) for model in models)) for one in first])
    np.testing.assert_allclose(rows[0]["advantage/mean"], -tokens.mean(), rtol=1e-4)
    np.testing.assert_allclose(rows[0]["advantage/std"], tokens.std(), rtol=1e-4)  # minus that of each token
    assert rows[0]["reward/mean"] == 0 < rows[0]["grad_norm"]


def test_several_teachers_on_ranks_are_weighed_each_in_a_layout_of_its_own(place: Place) -> None:
    """The student's own weights are the second, and count three times."""
    student, _ = models_of(place)
    keys = (
        *("algorithm.kl.teachers.wide.path={teacher}", "roles.layouts.teacher_wide.tp=2"),
        *(f"algorithm.kl.teachers.like_it.path={student}", "algorithm.kl.teachers.like_it.weight=3"),
        *("roles.layouts.teacher_like_it.pp=2", "rollout.temperature=0.8"),
    )
    rows, first, models = trained(place, "distill", keys, "train.steps=1")
    of_student, of_wide = (
        np.concatenate([np.log(distribution(model, *one, 0.8)[range(len(one[1])), one[1]]) for one in first])
        for model in models
    )
    wanted = (of_wide + 3 * of_student) / 4 - of_student
    np.testing.assert_allclose(rows[0]["advantage/mean"], wanted.mean(), rtol=1e-4)
    np.testing.assert_allclose(rows[0]["advantage/std"], wanted.std(), rtol=1e-4)
    assert rows[0]["kl/reference"] > 0.02 < rows[0]["grad_norm"]


@PLACES
def test_the_tokens_that_a_teacher_names_are_learnt_from(place: Place, of: tuple[str, ...]) -> None:
    """Of three tokens and a bucket, KL(student‖teacher), of a teacher on ranks at a temperature."""
    temperature = 0.8 if of is OF_RANKS else 1.0
    keys = ("algorithm.kl.top_k=3", "algorithm.kl.beta=1", f"rollout.temperature={temperature}", "train.minibatches=1")
    rows, first, models = trained(place, "gkd", of, *keys, "train.steps=1")
    found: list[float] = []
    for one in first:
        student, teacher = (distribution(model, *one, temperature=temperature) for model in models)
        for pi, ref in zip(student, teacher, strict=True):
            named = np.argsort(-ref)[:3]
            p, q = (np.append(x[named], 1 - x[named].sum()) for x in (pi, ref))
            found.append(float((p * np.log(p / q)).sum()))
    np.testing.assert_allclose(rows[0]["loss/kl"], np.mean(found), rtol=1e-4)
    assert rows[0]["reward/mean"] == 0 < rows[0]["grad_norm"]


def behind_the_answer(text: str, form: str) -> list[int]:
    """The prompt that a teacher reads in place of such as ``37+08=``, whose answer is 540: its digits from the last."""
    numbers = [int(one) for one in text.rstrip("=").split("+")]
    return [*form.format(prompt=text.rstrip("="), answer=f"{sum(numbers):03}"[::-1]).encode()]


def test_a_policy_that_reads_the_answer_teaches_itself(place: Place) -> None:
    """The loss and its gradient's norm are autograd's, of transformers' model twice, once without a gradient."""
    form, keys = "{answer}. {prompt}=", ("algorithm.kl.top_k=300", "train.minibatches=1", "train.steps=1")
    escaped = form.replace("{", "{{").replace("}", "}}")
    of = (f"algorithm.kl.teachers.me.prompt={escaped}", "algorithm.kl.teachers.me.max_prompt_tokens=11")
    rows, first, (student, _) = trained(place, "gkd", of, *keys, "algorithm.aggregation=token_mean")
    student.get_input_embeddings().padding_idx = None
    total, count = torch.zeros([], dtype=torch.float64), sum(len(completion) for _, completion in first)
    for prompt, completion in first:
        with torch.no_grad():
            t = logits(student, behind_the_answer(bytes(prompt).decode(), form), completion).softmax(-1)
        p = logits(student, prompt, completion).softmax(-1)
        m = (p + t) / 2
        total = total + (t * (t / m).log() + p * (p / m).log()).sum() / 2 / count
    total.backward()
    norm = torch.stack([one.grad.norm() for one in student.parameters() if one.grad is not None]).norm()
    np.testing.assert_allclose(rows[0]["loss/kl"], total.item(), rtol=1e-4)
    np.testing.assert_allclose(rows[0]["grad_norm"], float(norm), rtol=1e-4)
    assert rows[0]["reward/mean"] == 0 < rows[0]["loss/kl"]


def test_teachers_of_all_places_read_prompts_of_their_own(place: Place) -> None:
    """The policy itself, a wider model on ranks of its own under tensor parallelism, and the same behind a server."""
    forms = {
        "me": "{answer} {prompt}=",
        "near": "{prompt} is {answer}, {prompt}=",
        "wide": "{prompt}={answer}\n{prompt}=",
    }
    weights = {"me": 1, "near": 2, "wide": 3}
    of = [*OF_SERVER, "algorithm.kl.teachers.near.path={teacher}", "roles.layouts.teacher_near.tp=2"]
    for name, form in forms.items():
        given = {"weight": weights[name], "prompt": form.replace("{", "{{").replace("}", "}}"), "max_prompt_tokens": 24}
        of += [f"algorithm.kl.teachers.{name}.{key}={value}" for key, value in given.items()]
    rows, first, (student, wide) = trained(place, "distill", tuple(of), "train.steps=1")
    found = []
    for prompt, completion in first:
        own = logprobs(student, prompt, completion)
        of_all = [
            weights[name]
            * logprobs(student if name == "me" else wide, behind_the_answer(bytes(prompt).decode(), form), completion)
            for name, form in forms.items()
        ]
        found.append(sum(of_all) / 6 - own)
    tokens = np.concatenate(found)
    np.testing.assert_allclose(rows[0]["advantage/mean"], tokens.mean(), rtol=1e-4)
    np.testing.assert_allclose(rows[0]["advantage/std"], tokens.std(), rtol=1e-4)
    np.testing.assert_allclose(rows[0]["kl/reference"], -np.mean([one.mean() for one in found]), rtol=1e-4)
    assert rows[0]["kl/reference"] > 0.02 < rows[0]["grad_norm"]


def logits(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """[T, V] where a completion's tokens were sampled, float64."""
    found: torch.Tensor = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return found.double()


def distribution(model: torch.nn.Module, prompt: list[int], completion: list[int], temperature: float) -> np.ndarray:
    """Probabilities [T, V] where a completion's tokens were sampled."""
    with torch.no_grad():
        return (logits(model, prompt, completion) / temperature).softmax(-1).numpy()


def logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> np.ndarray:
    """Log-probs [T] of a completion's tokens."""
    return np.log(distribution(model, prompt, completion, 1.0)[range(len(completion)), completion])
