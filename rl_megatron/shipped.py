"""Folders of files that come with the code: recipes and job templates, in a checkout and in an installed wheel."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal


def shipped(folder: Literal["conf", "slurm"]) -> Path:
    """The folder ``conf`` or ``slurm``: inside this package where a wheel put it, else beside it, in a checkout.

    Raises FileNotFoundError if an installation has neither.
    """
    package = Path(str(files("rl_megatron")))
    places = [package / folder, package.parent / folder]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"{folder}/ of rl_megatron is neither {places[0]} nor {places[1]}: the installation lacks it; install it again"
    )
