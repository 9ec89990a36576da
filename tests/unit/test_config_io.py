"""Composition, overrides and errors of the configuration; whatever is given quickly ends in one or the other."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from launcher.runs.folder import choose
from rl_megatron.config import yaml_text
from rl_megatron.config.errors import explain_errors
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.run import RunConfig, RunSection
from rl_megatron.config.sections.data import ArithmeticRunData, FileRunData
from rl_megatron.engines.http import Server
from rl_megatron.errors import ConfigError, EngineError, RewardError, RLMegatronError
from rl_megatron.http.client import TryAgain
from rl_megatron.http.token_file import TokenFile
from rl_megatron.models.json_files import tensor_names
from rl_megatron.observability import timeline
from rl_megatron.observability.files import read_jsonl
from rl_megatron.observability.timeline import read_trace
from rl_megatron.rewards.tests import _tests
from rl_megatron.section import Section
from rl_megatron.types import Prompt
from tests.rows import config_of
from tests.unit.launcher.commands import status_of

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A conf/ folder: ``run`` starts from ``base`` and two groups."""
    files = {
        "base.yaml": "seed: 7\nlearner: {ep: 2, optimizer: {beta1: 0.5, beta2: 0.6}}\n",
        "run.yaml": "defaults:\n  - base\n  - algorithm: narrow\n  - data: sums\nlearner: {optimizer: {beta1: 0.7}}\n",
        "algorithm/narrow.yaml": "clip_low: 3e-4\nratio_level: sequence\naggregation: seq_mean_token_mean\n",
        "algorithm/wide.yaml": "clip_high: 9\n",
        "data/sums.yaml": "type: arithmetic\ndigits: 1\n",
        "data/mine.yaml": "type: files\ntrain: a.jsonl\neval: b.jsonl\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def problems(name: str, overrides: list[str], root: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(name, overrides, root)
    return str(caught.value).splitlines()


def test_defaults_compose_under_the_file_that_names_them(conf: Path) -> None:
    config = load_config("run", [], conf)
    assert config.seed == 7
    assert (config.learner.ep, config.learner.optimizer.beta1, config.learner.optimizer.beta2) == (2, 0.7, 0.6)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (3e-4, 0.2)
    assert config.data == ArithmeticRunData(digits=1)
    config = load_config("run", ["algorithm.clip_low=0.1", "algorithm=wide", "data=mine"], conf)
    assert config.algorithm.ratio_level == "token"
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.1, 9.0)
    assert config.data == FileRunData(type="files", train=Path("a.jsonl"), eval=Path("b.jsonl"))


def test_a_choice_sets_keys_of_other_sections_under_single_values_in_any_order(conf: Path, tmp_path: Path) -> None:
    """Over what files say, but under what a file says that chose it."""
    (conf / "algorithm" / "whole.yaml").write_text("clip_high: 9\nbeside: {seed: 5, data: {digits: 3}}\n")
    for order in (["algorithm=whole", "data=sums", "seed=6"], ["seed=6", "data=sums", "algorithm=whole"]):
        config = load_config("run", order, conf)
        assert (config.algorithm.clip_high, config.seed, config.data) == (9, 6, ArithmeticRunData(digits=3))
    assert load_config("run", ["algorithm=whole"], conf).seed == 5
    own = tmp_path / "own.yaml"
    own.write_text("defaults: [run, {algorithm: whole}]\ndata: {digits: 2}\n")
    config = load_config(str(own), [], conf)
    assert (config.seed, config.data) == (5, ArithmeticRunData(digits=2))
    for rows in itertools.permutations(["run", "{algorithm: whole}", "{data: sums}"]):
        own.write_text(f"defaults: [{', '.join(rows)}]\n")
        config = load_config(str(own), [], conf)
        assert (config.seed, config.data) == (5, ArithmeticRunData(digits=3))


@pytest.mark.parametrize("spelling", ["above", "command line"])
def test_what_a_choice_set_in_a_section_stays_when_that_is_replaced(spelling: str, conf: Path, tmp_path: Path) -> None:
    """Wherever both are chosen, with the value that it has by then; a file that has the key itself replaces it."""
    (conf / "algorithm" / "whole.yaml").write_text("beside: {data: {curriculum: {retire_above: 0.9}}}\n")
    (conf / "data" / "plain.yaml").write_text("type: arithmetic\n")
    (conf / "data" / "named.yaml").write_text("type: arithmetic\ncurriculum: {retire_above: 0.7}\n")
    own, above = tmp_path / "own.yaml", tmp_path / "above.yaml"

    def retires(choice: str, then: str = "") -> tuple[float | None, int, int]:
        own.write_text(f"defaults: [run, {{algorithm: whole}}]\ndata: {{num_eval: 7, digits: 3{then}}}\n")
        above.write_text(f"defaults: [own, {{data: {choice}}}]\n")
        if spelling == "above":
            data = load_config(str(above), [], conf).data
        else:
            data = load_config(str(own), [f"data={choice}"], conf).data
        assert isinstance(data, ArithmeticRunData)
        return data.curriculum.retire_above, data.digits, data.num_eval

    usual = ArithmeticRunData()
    assert retires("plain") == (0.9, usual.digits, usual.num_eval)
    assert retires("plain", ", curriculum: {retire_above: 0.5, min_seen: 4}") == (0.5, usual.digits, usual.num_eval)
    assert retires("named") == (0.7, usual.digits, usual.num_eval)


@pytest.mark.parametrize("beside", ["{algorithm: {clip_low: 1}}", "{sed: 5}", "[seed]", "5"])
def test_a_choice_sets_keys_of_known_other_sections_alone(conf: Path, beside: str) -> None:
    (conf / "algorithm" / "whole.yaml").write_text(f"beside: {beside}\n")
    (line,) = problems("run", ["algorithm=whole"], conf)
    assert "whole.yaml: beside: " in line
    assert "is not the name of another section" in line


def test_a_file_of_ones_own_starts_from_a_known_config_and_its_groups(conf: Path, tmp_path: Path) -> None:
    own = tmp_path / "elsewhere" / "own.yaml"
    own.parent.mkdir()
    own.write_text("defaults: [run, {algorithm: wide}]\nseed: 8\n")
    config = load_config(str(own), [], conf)
    assert (config.seed, config.algorithm.clip_high, config.data) == (8, 9.0, ArithmeticRunData(digits=1))


@pytest.mark.parametrize(
    ("override", "section", "key", "expected"),
    [
        ("algorithm.clip_low=3e-4", "algorithm", "clip_low", 3e-4),
        ("train.steps=1e1", "train", "steps", 10),
        ("learner.dp=null", "learner", "dp", None),
        ("learner.dp=", "learner", "dp", None),
        ("algorithm.leave_one_out=true", "algorithm", "leave_one_out", True),
        ("log.wandb=off", "log", "sinks", ("tensorboard",)),
        ("log.wandb=offline", "log", "sinks", ("tensorboard", "wandb:offline")),
        ("log.tensorboard=false", "log", "sinks", ()),
        ("train.lr_decay=none", "train", "lr_decay", "none"),
        ("reward.on_error=-1", "reward", "on_error", -1.0),
        ("reward.on_error=drop", "reward", "on_error", "drop"),
        ("run.name='1'", "run", "name", "1"),
        ("run.name=2024-01-01", "run", "name", "2024-01-01"),
        ("data.prompt_template={prompt} #= a: [b", "data", "prompt_template", "{prompt} #= a: [b"),
        (r'data.prompt_template="{prompt}\n"', "data", "prompt_template", "{prompt}\n"),
    ],
)
def test_override_values(conf: Path, override: str, section: str, key: str, expected: object) -> None:
    value = getattr(getattr(load_config("run", ["data=mine", override], conf), section), key)
    assert value == expected
    assert type(value) is type(expected)


def test_yaml_files_read_off_as_text_and_exponents_as_numbers(conf: Path) -> None:
    text = "log: {wandb: off, tensorboard: false}\ntrain: {learning_rate: 1e-3}\nrun: {name: no}\n"
    (conf / "run.yaml").write_text(text)
    config = load_config("run", [], conf)
    assert (config.log.sinks, config.train.learning_rate, config.run.name) == ((), 1e-3, "no")


@given(written=st.from_regex(r"\A[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,2})?\Z"))
@example(written="00123")
@example(written="12.10")
@example(written="1e-5")
@example(written="+5")
@settings(max_examples=20)
def test_a_number_for_a_key_of_text_is_kept_as_written(tmp_path_factory: pytest.TempPathFactory, written: str) -> None:
    path = tmp_path_factory.mktemp("written") / "run.yaml"
    slurm = f"slurm: {{account: {written}, environment: {{X: {written}}}}}"
    path.write_text(f"{slurm}\neval: {{success_reward: {written}}}\n")
    keys = ["slurm.account", "slurm.environment.X", "eval.success_reward"]
    for config in (load_config(str(path), []), load_config("tiny_cpu", [f"{key}={written}" for key in keys])):
        assert (config.slurm.account, config.slurm.environment["X"]) == (written, written)
        assert config.eval.success_reward == float(written)
    tree = yaml_text.read(path)
    path.write_text(yaml_text.write(tree))
    assert yaml_text.read(path) == tree


def test_a_variable_is_refused_by_its_name_and_may_be_empty() -> None:
    (said,) = problems("tiny_cpu", ["slurm.environment.EMPTY="])
    assert said.startswith("slurm.environment.EMPTY=None: must be a valid string; on the command line, quotes inside")
    assert load_config("tiny_cpu", ["slurm.environment.EMPTY=''"]).slurm.environment == {"EMPTY": ""}


def test_every_problem_is_named_at_once(conf: Path) -> None:
    lines = problems(
        "run",
        [
            *("algorithm=narow", "algorithmm=narrow", "learner=cuda", "learner.tpp=4", "learner.ep=0", "steps=10"),
            *("samples=3", "oops", "job=distill", "train.lr_decay=cosin", "reward.on_error=warn", "data.digits=9"),
            *("data.digit=1", "rollout.stop=3", "run.name=1", "seed.x=1"),
        ],
        conf,
    )
    expected = [  # start of the line, and words that must be in it
        (f"algorithm=narow: {conf}/algorithm/narow.yaml: no such file (did you mean 'narrow'?)", "narrow, wide"),
        ("algorithmm='narrow': no such key (did you mean 'algorithm'?)", "near: algorithm"),
        ("learner='cuda': a section, not one value", " keys are in docs/configuration.md"),
        ("learner.tpp=4: no such key (did you mean 'learner.tp'?)", "near: tp, pp, vpp"),
        ("learner.ep=0: must be greater than or equal to 1", ""),
        ("steps=10: no such key (did you mean 'reward.steps' or 'warm_start.steps' or 'train.steps' or", ""),
        ("samples=3: no such key (did you mean 'eval.sets.<name>.samples'?)", ""),
        ("'oops': not an override; write section.key=value", "algorithm, data"),
        ("job='distill': must be 'rl', 'sft', 'dpo' or 'reward_model'; algorithms, distillation too,", "algorithm=gkd"),
        ("train.lr_decay='cosin': must be 'none', 'linear' or 'cosine' (did you mean 'cosine'?)", ""),
        ("reward.on_error='warn': must be 'fail' or 'drop' or a valid number", ""),
        ("data.digits=9: must be less than or equal to 6", ""),
        ("data.digit=1: no such key (did you mean 'data.digits'?)", "num_eval"),
        ("rollout.stop=3: must be a list, for example [0, 1]", ""),
        ("run.name=1: must be a valid string", "quotes"),
        ("seed.x=1: seed=7 is one value, without keys", ""),
    ]
    for start, word in expected:
        assert [line for line in lines if line.startswith(start) and word in line], (start, lines)
    assert len(lines) == len(expected)


def test_keys_of_a_union_are_told_without_its_tags(conf: Path) -> None:
    assert problems("run", ["data.type=files", "data.digits=2"], conf) == [
        "data.train: required, but not given; add data.train=<value>",
        "data.eval: required, but not given; add data.eval=<value>",
        "data.digits=2: data.type=files reads problems from files; add data=arithmetic to generate sums",
    ]
    expected = ["data.type='file': no such choice (did you mean 'files'?); one of: arithmetic, files, hub, mixture"]
    assert problems("run", ["data.type=file"], conf) == expected
    assert problems("base", ["data.digits=2"], conf) == [
        "data.type: required, but not given; one of: arithmetic, files, hub, mixture"
    ]


def test_a_missing_file_does_not_bring_complaints_about_what_it_would_have_held(conf: Path) -> None:
    assert problems("rum", ["data.digits=2", "learner.ep=0"], conf) == [
        f"{conf}/rum.yaml: no such file (did you mean 'run'?); one of: base, run",
        "learner.ep=0: must be greater than or equal to 1",
    ]
    expected = [f"data=mime: {conf}/data/mime.yaml: no such file (did you mean 'mine'?); one of: mine, sums"]
    assert problems("run", ["data=mime", "data.train=x"], conf) == expected


def test_rules_between_keys_stay_readable() -> None:
    first, second = problems("tiny_cpu", ["learner.ep=2", "learner.tp=3", "learner.dp=1", "train.minibatches=999999"])
    assert first.startswith("learner: ep*etp = 2*1 = 2 does not divide tp*cp*dp = 3*1*1 = 3")
    assert second.startswith("train.minibatches=999999 is more than")
    turns = ["rollout=vllm", "rollout.server.colocated=true", "train.max_staleness=2", "slurm.engines.nodes=1"]
    assert [line.split(" and ", 1)[1] for line in problems("tiny_cpu", turns)] == [
        "train.max_staleness=2: colocated servers cannot sample while the learner trains; "
        "set one of them to its default",
        "slurm.engines.nodes=1: those nodes run only servers; leave one of them out",
    ]
    (found,) = problems("tiny_cpu", ["rollout=vllm", "algorithm=remax", "train.max_staleness=2"])
    assert "max_staleness=2 with algorithm.advantage_mean=greedy and rollout.engine=vllm: a push between" in found
    alone = ["learner.offload.while_sampling=gradients", "learner.device=cuda"]
    fix = "set rollout.server.colocated=true with rollout=vllm or sglang, or leave it out"
    turns = f"servers take turns with the learner; {fix}"
    for engine in ("local", "vllm"):
        (line,) = problems("tiny_cpu", [*alone, f"rollout={engine}"])
        assert line.startswith("learner.offload.while_sampling=gradients with ")
        assert line.endswith(f"rollout.server.colocated=false: only colocated {turns}")
    on_cpus = ["learner.offload.while_sampling=optimizer", "rollout=vllm", "rollout.server.colocated=true"]
    (line,) = problems("tiny_cpu", on_cpus)
    assert "with learner.device=cpu: there is no GPU memory to free; leave it out" in line


def test_a_section_of_one_kind_of_data_is_named_whole() -> None:
    (line,) = problems("tiny_cpu", ["data.curriculum=3"])
    assert line == "data.curriculum=3: a section, not one value; set data.curriculum.<key>=<value>"


def test_layers_without_an_attention_kernel_are_refused() -> None:
    given = ["learner.cp=2", "learner.ep=1", "learner.device=cuda"]
    (problem,) = problems("tiny_cpu", [*given, "learner.layers=transformer_engine"])
    assert "attention kernels for half precision only; set learner.dtype=bfloat16" in problem
    load_config("tiny_cpu", [*given, "learner.layers=transformer_engine", "learner.dtype=bfloat16"])
    load_config("tiny_cpu", given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2\n", "key 'seed' is given twice"),
        ("seed: [1\n", "line 2"),
        ("- seed\n", "holds ['seed']; a config file is a mapping"),
        ("defaults: [run]\n", "defaults lead in a circle: run -> run"),
        ("defaults: [3]\n", "defaults: 3 is neither a config's name nor {group: name}"),
        ("defaults: {algorithm: wide, data: sums}\n", "is neither a config's name nor {group: name}"),
        ("defaults: [bsae]\n", "bsae.yaml: no such file (did you mean 'base'?)"),
        ("algorithm: wide\n", "algorithm='wide': a section, not one value"),
        ("1: 2\n", "1=2: no such key"),
    ],
)
def test_a_bad_file_is_named(conf: Path, text: str, message: str) -> None:
    (conf / "run.yaml").write_text(text)
    (line,) = [line for line in problems("run", [], conf) if message in line]
    assert line


def test_bytes_that_are_not_utf8_are_named(conf: Path) -> None:
    (conf / "run.yaml").write_bytes(b"seed: \xff\n")
    (line,) = problems("run", [], conf)
    assert line.startswith(f"{conf}/run.yaml: cannot be read: 'utf-8' codec")


def test_shipped_algorithms_are_the_rows_of_their_papers() -> None:
    gspo, grpo, cispo = (load_config("tiny_cpu", [f"algorithm={name}"]).algorithm for name in ("gspo", "grpo", "cispo"))
    assert (gspo.objective, gspo.ratio_level, gspo.clip_low, gspo.clip_high) == ("clip", "sequence", 3e-4, 4e-4)
    assert (grpo.objective, grpo.ratio_level, grpo.clip_low, grpo.clip_high) == ("clip", "token", 0.2, 0.2)
    assert (cispo.objective, cispo.ratio_level, cispo.cap_low, cispo.cap_high) == ("cispo", "token", 0.0, 5.0)
    assert (gspo.aggregation, grpo.aggregation) == ("seq_mean_token_mean", "seq_mean_token_mean")
    assert cispo.aggregation == "token_mean"


def test_shipped_yaml_holds_only_what_differs_from_the_schema() -> None:
    assert load_config("tiny_cpu", ["data=arithmetic"]).data == ArithmeticRunData()
    for path in sorted((REPO / "conf" / "algorithm").glob("*.yaml")):
        written = yaml_text.read(path)
        others = written.pop("beside", {})
        chosen, defaults = config_of(path.stem), RunConfig()
        for name, keys in {**others, "algorithm": written}.items():
            section, unset = getattr(chosen, name), getattr(defaults, name)
            assert [key for key in keys if getattr(section, key) == getattr(unset, key)] == []


THREE_KEYS = {
    "name": st.one_of(
        st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]*\Z"), st.sampled_from(["off", "3e-4", "1_0", "null", "0x1", "010"])
    ),
    "template": st.text(st.characters(exclude_categories=["Cs"], exclude_characters=["\0"])),
    "score": st.floats(allow_nan=False, allow_infinity=False),
}


@given(**THREE_KEYS)
@example(name="off", template="\x85", score=0.0)
@example(name="off", template="\x85 \u2028", score=0.0)
def test_what_is_written_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, template: str, score: float
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    tree = {"run": {"name": name}, "data": {"prompt_template": template}, "eval": {"success_reward": score}}
    path.write_text(yaml_text.write(tree))
    assert yaml_text.read(path) == tree


@given(**THREE_KEYS)
@example(name="off", template="\x85 \u2028", score=0.0)
@settings(max_examples=15)  # of all keys: 0.1 s each
def test_a_resolved_config_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, name: str, template: str, score: float
) -> None:
    data = FileRunData(type="files", train=Path("a b.jsonl"), eval=Path("c#.parquet"), prompt_template=template)
    update = {"eval": RunConfig().eval.model_copy(update={"success_reward": score})}
    config = RunConfig(seed=3, run=RunSection(name=name), data=data).model_copy(update=update)
    path = tmp_path_factory.mktemp("resolved") / "config.yaml"
    save_resolved(config, path)
    assert load_config(str(path), []) == config
    assert [file.name for file in path.parent.iterdir()] == ["config.yaml"]


# Any configuration quickly gives a RunConfig, or a ConfigError of bounded length in good English.
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
        for below in [kind for kind in kinds if issubclass(kind, Section)]:
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
        if ".part." not in key and kinds & {int, float} and bool not in kinds and "Mapping" not in str(field):
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
    for keys in ([], ["run.name=x"]):
        with pytest.raises(ConfigError, match=re.escape(f"run.dir=r is relative to the current folder, {tmp_path}: ")):
            choose(load_config("tiny_cpu", ["run.dir=r", *keys]), "tiny_cpu", resume=True)
        with pytest.raises(ConfigError, match=r"; begin a new run without --resume$"):
            choose(load_config("tiny_cpu", [f"run.dir={tmp_path}/r", *keys]), "tiny_cpu", resume=True)


@pytest.mark.parametrize("name", ["x", "x.yaml"])
def test_a_runs_folder_given_as_a_configuration_is_told_its_file(tmp_path: Path, name: str) -> None:
    (folder := tmp_path / name).mkdir()
    save_resolved(RunConfig(), folder / "config.yaml")
    with pytest.raises(
        ConfigError, match=re.escape(f"{folder}: no such file; did you mean --config {folder}/config.yaml?")
    ):
        load_config(str(folder), [])
    assert load_config(str(folder / "config.yaml"), []) == RunConfig()


@pytest.mark.parametrize("given", ["mine", "mine.yml"])
def test_a_file_of_the_users_is_offered_where_its_suffix_is_missing_or_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("train: {steps: 3}\n")
    with pytest.raises(
        ConfigError, match=re.escape(f"--config {given}: no such file; did you mean --config mine.yaml?")
    ):
        load_config(given, [])


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
    with pytest.raises(ConfigError, match=r"has tiny_cpu-9999, the highest number; set run\.name, or another"):
        choose(config, "tiny_cpu", resume=False, taken=lambda _: True)


# JSON and YAML that are nested too deeply are refused like any torn file or answer; json has RecursionError for them.
# tests/unit/weights, data and rewards do the same for files of models and of problems, and for servers of rewards.
DEEP = "[" * 100_000
READERS: dict[str, Callable[[Path], object]] = {
    "metrics.jsonl": lambda run: read_jsonl(run / "metrics.jsonl"),
    "trace.json": lambda run: list(read_trace(run)),
    "profile/step_000001/ranks.json": lambda run: list(timeline.read_kernels(run)),
    "model.safetensors": tensor_names,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "train"}\n')
    return tmp_path


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_nested_too_deeply_is_named(name: str, run: Path) -> None:
    file = run / name
    file.parent.mkdir(parents=True, exist_ok=True)
    header = len(DEEP).to_bytes(8, "little") if name.endswith(".safetensors") else b""
    file.write_bytes(header + DEEP.encode() + b"\n")
    with pytest.raises(RLMegatronError) as told:
        READERS[name](run)
    assert str(file.parent) in str(told.value)
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize(
    ("command", "name", "content"),
    [
        ("convert --inspect", "checkpoints/step_000001/trainer.json", DEEP),
        ("convert --inspect", "config.json", DEEP),
        ("convert --inspect", "config.json", "[7]"),
        ("report", "config.yaml", DEEP),
        ("report", "config.yaml", "a: !!int b"),
        ("report", "config.yaml", "a: !!bool b"),
    ],
)
def test_a_command_says_which_file_it_is(
    command: str, name: str, content: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text(content)
    assert status_of(*command.split(), str(run)) == 1
    said = capsys.readouterr().err
    assert str(run / name) in said
    assert len(said) < 2000


def test_an_answer_that_is_nested_too_deeply_is_the_servers() -> None:
    server = Server("http://127.0.0.1:9", token=None, timeout_seconds=1.0)
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/models: the answer is not JSON"):
        server._json("/models", DEEP)


@pytest.mark.parametrize("tests", [DEEP, {"function": "f", "tests": [{"input": DEEP, "output": "1"}]}])
def test_tests_that_are_nested_too_deeply_are_the_problems(tests: object) -> None:
    with pytest.raises(RewardError, match="prompt 'p': its field 'tests'") as told:
        _tests(Prompt(id="p", text="", token_ids=(1,), answer="", meta={"tests": tests}), "tests")
    assert len(str(told.value)) < 1000


KEY = "rollout.server.token_file"


def test_a_token_is_the_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t0ken\n")
    path.chmod(0o644)
    token = TokenFile(file=path, key=KEY)
    assert token.now() == "t0ken"
    path.write_text("other")
    assert token.now() == "other"


@pytest.mark.parametrize("held", [None, b"", b"\n", b"two\nlines", b"two words", "t\u00f6ken".encode(), b"\xff"])
def test_a_file_without_a_token_is_refused_by_key_and_read_again_in_a_run(held: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t0ken")
    token = TokenFile(file=path, key=KEY)
    path.unlink()
    if held is not None:
        path.write_bytes(held)
    with pytest.raises(ConfigError, match=f"{KEY}={path}: "):
        TokenFile(file=path, key=KEY)
    with pytest.raises(TryAgain, match=f"{KEY}={path}: "):
        token.now()


def test_a_private_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("t0ken")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others can read it; chmod 600 it"):
        TokenFile(file=path, key=KEY, private=True)


@pytest.mark.parametrize("refusal", [401, 403])
@pytest.mark.parametrize(
    ("written", "takes", "asked", "status"),
    [
        ("old", "old", ["old"], 200),
        ("new", "new", ["old", "new"], 200),
        ("old", "new", ["old"], None),
        ("new", "newest", ["old", "new"], None),
    ],
    ids=["taken", "rotated", "not yet rotated", "rotated in vain"],
)
def test_a_request_whose_token_is_refused_is_sent_again_once_with_another(
    tmp_path: Path, refusal: int, written: str, takes: str, asked: list[str], status: int | None
) -> None:
    path, seen = tmp_path / "token", list[str]()
    path.write_text("old")
    token = TokenFile(file=path, key=KEY)

    async def ask(given: str) -> tuple[int, bytes]:
        seen.append(given)
        path.write_text(written)  # who rotates it does so while the request is under way
        return (200 if given == takes else refusal), b"expired"

    answered = asyncio.run(token.answer(ask))
    assert seen == asked
    assert answered[0] == (status or refusal)
    said = f"; it refuses the token of {KEY}={path}: write one that it takes into that file"
    assert token.refused(answered[0]) == ("" if status else said)
