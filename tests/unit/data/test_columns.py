"""Columns from outside of the package, from an engine's answer to the learner's packed micro-batch.

Three are declared here: values of any number for each sampled token, one number for each sampled token, and two numbers
for each of a model's layers at each position. Nothing between both ends knows their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from rl_megatron import feature
from rl_megatron.columns import Column, ColumnReader, ColumnWriter, Ragged, read_column, written_column
from rl_megatron.config.io import load_config
from rl_megatron.data.packing import Packer
from rl_megatron.data.rows import RankRows, SentRows, has_layers, select_layers
from rl_megatron.data.samples import (
    columns_of_request,
    columns_of_row,
    for_pass,
    select,
    single_turns,
    split,
    to_samples,
)
from rl_megatron.engines.answers import join_continuation
from rl_megatron.engines.local.adapter import decode_completions, decode_request, encode_completions, encode_generation
from rl_megatron.errors import DataError, EngineError
from rl_megatron.learner.packed import pack_micro_batch
from rl_megatron.types import Completion, GenerationRequest, ParallelDims, Prompt, RolloutGroup, Samples, SamplingParams
from tests.completions import columns_of, completion

LAYERS = 4
OWN = {
    "kept": Column(name="kept", of="sampled"),
    "marks": Column(name="marks", of="sampled"),
    "indices": Column(name="indices", of="positions", layers=lambda shape: range(LAYERS)),
}
PROMPT, LENGTHS = 3, (4, 1, 6)


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    asks = {"kept": lambda config: "rollout.top_p" if config.rollout.top_p < 1 else None, "marks": lambda config: None}
    every = {**feature.features(), "own": feature.Feature(name="own", columns=[*OWN.values()], asks=asks)}
    feature.declared_columns.cache_clear()
    with patch.object(feature, "features", lambda: every):
        yield
    feature.declared_columns.cache_clear()


def values_of(token: int) -> list[int]:
    """The values that ``kept`` has for a sampled token: as many as its id modulo 4, so some have none."""
    return [10 * token + i for i in range(token % 4)]


def entry_of(position: int, token: int) -> list[list[int]]:
    """[layers, 2] of ``indices`` where ``token`` is the input."""
    return [[100 * layer + position, token] for layer in range(LAYERS)]


def answered(prompt: list[int], tokens: list[int]) -> Completion:
    """What an engine says: of ``tokens`` sampled after ``prompt``."""
    kept, inputs = [values_of(token) for token in tokens], [*prompt, *tokens][:-1]
    return completion(
        tokens,
        columns={
            "kept": Ragged(
                np.array([one for its in kept for one in its], np.int32), np.array([*map(len, kept)], np.int32)
            ),
            "marks": np.array(tokens, np.float32) / 2,
            "indices": np.array([entry_of(at, token) for at, token in enumerate(inputs)], np.int16),
        },
    )


def groups() -> list[RolloutGroup]:
    """A group of three completions, each as it comes back from a server."""
    ids = [50, 51, 52]
    said = [answered(ids, [*range(first, first + n)]) for first, n in zip((7, 12, 20), LENGTHS, strict=True)]
    came = decode_completions(json.loads(json.dumps(encode_completions(said))))
    assert [columns_of(one) for one in came] == [columns_of(one) for one in said]
    return [single_turns(Prompt(id="a", text="", token_ids=tuple(ids), answer=""), came)]


def check(found: Samples, layers: tuple[int, ...] = tuple(range(LAYERS))) -> None:
    """Every position has what the engine said of its target, if that was sampled, and of its input."""
    kept = found.extra["kept"]
    assert isinstance(kept, Ragged)
    of_positions = [part.values.tolist() for part in split(kept, [1] * len(found.mask))]
    starts = found.cu_seqlens[:-1].repeat_interleave(found.cu_seqlens.diff())
    places = (torch.arange(len(found.mask)) - starts).tolist()
    rows = zip(found.input_ids.tolist(), found.targets.tolist(), found.mask.tolist(), places, strict=True)
    for at, (given, target, sampled, place) in enumerate(rows):
        assert of_positions[at] == (values_of(target) if sampled else [])
        assert found.extra["marks"][at] == (target / 2 if sampled else 0)
        assert found.extra["indices"][at].tolist() == [entry_of(place, given)[layer] for layer in layers]
    assert (kept.values.dtype, found.extra["indices"].dtype) == (torch.int32, torch.int16)


def test_samples_have_every_column_at_the_positions_of_its_tokens() -> None:
    samples = to_samples(groups())
    check(samples)
    check(select(samples, torch.tensor([2, 0])))
    assert set(to_samples(groups(), columns=["kept"]).extra) == {"kept"}
    assert to_samples(groups(), columns=[]).extra == {}


def test_a_ragged_column_of_layers_is_refused() -> None:
    group = groups()[0]
    ragged = Ragged(np.zeros(2, np.int16), np.array([1, 1, 0], np.int32))
    row = replace(group.trajectories[1].chains[0], columns={"indices": ragged})
    one = replace(group, trajectories=(replace(group.trajectories[1], chains=(row,)),))
    with pytest.raises(DataError, match="indices must have the decoder's layers as their second dimension; a ragged"):
        to_samples([one])


def test_a_request_names_the_columns_and_the_run_those_that_it_needs() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=4, stop_token_ids=(), seed=0)
    request = GenerationRequest(id="x", token_ids=(1,), num_completions=1, params=params, columns=("kept", "marks"))
    assert decode_request(json.loads(json.dumps(encode_generation("x", request)))) == ("x", request)
    assert load_config("tiny_cpu", ["rollout.top_p=0.9"]).required_columns == {"kept": "rollout.top_p"}


def test_a_completion_that_a_push_cut_has_the_columns_of_both_parts() -> None:
    """A position keeps what the part said that computed it first."""
    first, more = answered([50, 51, 52], [7, 8]), answered([50, 51, 52, 7, 8], [9, 10, 11])
    again = replace(more, columns={**more.columns, "indices": more.columns["indices"] + np.int16(0)})
    again.columns["indices"].flags.writeable = True
    again.columns["indices"][:4] = -1  # of positions that the first part computed
    assert columns_of(join_continuation(first, replace(again))) == columns_of(answered([50, 51, 52], [7, 8, 9, 10, 11]))
    bare = replace(first, columns={})
    assert set(join_continuation(bare, more).columns) == {"indices"}  # the first part's tokens have no values


def test_a_row_of_two_requests_has_the_columns_of_both() -> None:
    """The second one's prompt has two tokens that nobody sampled."""
    first, second = answered([50, 51, 52], [7, 8]), answered([50, 51, 52, 7, 8, 90, 91], [9, 10])
    parts = [columns_of_request(first, 5), columns_of_request(second, 9, after=5)]
    row = columns_of_row(parts, 9)
    kept, marks = row["kept"], row["marks"]
    assert isinstance(kept, Ragged)
    assert kept.counts.tolist() == [0, 0, 3, 0, 0, 0, 1, 2]
    assert kept.values.tolist() == [*values_of(7), *values_of(9), *values_of(10)]
    assert marks[:].tolist() == [0, 0, 3.5, 4, 0, 0, 4.5, 5]
    assert row["indices"][:, 0, 0].tolist() == [*range(8)]  # type: ignore[index]
    assert parts[1]["indices"].base is None  # type: ignore[union-attr]  # the request's other positions are freed
    assert columns_of_row(parts, 5)["kept"].counts.tolist() == [0, 0, 3, 0]  # type: ignore[union-attr]
    assert set(columns_of_row([parts[0], {"marks": parts[1]["marks"]}], 9)) == {"marks"}
    short = replace(second, columns={**second.columns, "marks": second.columns["marks"][:1]})
    with pytest.raises(EngineError, match=r"marks have 1 entries, but .* there must be 2: one of each sampled token"):
        columns_of_request(short, 9, after=5)


def test_waiting_completions_keep_their_columns_in_a_checkpoint(tmp_path: Path) -> None:
    adapter, columns = TypeAdapter(list[RolloutGroup]), ColumnWriter()
    text, names = adapter.dump_json(groups(), context=columns), columns.write(tmp_path)
    reader = ColumnReader(tmp_path, names)
    again = adapter.validate_json(text, context=reader)
    reader.check()
    check(to_samples(again))
    check(to_samples(adapter.validate_json(adapter.dump_json(groups()))))
    with pytest.raises(LookupError, match="is not among the checkpoint's files"):
        adapter.validate_json(text, context=ColumnReader(tmp_path, [one for one in names if one != "columns.npy"]))


@pytest.mark.parametrize("cut_by", ["the relay", "the rank"])
def test_ranks_get_their_rows_and_their_layers(cut_by: str) -> None:
    """Four ranks for three rows: one has the first positions of the batch, without anything to learn."""
    samples, layers = to_samples(groups()), {"indices": (1, 3)}
    batch = Packer(dims=ParallelDims(dp=4), max_tokens=20).pack(samples)
    sent, placeholders = SentRows(4), 0
    for to_score in (True, False):
        shares, again = sent.shares(batch, to_score=to_score), sent.shares(batch, to_score=to_score)
        assert all(map(has_layers, shares)) == to_score  # and once a step
        for share, more, numbers, wanted in zip(shares, again, batch.sequences, batch.micro_batches, strict=True):
            held = RankRows()
            if not to_score:
                continue
            cut = select_layers(share, layers) if cut_by == "the relay" else share
            for found, ids, whole in zip(held.micro_batches(cut, layers), numbers, wanted, strict=True):
                assert found.every_column.keys() == whole.every_column.keys()
                if len(ids):
                    check(found, (1, 3))
                    assert held.num_bytes >= found.extra["kept"].nbytes
                else:
                    placeholders += 1
                    assert found.extra["indices"].tolist() == [[entry_of(0, 50)[layer] for layer in (1, 3)]]
                    assert found.extra["kept"].counts.tolist() == whole.extra["kept"].counts.tolist() == [0]  # type: ignore[union-attr]
            (found, *_) = held.micro_batches(more, layers)
            assert found.num_sequences == 1
    assert placeholders == 1


def test_ranks_get_new_values_of_a_ragged_column_with_the_counts_of_before() -> None:
    samples, held = to_samples(groups()), RankRows()
    kept, sent = samples.extra["kept"], SentRows(1)
    assert isinstance(kept, Ragged)
    changed = replace(samples, extra={**samples.extra, "kept": Ragged(kept.values + 1, kept.counts)})
    for given in (samples, changed):
        batch = Packer(dims=ParallelDims(), max_tokens=100).pack(given)
        (share,) = sent.shares(batch, to_score=True)
        (found,) = held.micro_batches(share, {"indices": range(LAYERS)})
        (whole,) = batch.micro_batches[0]
        assert found.extra["kept"].values.tolist() == whole.extra["kept"].values.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dtype": "|S4"}, "no type of numbers"),
        ({"dtype": "|O"}, "no column"),
        ({"shape": [3]}, "reshape"),
        ({"counts": np.array([3, -1], "<i4")}, "counts are of 2 values"),
        ({"counts": np.array([1, 2], "<i4")}, "counts are of 3 values, and it has 2"),
    ],
)
def test_what_a_server_calls_a_column_and_is_none_is_refused(changed: dict[str, Any], why: str) -> None:
    said = written_column(Ragged(np.array([1, 2], "<i4"), np.array([2, 0], "<i4")), lambda its: its)
    read_column(said, lambda its: its)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=why):
        read_column({**said, **changed}, lambda its: np.asarray(its).view(np.uint8))


def test_a_slice_of_a_ragged_column_has_the_values_of_its_positions() -> None:
    part = Ragged(np.array([1, 2, 3, 4, 5], np.int32), np.array([2, 0, 1, 2], np.int32))[2:4]
    assert (part.values.tolist(), part.counts.tolist()) == ([3, 4, 5], [1, 2])


def test_models_without_the_policys_layers_get_the_other_columns() -> None:
    batch = Packer(dims=ParallelDims(), max_tokens=20).pack(to_samples(groups()))
    assert set(for_pass(batch, replays=False, last_tokens=False).micro_batches[0][0].extra) == {"kept", "marks"}
    assert set(for_pass(batch, replays=True, last_tokens=False).micro_batches[0][0].extra) == set(OWN)


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("sizes", [(), (64,)])
def test_a_packed_micro_batch_has_them_at_its_own_positions(tp: int, cp: int, sizes: tuple[int, ...]) -> None:
    """Padding has no values and zeros; padding that repeats tokens has their columns."""
    samples, sizes = to_samples(groups()), tuple(size * tp * cp * 2 for size in sizes)
    kept = samples.extra["kept"]
    assert isinstance(kept, Ragged)
    of_positions, seen = [part.values.tolist() for part in split(kept, [1] * len(samples.mask))], list[int]()
    for rank in range(cp):
        share = pack_micro_batch(samples, tp=tp, cp=cp, cp_rank=rank, device=torch.device("cpu"), sizes=sizes)
        its: Any = share.extra["kept"]
        assert not set(share.columns) & set(OWN)  # losses do not take them
        assert len(its) == len(share.extra["marks"]) == len(share.source)
        for part, source, token in zip(split(its, [1] * len(its)), share.source.tolist(), share.input_ids, strict=True):
            if source >= 0:
                assert part.values.tolist() == of_positions[source]
                seen.append(source)
            else:
                assert sizes or (part.values.tolist(), int(token)) == ([], 0)
        real = share.source >= 0
        for name in ("marks", "indices"):
            assert torch.equal(share.extra[name][real], samples.extra[name][share.source[real]])
            assert sizes or not share.extra[name][~real].any()
        if sizes:
            assert torch.equal(share.extra["indices"][:, 0, 1].long(), share.input_ids)
    assert sorted(seen) == list(range(len(samples.mask)))
