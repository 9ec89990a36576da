"""Shards sent straight into engine ranks: where each engine's own loader would have put them, and what goes wrong."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from rl_megatron.errors import CorruptionError, EngineError, SyncError
from tests.engines.benches import ServedBench, logprobs_of, request
from tests.engines.straight import FolderSender, direct
from tests.engines.test_restarts import check, process_of, while_sampling


@pytest.mark.parametrize("beside", [False, True], ids=["member", "beside"])
def test_shards_go_straight_into_engines(
    server: ServedBench, models: tuple[Path, Path], beside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Log-probs are of what was pushed, and no byte more than a rank needs was sent; then through the file again."""
    sender = FolderSender(models[0])
    with direct(server, sender, beside=beside):
        for version, folder in enumerate([models[0], models[1], models[0]], start=1):
            sender.hold(folder, lambda tensors: None)
            server.sync.folder = folder
            with caplog.at_level(logging.INFO):
                update = server.run(server.weights.push(version))
            assert update.num_bytes == sender.least_bytes
            for completion in server.generate(request(n=3))[0]:
                expected = logprobs_of(folder, request().token_ids, completion, 1.0)
                torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
                assert completion.spans == ((0, version),)
        assert sender.least_bytes == sum(t.nbytes for t in sender.tensors.values()) * len(server.engine.servers)
    said = re.findall(r"holds at most (\S+) GB of a version beside its weights", caplog.text)
    if server.name == "sglang":  # which receives in place
        assert not said
    else:  # the layer that arrives, and the one before it or the embedding and the head
        sizes = Counter[str]()
        for name, tensor in sender.tensors.items():
            sizes[name.split(".")[2] if "layers" in name else ""] += tensor.nbytes
        layer, outside, (most,) = max(sizes["0"], sizes["1"]), sizes[""], [float(gb) * 1e9 for gb in said]
        assert max(layer, outside) - 1e3 < most < layer + max(layer, outside) + 1e3 < sum(sizes.values())
    server.push(models[1], 5)
    assert server.generate(request())[0][0].spans == ((0, 5),)


def test_a_lone_server_that_is_killed_comes_back_with_what_went_straight_into_it(
    start: Callable[[str], ServedBench], models: tuple[Path, Path]
) -> None:
    """And goes on with the requests that it had; the next version goes straight into the new one. 30 seconds."""
    server, sender = start("vllm"), FolderSender(models[0])
    with direct(server, sender):
        for version, folder in enumerate(models[::-1], start=1):
            sender.hold(folder, lambda tensors: None)
            server.sync.folder = folder
            server.run(server.weights.push(version))
            if version == 1:
                victim = process_of(server, 0)
                answered = while_sampling(server, partial(os.killpg, victim.pid, signal.SIGKILL))
                check(server, folder, answered, version, restarts=1)
        assert server.generate(request())[0][0].spans == ((0, 2),)


def test_a_refusal_ends_it(server: ServedBench, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A status 400 to the server's update, a learner that is gone, a bit that flips on the way."""
    sender = FolderSender(models[0])
    adapter, (replica,) = server.engine.adapter, server.engine.servers
    sender.hold(models[0], lambda tensors: None)
    server.sync.folder = models[0]
    with direct(server, sender):
        server.run(server.weights.push(1))
        post = replica.post

        async def refusing(path: str, *arguments: object, **more: object) -> object:
            if path.startswith("/update_weights"):
                raise EngineError(f"{path}: status 400: no")
            return await post(path, *arguments, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(replica, "post", refusing)
        with pytest.raises(SyncError, match="status 400: no"):
            server.run(server.weights.push(2))
        monkeypatch.undo()
        with pytest.raises(EngineError, match="no weights are served"):
            server.generate(request())
        sender.dies = True
        with pytest.raises(SyncError, match="the learner is gone"):
            server.run(server.weights.push(3))
        sender.dies, sender.flipped = False, "model.layers.1.mlp.experts.3.down_proj.weight"  # vLLM packs it
        with pytest.raises(CorruptionError, match=r"wrote in model\.layers\.1\.mlp\.experts\.3\.down_proj\.weight$"):
            server.run(server.weights.push(4))
        sender.flipped = ""
        server.run(server.weights.push(4))
        assert server.generate(request())[0][0].spans == ((0, 4),)
    assert server.engine.adapter is adapter
