"""What documents name exists, in a process of its own; examples, docs/proof.md and budgets."""

from __future__ import annotations

import ast
import csv
import ctypes
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from launcher.preflight.checks import preflight
from launcher.preflight.sizes import size_problems
from launcher.processes.environment import adopt_orphans
from launcher.runs.folder import choose
from rl_megatron.config.io import load_config
from rl_megatron.models.named import NAMED
from rl_megatron.observability.intervals import mean_interval
from tests.budgets import FILE, counts
from tests.proof import run
from tests.proof.run import PAGE, Claim, claims, printed, stale
from tests.unit.test_documented_commands import (
    EVERY,
    EXAMPLES,
    OTHERS,
    PAGES,
    REPO,
    Command,
    configuration,
    parsed,
    tracked,
)
from tools.planner.estimates import estimate
from tools.planner.memory import check_memory


@pytest.mark.parametrize("document", PAGES, ids=lambda path: str(path.relative_to(REPO)))
def test_files_that_a_document_names_are_there(document: Path) -> None:
    """Whole paths, paths inside a package, and bare names."""
    named = set(re.findall(r"`([\w./-]+\.(?:py|sh|j2|toml))`", document.read_text(encoding="utf-8")))
    named = {name for name in named - EXAMPLES if not name.startswith(OTHERS) and "<" not in name}
    files = tracked()
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in files)] == []


SUBMITTED = [c for c in EVERY if c.place.startswith("docs/migrating.md") and c.words[:2] == ("rl-megatron", "submit")]


# Every command block of the documents: commands are there, take these arguments, and configurations load.
@pytest.mark.parametrize(
    "command",
    [c for c in SUBMITTED if not c.words[2].endswith(".yaml")],  # a file that another command of the page writes
    ids=lambda c: c.place[:90],
)
def test_recipes_of_who_moves_here_fit_their_gpus(command: Command) -> None:
    """Sent as written, they find a fault in nothing but the reader's own files."""
    name, given = parsed(command)
    assert name == "submit"
    config = configuration(str(given["config"]), ["run.launcher=slurm", *given["overrides"]])  # type: ignore[misc]
    assert check_memory(config, NAMED[str(config.model.name)]) is not None
    assert list(size_problems(config, NAMED[str(config.model.name)])) == []
    assert list(estimate(config, NAMED[str(config.model.name)]).warnings()) == []
    found = preflight(config, for_job=True)
    own = ("model.path=", "data.train=", "data.eval=", "rollout.python=", "reward.function='my_rewards")
    assert [text for text in found.texts("problem") if not text.startswith(own)] == []
    assert found.texts("note") == []


def test_a_machine_with_its_own_torch_names_all_packages_that_are_missing() -> None:
    """Every package that this one depends on; here none is missing, and without site-packages all are."""
    (asked,) = (c for c in EVERY if c.place.startswith("docs/install.md") and c.words[:2] == ("python3", "-c"))
    program = asked.words[2]
    named = set(program.split('"""')[1].split())
    wanted = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
    distributions = {re.split("[=>]", line)[0] for line in wanted}
    imported = {"megatron-core": "megatron", "pyyaml": "yaml"}
    assert {imported.get(name, name.replace("-", "_")) for name in distributions} <= named
    here, bare = (
        subprocess.run([sys.executable, *flags, "-c", program], capture_output=True, text=True, check=True).stdout
        for flags in ([], ["-I", "-S"])
    )
    assert here == "[]\n"
    assert set(ast.literal_eval(bare)) == named


# docs/configuration.md matches the schema, key by key.
def test_a_machine_without_torch_can_make_it() -> None:
    code = "import sys; sys.modules['torch'] = None; import rl_megatron.config.docs as d; d.render()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)


# Examples for other schedulers: valid by publishers' schemas, scripts that start and stop, and a GPU for each rank.
SCHEDULERS = Path(__file__).resolve().parents[2] / "docs" / "examples"
STAND_IN = f"""#!{sys.executable}
import os, shlex, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved")))
print(shlex.join(sys.argv), flush=True)
if "STATUS" not in os.environ:
    signal.pause()
sys.exit(int(os.environ["STATUS"]))
"""


def started(shell: str, script: str, home: Path, **variables: str) -> subprocess.Popen[str]:
    """The script, with ``home`` for the volume of runs, and a stand-in for rl-megatron that waits for SIGTERM."""
    program = home / "learner" / "bin" / "rl-megatron"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(STAND_IN, encoding="utf-8")
    program.chmod(0o755)
    there = script.replace("/runs", str(home / "runs"))
    environment = {"HOME": str(home), "PATH": f"{program.parent}:{os.environ['PATH']}", **variables}
    return subprocess.Popen([shell, "-c", there], env=environment, stdout=subprocess.PIPE, text=True)


def ranks_of(words: Sequence[str]) -> int:
    """Ranks of the learner that ``rl-megatron train`` with these words would start, by Ray and with a fixed name."""
    program, command, option, name, *keys, last = words
    assert (Path(program).name, command, option, last) == ("rl-megatron", "train", "--config", "--resume")
    config = choose(load_config(name, keys), name, resume=True)
    assert (config.run.launcher, config.learner.device, config.run.name) == ("ray", "cuda", "first")
    return config.learner.dims.world_size


def ranks_started(shell: str, script: str, home: Path) -> int:
    """Ranks of the script's first start, which is then stopped as its machine's end would: saved, it has failed."""
    with started(shell, script, home) as run:
        assert run.stdout is not None
        words = shlex.split(run.stdout.readline())
        run.terminate()
        assert (run.wait(timeout=30), run.stdout.read()) == (1, "saved\n")
    ranks = ranks_of(words)
    for status in (0, 2):
        with started(shell, script, home, STATUS=str(status)) as run:
            assert run.wait(timeout=30) == status
    return ranks


@pytest.mark.parametrize("version", ["1.30", kubernetes_validate.latest_version()])
def test_kubernetes_takes_the_job_and_it_has_a_gpu_for_each_rank(version: str, tmp_path: Path) -> None:
    job = yaml.safe_load((SCHEDULERS / "kubernetes.yaml").read_text(encoding="utf-8"))
    kubernetes_validate.validate(job, version, strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["sh", "-c"]
    (script,) = container["args"]
    assert ranks_started("sh", script, tmp_path) == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_skypilots_machine_has_a_gpu_for_each_rank(tmp_path: Path) -> None:
    task = yaml.safe_load((SCHEDULERS / "skypilot.yaml").read_text(encoding="utf-8"))
    assert task["num_nodes"] == 1
    assert f"H100:{ranks_started('bash', task['run'], tmp_path)}" == task["resources"]["accelerators"]
    assert "--config tiny_cpu" in task["run"]
    assert "run.dir=" + next(iter(task["volumes"])) in task["run"]


# docs/proof.md: every kind of complaint has threads, command, output and test; quick ones of both pages hold.
KINDS = 12
CLAIMS = list(claims())
CLAIMS_OF_OTHERS = [claim for name in ("how_it_works.md", "cluster.md") for claim in claims(REPO / "docs" / name)]
QUICK = [claim for claim in [*CLAIMS, *CLAIMS_OF_OTHERS] if claim.runner == "tests/processes/test_documents.py"]


def test_every_kind_of_complaint_has_threads_a_command_its_output_and_a_test() -> None:
    _, *sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert len(sections) == KINDS
    for section in sections:
        title = section.splitlines()[0]
        threads = re.findall(
            r"\[([\w.-]+/[\w.-]+#\d+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)\)", section
        )
        assert len(threads) >= 2, title
        assert [name for name, repository, number in threads if name != f"{repository}#{number}"] == []
        assert re.search(r"`[\w/]+\.py::\w+`", section), title
        assert "<!-- run by " in section, title
    assert len(CLAIMS) == KINDS


def test_a_command_of_hours_shows_its_stored_run_by_date_and_commit() -> None:
    """The page's figures are those of the stored table."""
    text = PAGE.read_text(encoding="utf-8")
    (at,) = re.finditer(r"<!-- not run: hours; the stored run is of \d{4}-\d\d-\d\d, commit [0-9a-f]{7} -->", text)
    named, shown = re.search(r"`(docs/[\w/-]+\.csv)`.*?```\n(.*?)```", text[at.end() :], re.S).groups()  # type: ignore[union-attr]
    arms = defaultdict[str, list[float]](list)
    for row in csv.DictReader((REPO / named).read_text().splitlines()):
        arms[row["arm"]].append(float(row["result"]))
    found = {arm: mean_interval(values) for arm, values in arms.items()}
    assert shown.splitlines() == [f"{arm:<12} {f.value:.4f}  {f.low:.4f} to {f.high:.4f}" for arm, f in found.items()]


def test_a_command_that_does_not_end_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LIMIT_SECONDS", 0.01)
    assert printed("rl-megatron doctor") == "it did not end within 0.01 s"


def test_a_long_or_stale_command_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = "rl-megatron 9.9.9\n"
    monkeypatch.setattr(run, "claims", lambda: iter([Claim("rl-megatron --version", shown, "x.py")]))
    monkeypatch.setattr(run, "SHOWN_BY_RUNNING", 0.001)
    with pytest.raises(SystemExit) as ended:
        run.main()
    said = capsys.readouterr().out
    assert ended.value.code == 1
    assert re.match(
        r"STALE +\d+ s of CPU  rl-megatron --version\n  not there: rl-megatron 9\.9\.9\nrl-megatron 0", said
    )
    assert "over 0.001 s: mark it as not run, and show a stored run with date and commit" in said
    monkeypatch.setattr(run, "printed", lambda command: shown)
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert not ended.value.code


LEAVES = """
import os, time
if os.fork() == 0:
    while time.process_time() < 0.2: pass
    os.closerange(0, 3)
    time.sleep(60)
"""


def test_what_it_leaves_counts_and_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As those of a fork server, for which no parent waits."""
    monkeypatch.setattr(run, "claims", lambda: iter([Claim(shlex.join(["python", "-c", LEAVES]), "", "x.py")]))
    monkeypatch.setattr(run, "SHOWN_BY_RUNNING", 0.19)
    monkeypatch.setattr(run, "LEFT_SECONDS", 0.1)
    adopt_orphans()
    try:
        with pytest.raises(SystemExit):
            run.main()
    finally:
        ctypes.CDLL(None).prctl(36, 0)  # PR_SET_CHILD_SUBREAPER
    assert "over 0.19 s" in capsys.readouterr().out


@pytest.mark.parametrize("claim", QUICK, ids=lambda claim: claim.command[:60])
def test_a_quick_command_prints_what_its_page_shows(claim: Claim) -> None:
    text = printed(claim.command)
    assert stale(claim.shown, text) is None, text


@pytest.mark.parametrize(
    ("shown", "text", "missing"),
    [
        ("a 1.00 GB\n", "a 1.04  GB\n", None),
        ("a 1.00 GB\n", "a 1.06 GB\n", "a 1.00 GB"),
        ("a 1,000\n", "a 940\n", "a 1,000"),
        ("one\n...\nfour\n", "one\ntwo\nthree\nfour\n", None),
        ("one\nthree\n...\n", "one\ntwo\nthree\n", "three"),
        ("...\ntwo\none\n...\n", "one\ntwo\n", "one"),
        ("one\n", "one\ntwo\n", "nothing behind line 1"),
        ("3 passed in 1.2s\n", "3 passed in 90s (0:01:30)\n", None),
        ("3 passed in 1.2s\n", "2 passed in 1.2s\n", "3 passed in 1.2s"),
        ("t.py::test PASSED\n", "t.py::test PASSED [ 33%]\n", None),
        ("t.py::test PASSED\n", "t.py::test FAILED [ 33%]\n", "t.py::test PASSED"),
    ],
)
def test_an_output_is_stale_by_words_or_by_figures_beyond_tolerance(shown: str, text: str, missing: str | None) -> None:
    assert stale(shown, text) == missing


# Nothing grows past its budget, and a budget follows what shrinks.
def test_nothing_grows_past_its_budget() -> None:
    budgets, now = yaml.safe_load(FILE.read_text()), counts()
    assert budgets.keys() == now.keys()
    grown = {name: f"{now[name]}, budget {budgets[name]}" for name in now if now[name] > budgets[name]}
    assert grown == {}, (
        "remove as much, or raise the budget in tests/budgets.yaml by a decision in docs/how_it_works.md"
    )
