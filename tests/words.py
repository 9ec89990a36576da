"""Checks that code and documents keep the laws of plain English.

``python -m tests.words`` lists each breach, and fails if there is one.

Names that are formats keep theirs: configuration keys, metrics and fields of files and messages. So do methods that
a library calls.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
CODE = ("rl_megatron", "launcher", "tools")
GENERATED = ("docs/configuration.md", "docs/metrics.md", "docs/commands.md", "docs/migrating.md")
FORMATS = {"Section", "BaseModel", "Struct", "TypedDict", "JsonFields"}
"""Base classes of formats: a field's name is part of a file, a message or the configuration."""
OF_LIBRARIES = {"connection_made"}  # asyncio.Protocol

DOCSTRING_STARTS = re.compile(
    r"(of|as|those|what|how|why|where|who|whose|which|whether|in|for|with|without|by|to|at|on|from|have|one|such|if|no"
    r"|nothing|so|than)\b",
    re.I,
)
COMMENT_STARTS = re.compile(
    r"(of|in|at|by|on|to|from|with|without|for|as|over|under|beside|behind|before|after|between|per|since|until|whose"
    r"|which|that|where|what|how|why|whether|if|once|and|or|so|than)\b"
)
IN_NAMES = re.compile(
    r"(?:^|_)(said|asked|told|heard|beside|behind|apart|made|its|ones|gone|begun|alike|unlike|upcoming|whose|elsewhere"
    r"|everywhere|together|alone|most|least)(?:_|$)"
)
NAME_STARTS = re.compile(r"_?(of|in|at|by|over|under|beside|behind|without|or|than|until|unless|why|what|where)_")
NAME_ENDS = re.compile(r"[a-z].*_(of|at|by|in|with|over|again|alone|apart|beside|behind|together|once)$")
PHRASES: Mapping[str, re.Pattern[str]] = {
    "at once": re.compile(r"\bat once\b", re.I),
    "go on": re.compile(r"\b(go|goes|going|went|gone) on\b", re.I),
    "have X do": re.compile(r"(?:^|[.:;] )(Have|Has|Let|Lets)\b"),
    "beside": re.compile(r"\bbeside\b", re.I),
    "behind": re.compile(r"\bbehind\b", re.I),
    "of which": re.compile(r"\bof which\b", re.I),
    "nobody": re.compile(r"\b(nobody|somebody|whoever)\b", re.I),
    "what": re.compile(r"(?:^|[.!?] )What (?!to do)(?![^.!?]*\?)"),
    "British": re.compile(
        r"\b\w*(quantis|normalis|initialis|optimis|synchronis|serialis|tokenis|parallelise|materialis|summaris|recognis"
        r"|organis|utili[s]|minimis|maximis|behaviour|colour|favour|neighbour|centred|centring|licence|catalogue|modelled"
        r"|labell|cancel(?:led|ling)|travell|learnt|spelt)\w*",
        re.I,
    ),
}
WHOSE = re.compile(r"\bwhose\b", re.I)
LINES_A_WHOSE = 200
MAX_WORDS = 30  # of a docstring's sentence


@dataclass(frozen=True, slots=True)
class Breach:
    """One place that breaks a law."""

    law: str
    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.law}: {self.text}"


def code_breaches(path: str, text: str) -> Iterator[Breach]:
    """The breaches of a Python file."""
    prose = list[tuple[int, str]]()
    for node in ast.walk(tree := ast.parse(text)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            prose += [(c.lineno, c.value) for c in ast.walk(node.exc) if _is_sentence(c)]  # type: ignore[attr-defined]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.append((node.lineno, node.value.value))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for law, found in _docstring_breaches(ast.get_docstring(node) or ""):
                yield Breach(law, path, node.lineno, found)
    for line, name, law in _names(tree):
        yield Breach(law, path, line, name)
    for line, comment, trails in _comments(text):
        prose.append((line, comment))
        if trails and COMMENT_STARTS.match(comment):
            yield Breach("comment's start", path, line, comment[:80])
    yield from _prose_breaches(path, dict.fromkeys(prose), text.count("\n"))


def document_breaches(path: str, text: str) -> Iterator[Breach]:
    """The breaches of a Markdown page, blocks of code and code in a line left out."""
    bare = re.sub(r"^( *)```.*?^ *```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
    bare = re.sub(r"`[^`\n]*`", "x", re.sub(r"<!--.*?-->", "", bare, flags=re.S))
    paragraphs, line = list[tuple[int, str]](), 1
    for paragraph in re.split(r"(\n\s*\n)", bare):
        paragraphs.append((line, paragraph))
        line += paragraph.count("\n")
    yield from _prose_breaches(path, paragraphs, text.count("\n"))


def _docstring_breaches(docstring: str) -> Iterator[tuple[str, str]]:
    if DOCSTRING_STARTS.match(docstring):
        yield "docstring's start", docstring.split("\n")[0][:80]
    for sentence in re.split(r"(?<=[.!?])\s+", " ".join(docstring.split())):
        if len(sentence.split()) > MAX_WORDS:
            yield "long sentence", sentence[:80]


def _names(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    formats = {id(item) for node in ast.walk(tree) if _is_format(node) for item in node.body}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("__"):
            if NAME_STARTS.match(node.name):
                yield node.lineno, node.name, "name's start"
            if NAME_ENDS.match(node.name):
                yield node.lineno, node.name, "name's end"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            words = re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", node.name)
            yield from _refused(node.lineno, node.name, words)
        elif isinstance(node, ast.arg):
            yield from _refused(node.lineno, node.arg, node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and id(node) not in formats:
            yield from _refused(node.lineno, node.target.id, node.target.id)


def _refused(line: int, name: str, words: str) -> Iterator[tuple[int, str, str]]:
    if IN_NAMES.search(words.lower()) and name not in OF_LIBRARIES:
        yield line, name, "name's word"
    if PHRASES["British"].search(name):
        yield line, name, "British name"


def _is_format(node: ast.AST) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    return any(ast.unparse(base).split(".")[-1].endswith(tuple(FORMATS)) for base in node.bases)


def _is_sentence(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 3


def _comments(text: str) -> Iterator[tuple[int, str, bool]]:
    """The line, text and whether code precedes it, of each comment that is not for a tool."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        comment = token.string.lstrip("# ").strip()
        for_a_tool = comment.startswith(("noqa", "type:", "pragma", "!", "fmt"))
        if token.type == tokenize.COMMENT and comment and not for_a_tool:
            yield token.start[0], comment, bool(token.line[: token.start[1]].strip())


def _prose_breaches(path: str, prose: Iterable[tuple[int, str]], num_lines: int) -> Iterator[Breach]:
    whose = list[Breach]()
    for line, text in prose:
        flat = re.sub(r"``[^`]*``|`[^`]*`", "x", " ".join(text.split()))
        for law, pattern in (*PHRASES.items(), ("whose", WHOSE)):
            for match in pattern.finditer(flat):
                breach = Breach(law, path, line, flat[max(0, match.start() - 30) : match.end() + 30])
                if law == "whose":
                    whose.append(breach)
                else:
                    yield breach
    yield from whose[max(1, num_lines // LINES_A_WHOSE) :]


def breaches() -> list[Breach]:
    """Every breach of the project's tracked files."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    found = list[Breach]()
    for path in sorted(filter(None, listed.split("\0"))):
        if not (REPO / path).is_file():
            continue
        if path.endswith(".py") and path.startswith(tuple(f"{top}/" for top in CODE)):
            found += code_breaches(path, (REPO / path).read_text())
        elif path.endswith(".md") and path not in GENERATED and not path.startswith("tests/"):
            found += document_breaches(path, (REPO / path).read_text())
    return found


def main() -> int:
    """Returns the exit status: 1 if a law is broken."""
    found = breaches()
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
