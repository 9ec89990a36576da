"""Rewrites mathematical symbols of Unicode as ASCII or LaTeX, the only forms that number-comparing rules read."""

from __future__ import annotations

import re
import unicodedata

_RAISED, _LOWERED = (
    {
        sign: unicodedata.normalize("NFKC", sign).replace("−", "-")
        for sign in map(chr, range(0xB2, 0x2100))
        if unicodedata.decomposition(sign).startswith(kind) and sign not in "º℠™"
    }
    for kind in ("<super>", "<sub>")
)
_SMALL = _RAISED | _LOWERED
_NAMES = r"""times cdot cdot cdot div pm mp infty le le le ge ge ge ne approx to in cup cap emptyset setminus mathbb{R}
mathbb{Z} mathbb{N} mathbb{Q} mathbb{C} lfloor rfloor lceil rceil sqrt sqrt[3] sqrt[4] sum prod int"""
_COMMANDS = dict(zip("×⋅·∙÷±∓∞≤⩽≦≥⩾≧≠≈→∈∪∩∅∖ℝℤℕℚℂ⌊⌋⌈⌉√∛∜∑∏∫", _NAMES.split(), strict=True))
_KEPT = {*_SMALL, *"√∛∜…¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}  # the patterns below read them
_THOUSANDS = re.compile(r"(?<=\d)(?:[\u00a0\u2007-\u2009\u202f]|\\[,!]|\{,\})(?=\d{3}(?!\d))")
_LONG_DASH = re.compile(r"(?<![^\s(\[{=$,:])[—―](?=[\d.√∞π(])")  # elsewhere it is punctuation
_DEGREES = re.compile(r"(?<=\d) ?[°º˚∘](?:[CF]\b)?")
_AREA = re.compile(
    r"(\d(?: (?:m|in)| ?(?:[kcdm]m|ft|yd|mi))(?:/s)?)(?:[²³]|\^[23])(?=[.,;:!)*]*(?:\s|$))(?! ?[-+*/=<>^×·⋅−])"
)
_TENS = re.compile(r"(?<=\d) ?[×·⋅] ?10(?:([⁺⁻]?[⁰¹²³⁴-⁹]{1,3})|\^\{?([-+−]?\d{1,3})\}?)(?![\w⁰-⁹^{]|\.\d)")
_REPEATING = re.compile(r"(?<!\d)(\d{0,15})\.(\d{0,15}?)(?:\\overline\{(\d{1,15})\}|((?:\d\u0305){1,15}))")
_FRACTION = re.compile(
    r"(?<![\d.,/])(?:(\d{1,15}) ?)?(?:([¼½¾⅐-⅞])|(?<= )(\d{1,15})/(\d{1,15})(?![\d/]|[.,]\d))", re.ASCII
)
_ROOT = re.compile(
    r"([√∛∜]|(?<![A-Za-z\\])sqrt(?=\()) ?(?:\(((?:[^()]++|\([^()]*+\))*+)\)"
    r"|((?:\d++(?:\.\d++)?|\\[A-Za-z]++|[A-Za-zπ])(?:\{\d+\})*+[⁰¹²³⁴-⁹]*+))"
)
_SCRIPT = re.compile(f"([{re.escape(''.join(_RAISED))}]+)|[{re.escape(''.join(_LOWERED))}]+")
_EXPONENT = re.compile(r"\^(-\d+|\\frac\{\d+\}\{\d+\})")  # LaTeX would raise a part of these alone
_FUNCTION = re.compile(r"(?<![A-Za-z\\])(?=(?:sin|cos|tan|log|ln)(?:[_^]\{|\\))")
_OPENING = re.compile(r"\\boxed\s*\{|\\begin\{|\\[(\[]|\$\$|(?<![\d\\])\$")  # math-verify reads LaTeX after them
_CLOSING = {"\\begin{": "\\end{", "\\(": "\\)", "\\[": "\\]", "$$": "$$", "$": "$"}
_BARE = re.compile(  # a formula outside of these, with spaces only around its operators and commas
    r"(?: ?[-+*/=<>]+ ?| ?\\(?:log|ln|sin|cos|tan)(?:[_^]\{[^{}]{1,40}\})? *| ?\\[A-Za-z]+ *"
    r"|(?<=[\d)}]) (?=[A-Za-z][\^_])|\d+(?:[.,]\d+)*|(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])|[\^_(){}\[\]|]"
    r"|, ?(?=[-\w\\.^{} ]{1,40}[)\]]))+"
)
_VALUE = r"(?:[\d)\]}$%*°²³]|\b[A-J]\b)(?: ?[A-Za-z]{1,12})?"  # the end of a value, with a unit
_REASON = re.compile(  # follows a value; without parentheses only a stated answer, to the end of the sentence
    rf"({_VALUE}) \((?:as|because|check|for|since)\b(?:[^()\n]++|\([^()\n]*+\))*+\)"
    rf"|((?i:\banswer)(?: is(?! not)|:)[^\n]{{0,50}}?{_VALUE})"
    r"(?:[,;]? (?:because|since)|[,;] as| as(?= [\d\\$(√]))\b[^\n]*?(?=\.?$|\.\s)",
    re.MULTILINE,
)
_LONGEST = 40  # characters of a number and the operator before it
_OPERAND = re.compile(  # a number after an operator and the end of the first operand
    r"(?:[\d)\]}]|\b[A-Za-z])(?: ?(?:[-+*^]|\\(?:times|cdot|div)) {0,2}| / )\$?\d[\d.,]*(?: ?[A-Za-z]{1,12})?$"
)
_OPERATORS = {r"\times": "*", r"\cdot": "*", r"\div": "/"}  # math-verify reads these in plain text


class _Table(dict[int, str]):
    """The replacement of each character, by its code."""

    def __missing__(self, code: int) -> str:
        sign, category = chr(code), unicodedata.category(chr(code))
        kind, _, letter = unicodedata.name(sign, "").replace("MDA", "MBDA").partition(" LETTER ")
        self[code] = sign if sign in _KEPT else unicodedata.normalize("NFKC", sign)
        if sign in _COMMANDS and sign not in _KEPT:
            self[code] = f"\\{_COMMANDS[sign]} "
        elif kind in ("GREEK SMALL", "GREEK CAPITAL") and letter.isalpha():
            self[code] = f"\\{letter.lower() if kind == 'GREEK SMALL' else letter.capitalize()} "
        elif category in ("Cf", "Pd", "Zs"):
            self[code] = {"Cf": "", "Pd": "-", "Zs": " "}[category]
        return self[code]


_TABLE = _Table({ord(sign): plain for sign, plain in zip("⁄∕−—―〜", "//-—―〜", strict=True)})


def to_ascii(text: str, fraction: str = "{}/{}") -> str:
    """Writes digits, signs, letters, fractions and spaces between thousands in ASCII; ``2½`` and ``2 1/2`` as
    ``fraction`` of 5 and 2. Roots, superscripts and subscripts stay."""

    def write(match: re.Match[str]) -> str:
        whole, sign, top, bottom = match.groups()
        if sign is not None:
            top, bottom = unicodedata.normalize("NFKC", sign).split("⁄")
        elif whole is None or int(top) >= int(bottom):
            return match[0]
        return fraction.format(int(whole or 0) * int(bottom) + int(top), bottom)

    def repeat(match: re.Match[str]) -> str:
        start, period = match[1] + match[2], match[3] or match[4].replace("\u0305", "")
        bottom = (10 ** len(period) - 1) * 10 ** len(match[2])
        return fraction.format(int(start + period) - int(start or 0), bottom)

    text = _AREA.sub(r"\1", _REPEATING.sub(repeat, _THOUSANDS.sub("", text)))
    if not text.isascii():
        text = _TENS.sub(lambda match: f"e{read_digits(match[1] or match[2].replace('−', '-'))}", text)
        text = _DEGREES.sub("", _LONG_DASH.sub("-", text)).translate(_TABLE)
    return _FRACTION.sub(write, text)


def read_digits(digits: str) -> int:
    """Reads superscripts, or digits, as an integer."""
    return int(unicodedata.normalize("NFKC", digits).replace("−", "-"))


def to_latex(text: str) -> str:
    """Writes the symbols of ``text`` as LaTeX, ``2√3`` as ``2\\sqrt{3}``."""
    text = _ROOT.sub(_root, to_ascii(text, r"\frac{{{}}}{{{}}}"))
    text = _SCRIPT.sub(lambda run: f"{'^' if run[1] else '_'}{{{''.join(map(_SMALL.__getitem__, run[0]))}}}", text)
    return _FUNCTION.sub(r"\\", _EXPONENT.sub(r"^{\1}", text))


def _root(match: re.Match[str]) -> str:
    return f"\\{_COMMANDS.get(match[1], 'sqrt')}{{{match[3] or _ROOT.sub(_root, match[2])}}}"


def remove_reasons(text: str) -> str:
    """Removes the reason for a value: ``(as 7² = 49)`` of ``answer: 7 (as 7² = 49)``. A reason stays if it holds a box,
    or after an expression, because it may state the expression's value: ``3 * 4 (since 3 * 4 = 12)``."""

    def write(found: re.Match[str]) -> str:
        value: str = found[1] or found[2]
        stays = "\\boxed{" in found[0] or _OPERAND.search(
            text, max(0, found.start() - _LONGEST), found.start() + len(value)
        )
        return found[0] if stays else value

    return _REASON.sub(write, text)


def mark_formulas(text: str) -> str:
    """Puts dollars around the formulas of LaTeX text that are outside of mathematics. math-verify would read only a
    part of them: 2 of ``2\\sqrt{3}``."""
    pieces, at, missing = [], 0, set()
    for mark in _OPENING.finditer(text):
        if mark.start() < at or mark[0] in missing:
            continue
        closing = _CLOSING.get(mark[0], "")
        end = text.find(closing, mark.end()) + len(closing) if closing else _end_of_braces(text, mark.end())
        if end < mark.end():
            missing.add(mark[0])
        elif mark[0] != "$" or "\n" not in text[mark.end() : end]:
            pieces += [_BARE.sub(_marked, text[at : mark.start()]), text[mark.start() : end]]
            at = end
    return "".join(pieces) + _BARE.sub(_marked, text[at:])


def _end_of_braces(text: str, start: int) -> int:
    depth = 1
    for brace in re.compile("[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.end()
    return len(text)


def _marked(match: re.Match[str]) -> str:
    run = match[0]
    formula = run.lstrip(" +*/=<>,)]|").rstrip(" -+*/=<>,([|").removeprefix("- ")
    opened = len(re.findall(r"[(\[]", formula)) - len(re.findall(r"[)\]]", formula))  # opened minus closed
    formula = formula.rstrip(")] ") if opened < 0 else formula.lstrip("([ ") if opened > 0 else formula
    if not any(mark in formula for mark in ("\\", "^", "_{")) or formula.count("{") != formula.count("}"):
        return run
    before, after = run.split(formula, 1)
    plain = set(re.findall(r"\\[A-Za-z]+|[A-Za-z^]", formula)) <= _OPERATORS.keys()
    if plain and (after + match.string[match.end() :][:1] + " ")[0] in " .,:)\n":
        return before + re.sub(r"\\[a-z]+ ?", lambda command: _OPERATORS[command[0].strip()], formula) + after
    return f"{before}${formula}${after}"
