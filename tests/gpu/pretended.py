"""Runs the kit on pretended GPUs, as a plugin: ``pytest -p tests.gpu.pretended -m gpu tests/gpu``."""

from __future__ import annotations

from tests.gpu.machine import MACHINE

MACHINE.pretended = True
