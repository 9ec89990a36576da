"""Reads the commands of a shell script without running them: variables, defaults, arrays, arithmetic and continuations.

It follows the script from top to bottom. HOME is that of the user. Another value that only a shell could know stays as
text and is named.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_megatron.errors import ConfigError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN, _QUOTED = re.compile(r"[^ \t\r\n;|&()<>\"'\\$`]+"), re.compile(r'[^"\\$`]+')
_HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<more>\+?)=")
_OPENS, _CLOSES = {"if", "case", "for", "while", "until", "{"}, {"fi", "esac", "done", "}"}
_BEFORE = {"then", "else", "elif", "do", "in", "export", "local", "declare", "readonly", "time"}
"""Words that come before a command or an assignment."""
_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_GROWTH = 1 << 22  # characters that variables expand to
_MAX = 1 << 40  # numbers of scripts are far smaller


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command after expansion."""

    text: str
    line: int
    unresolved: tuple[str, ...] = ()
    """Expansions in ``text`` that only a shell could do, as they are written."""


def commands(text: str) -> Iterator[list[Word]]:
    """Yields the words of each simple command, in the order of the script. Assignments are followed, not yielded."""
    try:
        yield from _Script(text).commands()
    except RecursionError:
        raise ConfigError("too many expansions inside each other") from None


class _Script:
    """A position in the text, and the variables assigned before it."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.line = text, 0, 1
        self.depth = 0  # open ifs, loops, cases and functions
        self.variables: dict[str, list[Word]] = {"HOME": [Word(str(Path.home()), 0)]}
        self.left = [_MAX_GROWTH]

    def commands(self) -> Iterator[list[Word]]:
        words: list[Word] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in "\n;|&()":
                if self.text.startswith((">&", "&>"), self.at):
                    self._skip(2)
                    continue
                if words:
                    yield words
                words = []
                self._skip(1)
            elif character in " \t\r" or self.text.startswith("\\\n", self.at):
                self._skip(2 if character == "\\" else 1)
            elif character == "#":
                self._skip(self._end_of_line() - self.at)
            elif character in "<>":
                self._redirection()
            elif not words and (match := _ASSIGNMENT.match(self.text, self.at)):
                self._assignment(match)
            else:
                found = self._word()
                name = found[0].text if len(found) == 1 else ""
                if not words and name in _OPENS | _CLOSES | _BEFORE:
                    self.depth += (name in _OPENS) - (name in _CLOSES)
                else:
                    words += found
        if words:
            yield words

    def _end_of_line(self) -> int:
        end = self.text.find("\n", self.at)
        return end if end >= 0 else len(self.text)

    def _skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _redirection(self) -> None:
        """Skips a redirection with its target, and the lines of a here-document."""
        here = _HERE.match(self.text, self.at)
        if here is None:
            while self.text[self.at : self.at + 1] in set("<>& \t"):
                self._skip(1)
            self._word()
            return
        end = re.compile(rf"^\s*{here[2]}$", re.M).search(self.text, self.at)
        self._skip((end.end() if end else len(self.text)) - self.at)

    def _assignment(self, match: re.Match[str]) -> None:
        name, line = match["name"], self.line
        self._skip(match.end() - match.start())
        if self.text.startswith("(", self.at):
            self._skip(1)
            value = self._array(line)
        else:
            value = [_joined(self._word(split=False), line)]
        if self.depth:  # the condition is not evaluated
            value = [Word(f"${name}", line, (f"${name}, which line {line} sets under a condition",))]
        elif match["more"]:
            before = self.variables.get(name, [])
            array = len(before) != 1 or len(value) != 1
            if array:
                value = [*before, *value]
            else:
                (one,), (other,) = before, value
                value = [Word(one.text + other.text, line, one.unresolved + other.unresolved)]
        self.variables[name] = value

    def _array(self, line: int) -> list[Word]:
        words: list[Word] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == ")":
                self._skip(1)
                return words
            if character in " \t\r\n" or self.text.startswith("\\\n", self.at):
                self._skip(2 if character == "\\" else 1)
            elif character == "#":
                self._skip(self._end_of_line() - self.at)
            else:
                words += self._word()
        raise ConfigError(f"line {line}: an array has no closing parenthesis")

    def _word(self, split: bool = True) -> list[Word]:
        """Reads a word. Returns it expanded: no word or several, if an unquoted variable or an array is in it."""
        line, out = self.line, list[Word]()
        current, missing = list[str](), list[str]()
        began = False

        def end() -> None:
            nonlocal current, missing, began
            if began:
                out.append(Word("".join(current), line, tuple(missing)))
            current, missing, began = [], [], False

        quoted = False
        while self.at < len(self.text):
            character = self.text[self.at]
            if quoted and character == '"':
                quoted = False
                self._skip(1)
            elif not quoted and character in " \t\r\n;|&()<>":
                if character == "(" and current and current[-1].endswith(("$", "=")):
                    raise ConfigError(f"line {self.line}: cannot read {current[-1] + '(':.40}")
                break
            elif self.text.startswith("\\\n", self.at):
                self._skip(2)
            elif character == "\\" and (not quoted or self.text[self.at + 1 : self.at + 2] in '"\\$`'):
                current.append(self.text[self.at + 1 : self.at + 2])
                began = True
                self._skip(2)
            elif not quoted and character == '"':
                quoted = began = True
                self._skip(1)
            elif not quoted and character == "'":
                closing = self.text.find("'", self.at + 1)
                if closing < 0:
                    raise ConfigError(f"line {self.line}: a quotation mark is not closed")
                current.append(self.text[self.at + 1 : closing])
                began = True
                self._skip(closing + 1 - self.at)
            elif character in "$`":
                values = self._expansion()
                for index, value in enumerate(values):
                    parts = value.text.split() if split and not quoted and not value.unresolved else [value.text]
                    for number, part in enumerate(parts):
                        if index or number:
                            end()
                        line = line if began else value.line
                        current.append(part)
                        began = True
                    missing += value.unresolved
            else:
                plain = (_QUOTED if quoted else _PLAIN).match(self.text, self.at)
                current.append(plain[0] if plain else character)
                began = True
                self._skip(len(current[-1]))
        if quoted:
            raise ConfigError(f"line {line}: a quotation mark is not closed")
        end()
        return out

    def _expansion(self) -> list[Word]:
        """Reads what follows ``$`` or a backquote, and returns its value."""
        start, line = self.at, self.line
        if self.text.startswith("$((", start):
            length = self._closing("))") - start
            inner = self.text[start + 3 : start + length - 2]
            self._skip(length)
            return [self._computed(inner, line)]
        if self.text.startswith("$(", start) or self.text[start] == "`":
            length = self._closing(")" if self.text[start] == "$" else "`") - start
            self._skip(length)
            return [_unknown(self.text[start : start + length], line)]
        if self.text.startswith("${", start):
            length = self._closing("}") - start
            inner = self.text[start + 2 : start + length - 1]
            self._skip(length)
            return self._parameter(inner, line)
        self._skip(1)
        if (match := _NAME.match(self.text, self.at)) is None:
            special = self.text[self.at : self.at + 1]
            self._skip(1)
            return [] if special in "@*" else [_unknown(f"${special}", line)]
        self._skip(len(match[0]))
        return self._value(match[0], line)

    def _closing(self, mark: str) -> int:
        """The place after the closing mark of the expansion that begins here, with others inside it."""
        opening, depth, at = {"))": "(", ")": "(", "}": "{"}.get(mark, ""), 0, self.at + 1
        while at < len(self.text):
            character = self.text[at]
            if character == opening:
                depth += 1
            elif character == mark[0]:
                depth -= 1
                if depth <= 0:
                    return at + 1
            at += 1
        raise ConfigError(f"line {self.line}: {self.text[self.at : self.at + 20]!r} is not closed")

    def _parameter(self, inner: str, line: int) -> list[Word]:
        match = re.fullmatch(r"(\w+)(\[[@*]\])?(?::?([-=+?])(.*))?", inner, re.S)
        if match is None or not _NAME.fullmatch(match[1]):
            whole = f"${{{inner}}}"
            return [] if inner == "@" else [_unknown(whole, line)]
        if match[1] in self.variables or match[3] not in ("-", "="):
            return self._value(match[1], line, array=match[2] is not None)
        default = _Script(match[4])
        default.variables, default.line, default.left = self.variables, line, self.left
        return [_joined(default._word(split=False), line)] if match[4] else [Word("", line)]

    def _value(self, name: str, line: int, array: bool = False) -> list[Word]:
        """The value of a variable. Words of an array keep their own lines."""
        if name not in self.variables:
            return [_unknown(f"${{{name}[@]}}" if array else f"${name}", line)]
        self.left[0] -= sum(len(one.text) + 8 * len(one.unresolved) for one in self.variables[name])
        if self.left[0] < 0:
            raise ConfigError(f"line {line}: variables grow beyond {_MAX_GROWTH} characters")
        return [Word(one.text, one.line if array else line, one.unresolved) for one in self.variables[name]]

    def _computed(self, text: str, line: int) -> Word:
        missing: list[str] = []

        def number(name: re.Match[str]) -> str:
            value = _joined(self._value(name[1], line), line)
            missing.extend(value.unresolved)
            return value.text

        replaced = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", number, text)
        if missing:
            return Word(f"$(({text}))", line, tuple(missing))
        try:
            return Word(str(_evaluated(ast.parse(replaced.strip(), mode="eval").body)), line)
        except (SyntaxError, ValueError, ArithmeticError, RecursionError):
            return _unknown(f"$(({text}))", line)


def _joined(words: list[Word], line: int) -> Word:
    """Joins parts to one word."""
    return Word(" ".join(one.text for one in words), line, tuple(part for one in words for part in one.unresolved))


def _unknown(text: str, line: int) -> Word:
    return Word(text, line, (text,))


def _evaluated(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            result = _OPERATORS[type(op)](_evaluated(left), _evaluated(right))
            if abs(result) < _MAX:
                return result
    raise ValueError(ast.dump(node))
