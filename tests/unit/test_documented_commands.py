"""Every command block of the documents: commands are there, take these arguments, and configurations load.

The line before a block says in an HTML comment whether it is run: ``run`` (here, each command in order), ``run by
FILE`` (a test that reads the page), ``not run: WHY``.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench import memory
from launcher.__main__ import app
from launcher.commands.plan import _texts
from launcher.preflight.sizes import size_problems
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.experiments.cells import cells_of
from rl_megatron.experiments.study import read_study
from rl_megatron.models.named import NAMED
from rl_megatron.placement.seats import seats_of
from rl_megatron.scaling.memory import check_memory
from rl_megatron.scaling.routes import route_of
from rl_megatron.weights.layouts.parsing import model_shape, parse_layout
from tests.documents import blocks

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "slurm/*.md")
    for path in REPO.glob(pattern)
    if path.name != "CHANGELOG.md"
)
SHELL = {
    "mkdir",
    "ln",
    "install",
    "openssl",
    "cp",
    "source",
    "cd",
    "export",
    "git",
    "sbatch",
    "lm_eval",
    "vllm",
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
        text = re.sub(r"\$\(\(.*?\)\)", "100", block.text.replace("\\\n", " "))
        for line in text.splitlines():
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
    known = (REPO / "conf" / f"{name}.yaml").is_file()
    return load_config(name if known else "tiny_cpu", overrides)


def test_documents_have_commands() -> None:
    assert len(EVERY) > 50
    assert {"README.md", "docs/quickstart.md", "slurm/README.md"} <= {c.place.partition(":")[0] for c in EVERY}


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
            assert not route_of(config).shared
    elif name.startswith("experiment "):
        assert cells_of(read_study(REPO / str(given["study"])))
    elif name == "plan" and given["config"]:
        extra = [] if any(o.startswith("model.path=") for o in overrides) else ["model.path=."]
        configuration(str(given["config"]), [*(given["arguments"] or []), *extra])  # type: ignore[misc, list-item]
    elif name == "plan":
        model, *layouts = given["arguments"]  # type: ignore[misc]
        for side, text in _texts(layouts).items():
            parse_layout(side, text, model_shape(model))
    elif name == "inspect" and given["layout"]:
        parse_layout("layout", str(given["layout"]), model_shape(str(given["target"])))


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
    elif program(command).startswith("python") and rest and rest[0].startswith("tools/"):
        assert (REPO / rest[0]).is_file()
    elif not program(command).startswith("python") and program(command) not in SHELL:
        assert name.startswith((".venv/bin/", ".environments/", "/opt/")) or os.access(REPO / name, os.X_OK)


def test_the_script_to_edit_trains_on_two_nodes_by_the_words_for_its_sixth_line() -> None:
    script = (REPO / "slurm" / "train.sbatch").read_text()
    (line,) = re.findall(r"^CONFIG=\((.*)\)$", script, re.M)
    (words,) = re.findall(r"sixth line too,.*?as in\s`(.*?)`", (REPO / "slurm" / "README.md").read_text(), re.S)
    option, name, *keys = shlex.split(line)
    config = load_config(name, [*keys, "run.launcher=slurm", *shlex.split(words)])
    assert (option, config.learner.dims.world_size, config.slurm.nodes) == ("--config", 16, 2)
    assert f" --cpus-per-task={config.slurm.cpus_per_task}\n" in script
    assert list(size_problems(config, NAMED[str(config.model.name)])) == []
    assert check_memory(config, NAMED[str(config.model.name)]) is not None
    assert [seat.node for seat in seats_of(config, ("a", "b"), ())] == ["a", "b"]


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
