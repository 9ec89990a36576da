"""Processes that are forked from one which has done their imports.

`FORKS` is what tests start learner ranks and runs from: its server, one for each pytest process, imports torch,
megatron and our own rooms once, and a fork of it takes milliseconds. It has one thread, so that forks are sound: it
runs no kernel and opens no group. What a test sets in ``os.environ`` does not reach it: hand it over as an argument.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.wire import Muster

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.imports"])


def be_node(muster: Muster, stderr: Sequence[int], environment: Mapping[str, str]) -> None:
    """In a fork: be what a local run's ranks are forked from, with this environment and their stderr's descriptors."""
    from launcher.worker import node
    from launcher.worker.forking import BLOCKED_SIGNALS

    signal.pthread_sigmask(signal.SIG_SETMASK, BLOCKED_SIGNALS)
    os.environ.clear()
    os.environ.update(environment)
    node.run(replace(muster, stderr=stderr, parent=os.getppid()))
