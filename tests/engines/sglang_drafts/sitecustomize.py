"""On the path of SGLang 0.5.21's Python: a draft layer proposes one token at a step, on a CPU without AMX.

Stands in for kernels, where there are none: those that place proposals, and the one that accepts or replaces them, with
its rule in torch (arXiv:2211.17192). What decides on CPUs, the most probable token, is replaced by what decides on
GPUs. All else of proposing and verifying is SGLang's own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from typing import Any


def _accept(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    uniform_samples: Any,
    uniform_samples_for_final_sampling: Any,
    target_probs: Any,
    **_: object,
) -> None:
    """Of a proposal, which is certain, with the model's probability of it; else one of the others."""
    import torch

    for row, proposals in enumerate(candidates.tolist()):
        at = 0
        accept_index[row, 0] = retrive_index[row, 0]
        while at + 1 < len(proposals):
            proposed, probs = proposals[at + 1], target_probs[row, at]
            if uniform_samples[row, at] >= probs[proposed]:
                probs[proposed] = 0
                break
            predicts[retrive_index[row, at]] = proposed
            at += 1
            accept_index[row, at] = retrive_index[row, at]
        accept_token_num[row] = at
        up_to = target_probs[row, at].cumsum(-1)
        drawn = torch.searchsorted(up_to, uniform_samples_for_final_sampling[row] * up_to[-1], right=True)
        predicts[retrive_index[row, at]] = drawn.clamp(max=len(up_to) - 1).int()


def _kernels(module: Any) -> None:
    """Of sgl_kernel: for chains, as of one proposal after another, never trees."""
    import torch
    from torch import Tensor

    def chain(
        parents: Tensor,
        chosen: Tensor,
        lengths: Tensor,
        mask: Tensor,
        positions: Tensor,
        index: Tensor,
        following: Tensor,
        siblings: Tensor,
        width: int,
        depth: int,
        count: int,
        mode: int,
    ) -> None:
        steps = torch.arange(count)
        positions.copy_((lengths[:, None] + steps).flatten())
        index.copy_(torch.arange(index.numel()).view_as(index))
        following.copy_(torch.where(steps < count - 1, steps + 1, -1).expand_as(following))
        mask.copy_(torch.ones(count, count).tril().bool().flatten().repeat(len(lengths)))

    def places(rows: Tensor, table: Tensor, starts: Tensor, ends: Tensor, out: Tensor, *_: object) -> None:
        found = [
            table[row, start:end] for row, start, end in zip(*(x.tolist() for x in (rows, starts, ends)), strict=True)
        ]
        out.copy_(torch.cat(found))

    def behind(rows: Tensor, table: Tensor, lengths: Tensor, out: Tensor, _: int, width: int, count: int) -> None:
        places(rows, table, lengths, lengths + width * count, out)

    def last(tokens: Tensor, counts: Tensor, out: Tensor, stride: int) -> None:
        out.copy_(tokens.flatten()[torch.arange(len(counts)) * stride + counts - 1])

    module.fill_bonus_tokens_cpu = last
    module.copy_all_layer_kv_cache_cpu = lambda *_: None  # called at the start alone: chains need no copies
    module.build_tree_kernel_efficient_cpu = chain
    module.assign_extend_cache_locs_cpu = places
    module.assign_draft_cache_locs_contiguous_cpu = behind
    module.tree_speculative_sampling_target_only = _accept
    torch.cuda.empty_cache = torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]


def _no_own_attention(module: Any) -> None:
    """The draft layer's passes over what was accepted have the model's kind of attention, which is not listed."""
    module.DraftBackendFactory.create_draft_extend_backend = lambda factory: None


def _verifies(module: Any) -> None:
    """Plain torch's attention takes proposals for texts that go on."""
    extend = module.TorchNativeAttnBackend.forward_extend

    def forward_extend(backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        if not batch.forward_mode.is_target_verify():
            return extend(backend, q, k, v, layer, batch, *rest, **more)
        import torch

        before, count = batch.seq_lens, batch.spec_info.draft_token_num
        batch.extend_prefix_lens, batch.extend_seq_lens = before, torch.full_like(before, count)
        batch.seq_lens = before + count
        try:
            return extend(backend, q, k, v, layer, batch, *rest, **more)
        finally:
            batch.seq_lens = before

    module.TorchNativeAttnBackend.forward_extend = forward_extend


def _samples(module: Any) -> None:
    module._verify_uses_greedy = lambda *, is_all_greedy, **_: False


_AFTER: dict[str, Callable[[Any], None]] = {
    "sgl_kernel": _kernels,
    "sglang.srt.speculative.draft_utils": _no_own_attention,
    "sglang.srt.layers.attention.torch_native_backend": _verifies,
    "sglang.srt.speculative.eagle_utils": _samples,
}


class _Patches(importlib.abc.MetaPathFinder):
    """After an import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = _AFTER.get(name)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def run(module: Any) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Patches())
