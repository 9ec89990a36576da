"""The fenced blocks of a Markdown document."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Block:
    """The text between two fences; ``mark`` is the HTML comment on the line before, "" without one."""

    language: str
    text: str
    mark: str = ""


def blocks(path: Path, *languages: str) -> Iterator[Block]:
    """The blocks in these languages, in order."""
    fenced = r"^(?: *<!-- ([^\n]*) -->\n)?( *)```(\w*)\n(.*?)^ *```$"
    for mark, indent, language, text in re.findall(fenced, path.read_text(), re.M | re.S):
        if language in languages:
            yield Block(language, re.sub(rf"^{indent}", "", text, flags=re.M), mark)
