"""How weights reach engines (``weights.transport``), and which teachers fit an algorithm and its data."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.preflight.model_files import check
from launcher.preflight.subject import PreflightContext
from launcher.runs.folder import mirror_path
from rl_megatron.config.io import load_config
from rl_megatron.config.resume import fixed
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.weights import PROCESS_GROUP
from rl_megatron.errors import ConfigError
from rl_megatron.models.tiny import TinySizes, make_tiny_model
from rl_megatron.placement.ranks import extra_role_nodes, ranks_by_role
from rl_megatron.weights.checks.libraries import DEFAULTS, FIELDS, HANDLE, OF_A_GROUP
from tests.unit.launcher.test_memory import DEEPSEEK

REPO = Path(__file__).resolve().parents[2]
WRITTEN = {"dpo_tiny", "reward_tiny", "sft_tiny"}  # which have no servers
RECIPES = sorted(path.stem for path in (REPO / "conf").glob("*.yaml") if path.stem not in WRITTEN)
SERVED = ["rollout=vllm"]


def problems(overrides: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config("tiny_cpu", overrides)
    return str(caught.value).splitlines()


def test_everything_that_can_be_compared_is_needed_by_members_or_through_memory() -> None:
    assert {*OF_A_GROUP, *HANDLE} == set(FIELDS)
    assert {"nccl", "torch", *DEFAULTS} == set(OF_A_GROUP)


MEMBERS = {"deepseek_v3_async", "kimi_k2_async", "qwen3_235b_a22b_async", "qwen3_30b_a3b_async"}
BESIDE = {"deepseek_v3", "kimi_k2", "qwen3_235b_a22b", "qwen3_30b_a3b", "qwen3_30b_a3b_80gb"}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_direct_is_the_kind_that_fits_a_recipe(recipe: str, launcher: str) -> None:
    config = load_config(recipe, ["model.path=/given", f"run.launcher={launcher}"])
    kind = config.transport
    assert (config.weights.transport == "direct") == (recipe in MEMBERS | BESIDE)
    assert kind.name == ("direct" if recipe in MEMBERS | BESIDE else "process_group")  # of engines in its ranks
    assert kind.last_hop == (recipe in BESIDE)
    assert kind.members == (recipe in MEMBERS or (recipe in BESIDE and launcher == "local"))


ON_GPUS, DIRECT = ["rollout=vllm", "learner.device=cuda"], "weights.transport=direct"


@pytest.mark.parametrize(
    ("keys", "members", "last_hop"),
    [
        ([], True, False),  # on further GPUs of this machine
        (["rollout.server.memory_fraction=0.3"], True, True),  # on those, if there are enough
        (["rollout.server.memory_fraction=0.3", "rollout.server.tp=2"], True, True),
        (["rollout.server.colocated=true", "rollout.server.memory_fraction=0.3"], True, True),
        (["run.launcher=slurm", "rollout.server.tp=2"], False, True),
        (["run.launcher=slurm"], False, True),
        (["run.launcher=slurm", "slurm.engines.nodes=1"], True, False),
        (["rollout.server.addresses=http://a:1", "run.launcher=slurm"], True, False),
        (["learner.device=cpu"], False, True),
        (["learner.device=cpu", "run.launcher=slurm", "rollout.server.tp=2"], False, True),
        (["learner.device=cpu", "rollout.server.colocated=true", "rollout.server.tp=2"], False, True),
    ],
)
def test_direct_depends_on_the_gpus_that_servers_have(keys: list[str], members: bool, last_hop: bool) -> None:
    kind = load_config("tiny_cpu", [*ON_GPUS, DIRECT, *keys]).transport
    assert (kind.name, kind.members, kind.last_hop) == ("direct", members, last_hop)


def test_engines_in_the_learners_processes_get_weights_over_its_group() -> None:
    config = load_config("tiny_cpu", [*ON_GPUS, DIRECT, "learner.device=cpu", "rollout=local"])
    assert config.transport == PROCESS_GROUP


def test_servers_on_other_nodes_have_their_file_in_the_runs_folder_or_where_the_key_says(tmp_path: Path) -> None:
    given = ["model.path=/given", "run.launcher=slurm"]
    assert mirror_path(load_config(DEEPSEEK, given), tmp_path).parent.parent == tmp_path
    elsewhere = load_config(DEEPSEEK, [*given, "weights.folder=/fast"])
    assert mirror_path(elsewhere, tmp_path).parent.parent == Path("/fast")


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("rollout.server.transport=file", "weights.transport=file"),
        ("rollout.server.weights_dir=/fast", "weights.folder=/fast"),
    ],
)
def test_keys_that_moved_are_read_by_their_new_names(key: str, new: str) -> None:
    assert load_config("tiny_cpu", [*SERVED, key]) == load_config("tiny_cpu", [*SERVED, new])


def test_disk_is_refused_with_its_new_name() -> None:
    assert problems(["weights.transport=disk"]) == ["weights.transport='disk': must be 'file', the new name of 'disk'"]


@pytest.mark.parametrize("value", ["my_package.moves:Copies", "a:b"])
def test_own_code_is_refused_with_what_there_is(value: str) -> None:
    expected = [f"weights.transport='{value}': must be 'auto', 'file' or 'direct'; no code of your own moves weights"]
    assert problems([f"weights.transport={value}"]) == expected


def test_the_in_process_engine_loads_no_file() -> None:
    assert problems(["weights.transport=file"]) == [
        "weights.transport=file with rollout.engine=local: files are for servers, and this engine samples in the "
        "learner's processes; set weights.transport=auto"
    ]


def test_a_nodes_own_memory_is_no_folder_for_servers_on_other_nodes() -> None:
    given = [*SERVED, "run.launcher=slurm", "weights.folder=/dev/shm/mine"]
    (problem,) = problems([*given, "slurm.engines.nodes=1"])
    assert problem.startswith("weights.folder=/dev/shm/mine is in the memory of each node, and the learner's ranks can")
    load_config("tiny_cpu", [*given, "slurm.nodes=2", "rollout.server.replicas=2"])


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ((), "file"),
        (("slurm.engines.nodes=1",), "direct"),
        (("slurm.engines.nodes=1", "weights.folder=/fast"), "file"),
        (("slurm.engines.nodes=1", "weights.delta=true"), "file"),
        (("slurm.engines.nodes=1", "weights.transport=file"), "file"),
        (("slurm.engines.nodes=1", "run.launcher=local"), "file"),
        (("rollout.server.addresses=http://a:1",), "file"),
    ],
)
def test_auto_goes_straight_into_servers_on_nodes_of_their_own(keys: tuple[str, ...], kind: str) -> None:
    assert load_config("tiny_cpu", [*SERVED, "run.launcher=slurm", *keys]).transport.name == kind


def test_several_ranks_of_servers_may_share_a_gpu_of_the_learners() -> None:
    """Their learner rank hands on to each."""
    given = [*ON_GPUS, DIRECT, "run.launcher=slurm", "slurm.nodes=2", "rollout.server.tp=2"]
    load_config("tiny_cpu", [*given, "rollout.server.replicas=2"])


def test_servers_that_take_turns_on_gpus_leave_room_for_the_learners_state() -> None:
    given = [*SERVED, "learner.device=cuda", "rollout.server.colocated=true"]
    (problem,) = problems(given)
    assert problem.endswith("stay there; set rollout.server.memory_fraction to the share that remains")
    load_config("tiny_cpu", [*given, "rollout.server.memory_fraction=0.5"])
    load_config("tiny_cpu", [*given, "rollout.server.addresses=http://a:1"])  # their own matter


def test_quantized_weights_are_for_servers_on_gpus_that_the_run_starts() -> None:
    given = ["rollout.server.quantization=fp8"]
    unread, *rest = sorted(problems(given), key=lambda line: "does nothing" not in line)
    assert unread.startswith(
        "rollout.server.quantization=fp8 does nothing: with rollout.engine=local this engine samples in the learner's"
    )
    (device, dtype, addresses) = problems([*given, *SERVED, "rollout.server.addresses=http://a:1"])
    assert rest == [device, dtype]
    assert "with learner.device=cpu: the engines' kernels for quantized weights need GPUs; set" in device
    assert dtype.endswith("learner.dtype=float32: the engines' kernels compute in bfloat16; set learner.dtype=bfloat16")
    assert "rollout.server.addresses=http://a:1: the run cannot see the format of running servers" in addresses


@pytest.mark.parametrize("transport", ["auto", "file", "direct"])
def test_quantized_weights_go_over_every_transport_as_others_do(transport: str) -> None:
    given = [*ON_GPUS, f"weights.transport={transport}", "learner.dtype=bfloat16"]
    plain = load_config("tiny_cpu", given)
    assert load_config("tiny_cpu", [*given, "rollout.server.quantization=fp8"]).transport == plain.transport


@pytest.mark.parametrize("kind", ["nvfp4", "MXFP8", "int4"])
def test_formats_of_fewer_bits_are_refused_by_name(kind: str) -> None:
    (problem,) = problems([*SERVED, f"rollout.server.quantization={kind}"])
    assert problem == (
        f"rollout.server.quantization={kind!r}: must be 'none', 'fp8' (128 x 128 blocks) or 'int8': {kind.upper()} "
        "cannot be quantized at a push"
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            ["weights.folder=/fast"],
            "weights.folder=/fast does nothing: with rollout.engine=local this engine samples in the learner's "
            "processes, and only servers read it; leave it out, or set it to its default, null",
        ),
        (
            ["weights.rendezvous_host=a"],
            "weights.rendezvous_host=a does nothing: with rollout.engine=local this engine samples in the learner's "
            "processes, and only servers read it; leave it out, or set it to its default, null",
        ),
        (
            [*SERVED, "weights.rendezvous_host=a"],
            "weights.rendezvous_host=a does nothing: with weights.transport=auto weights go through a file, without "
            "a rendezvous; leave it out, or set it to its default, null",
        ),
    ],
)
def test_a_key_that_the_transport_does_not_read_is_refused(given: list[str], reason: str) -> None:
    assert problems(given) == [reason]


def test_keys_that_act_with_servers_are_taken() -> None:
    """Whatever the transport, their file is filled: for an export, and for a server that comes back."""
    keys = ["weights.delta=true", "weights.bucket_mb=8", "weights.folder=/fast"]
    load_config("tiny_cpu", [*SERVED, *keys])
    load_config("tiny_cpu", [*SERVED, *keys, DIRECT, "weights.rendezvous_host=a"])


# Which teachers behind servers fit an algorithm and its data, and what a resume may change of them.
URL = "http://127.0.0.1:9"
KEY = "algorithm.kl.teachers"
FOLLOWS = "algorithm.kl.reference_update_rate=0.1"


def teacher(name: str, path: Path = Path("tests"), *keys: str) -> list[str]:
    given = [f"server={URL}", "engine=vllm", f"path={path}", *keys]
    return [f"{KEY}.{name}.{key}" for key in given]


def held(name: str, path: Path = Path("tests"), *keys: str) -> list[str]:
    """A teacher on ranks of the run."""
    return [f"{KEY}.{name}.{key}" for key in (f"path={path}", *keys)]


def own(name: str, most: int) -> list[str]:
    """A prompt of its own, and without more keys it is the policy itself."""
    return [f"{KEY}.{name}.prompt={{answer}}: {{prompt}}", f"{KEY}.{name}.max_prompt_tokens={most}"]


def shown(name: str, most: int, times: int = 1) -> list[str]:
    """A prompt of its own with another completion of the group."""
    return [f"{KEY}.{name}.prompt={'{right_completion} ' * times}{{prompt}}", own(name, most)[1]]


def sources(*names: str) -> list[str]:
    made = [f"data.sources.{name}.{key}" for name in names for key in ("type=arithmetic", "digits=2")]
    return ["data.type=mixture", *made]


def loaded(*keys: str) -> RunConfig:
    return load_config("tiny_cpu", ["algorithm=distill", *keys])


def test_ranks_hold_no_reference_beside_them() -> None:
    config = loaded(*teacher("a"))
    assert not config.needs_reference
    assert config.algorithm.needs_reference
    assert loaded().needs_reference
    assert not loaded(*own("a", 9)).needs_reference
    assert loaded(*own("a", 9), FOLLOWS).needs_reference  # the policy's moving average, which reads the prompt


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([*teacher("a"), "algorithm.kl.reference=tests"], "both score the policy; keep one"),
        ([*teacher("a"), "rollout.temperature=0.5"], "http://127.0.0.1:9 with rollout.temperature=0.5: servers"),
        (
            [*held("a"), f"{KEY}.a.timeout_seconds=3"],
            "timeout_seconds=3 does nothing: with algorithm.kl.teachers.a.server=null ranks of the run hold",
        ),
        ([f"{KEY}.a.server={URL}", f"{KEY}.a.path=tests"], "engine=null: requests depend on the engine; give"),
        (
            [*held("a"), "roles.layouts.teacher_b.tp=2"],
            "roles.layouts.teacher_b: no teacher of algorithm.kl.teachers or reward_models with its own ranks has "
            "this role; allowed: teacher_a",
        ),
        ([*teacher("a"), "roles.layouts.teacher_a.tp=2"], "with its own ranks has this role; allowed: none"),
        ([*held("a"), "roles.layouts.teacher_a.vpp=2"], "vpp=2 with roles.layouts.teacher_a.pp=1: chunks need"),
        ([*teacher("a"), "algorithm=grpo"], "does nothing: algorithm.kl.coefficient=0 does not read it"),
        ([*teacher("a"), "algorithm=dpo"], "with algorithm.preference.beta"),
        ([*teacher("a"), "roles.reference=separate"], "the algorithm has no reference"),
        ([*held("a"), FOLLOWS], "no teacher is the policy's moving average, because each has a path; leave refe"),
        ([*own("a", 9), FOLLOWS, "roles.reference=separate"], "takes its weights from the same ranks; set roles.ref"),
        ([FOLLOWS, "roles.reference=separate"], "_update_rate=0.1 with roles.reference=separate and job=rl: a"),
        ([FOLLOWS, "algorithm=grpo"], "reference_update_rate=0.1 does nothing: with algorithm.kl.coefficient=0 and"),
        (
            ["algorithm.kl.reference_update_every=2"],
            "every=2 does nothing: with algorithm.kl.reference_update_rate",
        ),
        ([*teacher("a"), *teacher("b"), "algorithm=gkd"], "a, b score the same prompts, but only estimator=k1"),
        (teacher("a", Path("tests"), "sources=[sums]"), f"{KEY}.a.sources names 'sums'; data.sources has none"),
        ([f"{KEY}.a.weight=2"], "no path: without one it is the policy itself, which judges by another prompt"),
        ([f"{KEY}.a.server={URL}", f"{KEY}.a.engine=vllm", *own("a", 9)], "on its own ranks; give path"),
        (own("a", 9)[:1], "prompt='{answer}: {prompt}' without max_prompt_tokens: a prompt of its own has both"),
        ([*held("a"), *own("a", 9)[1:]], "max_prompt_tokens=9 without prompt: a prompt of its own has both; give"),
        ([f"{KEY}.a.prompt={{answer}}", *own("a", 9)[1:]], "prompt='{answer}' has no {prompt}; write it where"),
        ([f"{KEY}.a.prompt={{{{prompt}}}}", *own("a", 9)[1:]], "prompt='{{prompt}}' has no {prompt}; write it where"),
        ([f"{KEY}.a.prompt={{prompt}} \\boxed{{}}", *own("a", 9)[1:]], "{} names no field; {NAME} is a field of the"),
        ([f"{KEY}.a.prompt={{prompt}} {{a!r:3}}", *own("a", 9)[1:]], "{a!r:3} names no field; {NAME} is a field of"),
        ([f"{KEY}.a.prompt={{prompt}} x}}", *own("a", 9)[1:]], "Single '}' encountered in format string; {NAME} is"),
        (
            [*own("a", 50), "learner.max_tokens_per_micro_batch=55"],
            "learner.max_tokens_per_micro_batch=55 is less than the longest sequence that teacher_a reads, "
            f"({KEY}.a.max_prompt_tokens=50 + rollout.max_new_tokens=6) = 56",
        ),
        (
            [*own("a", 9), "environment.function=calculator"],
            f"{KEY}.a.prompt with environment.function=calculator: an environment writes its prompts itself",
        ),
        ([*own("a", 9), "roles.layouts.teacher_a.tp=2"], "with its own ranks has this role; allowed: none"),
        ([*shown("a", 9), "rollout.group_size=1"], "with rollout.group_size=1: no group has another completion; raise"),
        ([*shown("a", 9, times=2)], "has {right_completion} 2 times, and one completion is shown; write it once"),
        (
            [*shown("a", 50), "learner.max_tokens_per_micro_batch=60"],
            "learner.max_tokens_per_micro_batch=60 is less than the longest sequence that teacher_a reads, "
            f"({KEY}.a.max_prompt_tokens=50 + rollout.max_new_tokens=6 + rollout.max_new_tokens=6) = 62",
        ),
        ([*sources("sums", "more"), *teacher("a", Path("tests"), "sources=[sums]")], "no teacher scores prompts"),
        ([f"{KEY}.a.server=ftp://x:1", f"{KEY}.a.engine=vllm", f"{KEY}.a.path=tests"], "must be http://host:port,"),
        ([f"{KEY}.a.server=http://me:pw@x:1", f"{KEY}.a.engine=vllm", f"{KEY}.a.path=tests"], "without user or path"),
    ],
)
def test_what_does_not_fit_is_refused(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(*keys)
    assert said in str(refused.value)


def test_several_are_weighed_and_each_source_may_have_its_own() -> None:
    loaded(*teacher("a"), *teacher("b", Path("tests"), "weight=3"))
    of = {name: teacher(name, Path("tests"), f"sources=[{name}]") for name in ("sums", "more")}
    for algorithm in ("distill", "gkd"):
        loaded(f"algorithm={algorithm}", *sources("sums", "more"), *of["sums"], *of["more"])


def test_ranks_hold_some_in_layouts_of_their_own_and_servers_others() -> None:
    keys = [*held("a"), *held("b", Path("tests"), "weight=2"), *teacher("c"), "roles.layouts.teacher_b.tp=4"]
    config = loaded(*keys, "roles.layouts.teacher_b.ep=2", "learner.dp=2")
    assert ranks_by_role(config) == {"learner": 2, "teacher_a": 2, "teacher_b": 4}
    assert extra_role_nodes(config) == {"teacher_a": 1, "teacher_b": 2}
    loaded(*held("a"), "rollout.temperature=0.5")


def test_a_resume_may_find_them_elsewhere_but_not_others() -> None:
    before = fixed(loaded(*teacher("a")))
    moved = loaded(*teacher("a", Path("tests"), "server=http://other:1", "engine=sglang", "timeout_seconds=9"))
    assert fixed(moved) == before
    assert fixed(loaded(*teacher("a", Path("conf")))) != before
    assert fixed(loaded(*teacher("a", Path("tests"), "weight=2"))) != before


def test_its_tokens_and_lengths_are_compared_with_the_policys(tmp_path: Path) -> None:
    policy = make_tiny_model(TinySizes(), tmp_path, 0)
    short = make_tiny_model(TinySizes(max_position_embeddings=8), tmp_path, 0)
    tokens, other = (policy / "tokenizer.json").read_text(), tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (other / name).write_text((policy / name).read_text())
    (other / "tokenizer.json").write_text(tokens.replace('"id": 256', '"id": 258', 1))

    def found(*paths: Path) -> list[str]:
        keys = [key for number, path in enumerate(paths) for key in teacher(f"t{number}", path)]
        config = loaded(f"model.path={policy}", *keys)
        return [one.text for one in check(PreflightContext(config=config, for_job=False))]

    assert found(policy) == []
    said = found(short, other, tmp_path)
    assert f"max_position_embeddings=8 of {KEY}.t0.path={short}" in said[0]
    assert f"{KEY}.t1.path={other}: 1 of the policy's" in said[1]
    assert f"{KEY}.t2.path={tmp_path}: it has no config.json" in said[2]


def test_the_longest_that_it_reads_behind_its_own_prompt_is_compared_with_its_positions(tmp_path: Path) -> None:
    policy = make_tiny_model(TinySizes(), tmp_path, 0)
    wide = make_tiny_model(TinySizes(max_position_embeddings=2048), tmp_path, 0)
    prompts = [*own("me", 1019), *own("near", 1019), *own("far", 1018)]
    config = loaded(f"model.path={policy}", *held("near", policy), *teacher("far", policy), *prompts)
    said = [one.text for one in check(PreflightContext(config=config, for_job=False))]
    places = {"me": "the model's max", "near": f"{KEY}.near.path={policy}: {KEY}", "far": "that the server samples"}
    for name, (before, whole) in {"me": (1019, 1025), "near": (1019, 1025), "far": (1018, 1024)}.items():
        keys = f"{KEY}.{name}.max_prompt_tokens={before} + rollout.max_new_tokens=6 = {whole}"
        assert [places[name] in one for one in said if keys in one] == [True], name
    fits = loaded(f"model.path={policy}", *held("near", wide), *own("near", 1019), *own("me", 1018))
    assert not [*check(PreflightContext(config=fits, for_job=False))]
