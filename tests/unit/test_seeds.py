"""Seeds known by a text are those of the published SHA-256 test vector."""

from __future__ import annotations

from rl_megatron.seeds import text_seed


def test_a_texts_seed_is_the_first_63_bits_of_its_sha256() -> None:
    """FIPS 180-2, appendix B.1: SHA-256 of "abc" begins with ba7816bf 8f01cfea."""
    assert text_seed("abc") == 0xEACF018FBF1678BA >> 1
