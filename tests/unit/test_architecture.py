"""The project's rules that no linter checks; import-linter holds the layers (pyproject.toml)."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rl_megatron.feature import features

REPO = Path(__file__).resolve().parents[2]
PRODUCT = ("rl_megatron", "launcher", "tools")
FILES = [
    path.relative_to(REPO) for folder in (*PRODUCT, "bench", "tests") for path in sorted((REPO / folder).rglob("*.py"))
]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 800, 100
DOCUMENTS = [path.relative_to(REPO) for folder in (".", "docs", "slurm") for path in (REPO / folder).glob("*.md")]
ONE_EACH = {  # functions that may have one name, by where they are: a table takes them, or a program
    "check": "launcher/preflight",
    "read": "rl_megatron/models/families",
    "main": "",
    "linear": "",  # one operation: forward alone, and with its gradient
    "rms_norm": "",
    "unpack": "launcher/wire.py",  # always called as wire.unpack
    "report": "launcher/commands",  # a command is called as its function is
    "submit": "launcher/commands",
    "train": "launcher/commands",
}
COLLECTIVE = ("rl_megatron/learner", "rl_megatron/features", "rl_megatron/weights/routes")
IN_ENGINES = (  # which read the environment of an engine's process, or of another program's
    "rl_megatron/bounded.py",  # which passes it on to a process of its own
    "rl_megatron/engines/engine_token.py",
    "rl_megatron/engines/sglang/server.py",
    "rl_megatron/weights/checks/libraries.py",
    "rl_megatron/weights/routes/rendezvous.py",  # and tells NCCL, which has no argument for it, how to wait
)


WORDS = {  # phrases that sound translated, as patterns, and the field's words; single words: .codespell-words
    "called off": "cancelled",
    "sen[dt] home": "cancel, cancelled",
    "done without": "left out",
    "let go of": "release, drop, close",
    "(is|are|was|were|be) told(?! apart| from)": "gets, is given, reported, refused",
    "hears? of": "gets, is notified",
    "(is|are) no more(?=[.,;:])": "has ended",
    "who asked": "the caller",
    "what came": "what arrived, what was read",
    "nobody (looks|tells|says)": "is not checked, is not reported",
    "looked at behind": "checked after",
    "(with|and) the way out": "and what to do",
    "in the place of": "in place of, instead of",
    "(the|a) step in hand": "the current step",
    "tells? of": "describes, mentions, reports",
    "mend(s|ed|ing)?": "fix, repair",
    "(is|are) wanted(?=[.,;:]| *$)": "must be, is required, is requested",
}


def inside(path: Path, *owners: str) -> bool:
    return any(path.is_relative_to(owner) for owner in owners)


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported: ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree: ast.AST) -> Iterator[str]:
    """``a.b`` of every attribute read from a plain name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"


def violations(path: Path, source: str) -> list[str]:
    """What a product file does that is another room's alone."""
    tree = ast.parse(source)
    imports = [*imported(tree)]
    names, found = [*imports, *attributes(tree)], []
    if not inside(path, "rl_megatron/learner", "rl_megatron/features"):
        found += [n for n in names if re.search(r"\bparallel_state\b|\bmpu\.get_", n)]
    if not inside(path, *COLLECTIVE):
        collective = r"torch\.distributed\b(?!\.checkpoint)|dist\.(all_|broadcast|init_)"  # no process group
        found += [n for n in names if re.match(collective, n)]
    found += [n for n in names if re.search(r"(gather|broadcast|scatter|send|recv)_object", n)]  # which are pickles
    configuration = inside(path, "rl_megatron/config")
    if not configuration and not inside(path, *COLLECTIVE):
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        found += [repr(text) for text in texts if re.fullmatch(r"cuda(:\d+)?", text)]
    if not inside(path, "launcher/hosts/ray") or path.name == "node.py":  # which only starts Ray's own command
        found += [n for n in imports if n.partition(".")[0] == "ray"]
    if not inside(path, "launcher", "tools/convert", "tools/lab", *IN_ENGINES):  # programs
        found += [n for n in names if re.fullmatch(r"os\.(environ|getenv|putenv)|sys\.argv", n)]
    return found


def types_of(tree: ast.Module) -> Iterator[str]:
    """Public classes and type aliases of a module; a TypeVar is none."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name):
            yield from (
                n.id for n in node.targets if isinstance(n, ast.Name) and re.fullmatch(r"[A-Z]\w*[a-z]\w*", n.id)
            )


def clashes(sources: Mapping[str, str]) -> list[str]:
    """Words with two owners, by path: public types, and functions that some module imports by their bare name."""
    types, functions, bare = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list), set[str]()
    for path, source in sources.items():
        tree = ast.parse(source)
        for name in types_of(tree):
            types[name].append(path)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not path.endswith("__main__.py"):
                functions[node.name] += [] if path.startswith(ONE_EACH.get(node.name, "/")) else [path]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                bare |= {alias.name for alias in node.names if not alias.asname}
    owners = [*types.items(), *((name, paths) for name, paths in functions.items() if name in bare)]
    return [f"{n}: {', '.join(paths)}" for n, paths in sorted(owners) if len(paths) > 1 and not n.startswith("_")]


def too_long(path: Path, source: str) -> list[str]:
    """The file and those of its functions that are too long, with their lines."""
    lengths = {str(path): (len(source.splitlines()), MAX_FILE_LINES)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lengths[f"{path}: {node.name}"] = (node.end_lineno or 0) - node.lineno + 1, MAX_FUNCTION_LINES
    return [f"{what} has {lines} lines of {limit}" for what, (lines, limit) in lengths.items() if lines > limit]


def test_files_and_functions_stay_short() -> None:
    assert [what for path in FILES for what in too_long(path, (REPO / path).read_text(encoding="utf-8"))] == []
    expected = ["x.py has 801 lines of 800", "x.py: f has 801 lines of 100"]
    assert too_long(Path("x.py"), "def f():\n" + "    x\n" * 800) == expected


def test_a_word_has_one_owner() -> None:
    packages = [path for path in FILES if inside(path, "rl_megatron", "launcher")]
    assert clashes({str(path): (REPO / path).read_text(encoding="utf-8") for path in packages}) == []
    planted = {
        "a.py": "class Row: ...\nPlace = tuple[int, int]\ndef show(): ...\ndef read(): ...\n_T = list[int]\n",
        "b.py": "Row = dict[str, int]\nclass Place: ...\ndef show(): ...\ndef read(): ...\nclass _T: ...\n",
        "c.py": "import a, b\nfrom a import show\na.read()\nb.read()\n",
    }
    assert clashes(planted) == ["Place: a.py, b.py", "Row: a.py, b.py", "show: a.py, b.py"]


def test_rooms_keep_to_their_own() -> None:
    rooms = [path for path in FILES if inside(path, *PRODUCT)]
    found = {str(path): violations(path, (REPO / path).read_text(encoding="utf-8")) for path in rooms}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("rl_megatron/rollout/x.py", "from megatron.core import parallel_state as mpu", 1),
        ("rl_megatron/training/trainer.py", "mpu.get_data_parallel_rank()", 1),
        ("rl_megatron/learner/x.py", "from megatron.core import parallel_state\nimport torch.distributed as dist", 0),
        ("rl_megatron/weights/plans/plan.py", "import torch.distributed as dist\ndist.broadcast(x)", 2),
        ("rl_megatron/weights/routes/x.py", "import torch.distributed as dist\ndist.broadcast(x)", 0),
        ("rl_megatron/weights/routes/x.py", "import torch.distributed as dist\ndist.all_gather_object(x, y)", 1),
        ("rl_megatron/rollout/x.py", "x.to('cuda'); x.to('cuda:1'); torch.cuda.is_available()", 2),
        ("rl_megatron/config/sections/learner.py", "device = 'cuda'", 0),
        ("rl_megatron/learner/x.py", "import os\nos.environ['A'] = os.getenv('B')", 2),
        ("launcher/x.py", "import os, sys\nos.environ['A'] = sys.argv[1]", 0),
        ("tools/x.py", "import sys\nsys.argv", 1),
        ("launcher/x.py", "import ray.util\nfrom ray import remote", 2),
        ("launcher/hosts/ray/cluster.py", "import ray", 0),
        ("launcher/hosts/ray/node.py", "import ray", 1),
    ],
)
def test_the_laws_see_what_breaks_them(path: str, source: str, found: int) -> None:
    assert len(violations(Path(path), source)) == found


def keys_of_features(source: str, keys: frozenset[str], shared: frozenset[str]) -> list[str]:
    """Keys that a module names in full, or reads by an attribute: a ``shared`` name by one of the key's own section.
    What is called is a method."""
    tree = ast.parse(source)
    of = {key.rpartition(".")[2]: key.split(".")[-2] for key in keys}
    called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    reads = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in of and id(n) not in called]
    read = [n.attr for n in reads if n.attr not in shared or ast.unparse(n.value).split(".")[-1] == of[n.attr]]
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return read + [key for key in sorted(keys) for text in texts if re.search(rf"{re.escape(key)}\b", text)]


def test_the_keys_of_features_are_read_by_features() -> None:
    keys = frozenset(
        f"{path}.{name}" for one in features().values() for path, kind in one.keys.items() for name in kind.model_fields
    )
    every = Counter(re.findall(r"^\| `[^`]*?([^`.]+)` \|", (REPO / "docs/configuration.md").read_text("utf-8"), re.M))
    shared = frozenset(name for key in keys if every[name := key.rpartition(".")[2]] > 1)
    rooms = [path for path in FILES if inside(path, "rl_megatron", "launcher")]
    others = [path for path in rooms if not inside(path, "rl_megatron/features", "rl_megatron/config/removed.py")]
    found = {str(path): keys_of_features((REPO / path).read_text(encoding="utf-8"), keys, shared) for path in others}
    assert {path: names for path, names in found.items() if names} == {}
    planted = "learner.draft, f'rollout.server.draft_tokens={n}', c.learner.batch_invariant, server.batch_invariant"
    assert keys_of_features(f"{planted}, e.draft()", keys, shared) == [
        *("draft", "batch_invariant", "rollout.server.draft_tokens")
    ]


STARTS = {f"subprocess.{name}" for name in ("Popen", "run", "check_call", "check_output")}


def without_variables(source: str) -> list[str]:
    """Calls that start a process and do not name its environment variables. Without them exec reads the C library's
    own, which another thread may be moving, and then fails with EFAULT."""
    if not re.search("subprocess", source):
        return []
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    starts = (one for one in calls if ast.unparse(one.func) in STARTS | {"asyncio.create_subprocess_exec"})
    return [ast.unparse(one) for one in starts if "env" not in {keyword.arg for keyword in one.keywords}]


def test_every_process_gets_its_variables_by_name() -> None:
    rooms = [path for path in FILES if inside(path, "rl_megatron", "launcher")]
    found = {str(path): without_variables((REPO / path).read_text(encoding="utf-8")) for path in rooms}
    assert {path: calls for path, calls in found.items() if calls} == {}
    assert without_variables("subprocess.run(x, env=y)\nsubprocess.Popen(z)") == ["subprocess.Popen(z)"]


def pointers(source: str) -> list[str]:
    """Docstrings, of names and attributes alike, that point elsewhere and say nothing."""
    if not re.search(r'"\s*See ', source):  # to parse all files takes a second
        return []
    alone = (n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Expr))
    texts = (n.value for n in alone if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return [text for text in texts if text.lstrip().startswith("See ")]


def test_no_docstring_only_points_elsewhere() -> None:
    found = {str(path): pointers((REPO / path).read_text(encoding="utf-8")) for path in FILES}
    assert {path: texts for path, texts in found.items() if texts} == {}
    assert pointers('x = 1\n"""See Y."""\ndef f():\n    """See g."""\n') == ["See Y.", "See g."]


def translated(text: str) -> list[str]:
    """Phrases of ``WORDS`` in a text, wherever its lines end, each with better words."""
    flat = " ".join(text.replace('"', " ").replace("#", " ").lower().split())
    if not re.search(rf"\b({'|'.join(WORDS)})\b", flat):  # of all at once, an eighth of the time
        return []
    return [f"{m[0]!r}: {better}" for p, better in WORDS.items() for m in re.finditer(rf"\b{p}\b", flat)]


def test_texts_use_the_words_of_the_field() -> None:
    texts = [path for path in (*FILES, *DOCUMENTS) if path.name != Path(__file__).name]
    found = {str(path): translated((REPO / path).read_text(encoding="utf-8")) for path in texts}
    assert {path: phrases for path, phrases in found.items() if phrases} == {}
    assert translated('x = "It was called "\n  "off, and # who\n    # asked"') == [
        "'called off': cancelled",
        "'who asked': the caller",
    ]
    assert translated("A cause is told apart from others: there are no more causes.") == []


def test_transformers_reads_folders_without_their_code() -> None:
    """Without the argument it asks at a terminal whether to run them."""
    calls = [
        (str(path), "trust_remote_code=False" in ast.unparse(node).replace(" ", ""))
        for path in FILES
        if path.parts[0] in PRODUCT
        if "from_pretrained" in (source := (REPO / path).read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    ]
    assert len(calls) >= 5
    assert [path for path, without in calls if not without] == []


def test_every_benchmark_takes_json_and_says_the_machine() -> None:
    children = {"mbridge_convert.py", "trl_gkd.py", "trl_gspo.py", "trl_written.py"}  # which other benchmarks start
    for path in sorted((REPO / "bench").glob("*.py")):
        text = path.read_text()
        if "__main__" in text and path.name not in children:
            assert "parse(" in text, path.name
            assert "write(" in text, path.name
            assert "from bench.results import" in text, path.name


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_every_dependency_is_pinned_once(python: str) -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [n for n in (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines() if not n.startswith("#")]
    given = [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"python_version": python})]
    pins = {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in given}
    assert len(pins) == len(given)
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    for requirement in map(Requirement, wanted):
        assert requirement.name == project["name"] or requirement.specifier.contains(pins[requirement.name]), python
    (megatron,) = (r for r in map(Requirement, wanted) if r.name == "megatron-core")
    ends = {">=": "3.11", "<=": "3.12"}  # which Python has which end of the range
    assert [one.version for one in megatron.specifier if ends[one.operator] == python] == [pins["megatron-core"]]
    assert re.findall(r"torch==(\S+)", (REPO / "Makefile").read_text(encoding="utf-8")) == [pins["torch"]]


def test_the_picture_shows_the_floors() -> None:
    """ARCHITECTURE.md draws every room of the tree on its floor, as the contracts have it that `make lint` checks."""
    picture = re.search(r"## The house\n.*?```\n(.*?)```", (REPO / "ARCHITECTURE.md").read_text(), re.S)
    assert picture
    drawn: dict[str, list[set[str]]] = {}
    for line in picture[1].splitlines():
        indent, beside, name, what = re.fullmatch(r"( *)(\| )?(\w+) +(\S.*)", line).groups()  # type: ignore[union-attr]
        assert what, line
        if not indent:
            floors = drawn.setdefault(name, [])
        elif beside:
            floors[-1].add(name)
        else:
            floors.append({name})
    contracts = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {one["containers"][0]: one["layers"] for one in contracts if len(one.get("containers", ())) == 1}
    assert drawn == {top: [set(floor.split(" | ")) for floor in layers[top]] for top in drawn}
    assert list(drawn) == next(one for one in contracts if one["name"] == "Programs stand on the library")["layers"]
    tree = {
        path.name.removesuffix(".py") for top in drawn for path in (REPO / top).iterdir() if path.name != "__init__.py"
    }
    assert {name for floors in drawn.values() for floor in floors for name in floor} == tree - {"__pycache__"}


MET = ("rl_megatron/interfaces.py", "rl_megatron/engines/adapter.py")  # protocols, through which two files meet


def named_in(file: str) -> set[str]:
    """Dotted names that a file imports, or has as texts."""
    tree = ast.parse((REPO / file).read_text(encoding="utf-8"))
    texts = {
        n.value.partition(":")[0] for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    return {*imported(tree), *texts, *modules}


def apart(way: list[str]) -> list[str]:
    """Files of a way that neither import, nor are imported by, one before them or the next, nor meet one."""
    found = {file: named_in(file) for file in (*way, *MET)}
    module = {file: file.removesuffix(".py").replace("/", ".") for file in found}

    def linked(one: str, other: str) -> bool:
        return module[one] in found[other] or module[other] in found[one]

    def met(one: str, others: list[str]) -> bool:
        return any(module[by] in found[one] and any(module[by] in found[of] for of in others) for by in MET)

    return [
        file
        for at, file in enumerate(way)
        if at and not any(linked(file, one) for one in (*way[:at], *way[at + 1 : at + 2])) and not met(file, way[:at])
    ]


def test_three_ways_are_short_and_follow_the_imports() -> None:
    (section,) = re.findall(r"## Three ways\n(.*?)\n## ", (REPO / "ARCHITECTURE.md").read_text("utf-8"), re.S)
    ways = [
        [
            f"{name if name.startswith('launcher/') else f'rl_megatron/{name}'}.py"
            for name in re.findall(r"\w+(?:/\w+)+", text)
        ]
        for text in re.findall(r"```\n(.*?)```", section, re.S)
    ]
    assert [len(way) <= most for way, most in zip(ways, (31, 26, 33), strict=True)] == [True] * 3
    assert all(len({*way}) == len(way) for way in ways)
    assert [apart(way) for way in ways] == [[], [], []]
    assert apart([*ways[0], "rl_megatron/models/rotary.py"]) == ["rl_megatron/models/rotary.py"]
