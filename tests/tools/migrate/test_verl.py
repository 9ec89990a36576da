"""Public scripts of verl give the configurations that their arguments mean; the values were derived by hand."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from tools.migrate.commands import import_command
from tools.migrate.core import Imported, import_file
from tools.migrate.shell import commands
from tools.migrate.tables import framework, our_keys

EXAMPLES = Path(__file__).parent / "examples/verl"
MEGATRON_DEFAULTS = {"learner.optimizer.beta2": 0.999, "learner.optimizer.weight_decay": 0.01}  # of verl's optimizer
EXPECTED: dict[str, dict[str, Any]] = {
    "dapo.sh": {
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.28,
        "algorithm.dual_clip": 3.0,
        "algorithm.aggregation": "token_mean",
        "algorithm.advantage_std": "group",
        "algorithm.overlong_buffer": 128,
        "algorithm.overlong_factor": 1.0,
        "algorithm.kl.coefficient": 0.0,
        "rollout.dynamic_sampling": "refill",
        "rollout.prompts_per_step": 256,  # 2 * 8 * 2 * 4 * 2
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 2048,
        "train.minibatches": 2,
        "train.minibatch_by_group": True,
        "train.steps": 1,
        "train.learning_rate": 1e-6,
        **MEGATRON_DEFAULTS,
    },
    "grpo_megatron_lora.sh": {
        "algorithm.aggregation": "token_mean",
        "algorithm.clip_high": 0.2,
        "algorithm.kl.coefficient": 0.001,
        "algorithm.kl.placement": "loss",
        "algorithm.kl.estimator": "k3",
        "algorithm.kl.importance_weighted": False,
        "rollout.prompts_per_step": 128,
        "train.minibatches": 8,
        "learner.tp": 4,
        "learner.dp": 2,
        "learner.lora.rank": 256,
        "learner.lora.alpha": 512,
        "learner.recompute.uniform": 1,
        "rollout.server.replicas": 4,
        "rollout.on_long_prompt": "drop",
    },
    "gspo_moe.sh": {
        "algorithm.ratio_level": "sequence",
        "algorithm.aggregation": "seq_mean_token_mean",  # whatever loss_agg_mode says
        "algorithm.clip_low": 3e-4,
        "algorithm.clip_high": 4e-4,
        "algorithm.dual_clip": None,
        "algorithm.overlong_buffer": 4096,
        "learner.optimizer.weight_decay": 0.1,
        "learner.ep": 4,
        "learner.etp": 1,
        "learner.dp": 4,
        "learner.max_tokens_per_micro_batch": 10240,
        "train.lr_warmup_steps": 10,
        "train.minibatches": 8,
        "train.steps": 300,
        "rollout.max_new_tokens": 8192,
    },
    "ppo_critic_rm.sh": {
        "algorithm.credit": "gae",
        "algorithm.advantage_mean": "none",
        "algorithm.whiten": True,
        "algorithm.lam": 1.0,
        "algorithm.dual_clip": 3.0,
        "algorithm.critic.learning_rate": 1e-5,
        "algorithm.critic.clip": 0.5,
        "reward.function": "ranks:rm",
        "rollout.group_size": 1,
        "train.minibatches": 4,
    },
    "reinforce_plus_plus_baseline.sh": {
        "algorithm.advantage_mean": "group",
        "algorithm.advantage_std": "none",
        "algorithm.whiten": True,
        "algorithm.kl.coefficient": 0.001,
        "algorithm.kl.placement": "completion_reward",
        "algorithm.kl.estimator": "k1",
        "train.minibatches": 1,
        "train.learning_rate": 3e-6,
    },
    "remax.sh": {
        "algorithm.advantage_mean": "greedy",
        "algorithm.objective": "clip",
        "algorithm.aggregation": "token_mean",
        "algorithm.kl.placement": "completion_reward",
        "train.minibatches": 4,
        "learner.max_tokens_per_micro_batch": 30000,
    },
    "rloo.sh": {
        "algorithm.leave_one_out": True,
        "algorithm.advantage_std": "none",
        "algorithm.objective": "clip",
        "algorithm.aggregation": "token_mean",
        "algorithm.kl.coefficient": 0.001,
        "train.minibatches": 4,
        "rollout.group_size": 5,
    },
    "sft_lora.sh": {
        "job": "sft",
        "learner.lora.rank": 32,
        "learner.lora.alpha": 16,
        "train.learning_rate": 1e-4,
        "data.fields.prompt": "extra_info.question",
        "data.fields.answer": "extra_info.answer",
        "sft.epochs": 1,
    },
}
REFUSED = {
    "multi_turn.yaml": "multi_turn.enable=true (line 21): turns with tools are an environment here",
    "rollout_correction.sh": "rollout_rs=token_k1,seq_max_k2 (line 24)",
}


def value(config: RunConfig, key: str) -> object:
    found: Any = config.model_dump(mode="json")
    for part in key.split("."):
        found = found[part]
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_a_script_gives_the_values_that_change_the_loss(name: str) -> None:
    imported = import_file(EXAMPLES / name)
    assert {key: value(imported.config, key) for key in EXPECTED[name]} == EXPECTED[name]
    assert not [line for line in imported.not_carried if "not in the tables" in line]


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        import_file(EXAMPLES / name)
    assert REFUSED[name] in str(caught.value)


def test_every_key_of_a_script_is_carried_or_named(tmp_path: Path) -> None:
    imported = import_script(tmp_path, "trainer.unheard_of=3", "data.shuffle=False", "critic.optim.lr=1e-5")
    assert any(line.startswith("trainer.unheard_of=3 (line 1): not in the tables") for line in imported.not_carried)
    assert any(line.startswith("data.shuffle=false") for line in imported.not_carried)
    (unread,) = (line for line in imported.not_carried if line.startswith("critic.optim.lr=1e-5"))
    assert "algorithm.credit=completion does not read it" in unread


def test_defaults_that_change_the_loss_are_written_as_theirs(tmp_path: Path) -> None:
    lines = {line.key: line for line in import_script(tmp_path).lines}
    assert lines["algorithm.dual_clip"].source == "actor_rollout_ref.actor.clip_ratio_c=3.0 (their default)"
    assert lines["train.learning_rate"].value == 1e-6
    assert "their default" in lines["learner.optimizer.weight_decay"].source


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/Qwen2.5-32B/", "qwen2.5-32b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("$MODELS/Qwen3-8B-Base", "qwen3-8b"),
        ("Qwen/Qwen2.5-0.5B", None),
    ],
)
def test_a_known_model_is_named_so_that_plans_need_no_folder(tmp_path: Path, path: str, name: str | None) -> None:
    assert import_script(tmp_path, f"actor_rollout_ref.model.path={path}").config.model.name == name


LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
ESTIMATOR = "algorithm.adv_estimator"
REJECTION = "algorithm.rollout_correction.rollout_rs"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((f"{LOSS}=cispo",), {"algorithm.cap_low": 0.8, "algorithm.cap_high": 1.2, "algorithm.objective": "cispo"}),
        (
            (f"{LOSS}=geo_mean", "actor_rollout_ref.actor.clip_ratio=0.4"),  # exp(-0.4), exp(0.4)
            {
                "algorithm.clip_low": 0.3297,
                "algorithm.clip_high": 0.4918,
                "algorithm.aggregation": "seq_mean_token_mean",
            },
        ),
        ((f"{LOSS}=sapo",), {"algorithm.objective": "sapo", "algorithm.aggregation": "seq_mean_token_mean"}),
        (
            (f"{LOSS}=dppo_tv",),
            {"algorithm.cap_high": 3.0, "algorithm.clip_low": 0.2, "algorithm.old_logprobs": "learner"},
        ),
        ((f"{LOSS}=kl_cov",), {"algorithm.parameters.kl_cov": 0.1, "algorithm.tokens.share": 2e-4}),
        ((f"{ESTIMATOR}=grpo_passk",), {"algorithm.best_of": 8, "algorithm.leave_one_out": True}),
        ((f"{ESTIMATOR}=optimal_token_baseline",), {"algorithm.credit": "optimal", "algorithm.advantage_mean": "none"}),
        ((f"{ESTIMATOR}=reinforce_plus_plus",), {"algorithm.credit": "discounted", "algorithm.whiten": True}),
        (
            (
                "algorithm.norm_adv_by_std_in_grpo=False",
                "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
            ),
            {"algorithm.advantage_std": "none", "algorithm.aggregation": "seq_mean_token_sum_norm"},
        ),
        (
            (
                "algorithm.rollout_correction.rollout_is=sequence",
                "algorithm.rollout_correction.rollout_is_threshold=0.5_4",
            ),
            {
                "algorithm.correction.mode": "mask",
                "algorithm.correction.level": "product",
                "algorithm.correction.low": 0.5,
                "algorithm.correction.high": 4.0,
            },
        ),
        (
            (f"{REJECTION}=seq_mean_k1", f"{REJECTION}_threshold=0.8_1.6"),  # log 0.8 <= -d <= log 1.6
            {
                "algorithm.correction.mode": "band",
                "algorithm.correction.level": "sequence",
                "algorithm.correction.low": 0.625,
                "algorithm.correction.high": 1.25,
            },
        ),
        (
            (f"{REJECTION}=token_k1", f"{REJECTION}_threshold=4"),
            {"algorithm.correction.level": "token", "algorithm.correction.low": 0.25, "algorithm.correction.high": 4.0},
        ),
        (
            (f"{REJECTION}=seq_max_k3", f"{REJECTION}_threshold=0.1"),
            {
                "algorithm.correction.mode": "reject",
                "algorithm.correction.level": "worst",
                "algorithm.correction.high": 0.1,
            },
        ),
    ],
)
def test_losses_without_an_example(tmp_path: Path, arguments: tuple[str, ...], expected: dict[str, Any]) -> None:
    config = import_script(tmp_path, *arguments).config
    assert {key: value(config, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("actor_rollout_ref.rollout.n=$(nproc)", "only the shell knows $(nproc); write the value out"),
        ("algorithm.adv_estimator=mine", "no row of conf/algorithm has this loss"),
        ("data.train_batch_size=many", "the value is not a number"),
        ("algorithm.adv_estimator=gdpo", "algorithm=gdpo compares reward.parts"),
        ("actor_rollout_ref.actor.loss_agg_mode=token-sum", "no aggregation here divides so"),
        ("actor_rollout_ref.rollout.repetition_penalty=1.1", "a penalty changes the distribution"),
        (f"{REJECTION}=token_k2 {REJECTION}_threshold=2", "one rejection by k1 or k3 is here"),
        (
            f"{REJECTION}=token_k1 {REJECTION}_threshold=2 {REJECTION[:-2]}is=token",
            "a rejection is here without weights",
        ),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=100", "1024 prompts of a step are not whole minibatches of 100"),
    ],
)
def test_values_that_change_the_loss_are_refused(tmp_path: Path, argument: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        import_script(tmp_path, argument)
    assert message in str(caught.value)
    assert argument.split("=", maxsplit=1)[0] in str(caught.value)


def test_yaml_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"trainer:\n  nnodes: 1\ndata:\n  train_files: {'[' * 5000}{']' * 5000}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: expressions or sections are nested too deep"):
        import_file(file)


def test_a_value_that_only_the_shell_knows_is_left_to_the_user(tmp_path: Path) -> None:
    imported = import_script(tmp_path, "trainer.nnodes=$SLURM_NNODES")
    assert "slurm.nodes: only the shell knows $SLURM_NNODES; set it" in imported.to_set
    assert imported.config.slurm.nodes == 1


def test_epochs_are_steps_if_the_rows_are_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl leaves out an epoch's last rows that do not fill a batch. HOME is the user's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = ("data.train_files=$HOME/t.jsonl", "data.train_batch_size=4", "trainer.total_epochs=3")
    keys += ("actor_rollout_ref.actor.ppo_mini_batch_size=2",)
    imported = import_script(tmp_path, *keys)
    assert "train.steps: total_epochs=3 there; set 3 x the rows of data.train / 4" in imported.to_set
    assert not [line for line in imported.to_set if "HOME" in line]
    (tmp_path / "t.jsonl").write_text("{}\n" * 11)
    imported = import_script(tmp_path, *keys)
    assert (imported.config.train.steps, imported.config.data.train) == (6, tmp_path / "t.jsonl")
    pq.write_table(pa.table({"prompt": range(8)}), tmp_path / "t.parquet")
    assert import_script(tmp_path, *keys, "data.train_files=$HOME/t.parquet").config.train.steps == 6
    (tmp_path / "t.parquet").write_bytes(b"torn")
    assert any("set 3 x" in line for line in import_script(tmp_path, *keys, "data.train_files=$HOME/t.parquet").to_set)


def test_an_unknown_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("python train.py --lr 3\n")
    with pytest.raises(ConfigError, match=r"run\.sh: not a file of verl"):
        import_file(file)


def test_the_tables_name_keys_that_exist() -> None:
    config = RunConfig()
    for key in framework("verl").cells:
        if not key.startswith(("data.", "eval.sets.", "reward_models.", "rollout.top_k")):
            assert not framework("verl").cells[key][-1].converts or value(config, key) != "missing"
    assert framework("verl").cells.keys() <= our_keys().keys()


def test_the_command_writes_a_file_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.yaml"
    import_command(EXAMPLES / "rloo.sh", out)
    assert load_config(str(out), []) == import_file(EXAMPLES / "rloo.sh").config
    text, printed = out.read_text(), capsys.readouterr().out
    assert "  objective: clip # actor_rollout_ref.actor.policy_loss.loss_mode=vanilla (their default)\n" in text
    assert "# - actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80 (line 14): " in text
    assert f"check it: rl-megatron train --config {out} --check" in printed
    with pytest.raises(ConfigError, match="the file exists"):
        import_command(EXAMPLES / "rloo.sh", out)


def test_a_script_is_followed_as_bash_does() -> None:
    text = """
    n=2; name='a b'   # a comment
    A=(--x 1 --name "$name"); A+=(--y)
    if true; then hidden=1; fi
    run "${A[@]}" k=$((n * 8)) p=${P:-${Q:-"$DATA/q"}} $hidden "c=$(date)" 'lit $n' >log 2>&1 | tee x
    """
    run, tee = list(commands(text))[-2:]
    texts = [word.text for word in run]
    assert texts[:8] == ["run", "--x", "1", "--name", "a b", "--y", "k=16", "p=$DATA/q"]
    assert run[7].unresolved == ("$DATA",)
    assert run[8].unresolved == ("$hidden, which line 4 sets under a condition",)
    assert (run[9].text, run[9].unresolved, run[10].text) == ("c=$(date)", ("$(date)",), "lit $n")
    assert [word.text for word in tee] == ["tee", "x"]


def import_script(folder: Path, *arguments: str) -> Imported:
    """A GRPO script of verl with these arguments, all in its first line."""
    given = ["algorithm.adv_estimator=grpo", "data.train_files=t.parquet", "actor_rollout_ref.rollout.name=vllm"]
    given += ["actor_rollout_ref.rollout.n=8"]
    script = folder / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo {' '.join([*given, *arguments])}\n")
    return import_file(script)
