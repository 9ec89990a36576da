"""Processes that are forked from one which has done their imports.

`FORKS` is what tests start learner ranks and runs from: its server, one for each pytest process, imports torch,
megatron and our own rooms once, and a fork of it takes milliseconds. It has one thread, so that forks are sound: it
runs no kernel and opens no group. What a test sets in ``os.environ`` does not reach it: hand it over as an argument.
"""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.imports"])
