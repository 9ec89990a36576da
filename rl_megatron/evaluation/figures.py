"""What several samples of a problem say of a policy: mean@k, pass@k, maj@k, all@k. Pure; one problem at a time.

A problem has n samples, of which c are right. Figures of a set are means over its problems; `bounds.py`,
`rates.py` and `chances.py` have intervals.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


def pass_at(right: int, samples: int, k: int) -> float:
    """Chance that k of the n samples, drawn without replacement, hold a right one: 1 - C(n - c, k) / C(n, k).

    Its expectation is that of k new samples, which 1 - (1 - c / n)^k underestimates (arXiv:2107.03374). A product of k
    ratios in [0, 1], since binomials of large n overflow. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    _check(right, samples, k)
    return 1 - math.prod((samples - right - i) / (samples - i) for i in range(min(k, samples - right + 1)))


def all_at(right: int, samples: int, k: int) -> float:
    """Chance that k of the n samples, drawn so, are all right: C(c, k) / C(n, k). Raises as `pass_at`."""
    _check(right, samples, k)
    return math.prod((right - i) / (samples - i) for i in range(min(k, right + 1)))


def majority(answers: Sequence[str], right: Sequence[bool]) -> float:
    """Whether the answer that most samples give is right; of several with as many votes, the share that is (maj@k).

    ``answers`` and ``right`` are by sample. An empty answer is no vote; without a vote the problem counts 0. Where
    samples of one answer are not judged alike, the answer counts by its share of right ones.
    """
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0.0
    most = max(votes.values())
    won = [answer for answer, count in votes.items() if count == most]
    shares = [sum(ok for one, ok in zip(answers, right, strict=True) if one == answer) / most for answer in won]
    return math.fsum(shares) / len(won)


def _check(right: int, samples: int, k: int) -> None:
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise ValueError(f"{right} right of {samples} samples, k={k}: 0 <= right <= samples and 1 <= k <= samples")
