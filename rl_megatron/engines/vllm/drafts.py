"""What vLLM 0.32.0 is started with, so that a model's draft layer proposes tokens, and what it counts of them
(config/speculative.py, v1/spec_decode/metrics.py)."""

from __future__ import annotations

import json
import re

_COUNTED = re.compile(r"^vllm:spec_decode_num_(draft|accepted)_tokens_total(?:\{.*\})? (\S+)", re.MULTILINE)


def started_with(tokens: int) -> tuple[str, ...]:
    """The option for so many tokens at each step; none for 0.

    By default the layer proposes its most probable token, which is accepted with the model's probability of it; else
    another is drawn from the model's distribution without it (arXiv:2211.17192, v1/sample/rejection_sampler.py).
    """
    said = json.dumps({"method": "mtp", "num_speculative_tokens": tokens})
    return ("--speculative-config", said) if tokens else ()


def counted(metrics: str) -> tuple[float, float]:
    """Tokens that were proposed, and those accepted, over all data-parallel ranks; by the text of /metrics."""
    said = _COUNTED.findall(metrics)
    proposed, accepted = (sum(float(count) for kind, count in said if kind == one) for one in ("draft", "accepted"))
    return proposed, accepted
