"""Every engine with models of other kinds, TP1 and TP2: real learner ranks push, transformers' forward is the oracle.

Learner ranks start once (40 seconds), a model's two servers at the same time (30 seconds), on an idle machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from launcher.build import _check_fits
from launcher.engines import SERVERS
from rl_megatron.config_io import load
from rl_megatron.errors import ConfigError
from rl_megatron.models.shape import ModelShape
from tests.engines.benches import REPO, LocalBench, ServedBench, logprobs_of, request, served
from tests.engines.conftest import needs
from tests.engines.learned import KERNELS, LAYOUTS, SHARED, folder_of, mirror_of, push_all

pytestmark = pytest.mark.slow
# The last is longer than two blocks of vLLM's prefix cache: what it computed by older weights would show.
PROMPTS = [[(11 * i + 3 * j) % 256 for j in range(length)] for i, length in enumerate((4, 13, 22, 31, 40, 49, 300))]


REFUSED = {("sglang", "deepseek_v3"): "takes the cached latents of latent attention for keys"}
"""What an engine cannot do on a CPU, and says so."""


@pytest.fixture(scope="module")
def pushed(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("learned")
    push_all(root, models)
    return root


def check(server: ServedBench, name: str, pushed: Path) -> None:
    """What each learner pushed is what the server samples from."""
    for layout, chosen in LAYOUTS.items():
        version = chosen.seed
        server.run(server.engine.load(mirror_of(pushed, name, layout), version))
        server.run(server.engine.commit(version))
        requests = [request(prompt, n=2) for prompt in PROMPTS]
        for asked, completions in zip(requests, server.generate(*requests), strict=True):
            for c in completions:
                expected = logprobs_of(folder_of(pushed, name, version), asked.token_ids, c.token_ids, 1.0)
                torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)
                assert c.versions == (version, version)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", [SHARED, *KERNELS])
def test_pushed_weights_give_the_log_probs_of_transformers(
    name: str, tp: int, pushed: Path, start: Callable[[str], ServedBench], tmp_path: Path
) -> None:
    for engine in SERVERS:
        needs(engine)
    model = folder_of(pushed, name, 1)

    def try_out(engine: str) -> None:
        folder = tmp_path / engine
        folder.mkdir()
        if (engine, name) in REFUSED:
            with pytest.raises(ConfigError, match=REFUSED[engine, name]), served(engine, model, folder, tp=tp):
                pass
            return
        with served(engine, model, folder, tp=tp, routes=False) as server:
            check(server, name, pushed)

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


def test_the_embedded_engine_takes_what_learners_pushed(pushed: Path) -> None:
    local = LocalBench(ModelShape.from_folder(folder_of(pushed, SHARED, 1)))
    for layout, chosen in LAYOUTS.items():
        local.push(mirror_of(pushed, SHARED, layout).parent, chosen.seed)
        (completion,) = local.generate(request(PROMPTS[-1]))[0]
        expected = logprobs_of(folder_of(pushed, SHARED, chosen.seed), PROMPTS[-1], completion.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", KERNELS)
def test_the_embedded_engine_refuses_other_models_by_name(name: str, pushed: Path) -> None:
    shape = ModelShape.from_folder(folder_of(pushed, name, 1))
    with pytest.raises(ConfigError, match=f"model_type='{name}': the engine that samples here does not run it"):
        _check_fits(load("tiny_cpu", []), shape)
