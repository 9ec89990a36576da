"""Names ranks in messages and files. Each role numbers its ranks from 0."""

from __future__ import annotations

LEARNER = "learner"


def rank_label(role: str, rank: int | str) -> str:
    """Returns the rank's name in a sentence: "rank 3" for the learner, "critic rank 3" for another role."""
    return f"rank {rank}" if role == LEARNER else f"{role} rank {rank}"


def file_stem(role: str, rank: int | str) -> str:
    """Returns the rank's name in names of files: "rank-3", "critic-3"."""
    return f"{'rank' if role == LEARNER else role}-{rank}"
