"""Public recipes of TRL and slime give the configurations that they mean, by values derived by hand from their docs."""

from pathlib import Path
from typing import Any

import pytest

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from tools.migrate import slime, trl
from tools.migrate.core import READERS, Imported, import_file
from tools.migrate.given import Given
from tools.migrate.tables import framework

EXAMPLES = Path(__file__).parent / "examples"
ADAM = {"learner.optimizer.beta1": 0.9, "learner.optimizer.beta2": 0.999, "learner.optimizer.weight_decay": 0.0}
DAPO_RUN = {  # what eight of slime's scripts have in common
    "algorithm.clip_low": 0.2,
    "algorithm.clip_high": 0.28,
    "algorithm.advantage_std": "group",
    "algorithm.dual_clip": None,
    "algorithm.kl.coefficient": 0.0,
    "algorithm.entropy_coefficient": 0.0,
    "learner.optimizer.beta2": 0.98,
    "train.learning_rate": 1e-6,
    "train.lr_decay": "none",
    "rollout.temperature": 1.0,
    "rollout.on_long_prompt": "drop",
    "data.chat_template": True,
}
SEQUENCE_MEAN = {"algorithm.aggregation": "seq_mean_token_mean", "learner.optimizer.weight_decay": 0.1}
MASKED = {  # TRL's correction with vLLM, which is on by default
    "algorithm.correction.mode": "mask",
    "algorithm.correction.level": "product",
    "algorithm.correction.low": 0.0,
    "algorithm.correction.high": 3.0,
}
EXPECTED: dict[str, dict[str, Any]] = {
    "trl/dapo.py.txt": {
        "algorithm.clip_low": 0.2,
        "algorithm.clip_high": 0.28,
        "algorithm.aggregation": "token_mean",
        "algorithm.advantage_std": "group",
        "algorithm.drop_truncated": True,
        "algorithm.kl.coefficient": 0.0,
        "algorithm.correction.mode": "none",  # without vLLM
        "rollout.group_size": 16,
        "rollout.prompts_per_step": 32,  # 512 / 16
        "rollout.max_new_tokens": 20480,
        "train.minibatches": 1,
        "train.learning_rate": 1e-6,
        "train.lr_decay": "linear",
        **ADAM,
    },
    "trl/dr_grpo_codeforces.yaml": {
        "algorithm.aggregation": "seq_mean_token_sum_norm",
        "algorithm.advantage_std": "none",
        "algorithm.clip_high": 0.2,
        "algorithm.drop_truncated": True,
        "rollout.temperature": 0.7,
        "rollout.max_prompt_tokens": 2000,
        "rollout.max_new_tokens": 8192,
        "learner.optimizer.clip_grad": 0.2,
        "train.learning_rate": 1e-6,
        "train.lr_decay": "none",  # constant_with_warmup
        "seed": 42,
        **MASKED,
        **ADAM,
    },
    "trl/grpo_open_r1.yaml": {
        "algorithm.aggregation": "token_mean",  # loss_type=dapo is the default
        "algorithm.advantage_std": "group",
        "rollout.group_size": 16,
        "rollout.prompts_per_step": 4,  # 16 rows x 4 steps / 16, of one process
        "train.learning_rate": 2e-5,
        "train.lr_decay": "cosine",
        "checkpoint.every": 0,  # save_strategy=epoch
        "log.sinks": ["tensorboard", "wandb"],
        **MASKED,
    },
    "trl/gspo.py.txt": {
        "algorithm.ratio_level": "sequence",
        "algorithm.clip_low": 3e-4,
        "algorithm.clip_high": 4e-4,
        "algorithm.aggregation": "seq_mean_token_mean",
        "algorithm.correction.mode": "none",
        "learner.lora.rank": 16,
        "learner.lora.alpha": 32,
        "train.minibatches": 4,  # 8 / 2
        "rollout.prompts_per_step": 8,  # 8 rows x 8 steps / 8
        "train.learning_rate": 1e-5,
    },
    "trl/dpo.py.txt": {
        "job": "dpo",
        "dpo.loss": "dpo",
        "dpo.beta": 0.1,
        "dpo.per_token": False,
        "dpo.max_tokens": 1024,
        "dpo.batch_size": 16,
        "dpo.epochs": None,  # max_steps wins
        "train.steps": 1000,
        "train.learning_rate": 5e-7,
        "train.lr_decay": "linear",
        **ADAM,
    },
    "trl/kto.py.txt": {
        "job": "dpo",
        "dpo.loss": "kto",
        "dpo.beta": 0.1,
        "dpo.desirable_weight": 1.0,
        "dpo.epochs": 1,
        "train.learning_rate": 5e-7,
        "train.lr_decay": "cosine",
    },
    "trl/reward_modeling.py.txt": {
        "job": "reward_model",
        "reward_model.centring": 0.0,
        "reward_model.max_tokens": 2048,
        "reward_model.epochs": 1,
        "train.learning_rate": 1e-5,
        "learner.lora.rank": None,  # of the second command alone
        "eval.every": 50,
    },
    "trl/sft_open_r1.yaml": {
        "job": "sft",
        "sft.batch_size": 16,
        "sft.epochs": 5,
        "sft.max_tokens": 32768,
        "train.learning_rate": 4e-5,
        "train.lr_decay": "cosine",
        "train.lr_min": 4e-6,
        "learner.optimizer.clip_grad": 0.2,
    },
    "trl/sft_gpt_oss.sh": {
        "job": "sft",
        "sft.max_tokens": 4096,
        "sft.on_long": "cut",
        "train.learning_rate": 2e-5,  # of SFTConfig
        "train.lr_min": 2e-6,
        "learner.dtype": "bfloat16",
    },
    "slime/grpo.sh": {**DAPO_RUN, **SEQUENCE_MEAN, "train.minibatches": 1, "learner.tp": 2, "eval.every": 20},
    "slime/gspo_moe.sh": {
        "algorithm.ratio_level": "sequence",
        "algorithm.clip_low": 4e-4,
        "algorithm.clip_high": 4e-4,  # as --eps-clip
        "algorithm.kl.coefficient": 0.0,
        "rollout.prompts_per_step": 8,
        "learner.ep": 16,
        "learner.cp": 2,
        "learner.dp": 2,  # 64 GPUs / (4 x 4 x 2)
        "learner.max_tokens_per_micro_batch": 32768,
        **SEQUENCE_MEAN,
    },
    "slime/sft.sh": {
        "job": "sft",
        "sft.batch_size": 128,
        "sft.epochs": 3,
        "train.learning_rate": 1e-5,
        "train.lr_decay": "cosine",
        "train.lr_min": 1e-6,
        "learner.optimizer.beta2": 0.95,
        "data.fields.messages": "messages",
    },
    "slime/dynamic_sampling.sh": {
        **DAPO_RUN,
        **SEQUENCE_MEAN,
        "rollout.dynamic_sampling": "refill",
        "rollout.prompts_per_step": 128,
        "train.minibatches": 4,
    },
    "slime/search_agent.sh": {
        **DAPO_RUN,
        "algorithm.kl.coefficient": 0.001,
        "algorithm.kl.placement": "loss",
        "algorithm.kl.estimator": "k3",
        "algorithm.kl.importance_weighted": False,
        "learner.optimizer.weight_decay": 0.01,
        "reward.function": "generate_with_search:reward_func",
        "rollout.max_new_tokens": 512,
    },
    "slime/draft_layer.sh": {**DAPO_RUN, **SEQUENCE_MEAN, "learner.draft.train": True, "eval.every": 20},
    "slime/rollout_logprobs.sh": {**DAPO_RUN, **SEQUENCE_MEAN, "algorithm.old_logprobs": "rollout"},
    "slime/fully_async.sh": {
        **DAPO_RUN,
        **SEQUENCE_MEAN,
        "train.max_staleness": 1,
        "rollout.group_size": 4,
        "model.path": "/root/models/Qwen2.5-0.5B-Instruct",
    },
    "slime/token_mean.sh": {
        **DAPO_RUN,
        "algorithm.aggregation": "token_mean",
        "learner.optimizer.weight_decay": 0.1,
        "data.eval": "/root/gsm8k/test.parquet",
    },
}
REFUSED = {
    "trl/rloo.py.txt": "steps_per_generation=8 (line 10), gradient_accumulation_steps=2 (line 9): RLOOTrainer clips",
    "slime/custom_tis.sh": "--custom-tis-function-path=examples.train_infer_mismatch_helper.",
}


def example(name: str, folder: Path) -> Path:
    """The example as a user has it: Python files end in .py.txt here, so that no tool takes them for code."""
    if not name.endswith(".txt"):
        return EXAMPLES / name
    file = folder / Path(name).name.removesuffix(".txt")
    file.write_text((EXAMPLES / name).read_text())
    return file


def value(config: RunConfig, key: str) -> object:
    found: Any = config.model_dump(mode="json")
    for part in key.split("."):
        found = found[part]
    return found


def given(file: Path) -> Given:
    text = file.read_text()
    reader = next(reader for reader in READERS.values() if reader.recognizes(text, file))
    return reader.read(text, file)


def import_text(folder: Path, name: str, text: str) -> Imported:
    file = folder / name
    file.write_text(text)
    return import_file(file)


def test_each_example_has_an_expectation() -> None:
    names = {f"{file.parent.name}/{file.name}" for file in EXAMPLES.glob("*/*") if file.parent.name != "verl"}
    assert names == EXPECTED.keys() | REFUSED.keys()
    assert len(names) == 20


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_gives_the_values_that_change_the_loss(name: str, tmp_path: Path) -> None:
    imported = import_file(example(name, tmp_path))
    expected = EXPECTED[name]
    assert {key: value(imported.config, key) for key in expected} == expected


@pytest.mark.parametrize("name", EXPECTED)
def test_every_key_is_carried_or_listed(name: str, tmp_path: Path) -> None:
    file = example(name, tmp_path)
    keys, imported = given(file), import_file(file)
    table = framework(keys.framework)
    read = {source for cells in table.cells.values() for cell in cells for source in cell.sources}
    read |= {key for row in table.rows for key in row.when or ()}
    listed = {line.split("=", 1)[0] for line in imported.not_carried}
    assert not [key for key in keys.values if table.renamed.get(key, key) not in read and key not in listed]
    assert not [line for line in imported.not_carried if "not in the tables" in line]


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_counterpart_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        import_file(example(name, tmp_path))
    assert REFUSED[name] in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "OnlineDPOTrainer(model, args=OnlineDPOConfig(beta=0.1))", "trainer=OnlineDPOTrainer (line 1)"),
        ("a.py", "GKDTrainer(model, args=GKDConfig(lmbda=0.5))", "trainer=GKDTrainer (line 1)"),
        ("a.py", "GRPOConfig(importance_sampling_level='sequence')", "importance_sampling_level=sequence (line 1)"),
        ("a.py", "GRPOConfig(repetition_penalty=1.1)", "repetition_penalty=1.1 (line 1): sampling has no such penalty"),
        ("a.py", "SFTConfig(loss_type='dft')", "loss_type=dft (line 1)"),
        ("a.py", "DPOConfig(loss_type=['sigmoid', 'bco_pair'])", "the losses of pairs here are sigmoid"),
        ("a.py", "GRPOConfig(\n  beta=find_beta())", "only the program knows find_beta()"),
        ("grpo.yaml", "num_generations: 8\nlr_scheduler_type: polynomial", "lr_scheduler_type=polynomial (line 2)"),
        ("a.sh", "train.py --advantage-estimator grpo --use-opd", "--use-opd=true (line 1)"),
        ("a.sh", "train.py --advantage-estimator grpo --loss-type custom_loss", "--loss-type=custom_loss (line 1)"),
        (
            "a.sh",
            "train.py --advantage-estimator ppo --kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1",
            "a KL in the loss and one in the reward together have no row here",
        ),
    ],
)
def test_values_without_a_counterpart_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    base = " --n-samples-per-prompt 8 --rollout-batch-size 8 --rollout-max-response-len 8" if name == "a.sh" else ""
    with pytest.raises(ConfigError) as caught:
        import_text(tmp_path, name, text + base)
    assert message in str(caught.value)


def test_rloo_with_one_optimizer_step_a_batch_is_ours(tmp_path: Path) -> None:
    config = import_text(tmp_path, "a.py", "RLOOConfig(num_generations=4)").config
    assert (config.algorithm.objective, config.algorithm.leave_one_out) == ("reinforce", True)
    assert (config.algorithm.kl.coefficient, config.algorithm.kl.estimator) == (0.05, "k1")
    assert config.algorithm.kl.placement == "completion_reward"


def test_unknown_keys_are_listed(tmp_path: Path) -> None:
    of_trl = import_text(tmp_path, "a.py", "GRPOConfig(unheard_of=3)")
    assert any(line.startswith("unheard_of=3 (line 1): not in the tables") for line in of_trl.not_carried)
    text = "train.py --rollout-batch-size 8 --rollout-max-response-len 8 --n-samples-per-prompt 8 --unheard-of 3"
    of_slime = import_text(tmp_path, "a.sh", text)
    assert any(line.startswith("--unheard-of=3 (line 1): not in the tables") for line in of_slime.not_carried)


def test_python_is_read_and_never_run(tmp_path: Path) -> None:
    text = """
import sys; sys.exit(1)
K = 4
N = 8 * K
twice = 1
twice = 2
args = GRPOConfig(num_generations=N, temperature=twice, top_p=-1.0 if K else 1.0, epsilon=0.1 + 0.1, **more)
if K:
    args.beta = 0.5
SFTConfig()
trainer = GRPOTrainer("m", [reward], args=args, peft_config=LoraConfig(r=N, lora_alpha=K))
"""
    read = trl.read(text, tmp_path / "a.py")
    values = {key: (one.value, one.line) for key, one in read.values.items()}
    assert values["num_generations"] == (32, 7)
    assert values["epsilon"] == (0.2, 7)
    assert read.values["temperature"].unresolved == ("twice",)
    assert read.values["top_p"].unresolved == ("-1.0 if K else 1.0",)
    assert values["peft_config.r"] == (32, 11)
    assert values["model_name_or_path"] == ("m", 11)
    assert values["trainer.reward_funcs"] == (["reward"], 11)
    assert values["trainer"] == ("GRPOTrainer", 11)
    assert [note.split(":")[0] for note in read.notes] == ["line 7", "line 10", "line 9"]


def test_a_command_line_is_read_as_trl_does(tmp_path: Path) -> None:
    text = """
# It's a comment
CUDA_VISIBLE_DEVICES=0 accelerate launch --num_processes 2 trl/scripts/grpo.py --config base.yaml \\
    --vllm-mode=server --packing --no_bf16 --beta 1e-3 --reward_weights 1.0 0.5 \\
    --lr_scheduler_kwargs '{"min_lr": 1e-7}' --output_dir $OUT
trl grpo --beta 0.2
"""
    read = trl.read(text, tmp_path / "a.sh")
    values = {key: one.value for key, one in read.values.items()}
    assert values == {
        "trainer": "GRPOTrainer",
        "vllm_mode": "server",
        "packing": True,
        "bf16": False,
        "beta": 1e-3,
        "reward_weights": [1.0, 0.5],
        "lr_scheduler_kwargs": {"min_lr": 1e-7},
        "output_dir": "$OUT",
    }
    assert (read.values["beta"].line, read.values["output_dir"].unresolved) == (4, ("$OUT",))
    assert [note.split(":")[0] for note in read.notes] == ["line 3", "line 6"]


def test_options_of_slime_are_read_as_argparse_does(tmp_path: Path) -> None:
    text = """
source "$DIR/models/x.sh"
A=(
   --eps-clip 0.2 # not --eps-clip 0.3
   --sglang-cuda-graph-bs 1 2 $(seq 4 8)
)
ray job submit -- python3 train_async.py --colocate ${MODEL_ARGS[@]} ${A[@]} --lr=1e-6 --lr 2e-6
python3 train.py --lr 3
"""
    read = slime.read(text, tmp_path / "a.sh")
    values = {key: (one.value, one.line) for key, one in read.values.items()}
    assert values == {
        "program": ("train_async.py", 7),
        "--colocate": (True, 7),
        "--eps-clip": (0.2, 4),
        "--sglang-cuda-graph-bs": ([1, 2, "$(seq 4 8)"], 5),
        "--lr": (2e-6, 7),
    }
    assert [note.split(" ", 3)[1:3] for note in read.notes] == [
        ["2:", "x.sh"],
        ["8:", "this"],
        ["7:", "${MODEL_ARGS[@]}"],
        ["7:", "--lr"],
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "GRPOConfig(beta=" + "(" * 100_000),
        ("a.py", "GRPOConfig(beta=" + "-" * 100_000 + "1)"),
        ("a.py", "GRPOConfig(beta=1"),
        ("a.yaml", "model_name_or_path: " + "[" * 5_000),
        ("a.yaml", "model_name_or_path: [a"),
        ("a.yaml", "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))),
        ("a.yaml", "- model_name_or_path"),
    ],
)
def test_hostile_files_are_errors(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError):
        trl.read(text, tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "A=x\n" + 'A="$A$A"\n' * 40 + "train.py --lr $A",
        "A=(x)\n" + "A=($A $A)\n" * 40 + "train.py --lr $A",
        "A=$U\n" + 'A="$A$A"\n' * 40 + "train.py --lr $A",
        "train.py --lr " + "${A:-" * 5_000 + "}" * 5_000,
        "train.py --lr '",
        "A=(" + "x " * 9,
    ],
)
def test_hostile_scripts_are_errors(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        slime.read(text, tmp_path / "a.sh")


def test_names_of_names_do_not_multiply(tmp_path: Path) -> None:
    names = "".join(f"a{n} = [a{n - 1}, a{n - 1}]\n" for n in range(1, 40))
    read = trl.read(f"a0 = [1, 1]\n{names}GRPOConfig(reward_weights=a39)", tmp_path / "a.py")
    assert read.values["reward_weights"].unresolved


@pytest.mark.parametrize(("program", "staleness"), [("train.py", 0), ("train_async.py", 1)])
def test_slimes_asynchronous_trainer_is_one_push_behind(tmp_path: Path, program: str, staleness: int) -> None:
    options = "--rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 8"
    assert import_text(tmp_path, "a.sh", f"python3 {program} {options}").config.train.max_staleness == staleness


SLIME = "train.py --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 8 --advantage-estimator "
VARIANTS: list[tuple[str, str, dict[str, object]]] = [
    ("a.py", "ORPOConfig()", {"dpo.loss": "orpo", "dpo.nll": 1.0, "dpo.per_token": True, "dpo.reference_free": True}),
    (
        "a.py",
        "CPOConfig(loss_type='simpo', cpo_alpha=0.0, simpo_gamma=1.0, beta=2.0)",
        {"dpo.loss": "dpo", "dpo.per_token": True, "dpo.target_margin": 1.0, "dpo.nll": 0.0, "dpo.beta": 2.0},
    ),
    ("a.py", "DPOConfig(loss_type=['sigmoid', 'sft'], loss_weights=[1.0, 0.5])", {"dpo.loss": "dpo", "dpo.nll": 0.5}),
    ("a.py", "DPOConfig(loss_type='ipo')", {"dpo.loss": "ipo", "dpo.per_token": True}),
    (
        "a.py",
        "GRPOConfig(loss_type='cispo', epsilon_high=4.0)",
        {"algorithm.objective": "cispo", "algorithm.cap_low": 0.0, "algorithm.cap_high": 4.0},
    ),
    ("a.py", "GRPOConfig(loss_type='sapo')", {"algorithm.parameters.tau_negative": 1.05}),
    ("a.py", "GRPOConfig(top_entropy_quantile=0.2)", {"algorithm.tokens.choose": "top_entropy"}),
    ("a.py", "GRPOConfig(beta=0.04)", {"algorithm.kl.coefficient": 0.04, "algorithm.kl.importance_weighted": True}),
    (
        "a.py",
        "GRPOConfig(use_vllm=True, vllm_importance_sampling_mode='token_truncate')",
        {"algorithm.correction.mode": "truncate", "algorithm.correction.level": "token"},
    ),
    (
        "a.py",
        "GRPOConfig(use_vllm=True, vllm_tensor_parallel_size=2)",
        {"rollout.server.colocated": True, "rollout.server.memory_fraction": 0.3, "rollout.server.tp": 2},
    ),
    (
        "a.py",
        "GRPOConfig(use_vllm=True, vllm_mode='server', vllm_tensor_parallel_size=2)",
        {"rollout.server.colocated": False, "rollout.server.memory_fraction": None, "rollout.server.tp": 1},
    ),
    (
        "a.sh",
        SLIME + "ppo --kl-coef 0.1 --value-clip 0.3",
        {
            "algorithm.credit": "gae",
            "algorithm.lam": 1.0,
            "algorithm.whiten": False,
            "algorithm.critic.clip": 0.3,
            "algorithm.kl.coefficient": 0.1,
            "algorithm.kl.placement": "token_reward",
        },
    ),
    ("a.sh", SLIME + "cispo", {"algorithm.cap_low": 0.8, "algorithm.cap_high": 1.2}),
    ("a.sh", SLIME + "grpo --disable-grpo-std-normalization", {"algorithm.advantage_std": "none"}),
    ("a.sh", "X=gr; X+=po\n" + SLIME + "$X --use-tis", {"algorithm.correction.mode": "truncate"}),
]


@pytest.mark.parametrize(("name", "text", "expected"), VARIANTS)
def test_variants_of_the_loss(tmp_path: Path, name: str, text: str, expected: dict[str, object]) -> None:
    config = import_text(tmp_path, name, text).config
    assert {key: value(config, key) for key in expected} == expected
