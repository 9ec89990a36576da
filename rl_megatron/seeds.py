"""Seeds of random streams that are known by a text or by numbers: the same in every process, at every start."""

from __future__ import annotations

import hashlib


def text_seed(text: str) -> int:
    """The first 63 bits of the text's SHA-256, low bytes first: torch's and the engines' seeds are signed 64-bit."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def make_seed(*parts: int) -> int:
    """Hash several numbers to one 63-bit seed."""
    import numpy as np

    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)
