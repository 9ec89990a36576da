"""The stream of prompts: its order over epochs, what is left out, and what a resume compares."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from rl_megatron.config.sections.data import FileData
from rl_megatron.data.problems.pool import Listed, Pool
from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.data.problems.prompts import load_prompts
from rl_megatron.errors import CheckpointError, DataError
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.types import Prompt


def prompts(n: int) -> list[Prompt]:
    return [Prompt(id=str(i), text="", token_ids=(i,), answer="") for i in range(n)]


def test_an_epoch_is_numpys_permutation_of_its_number() -> None:
    """A resume of an older checkpoint goes on in the same order."""
    held = prompts(50)
    wanted = [held[row] for epoch in (0, 1) for row in np.random.default_rng([5, epoch]).permutation(50).tolist()]
    assert PromptStream(held, seed=5).take(100) == wanted


def test_an_epoch_holds_every_prompt_once_and_epochs_differ() -> None:
    stream = PromptStream(prompts(20), seed=0)
    epochs = [[p.id for p in stream.take(20)] for _ in range(3)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(20)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("taken", [0, 3, 7, 10, 14, 33])
def test_a_restored_stream_continues_in_the_same_order(taken: int) -> None:
    whole = PromptStream(prompts(7), seed=5).take(taken + 40)
    first = PromptStream(prompts(7), seed=5)
    first.take(taken)
    second = PromptStream(prompts(7), seed=5)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.take(40) == whole[taken:]


def test_what_is_left_out_comes_no_more_and_all_others_in_the_same_order() -> None:
    whole, stream = PromptStream(prompts(7), seed=5).take(28), PromptStream(prompts(7), seed=5)
    assert stream.take(7) == whole[:7]
    stream.leave_out(whole[2])
    wanted = [prompt for prompt in whole[7:] if prompt.id != whole[2].id]
    assert stream.take(4) == wanted[:4]
    again = PromptStream(prompts(7), seed=5)
    again.restore(stream.state(), sorted(stream.left_out))
    assert stream.take(14) == again.take(14) == wanted[4:]
    for prompt in prompts(6):
        stream.leave_out(prompt)
    with pytest.raises(DataError, match="no prompts are left to train on: none of 7 can be sampled"):
        stream.leave_out(prompts(7)[6])


def test_more_than_an_epoch_can_be_taken_at_once() -> None:
    one_by_one = PromptStream(prompts(3), seed=0)
    assert PromptStream(prompts(3), seed=0).take(11) == [one_by_one.take(1)[0] for _ in range(11)]


def dated(folder: Path, today: str) -> Pool:
    """The prompts of a start on that day, by a chat template that writes it."""
    path, tokenizer = folder / "train.jsonl", byte_tokenizer()
    path.write_text("".join(json.dumps({"question": f"1+{i}?", "answer": "4"}) + "\n" for i in range(5)))
    tokenizer.chat_template = f"{today}: {{{{ messages[0].content }}}}"
    data = FileData(type="files", train=path, eval=path, chat_template=True)
    return load_prompts(data, tokenizer, max_prompt_tokens=99, on_long_prompt="fail", seed=0)[0]


@pytest.mark.parametrize("weights", [None, {"": 1.0}])
def test_a_run_whose_chat_template_writes_the_date_resumes_on_another_day(
    tmp_path: Path, weights: dict[str, float] | None
) -> None:
    first = PromptStream(dated(tmp_path, "26 Nov"), seed=0, weights=weights)
    first.take(1)
    second = PromptStream(dated(tmp_path, "27 Nov"), seed=0, weights=weights)
    second.restore(first.state())
    (there,), (here,) = first.take(1), second.take(1)
    assert (there.id, there.text, here.text) == (here.id, f"26 Nov: {here.question}", f"27 Nov: {here.question}")


def test_a_checkpoint_of_an_older_version_resumes_and_other_questions_do_not(tmp_path: Path) -> None:
    """Its digest is of the prompts' texts, as it still is of prompts without a question."""
    pool = dated(tmp_path, "26 Nov")
    older = PromptStream([replace(one, question="") for one in pool], seed=0).state()
    PromptStream(pool, seed=0).restore(older)
    other = [replace(one, question=f"{one.question}!", text=f"{one.text}!") for one in pool]
    for state in (older, PromptStream(pool, seed=0).state()):
        with pytest.raises(CheckpointError, match="but with others, by their digest; resume with the same files"):
            PromptStream(other, seed=0).restore(state)


def test_a_state_of_other_data_is_refused() -> None:
    state = PromptStream(prompts(7), seed=0).state()
    with pytest.raises(CheckpointError, match="made with 7 training prompts, but the data has 8"):
        PromptStream(prompts(8), seed=0).restore(state)


class Walked(list[Prompt]):
    """Counts how often all of it is visited."""

    walks = 0

    @override
    def __iter__(self) -> Iterator[Prompt]:
        self.walks += 1
        return super().__iter__()


def test_a_prompt_is_left_out_without_a_walk_over_all_once_they_are_read_ahead() -> None:
    """The event loop leaves it out; over a million prompts in memory a walk takes it a second."""
    held = Walked(prompts(5))
    stream = PromptStream(held, seed=0)
    stream.read_ahead()
    before = held.walks
    stream.leave_out(held[3])
    assert (stream.left_out, held.walks) == ({3}, before)


class OneHash(str):
    """A name whose hash is that of each other."""

    __slots__ = ()

    @override
    def __hash__(self) -> int:
        return 7


def test_rows_are_found_by_names_of_equal_hashes_and_at_twelve_bytes_a_prompt() -> None:
    names = [OneHash(name) for name in "abc"]
    few = Listed([replace(one, id=name) for one, name in zip(prompts(3), names, strict=True)])
    assert [few.row_of(name) for name in names] == [0, 1, 2]
    with pytest.raises(KeyError):
        few.row_of(OneHash("d"))
    many = Listed(prompts(4096))
    tracemalloc.start()
    try:
        assert [many.row_of(str(row)) for row in range(4096)] == list(range(4096))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4096 * 24  # of a dict it would be 51 or more
