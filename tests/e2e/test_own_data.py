"""Problems, rewards and models of the user's own, from the command line."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq

from tests.e2e.processes import Place

PROBLEMS = [
    {
        "question": f"A baker has {a} loaves and bakes {b} more. How many loaves are there?",
        "answer": f"There are {a} + {b} = <<{a}+{b}={a + b}>>{a + b} loaves.\n#### {a + b}",
    }
    for a in range(1, 9)
    for b in (10, 20)
]


def test_gsm8k_as_json_lines_runs_two_steps(place: Place) -> None:
    for name, problems in (("train", PROBLEMS[4:]), ("test", PROBLEMS[:4])):
        (place.folder / f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in problems))
    keys = ("--config=gsm8k_tiny", "data.train=train.jsonl", "data.eval=test.jsonl", "learner.ep=1")
    sizes = ("rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=24")
    run = place.call(
        *("train", *keys, *sizes, "train.steps=2", "run.name=gsm8k", f"model.cache_dir={place.cache}", "seed=3")
    )
    assert run.process.returncode == 0, run.text()
    lines = [json.loads(line) for line in (place.folder / "runs/gsm8k/samples.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines} == {1, 2}
    asked = {p["question"]: p["answer"] for p in PROBLEMS[4:]}
    for line in lines:
        question = line["prompt"].removeprefix("Question: ").removesuffix("\nAnswer:")
        assert line["answer"] == asked[question]


def test_parquet_with_other_names_and_math_verify(place: Place) -> None:
    for name, problems in (("train", PROBLEMS[4:]), ("test", PROBLEMS[:4])):
        columns = {
            "problem": [p["question"] for p in problems],
            "solution": [p["answer"].rsplit("#### ")[1] for p in problems],
            "level": [1 for _ in problems],
        }
        pq.write_table(pa.table(columns), place.folder / f"{name}.parquet")
    run = place.start(
        "parquet",
        *("data=gsm8k", "data.train=train.parquet", "data.eval=test.parquet", "data.prompt_field=problem"),
        *("data.answer_field=solution", "data.chat_template=true", "reward.function=math_verify", "learner.ep=1"),
        *("rollout.max_prompt_tokens=128", "rollout.max_new_tokens=8", "warm_start.steps=0", "train.steps=2"),
    )
    run.finish()
    assert [row["reward/errors"] for row in run.rows() if row["step"]] == [0, 0]
    assert "user: A baker has" in (run.folder / "samples.jsonl").read_text()
