"""Every command block, path and test that the documents name exists; docs/configuration.md matches the schema."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

from bench import memory
from launcher import docs as command_docs
from launcher.__main__ import app
from launcher.preflight.checks import checks
from launcher.preflight.sizes import size_problems
from rl_megatron import types
from rl_megatron.config.docs import _Described, _section, render
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.data import (
    FIELDS,
    ArithmeticRunData,
    CurriculumSection,
    FileRunData,
    HubRunData,
    MixtureData,
)
from rl_megatron.models.named import NAMED
from rl_megatron.placement.routes import find_route
from rl_megatron.placement.seats import server_placements
from rl_megatron.section import EntryName, Section
from tests.documents import blocks
from tools.convert.layouts import model_shape, parse_layout
from tools.lab.study import read_study, study_cells
from tools.migrate import docs as migrating
from tools.planner.memory import check_memory
from tools.planner.plan import _texts

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/**/*.md") for path in REPO.glob(pattern) if path.name != "CHANGELOG.md"
)
SHELL = {
    *("mkdir", "ln", "install", "openssl", "cp", "source", "cd", "export", "git", "sbatch", "lm_eval", "vllm")
}  # the shell's and others': not ours to parse
A_COMMAND = r"(\$ )?(rl-megatron|python[\d.]*|pip|make|export|cd|source|git|srun|sbatch|bash|[\w./-]*bin/\S+) "


@dataclass(frozen=True)
class Command:
    """One command of a document, its words as a shell gives them."""

    place: str
    words: tuple[str, ...]
    mark: str


def commands(path: Path) -> Iterator[Command]:
    for block in blocks(path, "sh"):
        for line in re.sub(r"\$\(\(.*?\)\)", "100", block.text.replace("\\\n", " ")).splitlines():
            words = shlex.split(re.sub(r"<[a-z ]+>", "", line), comments=True)
            for part in " ".join(map(shlex.quote, words)).split(" '&&' "):
                if words:
                    started = re.sub(r"^srun( -\S+)* ", "", part)  # what it starts is looked at
                    yield Command(f"{path.relative_to(REPO)}: {line.strip()}", tuple(shlex.split(started)), block.mark)


EVERY = [command for path in DOCUMENTS for command in commands(path)]


def program(command: Command) -> str:
    return command.words[0].rpartition("/")[2]


def parsed(command: Command) -> tuple[str, dict[str, object]]:
    """The subcommand and its parameters. Raises for an unknown command or option, and a value of another type."""
    words, found, names = list(command.words[1:]), typer.main.get_command(app), []
    while (inner := getattr(found, "commands", None)) and words and not words[0].startswith("-"):
        names.append(words.pop(0))
        found = inner[names[-1]]
    return " ".join(names), dict(found.make_context(names[-1], words).params)


def configuration(name: str, overrides: list[str]) -> RunConfig:
    """As given; a file of the reader's stands for the default run."""
    return load_config(name if (REPO / "conf" / f"{name}.yaml").is_file() else "tiny_cpu", overrides)


def test_documents_have_commands() -> None:
    assert len(EVERY) > 50
    assert {"README.md", "docs/quickstart.md", "docs/cluster.md"} <= {c.place.partition(":")[0] for c in EVERY}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_every_block_of_commands_says_whether_it_is_run(path: Path) -> None:
    """A file that it names is there, and one that runs the page names the page. No other block has commands."""
    assert [block.text for block in blocks(path, "", "text") if re.match(A_COMMAND, block.text)] == []
    for mark in (block.mark for block in blocks(path, "sh", "bash", "shell", "console")):
        assert re.fullmatch(r"run|run by tests/[\w/]+\.py|not run: .{10,}", mark), f"{path}: {mark!r}"
        for named in re.findall(r"(?:tests|bench|tools)/[\w/]+(?:\.\w+)?", mark):
            assert (REPO / named).exists(), f"{path}: {mark}"
        for target in re.findall(r"make ([a-z0-9-]+)", mark):
            assert f"\n{target}:" in (REPO / "Makefile").read_text(), f"{path}: {mark}"
        if mark.startswith("run by "):
            assert path.name in (REPO / mark.removeprefix("run by ")).read_text(), f"{path}: {mark}"


@pytest.mark.parametrize("command", [c for c in EVERY if c.mark == "run"], ids=lambda c: c.place[:90])
def test_what_is_marked_as_run_ends_well(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own beside the documents' files."""
    for folder in ("bench", "docs"):
        (tmp_path / folder).symlink_to(REPO / folder)
    monkeypatch.chdir(tmp_path)
    assert command.words[0] == "rl-megatron"
    ended = CliRunner().invoke(app, list(command.words[1:]))
    assert ended.exit_code == 0, ended.output


@pytest.mark.parametrize("command", [c for c in EVERY if program(c) == "rl-megatron"], ids=lambda c: c.place[:90])
def test_what_a_document_shows_is_taken(command: Command) -> None:
    name, given = parsed(command)
    overrides = list(given.get("overrides") or [])  # type: ignore[call-overload]
    if name in {"train", "submit", "doctor mismatch"}:
        job = ["run.launcher=slurm"] if name == "submit" else []
        config = configuration(str(given.get("config") or given.get("target")), [*job, *overrides])
        if name == "submit" and config.model.name is not None:
            check_memory(config, NAMED[config.model.name])
            assert not find_route(config).shared
    elif name.startswith("experiment "):
        assert study_cells(read_study(REPO / str(given["study"])))
    elif name == "plan" and given["config"]:
        extra = [] if any(o.startswith("model.path=") for o in overrides) else ["model.path=."]
        configuration(str(given["config"]), [*(given["arguments"] or []), *extra])  # type: ignore[misc, list-item]
    elif name == "plan":
        model, *layouts = given["arguments"]  # type: ignore[misc]
        for side, text in _texts(layouts).items():
            parse_layout(side, text, model_shape(model))
    elif name == "convert" and given["layout"]:
        parse_layout("layout", str(given["layout"]), model_shape(str(given["source"])))


@pytest.mark.parametrize("command", [c for c in EVERY if program(c) != "rl-megatron"], ids=lambda c: c.place[:90])
def test_other_programs_of_documents_are_there(command: Command) -> None:
    name, *rest = command.words
    if program(command) == "make":
        makefile = (REPO / "Makefile").read_text()
        given = {word.partition("=")[0] for word in rest if "=" in word}
        assert given <= set(re.findall(r"^([A-Z_]+) \?=", makefile, re.M))
        assert {word for word in rest if "=" not in word} <= set(re.findall(r"^([a-z0-9-]+):", makefile, re.M))
    elif program(command).startswith("python") and rest[:1] == ["-m"]:
        package = rest[1].partition(".")[0]
        own = REPO / f"{rest[1].replace('.', '/')}.py"
        assert package in {"pip", *sys.stdlib_module_names} or own.is_file()
    elif program(command).startswith("python") and rest and rest[0].startswith("docs/"):
        assert (REPO / rest[0]).is_file()
    elif not program(command).startswith("python") and program(command) not in SHELL:
        assert name.startswith((".venv/bin/", ".environments/", "/opt/")) or os.access(REPO / name, os.X_OK)


def test_the_script_to_edit_trains_on_two_nodes_by_the_words_for_its_sixth_line() -> None:
    script = (REPO / "slurm" / "train.sbatch").read_text()
    (line,) = re.findall(r"^CONFIG=\((.*)\)$", script, re.M)
    (words,) = re.findall(r"sixth line too,.*?as in\s`(.*?)`", (REPO / "docs" / "cluster.md").read_text(), re.S)
    option, name, *keys = shlex.split(line)
    config = load_config(name, [*keys, "run.launcher=slurm", *shlex.split(words)])
    assert (option, config.learner.dims.world_size, config.slurm.nodes) == ("--config", 16, 2)
    assert f" --cpus-per-task={config.slurm.cpus_per_task}\n" in script
    assert list(size_problems(config, NAMED[str(config.model.name)])) == []
    assert check_memory(config, NAMED[str(config.model.name)]) is not None
    assert [seat.node for seat in server_placements(config, ("a", "b"), ())] == ["a", "b"]


@pytest.mark.parametrize(
    "given",
    [
        ("--steps", "60", "--every", "20"),
        ("--steps", "400", "--every", "150"),
        ("--steps", "400", "--every", "0"),
        ("--steps", "400", "--every", "-100"),
    ],
)
def test_the_bench_of_memory_refuses_steps_without_its_baseline_before_they_run(
    given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["memory", *given])
    monkeypatch.setattr(memory, "measure", lambda steps, every: pytest.fail("it ran"))
    with pytest.raises(SystemExit):
        memory.main()
    assert "growth is from step 300 to the last" in capsys.readouterr().err


# The paths and tests that documents name exist, and the site shows what their comments say.
PAGES = [REPO / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")]
PAGES += sorted((REPO / "docs").rglob("*.md"))
OTHERS = ("examples/", "verl/", "areal/", "trl/", "slime/", "src/transformers/")  # files of peers
EXAMPLES = {"my_rewards.py", "utils.py"}  # a reader's own; one that must not be


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True)
    return [f"/{path}" for path in listed.stdout.splitlines()]


@pytest.mark.parametrize("document", PAGES, ids=lambda path: str(path.relative_to(REPO)))
def test_tests_that_a_document_names_are_there(document: Path) -> None:
    """As ``unit/test_extensions.py::test_a_transport``."""
    named = re.findall(r"`([\w./-]+\.py)::(\w+)`", document.read_text(encoding="utf-8"))
    files = {path: REPO / "tests" / path for path, _ in named}
    texts = {path: file.read_text(encoding="utf-8") if file.is_file() else "" for path, file in files.items()}
    there = {path: set(re.findall(r"^(?:async )?def (\w+)\(", text, re.M)) for path, text in texts.items()}
    assert [f"{path}::{test}" for path, test in named if test not in there[path]] == []


def test_the_page_of_checks_and_pages_in_the_sites_navigation() -> None:
    page = (REPO / "docs" / "cluster.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| check \|.*\n\|---.*\n((?:\|.*\n)*)", page, re.M)
    assert re.findall(r"^\| ([a-z ]+) \|", table, re.M) == list(checks())
    # ``make docs`` says so too, later.
    listed = re.findall(r"^ +- (\S+\.md)$", (REPO / "docs" / "site.yaml").read_text(encoding="utf-8"), re.M)
    pages = [str(path.relative_to(REPO)) for path in [*PAGES, REPO / "CHANGELOG.md"]]
    assert sorted(listed) == sorted(pages)


def test_the_picture_of_a_step_names_files_and_types_that_are_there() -> None:
    picture = (REPO / "docs/img/step.svg").read_text(encoding="utf-8")
    files, names = (re.findall(rf'<text class="{kind}[^>]*>([^<]+)<', picture) for kind in ("file", "type"))
    assert len(files) > 6
    assert [path for path in files if not (REPO / "rl_megatron" / path).is_file()] == []
    assert {*names} - {"gradients"} <= {*vars(types)}


def test_the_site_shows_whether_each_block_of_commands_is_run() -> None:
    (name,) = re.findall(r"^hooks: \[(\S+)\]", (REPO / "docs" / "site.yaml").read_text(encoding="utf-8"), re.M)
    shown = runpy.run_path(str(REPO / "docs" / name))["on_page_markdown"]
    assert shown("<!-- run -->\n```sh\n<!-- run by tests/x_y.py -->\n<!-- a note -->\n", page=None).splitlines() == [
        *("<small>Run by a test</small>", "", "```sh"),
        *(r"<small>Run by tests/x\_y.py</small>", "", "<!-- a note -->"),
    ]
    expected = "  <small>Not run here: wants a\\_b\\* &amp; more</small>\n\n"
    assert shown("  <!-- not run: wants a_b* & more -->\n") == expected
    for document in PAGES:
        marks = [block.mark for block in blocks(document, "sh", "bash", "shell", "console")]
        assert shown(document.read_text(encoding="utf-8")).count("<small>") == len(marks), document


def test_the_versions_that_are_supported_are_those_that_are_asked_for() -> None:
    """By pyproject.toml and constraints.txt; each row of the table says until when."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (REPO / "constraints.txt").read_text(), re.M))
    asked = {re.split(r"[>=<]", line)[0]: re.findall(r"\d[\d.]*", line) for line in project["dependencies"]}
    text = (REPO / "docs" / "install.md").read_text(encoding="utf-8").partition("### For how long")[2]
    rows = dict(re.findall(r"^\| ([\w ,-]+) \| ([^|]+) \| [^|]{20,} \|$", text, re.M))
    assert rows["this project"] == project["version"].rpartition(".")[0]
    assert rows["Python"].split(", ")[0] == project["requires-python"].removeprefix(">=")
    least, beyond = asked["torch"]
    assert rows["torch"].split(", ")[0] == least == pinned["torch"].rpartition(".")[0]
    assert f"{rows['torch'].split(', ')[-1]}.99" < beyond
    assert rows["megatron-core"].split(", ") == asked["megatron-core"]
    assert "vLLM, SGLang" in rows


def test_each_feature_beside_other_frameworks_names_a_test_that_a_command_runs() -> None:
    page = (REPO / "docs" / "peers.md").read_text(encoding="utf-8")
    table, notes = page.partition("## What they have")[0], page.partition("\n[^")[2]
    tests = dict(re.findall(r"^\[?\^?(\w+)\]: (.*?)(?=^\[\^|\Z)", notes, re.M | re.S))
    rows = re.findall(r"^\| (?!here)([^|]+) \| ([^|]+) \|", table.replace("| | here", ""), re.M)
    assert len(rows) > 20
    assert {len(line.split("|")) for line in table.splitlines() if line.startswith("|")} == {13}  # ten frameworks
    linked = {feature: re.findall(r"\[\^(\w+)\]", cell) for feature, cell in rows}
    assert [feature for feature, names in linked.items() if not names] == []
    named = {name for names in linked.values() for name in names}
    assert [name for name in sorted(named) if not re.search(r"`[\w/]+\.py::\w+`", tests[name])] == []


def test_install_md_and_the_readme_count_extras_and_algorithms() -> None:
    """Others are for those who work on this project."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (REPO / "docs" / "install.md").read_text(encoding="utf-8").partition("| extra | for |")[2]
    listed = re.findall(r"^\| `(\w+)` \|", text.partition("\n\n")[0], re.M)
    assert {*listed} == {*project["optional-dependencies"]} - {"test", "dev", "mutants"}
    assert {"ray", "wandb", "vllm", "sglang", "te", "docs"} <= {*listed}
    # And docs/algorithms.md has a line for each.
    rows = {path.stem for path in (REPO / "conf" / "algorithm").glob("*.yaml")}
    (counted,) = re.findall(r"\*\*(\d+) algorithms as rows", (REPO / "README.md").read_text())
    page = (REPO / "docs/algorithms.md").read_text()
    named = set(re.findall(r"^\| (\w+) \|.*\| [^|]*(?:arXiv:|Williams)[^|]*\|$", page, re.M))
    assert (int(counted), named) == (len(rows), rows)


# docs/configuration.md matches the schema, key by key.
PAGE = REPO / "docs" / "configuration.md"
ROW = re.compile(r"^\| `([\w.]+)` \| (.+?) \| (?:`(.*)`|required) \|(?: (.*?) ?\|)?$", re.MULTILINE)


class Named(Section):
    """A mapping with two lines under it."""

    names: Mapping[EntryName, str] = Field(default_factory=dict)
    """Values by name, with
    ``more`` below."""


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in a config."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{key}.")
        else:
            yield above + key, value


def test_the_page_is_current() -> None:
    command = "python -m rl_megatron.config.docs > docs/configuration.md"
    assert PAGE.read_text(encoding="utf-8") == render(), f"run {command}"


def test_the_page_of_commands_is_current() -> None:
    """It has every command that the program knows."""
    text, command = command_docs.render(), "python -m launcher.docs > docs/commands.md"
    assert (REPO / "docs" / "commands.md").read_text(encoding="utf-8") == text, f"run {command}"
    every = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name in re.findall(r"^## (.*)$", text, re.M) if " " not in name] == list(every)


def test_the_page_of_other_frameworks_matches_the_tables() -> None:
    command = "python -m tools.migrate.docs > docs/migrating.md"
    page = (REPO / "docs" / "migrating.md").read_text(encoding="utf-8")
    assert page == migrating.render(), f"run {command}"


def test_every_key_is_there_with_its_default(tmp_path: Path) -> None:
    shown = {key: default for key, _, default, _ in ROW.findall(render()) if not key.startswith("data.")}
    assert sorted(shown) == sorted(k for k, _ in flat(RunConfig().model_dump()) if not k.startswith("data."))
    empty = tmp_path / "empty.yaml"
    empty.touch()
    for key, default in shown.items():
        assert load_config(str(empty), [f"{key}={default}"]) == RunConfig(), key


def test_all_kinds_of_data_are_there() -> None:
    keys = [key for key, *_ in ROW.findall(render()) if key.startswith("data.")]
    kinds = (ArithmeticRunData, FileRunData, HubRunData, MixtureData)
    inner = {"sources": (), "curriculum": CurriculumSection.model_fields, "fields": FIELDS}
    single = [f"data.{name}" for kind in kinds for name in kind.model_fields if name not in inner]
    below = [f"data.{name}.{key}" for name in ("curriculum", "fields", "fields") for key in inner[name]]
    assert [key for key in keys if key.count(".") == 1] == single
    assert [key for key in keys if key.count(".") > 1] == below
    assert {f"`data.sources.<name>.{key}`" for key in ("digits", "train", "weight", "reward")} <= set(
        re.findall(r"^\| (`[^`]+`)", render(), re.MULTILINE)
    )


def test_keys_have_meanings_values_words_and_one_line() -> None:
    silent = [key for key, _, _, meaning in ROW.findall(render()) if not meaning]
    assert [key for key in silent if not key.startswith("model.tiny.") and key != "data.type"] == []
    kinds = {key: kind for key, kind, *_ in ROW.findall(render())}
    assert (kinds["data.digits"], kinds["rollout.top_p"]) == ("integer ≥ 1, ≤ 6", "number > 0, ≤ 1")
    assert kinds["learner.etp"] == "integer ≥ 1 or `null`"
    assert kinds["reward.on_error"] == "`fail`, `drop` or number"
    assert (kinds["learner.device"], kinds["model.path"]) == ("`cpu`, `cuda`", "path or `null`")
    page = "".join(_section("made", Named.model_json_schema(schema_generator=_Described), {}))
    assert "| `made.names.<name>` | text | not there | Values by name, with `more` below. |\n" in page
