"""Measure CPU microseconds a token to decode servers' answers into columns, beside `json.loads`.

    python -m bench.answers [--tokens 32768 131072]

Answers have the form of vLLM 0.32.0's and SGLang 0.5.21's endpoints, as their own servers write them: compact JSON of
one completion, each token with its log-prob. Both ways give the same columns, which is checked first. *skipped* is the
floor: the time in which msgspec only finds where the answer ends.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.results import parse, write
from rl_megatron.engines.answers import SampledColumns
from rl_megatron.engines.sglang import adapter as sglang
from rl_megatron.engines.vllm import adapter as vllm

BAR = 0.3  # microseconds a token
SKIPPED = msgspec.json.Decoder(msgspec.Raw)
REPEATS, VOCABULARY = 7, 150_000


def drawn(tokens: int) -> tuple[list[int], list[float]]:
    """Token ids and log-probs."""
    rng = np.random.default_rng(0)
    return rng.integers(0, VOCABULARY, tokens).tolist(), (-rng.exponential(1.0, tokens)).tolist()


def of_vllm(tokens: int) -> bytes:
    """As GenerateResponse of entrypoints/scale_out/token_in_token_out/protocol.py, with ``logprobs: 0``."""
    ids, logprobs = drawn(tokens)
    entries = ({"token_id": t, "logprob": x, "rank": 1} for t, x in zip(ids, logprobs, strict=True))
    choice = {
        "index": 0,
        "text": None,
        "logprobs": {"content": [{**one, "top_logprobs": [one]} for one in entries]},
        "finish_reason": "length",
        "token_ids": ids,
        "routed_experts": None,
        "weight_versions": [{"version": "7", "start": 0}, {"version": "8", "start": tokens // 2}],
    }
    return _written({"request_id": "generate-tokens-1", "choices": [choice], "prompt_logprobs": None})


def of_sglang(tokens: int) -> bytes:
    """As the ``meta_info`` of srt/managers/tokenizer_manager.py."""
    ids, logprobs = drawn(tokens)
    meta = {
        "id": "1 0",
        "finish_reason": {"type": "length", "length": tokens},
        "prompt_tokens": 128,
        "weight_version": "8",
        "input_token_logprobs": [],
        "output_token_logprobs": [[x, t, None] for t, x in zip(ids, logprobs, strict=True)],
        "completion_tokens": tokens,
        "weight_versions": [{"version": "7", "start": 0}, {"version": "8", "start": tokens // 2}],
    }
    return _written([{"text": "", "output_ids": ids, "meta_info": meta}])


def _written(answer: object) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode()


def loaded_vllm(text: bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """The baseline: columns from `json.loads`."""
    (choice,) = json.loads(text)["choices"]
    content = choice["logprobs"]["content"]
    logprobs = np.fromiter((one["logprob"] for one in content), np.float32, len(content))
    return np.array(choice["token_ids"], np.int32), logprobs


def loaded_sglang(text: bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """The baseline: columns from `json.loads`."""
    said = json.loads(text)[0]["meta_info"]["output_token_logprobs"]
    ids = np.fromiter((token for _, token, _ in said), np.int32, len(said))
    return ids, np.fromiter((logprob for logprob, _, _ in said), np.float32, len(said))


def seconds(decode: Callable[[bytes], object], text: bytes) -> float:
    """The least CPU seconds: other work on the machine only adds to them."""
    taken = []
    for _ in range(REPEATS):
        began = time.process_time()
        decode(text)
        taken.append(time.process_time() - began)
    return min(taken)


def measure(engine: str, tokens: int) -> dict[str, object]:
    """One row."""
    make, load, read = {
        "vllm": (of_vllm, loaded_vllm, vllm.read_sampled),
        "sglang": (of_sglang, loaded_sglang, sglang.read_sampled),
    }[engine]
    text = make(tokens)
    (found,) = check(read(text))
    assert all(np.array_equal(a, b) for a, b in zip(load(text), (found.token_ids, found.logprobs), strict=True))
    ours, theirs = seconds(read, text), seconds(load, text)
    return {
        "engine": engine,
        "tokens": tokens,
        "bytes_per_token": len(text) / tokens,
        "us_per_token": ours / tokens * 1e6,
        "skipped_us_per_token": seconds(SKIPPED.decode, text) / tokens * 1e6,
        "json_us_per_token": theirs / tokens * 1e6,
        "ms": ours * 1e3,
        "json_ms": theirs * 1e3,
    }


def check(answers: Sequence[SampledColumns]) -> Sequence[SampledColumns]:
    """The versions of both halves are there."""
    assert [[span.version for span in one.spans] for one in answers] == [["7", "8"]]
    return answers


def main() -> None:
    """Print and write a row for each engine and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32_768, 131_072])
    args = parse(parser)
    rows = []
    for engine in ("vllm", "sglang"):
        for tokens in args.tokens:
            row = measure(engine, tokens)
            rows.append(row)
            print("  ".join(f"{name} {v:.3f}" if isinstance(v, float) else f"{name} {v}" for name, v in row.items()))
    print(f"bar: {BAR} us_per_token")
    write(args, rows)


if __name__ == "__main__":
    main()
