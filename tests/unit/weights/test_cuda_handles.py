"""CUDA IPC between processes that number the GPUs otherwise; torch's handles are doubles, as there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rl_megatron.errors import WeightError
from rl_megatron.weights.transports.cuda_ipc import CudaRings

HANDLE = (3, b"\x01handle", 64, 0, b"\x02counter", 0, b"\x03event", False)  # of the sender's GPU 3


class Opened(Exception):
    """What torch was asked to open."""


def sees(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=uuids[number]))


def told(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The ring's description by the sender, which sees four GPUs."""
    sees(monkeypatch, "a", "b", "c", "d")
    ring = SimpleNamespace(untyped_storage=lambda: SimpleNamespace(_share_cuda_=lambda: HANDLE))
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: ring)
    rings = CudaRings.__new__(CudaRings)
    rings.ends = SimpleNamespace(device="cuda")  # type: ignore[assignment]
    _, message, _ = rings._new_ring(64)
    return message


def opened(monkeypatch: pytest.MonkeyPatch, message: bytes) -> tuple[object, ...]:
    def open_handle(*parts: object) -> None:
        raise Opened(*parts)

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_handle)
    with pytest.raises(Opened) as caught:
        CudaRings.__new__(CudaRings)._open_ring(64, message, [])
    return caught.value.args


def test_the_receiver_opens_the_gpu_by_its_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    message = told(monkeypatch)
    sees(monkeypatch, "d")
    assert opened(monkeypatch, message) == (0, *HANDLE[1:])


def test_a_gpu_that_the_receiver_does_not_see_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    message = told(monkeypatch)
    sees(monkeypatch, "a", "b")
    with pytest.raises(WeightError, match=r"GPU d, and this process sees a, b "):
        CudaRings.__new__(CudaRings)._open_ring(64, message, [])
