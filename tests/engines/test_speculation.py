"""Engines decode speculatively with a GLM-4.5's draft layer, which every push brings.

Transformers' forward of the model and of its draft layer is the oracle: of log-probs, of the distribution of three
tokens, and of how often a proposal is accepted. One server of each (a minute). SGLang's kernels for it need a GPU, or a
processor with AMX: in their place are those of `sglang_drafts`, whose rule is ours, and the rest of it is SGLang's.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_megatron.features.draft.engines import Drafts
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.types import Completion
from tests.draft_models import COPIES, WrittenDraft, save_with_drafts
from tests.engines.benches import REPO, ServedBench, logits_of, logprobs_of, request, served
from tests.engines.conftest import needs

pytestmark = pytest.mark.slow
VOCABULARY, SAMPLES = 12, 4096
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 2048,
}
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """Two models whose tensors differ, those of the draft layer too."""
    root = tmp_path_factory.mktemp("drafts")
    found = []
    for number in (1, 2):
        folder = root / f"model-{number}"
        save_with_drafts("glm4_moe", folder, **SIZES)
        byte_tokenizer().save_pretrained(folder)
        draw = torch.Generator().manual_seed(number)
        held = {
            name: tensor + 0.1 * torch.randn(tensor.shape, generator=draw)
            for name, tensor in load_file(folder / "model.safetensors").items()
            if not name.startswith("model.layers.2.") or not name.endswith(COPIES)
        }
        held["lm_head.weight"] *= 3
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        found.append(folder)
    return found


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def server(
    request: pytest.FixtureRequest, folders: Sequence[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedBench]:
    """Which has had the first model before the second."""
    engine = request.param
    needs(engine)
    more = ["learner.draft.train=true"]
    folder = tmp_path_factory.mktemp(engine)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if engine == "sglang":
            patch.setenv("PYTHONPATH", f"{REPO / 'tests' / 'engines' / 'sglang_drafts'}")
        running = stack.enter_context(served(engine, folders[0], folder, routes=False, more=more, draft_tokens=1))
        running.push(folders[0], 1)
        running.push(folders[1], 2)
        yield running


def sampled(server: ServedBench, new: int) -> list[Completion]:
    """Of 4096 completions of the prompt, each of so many tokens."""
    groups = server.generate(*[request(PROMPT, n=64, new=new) for _ in range(SAMPLES // 64)])
    return [completion for group in groups for completion in group]


def chances(folder: Path, *before: int) -> Tensor:
    """The model's distribution behind the prompt and ``before``."""
    return logits_of(folder, [*PROMPT, *before])[-1].softmax(-1).double()


def test_three_tokens_have_the_models_distribution_and_log_probs(server: ServedBench, folders: Sequence[Path]) -> None:
    """By all 1728 texts of three tokens, and a chi-square test of those that are expected five times or more: a right
    sampler is refused once in a million times."""
    found = sampled(server, 3)
    expected = {
        (a, b, c): float(SAMPLES * p * q * r)
        for a, p in enumerate(chances(folders[1]))
        for b, q in enumerate(chances(folders[1], a))
        for c, r in enumerate(chances(folders[1], a, b))
    }
    counts = Counter(tuple(one.token_ids.tolist()) for one in found)
    often = [text for text, count in expected.items() if count >= 5]
    rare = (sum(counts.values()) - sum(counts[text] for text in often), SAMPLES - sum(expected[text] for text in often))
    cells = [(counts[text], expected[text]) for text in often] + [rare]
    assert len(cells) > 10
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    halves = [torch.tensor(half / 2, dtype=torch.float64) for half in (len(cells) - 1, statistic)]
    assert float(torch.special.gammaincc(*halves)) > 1e-6, cells
    for one in {tuple(one.token_ids.tolist()): one for one in found}.values():
        right = logprobs_of(folders[1], PROMPT, one, 1.0)
        torch.testing.assert_close(torch.tensor(one.logprobs), right, atol=1e-4, rtol=0)
        assert one.spans == ((0, 2),)


def test_proposals_are_those_of_the_draft_layer_pushed_last(server: ServedBench, folders: Sequence[Path]) -> None:
    """Behind the first token the layer proposes its most probable one, which is accepted as often as the model would
    draw it; the layer of the push before is right less than a tenth as often."""
    (hooks,) = (one for one in server.engine.adapter.hooks if isinstance(one, Drafts))
    (replica,) = server.engine.servers
    before = server.run(hooks.counts(replica))
    sampled(server, 2)
    proposed, accepted = (b - a for a, b in zip(before, server.run(hooks.counts(replica)), strict=True))
    assert proposed == SAMPLES
    masks = server.name == "vllm"  # reads zeros for the embedding at a sequence's first position
    right, stale = (accepted_by(WrittenDraft(folder, masks_first=masks), folders[1]) for folder in folders[::-1])
    assert stale < right / 10
    assert abs(accepted / proposed - right) < 5 * math.sqrt(right * (1 - right) / SAMPLES)


def accepted_by(draft: WrittenDraft, folder: Path) -> float:
    """How often the model accepts what a draft layer proposes for the second token."""
    first, behind = chances(folder), 0  # a token that the last position does not see
    proposals = [int(draft.logits(torch.tensor([*PROMPT, t, behind]))[-1].argmax()) for t in range(VOCABULARY)]
    return sum(float(first[t] * chances(folder, t)[proposal]) for t, proposal in enumerate(proposals))


def test_checksums_see_the_draft_layer(server: ServedBench) -> None:
    """Of its tensors that kernels keep as they were loaded: another checksum of one names it."""
    sums = {name: value for report in server.sync.reports for _, name, _, value in report.rows}
    weights = server.engine.weights
    ((seen, wrong),) = server.run(weights.comparable(server.path, sums)).values()
    changed = sums | {"model.layers.2.eh_proj.weight": 1, "model.layers.2.shared_head.norm.weight": 1}
    assert (seen > 20, wrong) == (True, [])
    ((_, wrong),) = server.run(weights.comparable(server.path, changed)).values()
    assert wrong == ["model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight"]
