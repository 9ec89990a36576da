"""Every engine with models of other kinds, TP1 and TP2: real learner ranks push, transformers' forward is the oracle.

They push into mirrors, and straight into engine ranks. Learner ranks start once (40 seconds), a model's two servers at
the same time (30 seconds), on an idle machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch

from launcher.servers.engines import SERVERS
from rl_megatron.errors import ConfigError
from rl_megatron.weights.layouts.families import read_shape
from rl_megatron.weights.layouts.recorded import Boxes
from rl_megatron.weights.routes.delivery import DirectDelivery
from rl_megatron.weights.routes.rendezvous import RendezvousStore
from tests.engines.benches import REPO, LocalBench, ServedBench, logprobs_of, request, served
from tests.engines.conftest import needs
from tests.engines.learned import KERNELS, LAYOUTS, SHARED, Learners, folder_of, learners_of, mirror_of

pytestmark = pytest.mark.slow
# The last is longer than two blocks of vLLM's prefix cache: what it computed by older weights would show.
PROMPTS = [[(11 * i + 3 * j) % 256 for j in range(length)] for i, length in enumerate((4, 13, 22, 31, 40, 49, 300))]


LATENT = ("deepseek_v3", "glm4_moe_lite")
REFUSED = {
    **{("sglang", name, tp): "takes the cached latents for keys" for name in LATENT for tp in (1, 2)},
    ("sglang", "olmoe", 2): "norms over all heads on each rank",
}
"""What an engine cannot do with so many ranks on a CPU, and says so."""
CASES = [(name, tp) for name in (SHARED, *KERNELS) for tp in (1, 2) if (name, tp) != ("hy_v3", 1)]  # a minute each


@pytest.fixture(scope="module")
def learners(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learners]:
    with learners_of(tmp_path_factory.mktemp("learned"), models) as running:
        yield running


@pytest.fixture(scope="module")
def pushed(learners: Learners) -> Path:
    return learners.root


def check(server: ServedBench, name: str, pushed: Path) -> None:
    """What each learner pushed is what the server samples from."""
    for layout, chosen in LAYOUTS.items():
        server.run(server.engine.weights.load(mirror_of(pushed, name, layout), chosen.seed))
        server.run(server.engine.weights.commit(chosen.seed))
        samples_from(server, folder_of(pushed, name, chosen.seed), chosen.seed)


def samples_from(server: ServedBench, folder: Path, version: int, prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
    """Its log-probs are those of a folder's weights, for requests that it gets at once."""
    requests = [request(prompt, n=2) for prompt in prompts]
    for asked, completions in zip(requests, server.generate(*requests), strict=True):
        for c in completions:
            expected = logprobs_of(folder, asked.token_ids, c, 1.0)
            torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)
            assert c.spans == ((0, version),)


def check_straight(server: ServedBench, name: str, learners: Learners) -> None:
    """So it is with what learners send straight into its ranks, each of which gets the boxes that it holds alone."""
    (ranks,) = server.run(server.engine.weights.boxes(server.path)).values()
    needed, whole = [bytes_of(boxes) for boxes in ranks], server.sync.mirror.num_bytes
    assert len(needed) == 2
    assert whole < sum(needed) < 1.1 * whole  # norms and routers alone are on both
    for version, (layout, apart) in enumerate(product(LAYOUTS, (True, False)), start=11):
        with learners.holding(name, layout) as weights:
            learners.ranks.call("live_apart", apart)
            server.sync.folder, first = folder_of(learners.root, name, LAYOUTS[layout].seed), learners.ranks.world_size
            server.weights._delivery = DirectDelivery(
                file=server.file(server.engine),
                learner=weights,
                servers=server.engine.weights,
                keeper=RendezvousStore("127.0.0.1", 300.0),
                learner_ranks=first,
                backend="gloo",
            )
            update = server.run(server.weights.push(version))
            assert learners.sent() == {first + rank: num_bytes for rank, num_bytes in enumerate(needed)}
            assert update.num_bytes == sum(needed)
        samples_from(server, server.sync.folder, version)


def bytes_of(boxes: Boxes) -> int:
    """Of a rank's boxes in float32."""
    return sum(4 * prod(high - low for low, high in box) for box in boxes.values())


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_pushed_weights_give_the_log_probs_of_transformers(
    name: str,
    tp: int,
    learners: Learners,
    start: Callable[[str], ServedBench],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From mirrors; of one family at TP2 straight from the learner's ranks, too."""
    for engine in SERVERS:
        needs(engine)
    if name in LATENT:  # whose kernels vLLM would choose by the processor
        monkeypatch.setenv("PYTHONPATH", f"{REPO / 'tests' / 'engines' / 'with_amx'}")
    pushed = learners.root
    model = folder_of(pushed, name, 1)

    def try_out(engine: str) -> None:
        folder = tmp_path / engine
        folder.mkdir()
        if (engine, name, tp) in REFUSED:
            with pytest.raises(ConfigError, match=REFUSED[engine, name, tp]), served(engine, model, folder, tp=tp):
                pass
            return
        with served(engine, model, folder, tp=tp, routes=False) as server:
            check(server, name, pushed)
            if name == SHARED:
                check_straight(server, name, learners)

    if (name, tp) == (SHARED, 1):
        for engine in SERVERS:
            check(start(engine), name, pushed)
        return
    with ThreadPoolExecutor() as pool:
        tried = [pool.submit(try_out, engine) for engine in SERVERS]
    problems = [problem for done in tried if (problem := done.exception()) is not None]
    if problems:
        raise BaseExceptionGroup(f"{name}, tp={tp}", problems)


def test_why_sglang_refuses_latent_attention() -> None:
    """The attention that it has without AMX kernels reads keys from the cache alone, which are latents there."""
    needs("sglang")
    (source,) = (REPO / ".engines/sglang").glob(
        "lib/*/site-packages/sglang/srt/layers/attention/torch_native_backend.py"
    )
    text = source.read_text()
    assert "per_req_key = k_cache[per_req_tokens]" in text
    assert not re.search("latent|kv_lora|mla", text, re.IGNORECASE)


@pytest.mark.parametrize("name", [SHARED, *KERNELS])
def test_the_embedded_engine_takes_what_learners_pushed(name: str, pushed: Path) -> None:
    local = LocalBench(read_shape(folder_of(pushed, name, 1)))
    for layout, chosen in LAYOUTS.items():
        local.push(mirror_of(pushed, name, layout).parent, chosen.seed)
        (completion,) = local.generate(request(PROMPTS[-1]))[0]
        expected = logprobs_of(folder_of(pushed, name, chosen.seed), PROMPTS[-1], completion, 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
