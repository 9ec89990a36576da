"""Pushes into the embedded engine, digests on the device, and greedy tokens as on the CPU. 40 seconds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gpu import branch, engine
from tests.gpu.differences import worst
from tests.gpu.machine import Machine
from tests.gpu.reference import FILE

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, machine: Machine) -> Any:
    return machine.seen(tmp_path_factory.mktemp("engine"), {"engine": (engine.engine_main, branch.FLOAT32)})["engine"]


def test_a_push_writes_the_weights_and_checksums_are_the_hosts(seen: Any) -> None:
    assert seen["process_group"] == seen["on the host"]


def test_a_flipped_bit_changes_the_checksum(seen: Any) -> None:
    ((name, found),) = seen["flipped"].items()
    assert found != seen["process_group"][name]


def test_a_bit_that_flips_in_a_copy_within_the_process_is_found(seen: Any) -> None:
    head, line = seen["refused"].splitlines()
    assert head == "version 2 did not arrive whole at rank 0 and is not served:"
    assert line.endswith("as rank 0 sent it")


def test_greedy_tokens_are_those_of_the_cpu(seen: Any) -> None:
    wanted = json.loads(FILE.read_text())["engine"]
    assert seen["tokens"] == wanted["tokens"]
    assert worst(seen["logprobs"], wanted["logprobs"]) < 1e-3
