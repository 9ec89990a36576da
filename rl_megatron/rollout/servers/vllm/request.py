"""The form of requests to vLLM 0.32.0 (entrypoints/scale_out/token_in_token_out/protocol.py)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rl_megatron.rollout.servers.http import Server


def scoring(server: Server, text: Sequence[int], top: int) -> dict[str, object]:
    """A request for the log-probs of a text and of the ``top`` most probable tokens, with one token behind it."""
    sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": top, "ignore_eos": True, "detokenize": False}
    return {"token_ids": list(text), "sampling_params": sampling, **salted(server)}


def aborting(names: Collection[str]) -> dict[str, list[str]]:
    """An order to abort requests by the names that they were given."""
    assert names, "vLLM takes an empty list for all requests, those of others too"
    return {"request_ids": [f"generate-tokens-{name}" for name in names]}


def salted(server: Server) -> dict[str, str]:
    """The key by which prefixes that other weights cached are not found."""
    return {} if server.salt is None else {"cache_salt": server.salt}
