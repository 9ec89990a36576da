"""Composition, overrides and errors of the configuration, on the real schema and on folders made for the test."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_megatron.config import yaml_text
from rl_megatron.config.io import load_config, save_resolved
from rl_megatron.config.run import RunConfig, RunSection
from rl_megatron.config.sections.data import ArithmeticRunData, FileRunData
from rl_megatron.errors import ConfigError
from tests.rows import config_of

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


def test_a_group_is_swapped_whole_and_before_single_values(conf: Path) -> None:
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
        ("log.wandb=off", "log", "wandb", "off"),
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
    (conf / "run.yaml").write_text("log: {wandb: off}\ntrain: {learning_rate: 1e-3}\nrun: {name: no}\n")
    config = load_config("run", [], conf)
    assert (config.log.wandb, config.train.learning_rate, config.run.name) == ("off", 1e-3, "no")


@given(written=st.from_regex(r"\A[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,2})?\Z"))
@example(written="00123")
@example(written="12.10")
@example(written="1e-5")
@example(written="+5")
@settings(max_examples=20)
def test_a_number_for_a_key_that_is_text_is_kept_as_it_is_written(
    tmp_path_factory: pytest.TempPathFactory, written: str
) -> None:
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
            "algorithm=narow",
            "algorithmm=narrow",
            "learner=cuda",
            "learner.tpp=4",
            "learner.ep=0",
            "steps=10",
            "samples=3",
            "oops",
            "job=distill",
            "train.lr_decay=cosin",
            "reward.on_error=warn",
            "data.digits=9",
            "data.digit=1",
            "run.name=1",
            "seed.x=1",
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
    assert problems("run", ["data.type=file"], conf) == [
        "data.type='file': no such choice (did you mean 'files'?); one of: arithmetic, files, hub, mixture"
    ]
    assert problems("base", ["data.digits=2"], conf) == [
        "data.type: required, but not given; one of: arithmetic, files, hub, mixture"
    ]


def test_a_missing_file_does_not_bring_complaints_about_what_it_would_have_held(conf: Path) -> None:
    assert problems("rum", ["data.digits=2", "learner.ep=0"], conf) == [
        f"{conf}/rum.yaml: no such file (did you mean 'run'?); one of: base, run",
        "learner.ep=0: must be greater than or equal to 1",
    ]
    assert problems("run", ["data=mime", "data.train=x"], conf) == [
        f"data=mime: {conf}/data/mime.yaml: no such file (did you mean 'mine'?); one of: mine, sums"
    ]


def test_rules_between_keys_stay_readable() -> None:
    first, second = problems("tiny_cpu", ["learner.ep=2", "learner.tp=3", "learner.dp=1", "train.minibatches=999999"])
    assert first.startswith("learner: ep*etp = 2*1 = 2 does not divide tp*cp*dp = 3*1*1 = 3")
    assert second.startswith("train.minibatches=999999 is more than")
    turns = ["rollout=vllm", "rollout.server.colocated=true", "train.max_staleness=2", "slurm.engines.nodes=1"]
    assert [line.split(", but ")[1] for line in problems("tiny_cpu", turns)] == [
        "with train.max_staleness=2 servers sample while the learner trains; set one of them to its default",
        "slurm.engines.nodes=1 are for servers alone; leave one of them out",
    ]
    ahead = ["rollout=vllm", "algorithm=remax", "train.max_staleness=2"]
    (found,) = problems("tiny_cpu", ahead)
    assert "max_staleness=2 with algorithm.advantage_mean=greedy: weights may be pushed between" in found
    alone = ["learner.offload.while_sampling=gradients", "learner.device=cuda"]
    turns = "set rollout.server.colocated=true with rollout=vllm or sglang, or leave it out"
    for engine in ("local", "vllm"):
        (line,) = problems("tiny_cpu", [*alone, f"rollout={engine}"])
        assert line == f"learner.offload.while_sampling=gradients, but no servers take turns with the learner; {turns}"
    on_cpus = ["learner.offload.while_sampling=optimizer", "rollout=vllm", "rollout.server.colocated=true"]
    (line,) = problems("tiny_cpu", on_cpus)
    assert "with learner.device=cpu would have no effect: there is no GPU to leave; leave it out" in line


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
    plain = load_config("tiny_cpu", ["data=arithmetic"])
    assert plain.data == ArithmeticRunData()
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
    config = RunConfig(seed=3, run=RunSection(name=name), data=data).model_copy(
        update={"eval": RunConfig().eval.model_copy(update={"success_reward": score})}
    )
    path = tmp_path_factory.mktemp("resolved") / "config.yaml"
    save_resolved(config, path)
    assert load_config(str(path), []) == config
    assert [file.name for file in path.parent.iterdir()] == ["config.yaml"]
