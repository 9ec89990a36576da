"""``rl-megatron plan`` and ``scale`` as a user calls them, what large recipes leave, and commands that fail."""

from __future__ import annotations

import functools
import json
import re
import secrets
from pathlib import Path
from typing import NoReturn

import pytest

from launcher.processes import limits
from rl_megatron.config.io import load_config
from rl_megatron.config.sections.data import FileKeys
from rl_megatron.errors import GB
from rl_megatron.files import write_atomically
from rl_megatron.models.named import NAMED
from rl_megatron.observability.files import JsonlFile
from rl_megatron.observability.log import run_log
from rl_megatron.weights.layouts.learner import job_shape
from tests.unit.launcher.commands import Said, status_of
from tests.unit.launcher.test_memory import (
    CONF,
    DEEPSEEK,
    DEEPSEEK_SHARED,
    QWEN3,
    QWEN_30B,
    QWEN_80GB,
    QWEN_APART,
    RECIPES,
    recipe,
)
from tools.planner.estimates import estimate
from tools.planner.memory import footprints, fullest
from tools.planner.plan import show_memory


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    monkeypatch.setenv("COLUMNS", "160")
    return Said("plan", capsys)


def test_a_named_model_is_costed_without_its_files(said: Said) -> None:
    text = said("qwen3-30b-a3b", "src=megatron,dp=2", "dst=hf,dp=2", "--per-node", "2", "--nic", "25")
    rows = {cells[1].strip(): cells[2:4] for line in text.splitlines() if len(cells := line.split("│")) > 3}
    assert [cell.strip() for cell in rows["bytes across nodes"]] == ["122.1 GB", "61.1 GB"]  # 30.5 B of 2 bytes each
    assert [cell.strip() for cell in rows["bytes within nodes"]] == ["0.0 GB", "61.1 GB"]
    assert rows["bound: the busiest port"][1].strip() == "2.44 s"
    assert "NIC 25 GB/s" in text
    assert re.search(r"[\d,]+ transfers between 4 pairs, planned in", text)


def test_a_folder_needs_only_its_config(said: Said, tmp_path: Path) -> None:
    config = {
        "model_type": "kimi_k2",
        "num_hidden_layers": 5,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "intermediate_size": 128,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "vocab_size": 1000,
        "rms_norm_eps": 1e-6,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 50000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    layouts = "src=megatron,tp=2,pp=2,ep=4,dp=2,stages=2+3", "dst=engine,tp=4,ep=4"
    assert "transfers between" in said(str(tmp_path), *layouts, "--colocated")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("kimi-k3", "src=hf", "dst=hf"),
            "kimi-k3 is neither a folder nor a known model (did you mean 'kimi-k2'?); known",
        ),
        (("kimi-k2", "src=hf"), "layouts: src=hf given; give both, for example src=megatron"),
        (("kimi-k2", "src=hf", "dst=vllm,tp=8"), "dst=vllm,tp=8: there is no table 'vllm'; allowed: hf, megatron"),
        (("kimi-k2", "src=megatron,tpp=4", "dst=hf"), "src=megatron,tpp=4: 'tpp=4' is not a setting; allowed: a"),
        (("kimi-k2", "src=megatron,tp=x", "dst=hf"), "'tp=x' is not a setting"),
        (("kimi-k2", "src=megatron", "dst=hf,tp=2"), "dst=hf,tp=2: an hf layout consists of full copies; give dp"),
        (("kimi-k2", "src=megatron,pp=4", "dst=hf"), "pp*vpp = 4*1 = 4 does not divide 61 layers"),
        (("kimi-k2", "src=megatron,pp=4,first=17", "dst=hf"), "each stage, as stages=11+12*6+11"),
        (("kimi-k2", "src=megatron,pp=2,stages=30+0", "dst=hf"), "'stages=30+0' is not a setting"),
        (("kimi-k2", "src=megatron,pp=2,vpp=2,stages=15*4", "dst=hf"), "pp*vpp = 2*2 = 4 and 61 layers"),
    ],
)
def test_bad_input_is_named(said: Said, arguments: tuple[str, ...], message: str) -> None:
    assert message in said(*arguments, status=1)


def test_an_engine_cuts_experts_by_tp_where_nothing_else_is_said(said: Said) -> None:
    """As vLLM and SGLang do without expert parallelism: each of 8 ranks gets an eighth of 235 B of 2 bytes."""
    source = "src=megatron,tp=4,ep=8,dp=16"
    texts = [
        said("qwen3-235b-a22b", source, f"dst=engine,tp=8,dp=8{rest}") for rest in ("", ",etp=8", ",ep=8", ",etp=1")
    ]
    received = [re.search(r"received by 64 ranks, max / mean *│ *([\d.]+) GB", text) for text in texts]
    assert [found and found[1] for found in received] == ["59.0", "59.0", "59.0", "456.4"]
    assert (
        "dst: rank 0 holds 456.4 GB of weights, which do not fit a GPU of 80 GB (--gpu-memory-gb); raise tp"
        in texts[-1]
    )
    assert not any("which do not fit a GPU" in text for text in texts[:3])
    assert "which do not fit" in said("qwen3-235b-a22b", source, "dst=engine,tp=8,dp=8", "--gpu-memory-gb", "40")


def test_a_configuration_shows_memory_and_then_what_pushes_and_checkpoints_cost(said: Said, tmp_path: Path) -> None:
    slow = tmp_path / "slow.yaml"
    slow.write_text("{like: h100, network: 25}")
    text = said("--config", DEEPSEEK, f"slurm.speeds.gpu={slow}")
    _, push, hop, save, *_ = text[text.index("It fits in slurm.gpu_memory_gb=80.\n") :].splitlines()
    assert push == "a push of weights by direct, through the network:"
    assert hop.endswith("one receives up to 47.0 GB: 1.88 s at 450 GB/s a rank inside a node, 25 between nodes")
    assert save.startswith("a checkpoint, every 20 steps: 9,437.7 GB, up to 347.5 GB by one node")
    through = said("--config", DEEPSEEK, "weights.transport=file")
    assert "\nnote: each push of weights goes through a file in the run's folder, on a shared file system: " in through


def test_what_the_learner_refuses_of_a_model_is_not_planned(said: Said) -> None:
    text = said("--config", QWEN_80GB, "learner.lora.rank=8", "learner.lora.targets=mlp", status=1)
    assert "learner.lora.targets=mlp: model_type='qwen3_moe' has no dense layers and no shared experts" in text
    text = said("--config", DEEPSEEK, "model.name=deepseek-v3.2", "learner.cp=2", status=1)
    assert "rollout.max_new_tokens=7168 = 8192 is more than index_topk=2048" in text


def test_the_path_in_a_file_is_the_model_as_on_the_command_line(said: Said, tmp_path: Path) -> None:
    half = tmp_path / "half"
    half.mkdir()
    (half / "config.json").write_text(json.dumps({**QWEN3, "num_hidden_layers": 24}))

    def planned(*arguments: str, status: int = 0, **model: object) -> str:
        file = tmp_path / "mine.yaml"
        file.write_text(json.dumps({"defaults": [QWEN_30B.removesuffix(".yaml")], "model": model}))
        return said("--config", str(file), *arguments, status=status)

    of_half = planned("model.name=null", f"model.path={half}")
    assert planned(name=None, path=str(half)) == of_half
    whole = planned()
    assert whole != of_half
    other = planned(path=str(half), status=1)
    assert "another model than model.name=qwen3-30b-a3b: num_layers 24 instead of 48" in other
    away = f"model.path={tmp_path / 'away'} is not on this machine: the sizes are those of model.name=qwen3-30b-a3b.\n"
    assert planned(path=str(tmp_path / "away")) == away + whole
    assert "the model's sizes are not known; set model.path or model.name" in planned(name=None, status=1)


def test_16_stages_are_whole_in_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(DEEPSEEK_SHARED, ["model.path=/given"])
    found = footprints(config, shape := NAMED["deepseek-v3"])
    most = [max(one.total for one in found if one.stage == stage) for stage in range(16)]
    for columns, tables in ((80, 2), (200, 1)):
        monkeypatch.setenv("COLUMNS", str(columns))
        show_memory(DEEPSEEK_SHARED, config, shape)
        lines = [line for line in capsys.readouterr().out.splitlines() if line[0] in "┏┃│└"]
        together = [re.findall(r"[\d.]+", line) for line in lines if line.startswith("│ together")]
        assert [number for numbers in together for number in numbers] == [f"{total / GB:.1f}" for total in most]
        assert len(together) == tables
        assert max(map(len, lines)) <= columns


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--nic 25", "slurm.speeds.gpu"),
        ("--nvlink 25", "slurm.speeds.gpu"),
        ("--per-node 4", "slurm.gpus_per_node"),
        ("--element-bytes 1", "learner.dtype"),
        ("--gpu-memory-gb 20", "slurm.gpu_memory_gb"),
        ("--colocated", "rollout.server.colocated"),
        ("--family mine:Mine", "learner.model"),
    ],
)
def test_options_of_two_layouts_are_keys_of_a_configuration(said: Said, option: str, key: str) -> None:
    name, *value = option.split()
    refused = said("--config", DEEPSEEK, name, *value, status=1)
    assert f"{name} goes with a model and two layouts; with --config set {key} instead" in refused


def test_a_recipe_that_does_not_fill_its_nodes_is_refused_or_noted_as_submit_does(said: Said) -> None:
    text = said("--config", QWEN_30B, "slurm.nodes=8", "weights.transport=direct", status=1)
    assert "slurm.nodes=8 * slurm.ntasks_per_node=8 = 64 tasks, but the learner has" in text
    assert "8 ranks; set learner.dp=16" in text
    recipe = ("--config", QWEN_APART, "rollout.server.tp=1")
    idle = "servers sample on 1 of the 6 GPUs of the servers' own nodes"
    assert f"note: {idle}" in said(*recipe, "rollout.server.replicas=1")
    assert idle not in said(*recipe, "rollout.server.replicas=6")


def test_a_reward_model_is_planned_as_its_run_checks_it_without_an_output_layer(said: Said) -> None:
    """80 GB are enough for it, and not for a policy in its layout."""
    sizes = ("model.name=qwen3-30b-a3b", "slurm.nodes=2", "slurm.gpus_per_node=8", "slurm.gpu_memory_gb=80")
    layout = ("device=cuda", "dtype=bfloat16", "tp=2", "ep=8", "dp=8", "max_tokens_per_micro_batch=8192")
    more = (*sizes, *(f"learner.{key}" for key in layout), "reward_model.max_tokens=4096")
    config = load_config("reward_tiny", [*more, "run.launcher=slurm", "model.path=/given"])
    text = said("--config", "reward_tiny", *more)
    together = fullest(config, job_shape(config, NAMED["qwen3-30b-a3b"])).total / GB
    assert re.search(rf"together +│ +{together:.1f} ", text)
    assert "│ logits" not in text
    assert "It fits in slurm.gpu_memory_gb=80." in text


def test_a_classifier_is_no_model_of_a_job_that_trains_log_probs(said: Said, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, "architectures": ["Qwen3MoeForSequenceClassification"]}))
    refused = said("--config", "sft_tiny", f"model.path={tmp_path}", status=1)
    assert "is a sequence classifier, which scores texts; job=sft needs a model with an output layer" in refused


# ``rl-megatron scale`` as a user calls it: terms, reasons, JSON, and a configuration that ``submit`` takes.
REPO = Path(__file__).resolve().parents[3]
ASKED = ("qwen3-30b-a3b", "gpus=16", "gpu=h100", "rollout.prompts_per_step=64")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    monkeypatch.setenv("COLUMNS", "160")
    return Said("scale", capsys)


def test_scale_of_a_dense_model_names_no_degree_of_experts(printed: Said, tmp_path: Path) -> None:
    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28}
    more = {"num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6}
    config = {"model_type": "qwen2", "tie_word_embeddings": False, "rope_theta": 1e6, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes, **more}))
    text = printed(str(tmp_path), "gpus=8", "gpu=h100")
    assert "best: tp2 dp4, " in text
    assert "etp" not in text


def test_scale_has_terms_and_reasons_also_as_json(printed: Said) -> None:
    text = printed("deepseek-v3", "gpus=512", "gpu=h100", "--explain", "all-to-all")
    for words in (
        *("seconds of a step", "training, by term", "GB of 80 on stage ", "experts", "optimizer", "rejected: "),
    ):
        assert words in text
    assert text.count("rejected: ") == 3
    assert "tokens/s, " in text
    assert "the order of layouts is a guess: " in text
    assert "all-to-all: tokens to the ranks of their experts and back" in text
    assert "--explain speed: no such term; terms: linears" in printed(*ASKED, "--explain", "speed", status=1)
    tree = json.loads(printed(*ASKED, "--json"))
    best = tree["plans"][0]
    assert sum(best["training"].values()) == pytest.approx(best["parts"]["training"])
    assert sum(best["bytes"].values()) <= 80e9
    assert best["seconds"] == min(plan["seconds"] for plan in tree["plans"])
    assert all(one["reason"] for one in tree["rejected"])


# The large recipes take no time that a key of theirs could spare, by the plan.
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_computes_logits_again_only_where_gpus_do_not_hold_them(name: str) -> None:
    config, _ = recipe(name)
    if config.learner.head_dtype is not None:
        assert fullest(*recipe(name, "learner.head_dtype=null")).total > config.slurm.gpu_memory_gb * GB  # type: ignore[operator]


@functools.cache
def seconds_of(name: str, *keys: str) -> float:
    found = estimate(*recipe(name, "run.launcher=slurm", *keys)).step
    assert found is not None
    return found.seconds


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_holds_its_servers_back_by_slots_and_its_first_line_says_its_seconds(name: str) -> None:
    assert seconds_of(name) == pytest.approx(seconds_of(name, "rollout.slots=4096"), rel=0.01)
    (said,) = re.findall(r"\A# Predicted, not measured: ([\d.]+) s a step", (CONF / f"{name}.yaml").read_text())
    assert seconds_of(name) == pytest.approx(float(said), rel=0.01)


@pytest.mark.parametrize("name", RECIPES)
def test_an_evaluation_is_shorter_than_a_step_and_greedy_only_where_the_model_does_not_think(name: str) -> None:
    config, _ = recipe(name)
    assert (config.eval.temperature > 0) == name.startswith("qwen3_")
    assert isinstance(config.data, FileKeys)
    assert config.eval.mode == "blocking"
    assert config.data.max_eval is not None
    assert config.data.max_eval < config.completions_per_step


# Refusals of the system, and Ctrl-C before anything runs, give one line and no traceback.
@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("/dev/null", "error: /dev/null: "),
        ("/proc/nowhere", "error: /proc/nowhere"),
        ("{tmp}/itself", "error: {tmp}/itself"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_line_with_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str, said: str
) -> None:
    (tmp_path / "itself").symlink_to("itself")
    assert status_of("train", f"run.dir={folder.format(tmp=tmp_path)}", f"model.cache_dir={tmp_path}") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said.format(tmp=tmp_path))


def test_a_full_disk_names_the_file_each_time() -> None:
    """When a row is written, and when what is left of it is at the end."""
    full = JsonlFile(Path("/dev/full"))
    for act in (lambda: full.append([{"step": 1}]), full.close):
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            act()
    full.close()


def test_a_replaced_file_is_named_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0")
    (tmp_path / ".x.0.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*/x'"):
        write_atomically(tmp_path / "x", b"1" * 10)


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.txt").symlink_to("/dev/full")
    import logging

    with run_log(tmp_path, role="controller"):
        for _ in range(3):
            logging.getLogger("rl_megatron").info("said")
    assert capsys.readouterr().err.count("No space left on device") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(24, "Too many open files", "/a"), "/a: Too many open files\nthe limit of open files"),
        (OSError(13, "Permission denied", "/a", None, "/b"), "/a: /b: Permission denied"),
        (RuntimeError("can't start new thread"), "can't start new thread\nno thread could be started"),
        (RuntimeError("a fault of ours"), None),
        (TimeoutError(), None),
    ],
)
def test_what_the_system_refuses_is_told_from_faults_of_ours(error: OSError | RuntimeError, said: str | None) -> None:
    refusal = limits.refusal(error)
    assert refusal is None if said is None else refusal is not None and refusal.startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "interrupted; the run had not started, so start it again\n"),
        (["--resume"], "interrupted; --resume continues from the last checkpoint, or starts over if there is none\n"),
    ],
)
def test_ctrl_c_before_a_run_has_its_folder_promises_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    def interrupted() -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.commands.train.gc_disabled", interrupted)  # around the imports, which take seconds
    if options:
        (tmp_path / "x").mkdir()
    assert status_of("train", f"run.dir={tmp_path}", "run.name=x", f"model.cache_dir={tmp_path}", *options) == 130
    assert capsys.readouterr().err == said
