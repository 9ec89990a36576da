"""Any configuration quickly gives a RunConfig, or a ConfigError of bounded length in good English."""

from __future__ import annotations

import random
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from launcher.runs.folder import choose
from rl_megatron.config.errors import explain_errors
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.section import Section

LONGEST = 40_000  # characters of an error
VALUES = [
    *("", "0", "-1", "1", "2", "1.5", "1e400", ".nan", ".inf", "-.inf", "nan", "1" * 20, "1" * 5000, "1e" + "9" * 5000),
    *("0x10", "2000000000", "9" * 18, "-" + "9" * 400, "true", "null", "~", "[]", "[1, [2]]", "{}", "{a: 1}", "'", '"'),
    *("!!int abc", "!!python/object:os.system x", "&a [*a]", "*a", "a" * 100_000, "\udcff", "a\0b", '"\\ud800"'),
    *('"\\UFFFFFFFF"', "\u202e\n\r\x85", "/", "..", "../" * 2000, "/dev/null", "http://[", "${HOME}", "$(id)", "%s"),
    *("{prompt}", "(" * 200, "[" * 3000, "a=b", "-", "files", "arithmetic", "🐟" * 3000),
]


def sections(section: type[Section], above: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key that the schema has, dotted, with what may stand there."""
    for name, field in section.model_fields.items():
        kinds = [k for k in (field.annotation, *typing.get_args(field.annotation)) if isinstance(k, type)]
        inner = [kind for kind in kinds if issubclass(kind, Section)]
        for below in inner:
            part = f"{above}{name}.part." if "Mapping" in str(field.annotation) else f"{above}{name}."
            yield from sections(below, part)
        yield above + name, field


KEYS = dict(sections(RunConfig))


def outcome(name: str, overrides: list[str]) -> str:
    """The error's text, with what must hold of each; "" where the configuration is taken."""
    try:
        load_config(name, overrides)
    except ConfigError as error:
        text = str(error)
        assert 0 < len(text) <= LONGEST, (len(text), overrides[0][:80])
        assert not re.search(r"must be (match|have|Input|Unable|an? instance)|Traceback", text), text
        text.encode()  # it can be printed
        return text
    return ""


def test_every_key_with_nasty_values_is_taken_or_refused_in_words() -> None:
    """A fifth of the values each (all take a minute), so that each value meets a fifth of the keys."""
    for number, key in enumerate(KEYS):
        group = ["data=gsm8k"] if key.startswith("data.") and key not in {"data.digits", "data.num_eval"} else []
        for value in VALUES[number % 5 :: 5]:
            outcome("tiny_cpu", [*group, f"{key}={value}"])


def test_an_empty_list_is_refused_in_words() -> None:
    assert outcome("tiny_cpu", ["profile.ranks=[]"]).endswith("profile.ranks='[]': must be at least 1 of them")


@pytest.mark.parametrize("key", ["roles.layouts", "reward.parts", "eval.sets", "slurm.environment"])
def test_a_mapping_on_the_command_line_is_refused_with_what_to_write(key: str) -> None:
    (said,) = outcome("tiny_cpu", [f"{key}={{critic: {{tp: 2}}}}"]).splitlines()
    assert f"a section of names, not one value; set {key}.<name>=<value>, or {key}.<name>.<key>=<value>" in said


def test_mixtures_of_them_are_refused_in_words() -> None:
    draw, words = random.Random(0), [*KEYS, "data", "algorithm", "rollout", "x", "a" * 100_000, "a." * 500 + "b", "."]
    for _ in range(100):
        outcome("tiny_cpu", [f"{draw.choice(words)}={draw.choice(VALUES)}" for _ in range(draw.randint(2, 40))])
    assert outcome("tiny_cpu", [f"x{i}=1" for i in range(5000)]).endswith("... and 4970 more")


def test_no_number_of_the_schema_may_be_nan_or_without_an_end() -> None:
    """A plain ``float`` takes NaN and infinity, a plain ``int`` as many digits as there are."""
    plain = []
    for key, field in KEYS.items():
        choices = field.metadata or [m for kind in typing.get_args(field.annotation) for m in _metadata(kind)]
        shown = str(field.annotation).replace("bool", "") + str(choices)
        if re.search(r"\bfloat\b", shown) and "allow_inf_nan=False" not in shown:
            plain.append(key)
        if re.search(r"\bint\b", shown) and "Le(le=" not in shown:
            plain.append(key)
    assert plain == []
    for value in (".nan", ".inf", "-.inf", "1" * 5000, "1e400"):
        for key in ("reward.on_error", "algorithm.unfinished_reward", "eval.success_reward", "seed"):
            assert outcome("tiny_cpu", [f"{key}={value}"]), (key, value)


def test_true_is_no_number() -> None:
    """Pydantic takes it for 1: a group size, a rate."""
    taken = []
    for key, field in KEYS.items():
        kinds = set(_kinds(field.annotation))
        if ".part." not in key and kinds & {int, float} and bool not in kinds:
            said = outcome("tiny_cpu", [f"{key}=true"])
            if "number, not true or false" not in said and "makes its own problems" not in said:
                taken.append(key)
    assert taken == []


def _kinds(kind: object) -> Iterator[object]:
    """The types of an annotation, of lists and mappings too."""
    yield kind
    for part in typing.get_args(kind):
        yield from _kinds(part)


def _metadata(kind: object) -> list[object]:
    return [getattr(m, "metadata", m) for m in getattr(kind, "__metadata__", ())]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [x]\nb: *a\n", "line 2, column 4: *a is an alias, which is refused; write the value out"),
        ("".join(f"k{i}: &k{i} [{f'*k{i - 1}, ' * 9 if i else 'x'}]\n" for i in range(9)), "*k0 is an alias"),
        ("a: &a [*a]\n", "*a is an alias"),
        ("a: " + "[" * 3000, "line 1, column 20: more than 16 levels deep"),
        ("{a: " * 3000, "more than 16 levels deep"),
        ("seed: !!int abc\n", "line 1, column 7: not a value of !!int"),
        ("seed: !!float abc\n", "not a value of !!float"),
        ("seed: !!bool maybe\n", "not a value of !!bool"),
        ("seed: !!timestamp 2020-01-01\n", "could not determine a constructor"),
        ("seed: " + "1" * 5000, "a number of more than 4000 digits"),
        ("seed: !!int 0x" + "f" * 5000, "not a value of !!int"),
        ('model: {name: "\\ud800"}\n', "text must be UTF-8"),
        ('model: {name: "\\0"}\n', "text must not contain a NUL character"),
        ('model: {name: "\\UFFFFFFFF"}\n', "cannot be read"),
        ("#" * 300_000, "holds more than 262144 bytes"),
        ("defaults: [" + "other, " * 200 + "]\n", "defaults lead to more than 100 files"),
        ("a" * 1000 + ": 1\n", "no such key"),
        ("a" * 100_000, "a config file is a mapping"),
        ("\ud800".encode("utf-8", "surrogatepass"), "'utf-8' codec"),
    ],
)
def test_a_file_that_is_a_trap_is_refused_in_words(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "other.yaml").touch()
    assert said in outcome(str(path), [])


def test_names_longer_than_a_file_systems_are_not_there(tmp_path: Path) -> None:
    long = "a" * 5000
    for name, overrides in ((long, []), (f"{long}.yaml", []), ("tiny_cpu", [f"algorithm={long}"])):
        assert "no such file" in outcome(name, overrides)
    assert outcome("\udcff.yaml", []).startswith("--config '\\udcff.yaml': text must be UTF-8")
    (tmp_path / "run.yaml").write_text(f"defaults: [{long}]\n")
    assert "no such file" in outcome(str(tmp_path / "run.yaml"), [])


def test_degrees_of_any_size_have_a_layout() -> None:
    """What the closed form gives is what counting up gives."""
    for tp, cp, ep, etp in ((1, 1, 8, 1), (2, 3, 4, 3), (6, 1, 4, 2), (4, 2, 2, 1), (3, 1, 1, 3)):
        learner = RunConfig().learner.model_copy(update={"tp": tp, "cp": cp, "ep": ep, "etp": etp})
        assert learner.dims.dp == next(d for d in range(1, ep * etp + 1) if tp * cp * d % (ep * etp) == 0)
    outcome("tiny_cpu", ["learner.ep=2000000000", "learner.etp=7"])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("run.name=a b", r"run.name='a b': must be text that matches ^[A-Za-z0-9][A-Za-z0-9._-]*$"),
        ("seed=" + "1" * 5000, f"seed='{'1' * 56}...: must be a valid integer of 64 bits"),
        ("data.train=a.jsonl", "data.train='a.jsonl': data.type=arithmetic makes its own problems; add data=gsm8k to "
         "read files"),
        ("gspo", "'gspo': not an override (did you mean 'algorithm=gspo'?)"),
        ("gsm8k_tiny", "'gsm8k_tiny': not an override (did you mean '--config gsm8k_tiny'?)"),
        ("roles.critik=1", "roles.critik=1: no such key (did you mean 'roles.critic'?); keys: critic, reference, "
         "layouts"),
        ("reward.parts.A=1", "reward.parts.A='A': must be text that matches ^[a-z][a-z0-9_]*$"),
    ],
)  # fmt: skip
def test_what_is_said(override: str, line: str) -> None:
    assert outcome("tiny_cpu", [override]) == line


def test_what_is_no_path_is_said_in_words() -> None:
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"model": {"path": [1]}})
    assert explain_errors(caught.value.errors()) == ["model.path=[1]: must be a path, as text"]


@pytest.mark.parametrize("stem", ["my run", "_test", "-x", "...", "日本", "a" * 250, "ok-1.2", "run (1)", " "])
def test_a_run_named_after_a_file_can_be_configured_by_its_own_configuration(tmp_path: Path, stem: str) -> None:
    config = load_config("tiny_cpu", [f"run.dir={tmp_path}"])
    named = choose(config, stem, resume=False)
    folder = tmp_path / str(named.run.name)
    folder.mkdir()
    save_resolved(named, folder / "config.yaml")
    again = load_config(str(folder / "config.yaml"), [])
    assert again == named
    assert choose(again, "config", resume=True) == named
    assert choose(config, stem, resume=True) == named  # by the file's name, as the run began
    assert choose(config, stem, resume=False).run.name == f"{named.run.name}-2"
    if stem == "ok-1.2":
        assert named.run.name == stem


def test_a_resume_from_another_folder_says_where_run_dir_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ([], ["run.name=x"]):
        with pytest.raises(ConfigError, match=re.escape(f"run.dir=r is relative to the current folder, {tmp_path}: ")):
            choose(load_config("tiny_cpu", ["run.dir=r", *given]), "tiny_cpu", resume=True)
        with pytest.raises(ConfigError, match=r"; begin a new run without --resume$"):
            choose(load_config("tiny_cpu", [f"run.dir={tmp_path}/r", *given]), "tiny_cpu", resume=True)


@pytest.mark.parametrize("name", ["x", "x.yaml"])
def test_a_runs_folder_given_as_a_configuration_is_told_its_file(tmp_path: Path, name: str) -> None:
    (folder := tmp_path / name).mkdir()
    save_resolved(RunConfig(), folder / "config.yaml")
    with pytest.raises(ConfigError, match=re.escape(f"{folder}: a folder, and no file; give {folder}/config.yaml")):
        load_config(str(folder), [])
    assert load_config(str(folder / "config.yaml"), []) == RunConfig()


def test_a_new_run_has_the_number_that_a_resume_without_a_name_takes(tmp_path: Path) -> None:
    config = load_config("tiny_cpu", [f"run.dir={tmp_path}"])
    for name in ("tiny_cpu", "tiny_cpu-3"):  # the second was removed
        (tmp_path / name).mkdir()
    new = choose(config, "tiny_cpu", resume=False)
    assert new.run.name == "tiny_cpu-4"
    (tmp_path / "tiny_cpu-4").mkdir()
    assert choose(config, "tiny_cpu", resume=True) == new


def test_a_folder_that_has_the_last_number_of_a_name_is_told_in_words(tmp_path: Path) -> None:
    config = load_config("tiny_cpu", [f"run.dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"has tiny_cpu-9999, the last of its numbers; set run\.name, or another"):
        choose(config, "tiny_cpu", resume=False, taken=lambda _: True)
