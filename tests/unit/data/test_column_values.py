"""Values of parquet columns as Python objects, beside pyarrow's own of the same columns."""

from __future__ import annotations

import datetime
import decimal
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rl_megatron.data.problems.records import as_json, values_of

LEAVES: tuple[tuple[pa.DataType, tuple[Any, ...]], ...] = (
    (pa.string(), ("", "a b", "\u20ac\n")),
    (pa.large_string(), ("x",)),
    (pa.dictionary(pa.int8(), pa.string()), ("user", "assistant")),
    (pa.int64(), (-(2**63), 0, 7)),
    (pa.uint64(), (2**64 - 1,)),
    (pa.bool_(), (True, False)),
    (pa.float64(), (1.5, float("nan"), float("inf"), -0.0)),
    (pa.binary(), (b"\xff\x00", b"")),
    (pa.timestamp("us"), (datetime.datetime(2026, 11, 25, 1, 2, 3, 4),)),
    (pa.decimal128(10, 2), (decimal.Decimal("1.20"),)),
    (pa.null(), (None,)),
)


def drawn(draw: random.Random, depth: int) -> tuple[pa.DataType, Any]:
    """A type, and a function that draws a value of it."""
    kind = draw.choice(["leaf", "list", "large", "fixed", "struct", "map"]) if depth else "leaf"
    if kind == "leaf":
        leaf, values = draw.choice(LEAVES)
        return leaf, lambda: draw.choice([None, *values])
    if kind == "struct":
        fields = {
            name: drawn(draw, depth - 1) for name in draw.sample(["role", "content", "a", "b"], draw.randrange(4))
        }
        of = pa.struct([(name, one) for name, (one, _) in fields.items()])
        return of, lambda: draw.choice([None, *[{name: value() for name, (_, value) in fields.items()}] * 4])
    inner, value = drawn(draw, depth - 1)
    if kind == "map":
        return pa.map_(pa.string(), inner), lambda: draw.choice([None, [("k", value()), ("l", value())]])
    many = {"list": pa.list_, "large": pa.large_list, "fixed": lambda one: pa.list_(one, 2)}[kind]
    return many(inner), lambda: draw.choice(
        [None, *[[value() for _ in range(2 if kind == "fixed" else draw.randrange(4))]] * 4]
    )


@pytest.mark.parametrize("seed", range(150))
def test_values_are_those_that_pyarrow_makes_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    kind, value = drawn(draw, 3)
    column = pa.array([value() for _ in range(40)], kind)
    for part in (column, column.slice(3, 20), column.slice(7).slice(2, 9), column.slice(40)):
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            assert repr(values_of(part)) == repr([as_json(one) for one in part.to_pylist()])


@pytest.mark.parametrize(
    ("kind", "fits", "text", "beyond", "its_text"),
    [
        (pa.timestamp("ns"), 10**9, "1970-01-01 00:00:01", 10**9 + 1, "1970-01-01 00:00:01.000000001"),
        (pa.timestamp("s"), 1, "1970-01-01 00:00:01", 253_402_300_800, "10000-01-01 00:00:00"),
        (pa.date32(), 1, "1970-01-02", 2_932_897, "10000-01-01"),
        (pa.time64("ns"), 1000, "00:00:00.000001", 1, "00:00:00.000000001"),
        (pa.duration("ns"), 10**9, "0:00:01", 1, "1"),
    ],
)
def test_dates_that_python_has_not_are_text_and_leave_others_as_they_are(
    kind: pa.DataType, fits: int, text: str, beyond: int, its_text: str
) -> None:
    column = pa.array([fits, None, beyond], pa.int64() if kind != pa.date32() else pa.int32()).cast(kind)
    wanted = [text, None, its_text]
    assert values_of(column) == wanted
    ends = pa.array([0, 3, 3], pa.int32())
    assert values_of(pa.ListArray.from_arrays(ends, column)) == [wanted, []]
    keys = pa.array(["a", "b", "c"])
    pairs = [["a", text], ["b", None], ["c", its_text]]
    assert values_of(pa.MapArray.from_arrays(ends, keys, column)) == [pairs, []]
    assert values_of(pa.FixedSizeListArray.from_arrays(column, 3)) == [wanted]
    assert values_of(pa.StructArray.from_arrays([column], ["at"])) == [{"at": one} for one in wanted]
    assert values_of(column.dictionary_encode()) == wanted


@pytest.mark.parametrize(("kind", "type_"), [(pa.float16(), np.float16), (pa.float32(), np.float32)])
def test_floats_of_fewer_bits_are_their_shortest_decimals(kind: pa.DataType, type_: type[np.floating[Any]]) -> None:
    """Whole numbers are what the column holds: its text has fewer digits, 16380 for 16384."""
    numbers = [0.1, 3.14, -0.0, 1e-5, 2.0**14, 1 / 3, float("inf"), float("nan"), None]
    column = pa.array([None if one is None else type_(one) for one in numbers], kind)
    wanted = [0.1, 3.14, -0.0, 1e-5, 2.0**14, float(str(type_(1 / 3))), None, None, None]
    assert repr(values_of(column)) == repr(wanted)
    assert repr(values_of(pa.FixedSizeListArray.from_arrays(column, 3))) == repr([wanted[:3], wanted[3:6], wanted[6:]])


def test_text_of_a_column_stays_bytes_and_inside_of_lists_is_text() -> None:
    assert values_of(pa.array(["a", None])) == [b"a", None]
    assert values_of(pa.array([["a"], None])) == [["a"], None]


def test_values_behind_null_lists_and_structs_are_left_out() -> None:
    """Their buffers hold values all the same, and those of other lists follow."""
    texts = pa.array(["a", "b", "c", "d"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 3, 4], pa.int32()), texts, mask=pa.array([False, True, False]))
    assert values_of(lists) == lists.to_pylist() == [["a"], None, ["d"]]
    structs = pa.StructArray.from_arrays([texts], ["x"], mask=pa.array([True, False, True, False]))
    assert values_of(structs) == structs.to_pylist() == [None, {"x": "b"}, None, {"x": "d"}]


def test_fields_of_one_name_and_bad_text_are_refused_as_pyarrow_does() -> None:
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
    bad = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), pa.array([b"\xff"]).view(pa.string()))
    for column, said in ((twice, "duplicate field names"), (bad, "can't decode byte 0xff")):
        for read in (pa.Array.to_pylist, values_of):
            with pytest.raises(ValueError, match=said):
                read(column)
    assert values_of(pa.array([], pa.list_(pa.int64()))) == []
