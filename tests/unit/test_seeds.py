"""Seeds known by a text are those of the published SHA-256 test vector; those known by numbers differ with each."""

from __future__ import annotations

from rl_megatron.seeds import make_seed, text_seed


def test_a_texts_seed_is_the_first_63_bits_of_its_sha256_and_others_differ() -> None:
    """FIPS 180-2, appendix B.1: SHA-256 of "abc" begins with ba7816bf 8f01cfea."""
    assert text_seed("abc") == 0xEACF018FBF1678BA >> 1
    seeds = [make_seed(a, b) for a in range(20) for b in range(20)]
    assert len(set(seeds)) == 400
    assert make_seed(3, 4) == make_seed(3, 4)
    assert all(0 <= s < 2**63 for s in seeds)
