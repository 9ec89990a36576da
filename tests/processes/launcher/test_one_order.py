"""The variables and the mode in which a rank of ``learner.deterministic=true`` computes."""

from __future__ import annotations

import json
import os
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from launcher.processes.environment import of_one_order
from launcher.wire import messages
from launcher.wire.greetings import Setup
from rl_megatron.config.io import load_config
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from tests.forks import FORKS

NAMES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
LAYERS = """
import json, os, torch
def layers(shape, layer):
    names = {names}
    raise RuntimeError(json.dumps([[os.environ.get(name) for name in names],
                                   torch.are_deterministic_algorithms_enabled()]))
"""


def test_users_values_stay_if_they_are_of_one_order_and_others_are_refused() -> None:
    assert list(of_one_order({})) == list(NAMES)
    assert "NCCL_ALGO" not in of_one_order({"NCCL_ALGO": "Tree"})
    with pytest.raises(
        ConfigError, match=r"NVTE_ALLOW_NONDETERMINISTIC_ALGO=1 in the ranks' environment: only with 0 "
    ):
        of_one_order({"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"})


def rank_main(connection: Connection, folder: Path) -> None:
    from launcher.worker.process import run_worker, telling

    for name in NAMES:
        os.environ.pop(name, None)
    sys.path.append(str(folder))
    with telling(connection):
        run_worker(connection, 0)


@pytest.mark.parametrize(("keys", "mode"), [((), False), (("learner.deterministic=true",), True)])
def test_a_rank_has_them_when_it_builds_its_model(keys: tuple[str, ...], mode: bool, tmp_path: Path) -> None:
    (tmp_path / "seen_by_layers.py").write_text(LAYERS.format(names=NAMES))
    config = load_config("tiny_cpu", ["learner.ep=1", "learner.layers=seen_by_layers:layers", *keys])
    model = make_tiny_model(TinySizes.of(config.model.tiny), tmp_path / "model", seed=1)
    ours, theirs = Pipe()
    rank = FORKS.Process(target=rank_main, args=(theirs, tmp_path))
    rank.start()
    theirs.close()
    setup = Setup(config=config, model_folder=model, run_folder=tmp_path, rendezvous=f"file://{tmp_path}/rendezvous")
    messages.send(ours, messages.pack(setup))
    status, said, *_ = messages.unpack(messages.receive(ours))
    rank.join()
    assert status == "raised", said
    values = [":4096:8", "Ring", "0"] if mode else [None, None, None]
    assert json.loads(said.splitlines()[0].removeprefix("RuntimeError: ")) == [values, mode]
