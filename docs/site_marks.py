"""A step of the site's build (docs/site.yaml): pages show whether each of their blocks of commands is run, and why not.

In the Markdown that is a comment on the line before the block, which tests read and browsers hide.
"""

from __future__ import annotations

import html
import re

_MARK = re.compile(r"^( *)<!-- (run|run by \S+|not run: [^\n]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """The page's text with the marks as small print. MkDocs calls it with each page."""
    return _MARK.sub(_small_print, markdown)


def _small_print(found: re.Match[str]) -> str:
    indent, mark = found.groups()
    said = "run by a test" if mark == "run" else mark.replace("not run: ", "not run here: ")
    text = re.sub(r"([*_`\\[\]])", r"\\\1", html.escape(said[0].upper() + said[1:], quote=False))
    return f"{indent}<small>{text}</small>\n"
