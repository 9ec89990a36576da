"""Reads verl's launch scripts and YAML files, and converts values of its keys that need more than a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rl_megatron.config import yaml_text
from rl_megatron.errors import ConfigError
from tools.migrate.conversions import count_rows, data_file
from tools.migrate.given import SKIP, Given, NoCounterpart, ToSet, Value
from tools.migrate.shell import Word, commands

FRAMEWORK = "verl"
_PROGRAM = re.compile(r"(verl|recipe)(\.\w+)*\.(?P<name>\w*(main|trainer)\w*)")
_OVERRIDE = re.compile(r"(?P<sign>[+~]*)(?P<key>[A-Za-z_][\w./@]*)=(?P<value>.*)", re.S)
_TOP = {"actor_rollout_ref", "algorithm", "trainer", "data", "critic", "reward_model"}
_INTERPOLATED = re.compile(r"\$\{([\w.]+)\}")
_ESTIMATORS = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "abs": "abs"}
_LR = {"constant": "none", "cosine": "cosine", "linear": "linear"}


def recognizes(text: str, path: Path) -> bool:
    """True for a script that calls a program of verl, or a YAML file with two of verl's sections."""
    if path.suffix in {".yaml", ".yml"}:
        return len(set(re.findall(r"^(\w+):", text, re.M)) & _TOP) > 1
    return _PROGRAM.search(text) is not None or len(re.findall(r"\bactor_rollout_ref\.\w", text)) > 1


def read(text: str, path: Path) -> Given:
    """Returns the keys of a script's command, or of a YAML file, and ``entry``: ``ppo`` or ``sft``."""
    if path.suffix in {".yaml", ".yml"}:
        return Given(framework=FRAMEWORK, values={**_yaml_values(text), "entry": Value(_entry(text), 1)})
    for words in commands(text):
        program = next((one for one in words if _PROGRAM.search(one.text)), None)
        overrides = dict(_overrides(words))
        if program is not None or len(overrides) > 1:
            line = program.line if program else words[0].line
            return Given(framework=FRAMEWORK, values={**overrides, "entry": Value(_entry(program), line)})
    raise ConfigError("no command in the script starts a trainer of verl, such as python3 -m verl.trainer.main_ppo")


def _entry(program: Word | str | None) -> str:
    return "sft" if program is not None and "sft" in (program if isinstance(program, str) else program.text) else "ppo"


def _overrides(words: list[Word]) -> Iterator[tuple[str, Value]]:
    """The keys of a command line; the last value of a key counts."""
    for word in words:
        match = _OVERRIDE.fullmatch(word.text)
        if match is None or match["key"].startswith("-") or "." not in match["key"]:
            continue
        unresolved = tuple(part for part in word.unresolved if part.split(",")[0] in match["value"])
        yield match["key"], Value(_parsed(match["value"]), word.line, unresolved)


def _parsed(text: str) -> object:
    """A value of Hydra: YAML's types, lists in brackets, quotes."""
    text = text.strip()
    if re.fullmatch(r"\[.*\]", text, re.S):
        inner = [one.strip() for one in text[1:-1].split(",") if one.strip()]
        return [_parsed(one) for one in inner]
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return None if text == "None" else yaml_text.scalar(text)


def _yaml_values(text: str) -> dict[str, Value]:
    """The keys of a YAML file by their dotted names, without Hydra's own."""
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"cannot be read as YAML: {' '.join(str(error).split())}") from error
    found = dict(_leaves("", tree))
    out: dict[str, Value] = {}
    for key, value in found.items():
        if key.startswith(("hydra.", "defaults")) or key.endswith("._target_") or value.value == "???":
            continue
        if isinstance(value.value, str) and "${" in value.value:
            whole = _INTERPOLATED.fullmatch(value.value)
            if whole is None or whole[1] not in found:  # an expression over verl's defaults: the default it is
                continue
            value = Value(found[whole[1]].value, value.line)
        out[key] = value
    return out


def _leaves(name: str, node: Any) -> Iterator[tuple[str, Value]]:
    if isinstance(node, yaml.MappingNode) and node.value:
        for key, value in node.value:
            yield from _leaves(f"{name}.{key.value}".lstrip("."), value)
    elif isinstance(node, yaml.SequenceNode):
        yield name, Value([_plain(one) for one in node.value], node.start_mark.line + 1)
    elif isinstance(node, yaml.ScalarNode):
        yield name, Value(_plain(node), node.start_mark.line + 1)


def _plain(node: Any) -> object:
    if not isinstance(node, yaml.ScalarNode):
        return str(node.value)
    return node.value if node.style in ("'", '"') else _parsed(node.value)


# Conversions: the values of the keys that verl.yaml lists in `from`, in that order.


def advantage_std(estimator: object, by_std: object) -> str:
    """The division by the standard deviation."""
    return "group" if estimator in ("grpo", "grpo_passk", "gdpo") and by_std is not False else "none"


def credit(estimator: object) -> object:
    """The credit of tokens."""
    if "optimal_token_baseline" in str(estimator):
        return "optimal"
    return {"gae": "gae", "reinforce_plus_plus": "discounted"}.get(str(estimator), "completion")


def clip_low(own: object, both: object, loss: object) -> object:
    """The lower limit of the ratio: its own key, or ``clip_ratio`` if only that is changed."""
    limit = float(str(both if own == 0.2 and both != 0.2 else own))
    return round(1 - math.exp(-limit), 4) if loss == "geo_mean" else limit


def clip_high(own: object, both: object, loss: object) -> object:
    """The upper limit of the ratio, like `clip_low`."""
    limit = float(str(both if own == 0.2 and both != 0.2 else own))
    return round(math.exp(limit) - 1, 4) if loss == "geo_mean" else limit


def is_rloo(estimator: object) -> bool:
    """True if the baseline leaves the completion itself out."""
    return estimator in ("rloo", "grpo_passk")


def whitens(estimator: object) -> bool:
    """True if verl whitens the advantages over the batch."""
    return estimator in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def passk_size(estimator: object, completions: object) -> object:
    """The number of completions whose best reward counts."""
    return completions if estimator == "grpo_passk" else 1


def ratio_level(loss: object) -> str:
    """The level of the ratio."""
    return "sequence" if loss == "gspo" else "token"


def chosen_tokens(loss: object) -> object:
    """The choice of tokens."""
    return loss if loss in ("clip_cov", "kl_cov") else "all"


def dual_clip(limit: object, loss: object) -> object:
    """The dual clip, which verl's GSPO does not read."""
    return SKIP if loss != "vanilla" else limit


def aggregation(mode: object, loss: object) -> object:
    """The aggregation; some of verl's losses average over sequences whatever the key says."""
    if loss in ("gspo", "geo_mean", "sapo"):
        return "seq_mean_token_mean"
    known = {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "seq_mean_token_mean",
        "seq-mean-token-sum": "seq_mean_token_sum",
        "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
    }
    if mode not in known:
        raise NoCounterpart("no aggregation here divides so (note 4 of docs/migrating.md)")
    return known[str(mode)]


def cap_low(limit: object) -> float:
    """The lower cap of CISPO, as a ratio."""
    return round(1 - float(str(limit)), 12)


def cap_high(limit: object, of_ratio: object, loss: object) -> float:
    """The upper cap of CISPO, 1 + its limit, or of DPPO, as a ratio."""
    return float(str(of_ratio)) if str(loss).startswith("dppo") else round(1 + float(str(limit)), 12)


def kl_coefficient(in_loss: object, of_loss: object, in_reward: object, of_reward: object) -> object:
    """The weight of the KL, which is in the loss or in the reward."""
    if in_loss is True and in_reward is True and float(str(of_loss)) and float(str(of_reward)):
        raise NoCounterpart("a KL in the loss and one in the reward together have no row here")
    if in_loss is True and float(str(of_loss)):
        return of_loss
    return of_reward if in_reward is True else 0.0


def kl_placement(in_reward: object, of_reward: object, estimator: object) -> object:
    """The place of the KL; without a credit of tokens verl's sum of tokens' rewards is one of the completion."""
    if in_reward is not True or not float(str(of_reward)):
        return "loss"
    return "token_reward" if estimator in ("gae", "reinforce_plus_plus") else "completion_reward"


def kl_estimator(in_reward: object, of_reward: object, of_loss: object, type_of_control: object) -> object:
    """The estimator of the KL that is on."""
    if in_reward is True and type_of_control != "fixed":
        raise NoCounterpart("a coefficient that adapts to the KL has no key here; use a fixed one")
    chosen = str(of_reward if in_reward is True else of_loss).removesuffix("+")
    if chosen != str(of_reward if in_reward is True else of_loss):
        raise NoCounterpart("the gradient of k2 under the value of another estimator has no key here")
    if chosen not in _ESTIMATORS:
        raise NoCounterpart("the KL over the whole vocabulary has no key here")
    return _ESTIMATORS[chosen]


def _rejection(chosen: object, limits: object) -> tuple[str, str, object, float]:
    """The mode, level and limits of a rejection (note 14 of docs/migrating.md). Raises NoCounterpart."""
    match = re.fullmatch(r"(?P<level>token|seq_mean|seq_sum|seq_max)_k(?P<kind>[13])", str(chosen))
    if match is None or match[0] == "seq_max_k1":
        raise NoCounterpart("one rejection by k1 or k3 is here, and none by k2, by binary_kl, or by several")
    level = {"token": "token", "seq_mean": "sequence", "seq_sum": "product", "seq_max": "worst"}[match["level"]]
    numbers = [float(part) for part in str(limits).split("_")]
    if match["kind"] == "3":
        return "reject", level, SKIP, numbers[0]
    low, high = numbers if len(numbers) == 2 else (1 / numbers[0], numbers[0])
    return "band", level, round(1 / high, 12), round(1 / low, 12)


def correction_mode(
    weight: object, rejection: object, threshold: object, normalized: object, limits: object, bypass: object
) -> object:
    """The correction's mode."""
    if rejection is None:
        if normalized is True:
            raise NoCounterpart("weights that are divided by their mean over the batch have no key here")
        return "none" if weight is None else "mask" if "_" in str(threshold) else "truncate"
    if weight is not None or bypass is True:
        raise NoCounterpart(
            "a rejection is here without weights and with old_logprobs=learner; leave out rollout_is and bypass_mode"
        )
    advice = "algorithm.correction: verl's mean is over the tokens that are kept; here the others count as 0 (note 14)"
    return ToSet(_rejection(rejection, limits)[0], advice)


def correction_level(weight: object, rejection: object, limits: object) -> object:
    """The level of the weights, or of the rejection."""
    if rejection is not None:
        return _rejection(rejection, limits)[1]
    return {"sequence": "product", "token": "token"}.get(str(weight), SKIP)


def correction_low(threshold: object, rejection: object, limits: object) -> object:
    """The least weight."""
    if rejection is not None:
        return _rejection(rejection, limits)[2]
    return float(str(threshold).split("_")[0]) if "_" in str(threshold) else SKIP


def correction_high(threshold: object, rejection: object, limits: object) -> object:
    """The greatest weight, or divergence."""
    if rejection is not None:
        return _rejection(rejection, limits)[3]
    return float(str(threshold).split("_")[-1])


def overlong_buffer(enabled: object, length: object) -> object:
    """The length of the soft penalty; 0 if it is off."""
    return int(str(length)) if enabled is True and length is not None else 0


def unfinished_reward(estimator: object) -> object:
    """The reward of a completion that was cut, which a critic's row replaces."""
    if estimator != "gae":
        return SKIP
    return ToSet(
        SKIP,
        "algorithm.unfinished_reward: algorithm=ppo gives a cut completion 0, verl its own reward; null here adds the "
        "critic's value to that",
    )


def overlong_factor(factor: object, enabled: object) -> object:
    """The penalty of the longest completion. verl's reward of DAPO is 1 or -1."""
    if enabled is not True:
        return SKIP
    advice = "algorithm.overlong_factor: halve it if your rewards are 1 and 0; verl's for DAPO's problems are 1 and -1"
    return ToSet(factor, advice)


def minibatches(prompts: object, of_minibatch: object) -> object:
    """The number of minibatches of a rollout batch."""
    whole, part = int(str(prompts)), int(str(of_minibatch))
    if part <= 0 or whole % part:
        raise NoCounterpart(f"{whole} prompts of a step are not whole minibatches of {part}")
    return whole // part


def steps(total: object, epochs: object, prompts: object, files: object) -> object:
    """The number of steps; epochs need the number of rows, which is read if the files are on this machine."""
    if total is not None:
        return total
    rows, batch = count_rows(files), int(str(prompts))
    if rows is None or rows < batch:
        return ToSet(SKIP, f"train.steps: total_epochs={epochs} there; set {epochs} x the rows of data.train / {batch}")
    number = int(str(epochs)) * (rows // batch)
    return ToSet(
        number, f"train.steps={number}: total_epochs={epochs} of {rows} rows; fewer if long prompts are dropped"
    )


def warmup_steps(number: object, ratio: object, total: object) -> object:
    """The steps of warm-up."""
    if number is not None and int(str(number)) > 0:
        return number
    share = float(str(ratio or 0))
    if not share:
        return 0
    if total is None:
        return ToSet(SKIP, f"train.lr_warmup_steps: {share:g} of the steps there; set {share:g} x train.steps")
    return int(share * int(str(total)))


def lr_decay(name: object) -> object:
    """The schedule of the learning rate."""
    if name not in _LR:
        raise NoCounterpart("train.lr_decay is none, linear or cosine")
    return _LR[str(name)]


def lr_min(minimum: object, share: object, rate: object) -> object:
    """The learning rate at the end of the decay."""
    return minimum or float(str(share or 0)) * float(str(rate)) or SKIP


def beta1(betas: object) -> object:
    """Adam's first beta."""
    return betas[0] if isinstance(betas, list) else SKIP


def beta2(betas: object) -> object:
    """Adam's second beta."""
    return betas[1] if isinstance(betas, list) else SKIP


def on_long_prompt(filters: object, truncation: object) -> object:
    """The treatment of longer prompts; none is cut here."""
    if filters is True:
        return "drop"
    if truncation in (None, "error"):
        return "fail"
    return ToSet("drop", f"rollout.on_long_prompt=drop: verl cuts longer prompts ({truncation}); here they are dropped")


def whole_gpus(per_node: object, nodes: object, *degrees: object) -> object:
    """The data-parallel degree that fills all GPUs."""
    gpus = int(str(per_node)) * int(str(nodes))
    for degree in degrees:
        if gpus % int(str(degree)):
            raise NoCounterpart(f"{gpus} GPUs are not whole groups of {degree}")
        gpus //= int(str(degree))
    return gpus


def largest(*values: object) -> int:
    """The largest of several numbers."""
    return max(int(str(one)) for one in values)


def clip_grad(megatron: object, fsdp: object) -> object:
    """The greatest norm of gradients, from whichever key is changed."""
    return megatron if megatron != 1.0 else fsdp


def micro_batch_tokens(limit: object, dynamic: object, context: object, ulysses: object, *lengths: object) -> object:
    """The tokens of a micro-batch on all ranks of a context-parallel group, at least one sequence."""
    longest = sum(int(str(one)) for one in lengths)
    return max(int(str(limit)) * largest(context, ulysses), longest) if dynamic is True else max(longest, 8192)


def lora_alpha(alpha: object, rank: object) -> object:
    """The scale of adapters, if there are any."""
    return alpha if rank is not None and int(str(rank)) > 0 else SKIP


def row_field(key: object, inner: object) -> object:
    """A field of a row, with the field inside it."""
    if isinstance(inner, list) and len(inner) == 1:
        return f"{key}.{inner[0]}"
    return key


def sft_epochs(epochs: object, total: object) -> object:
    """The epochs of a fine-tuning, unless steps are given."""
    return epochs if total is None else SKIP


def uniform_recompute_sft(enabled: object) -> object:
    """Recomputation of every layer."""
    return 1 if enabled is True else SKIP


def eval_file(held_out: object) -> object:
    """The file of held-out rows; without one, a name that the check refuses."""
    if held_out is None:
        return ToSet("HELD_OUT_FILE", "data.eval: the file names no held-out rows; give a file of them")
    return data_file(held_out)


def uniform_recompute(enabled: object, granularity: object) -> object:
    """Recomputation of every layer: verl's with FSDP, or Megatron's full one."""
    return 1 if granularity == "full" or (granularity is None and enabled is True) else SKIP


def engine(name: object) -> object:
    """The engine that samples."""
    if name in ("vllm", "sglang"):
        return name
    if name is None:
        return ToSet("vllm", "rollout.engine: the file names no engine; set vllm or sglang")
    raise NoCounterpart("the engines here are vllm and sglang; another needs an adapter (docs/engines.md)")


def engine_options(eager: object, tokens: object, name: object) -> object:
    """Options of the server's command line."""
    options = []
    if eager is True:
        options.append("--enforce-eager" if name != "sglang" else "--disable-cuda-graph")
    if tokens is not None and name == "vllm":
        options.append(f"--max-num-batched-tokens {tokens}")
    return " ".join(options) or SKIP


def while_sampling(hybrid: object, fsdp: object, megatron: object) -> object:
    """The state that leaves the GPU while servers sample."""
    if hybrid is not True:
        return SKIP
    return "optimizer" if fsdp is True or megatron is True else "gradients"


def reward_model_path(enabled: object, path: object) -> object:
    """The folder of the reward model, if it is on."""
    return path if enabled is True else SKIP


def reward_function(path: object, name: object, files: object, model: object) -> object:
    """The reward: a model's, the user's function, or verl's own choice by the rows' data_source."""
    if model is True:
        return "ranks:rm"
    if path is not None:
        module = Path(str(path)).stem
        return ToSet(
            f"{module}:{name}",
            f"reward.function: verl calls {name}(data_source, solution_str, ground_truth, extra_info); give it the "
            "arguments of docs/data.md",
        )
    return ToSet(
        "final_number" if "gsm8k" in str(files) and "math" not in str(files) else "math_verify",
        "reward.function: verl scores each row by its data_source, which the file does not show; check the choice",
    )


def samples_set(value: object) -> object:
    """A key of a set of evaluations that differs from one greedy sample."""
    return SKIP if value in (None, 1, 1.0, -1, 0) else value
