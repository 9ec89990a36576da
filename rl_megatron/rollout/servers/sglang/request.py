"""The form of requests to SGLang 0.5.21 (srt/managers/io_struct.py)."""

from __future__ import annotations

from collections.abc import Sequence

from rl_megatron.rollout.servers.http import Server
from rl_megatron.types import GenerationRequest


def names(request: GenerationRequest, request_id: str) -> list[str]:
    """The name of each of its completions."""
    return [f"{request_id} {number}" for number in range(request.num_completions)]


def scoring(server: Server, text: Sequence[int]) -> dict[str, object]:
    """A request for the log-probs of a text, with one token behind it."""
    sampling = {"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True}
    given = {"input_ids": list(text), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    return {**given, **labels(server, 0)}


def labels(server: Server, birth: int) -> dict[str, object]:
    """Older requests go first, since higher priorities do. The key is that by which prefixes that other weights cached
    are not found."""
    first = {"priority": -birth} if server.priorities else {}
    return {**first, **({} if server.salt is None else {"extra_key": server.salt})}
