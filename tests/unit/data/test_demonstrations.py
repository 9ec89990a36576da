"""Demonstrations of rows: the text of a field or the answer, its end, and what is refused before a run or in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_megatron.config.sections.data import FileRunData
from rl_megatron.data.demonstrations import Demonstrations, with_demonstrations
from rl_megatron.data.problems.prompts import load_prompts
from rl_megatron.data.samples import to_samples
from rl_megatron.data.trajectories import single_turns
from rl_megatron.errors import DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.types import Prompt, RolloutGroup
from tests.completions import completion

TOKENIZER = byte_tokenizer()
END = TOKENIZER.eos_token_id
ROWS = [
    {"question": "1+1", "answer": "2", "of": {"target": "one and one: 2"}},
    {"question": "3+1", "answer": "4", "of": {"target": " 4 "}},
]


def demonstrations(**fields: str | None) -> Demonstrations:
    return Demonstrations(
        fields=fields,
        tokenizer=TOKENIZER,
        end_token_ids=dict.fromkeys(fields, END),
        stop_token_ids=(END, ord("|")),
        vocab_size=len(TOKENIZER),
        most=15,
    )


def loaded(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> list[Prompt]:
    """Held-out rows have no demonstration."""
    train, held_out = folder / f"train{suffix}", folder / "eval.jsonl"
    held_out.write_text(json.dumps({"question": "9", "answer": "9"}))
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), train)
    else:
        train.write_text("\n".join(map(json.dumps, rows)))
    data = FileRunData(type="files", train=train, eval=held_out, demonstration_field="of.target")
    found, _ = load_prompts(data, TOKENIZER, max_prompt_tokens=9, on_long_prompt="fail", seed=0)
    return list(found[:])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_it_is_the_text_of_the_field_or_the_answer_and_its_end(tmp_path: Path, suffix: str) -> None:
    prompts = loaded(tmp_path, suffix, ROWS)
    for field, texts in (("of.target", ["one and one: 2", " 4 "]), (None, ["2", "4"])):
        said = [demonstrations(**{"": field})(prompt) for prompt in prompts]
        assert [one.token_ids.tolist() for one in said] == [[*text.encode(), END] for text in texts]
        assert all(not one.logprobs.any() and one.spans == () and one.finish_reason == "stop" for one in said)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({"target": None}, "field 'of.target' is None; a demonstration is a text"),
        ({"target": " "}, "field 'of.target' is ' '; a demonstration is a text"),
        ({"targets": "2"}, "no field 'of.target'; it has .*did you mean 'of.targets'"),
    ],
)
def test_a_row_without_one_is_refused_before_the_run(tmp_path: Path, of: Any, said: str, suffix: str) -> None:
    rows = [row | {"of": of} if place == 1 else row for place, row in enumerate(ROWS)]
    if suffix == ".parquet":
        rows = rows[1:]  # Arrow's structs have the keys of all rows
    place = "" if suffix == ".parquet" and "targets" in said else f":{len(rows)}"  # of a column, before a row is read
    with pytest.raises(DataError, match=f"train{suffix}{place}: {said}"):
        loaded(tmp_path, suffix, rows)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("0123456789abcde", r"its demonstration has 16 tokens, but rollout\.max_new_tokens=15; raise the latter"),
        ("1|2", r"its answer spells a token that ends sampling \(id 124\)"),
    ],
)
def test_one_that_no_policy_would_sample_is_refused_with_its_prompt(answer: str, said: str) -> None:
    prompt = Prompt(id="p:7", text="", token_ids=(1, 2), answer=answer, source="a")
    with pytest.raises(DataError, match=f"prompt 'p:7'.*{said}"):
        demonstrations(a=None)(prompt)
    with pytest.raises(DataError, match=f"prompt 'p:7' has the token {END}, but the model's embedding has 99 rows"):
        replace(demonstrations(a=None), vocab_size=99)(prompt)


def test_samples_tell_its_positions() -> None:
    prompt = Prompt(id="p", text="", token_ids=(1, 2), answer="3")
    sampled = single_turns(prompt, [completion([5, 6]), completion([7])])
    shown = single_turns(prompt, [demonstrations(**{"": None})(prompt)], rewards=[1.0])
    groups = [RolloutGroup(prompt=prompt, trajectories=sampled.trajectories, demonstration=shown), sampled]
    samples = to_samples(with_demonstrations(groups), demonstrated=True)
    assert samples.demonstrated is not None
    assert samples.demonstrated.tolist() == [*[False] * 5, *[True] * 3, *[False] * 5]
    assert samples.mask.tolist() == [bool(x) for x in (0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 1, 0, 1)]
    assert to_samples(with_demonstrations(groups)).demonstrated is None
