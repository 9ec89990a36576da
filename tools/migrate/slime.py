"""Reads slime's run scripts: the options after train.py, from arrays and variables. No shell is run.

Keys are the options as the script writes them (slime/utils/arguments.py, and Megatron's own). A flag without a value is
True, and several values are a list.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rl_megatron.config.yaml_text import scalar
from rl_megatron.errors import ConfigError
from tools.migrate.conversions import folder_name
from tools.migrate.given import SKIP, Given, NoCounterpart, ToSet, Value
from tools.migrate.shell import Word, commands

FRAMEWORK = "slime"
_PROGRAM = re.compile(r"(.*/)?train(_async)?\.py")
_MARK = re.compile(r"--(?:hf-checkpoint|rollout-batch-size|n-samples-per-prompt|advantage-estimator|num-rollout)\b")
_OPTION = re.compile(r"--[A-Za-z][\w-]*")


def recognizes(text: str, path: Path) -> bool:
    """True if the text has options of slime."""
    return path.suffix not in {".py", ".yaml", ".yml"} and _MARK.search(text) is not None


def read(text: str, path: Path) -> Given:
    """Returns the options of the first training that the script starts, or of a file that has only options.

    Raises ConfigError if it finds no options.
    """
    notes = list[str]()
    options: Sequence[Word] | None = None
    program = Value("train.py", 1)
    for words in commands(text):
        if words[0].text in {"source", "."}:
            notes.append(f"line {words[0].line}: {_file(words)} was not read; set its options yourself")
        start = next((at + 1 for at, word in enumerate(words) if _PROGRAM.fullmatch(word.text)), None)
        if start is None and _OPTION.match(words[0].text):
            start = 0
        if start is None:
            continue
        if options is None:
            options = words[start:]
            program = Value(words[start - 1].text.rsplit("/", 1)[-1] if start else "train.py", words[0].line)
        else:
            notes.append(f"line {words[0].line}: this is a second training; only the first was read")
    if not options:
        raise ConfigError(f"{path}: has no command train.py or train_async.py with options")
    values = dict[str, Value]()
    for name, line, given in split_options(options, notes):
        if name in values:
            notes.append(f"line {line}: {name} replaces the value of line {values[name].line}")
        values[name] = read_value(given, line)
    return Given(framework=FRAMEWORK, values={"program": program, **values}, notes=tuple(notes))


def split_options(words: Sequence[Word], notes: list[str]) -> list[tuple[str, int, list[Word]]]:
    """Returns the name, the line and the values of each option. Adds a note for each word that belongs to none."""
    options = list[tuple[str, int, list[Word]]]()
    for word in words:
        name, equals, value = word.text.partition("=")
        if _OPTION.fullmatch(name):
            options.append((name, word.line, [Word(value, word.line, word.unresolved)] if equals else []))
        elif word.text in word.unresolved and word.text.endswith("[@]}"):
            notes.append(f"line {word.line}: {word.text} has no value in this file; set its options yourself")
        elif options:
            options[-1][2].append(word)
        else:
            notes.append(f"line {word.line}: {word.text:.60} stands before the first option, and was not read")
    return options


def read_value(words: Sequence[Word], line: int) -> Value:
    """The value of an option: True without words, and a list of several."""
    given: list[object] = [scalar(word.text) for word in words]
    unresolved = tuple(part for word in words for part in word.unresolved)
    return Value(True if not given else given[0] if len(given) == 1 else given, line, unresolved)


def _file(words: Sequence[Word]) -> str:
    return words[1].text.rsplit("/", 1)[-1] if len(words) > 1 else "its file"


# Conversions: the values of the options that slime.yaml lists in `from`, in that order.


def advantage_std(not_by_std: object, not_at_all: object) -> str:
    """The division by the standard deviation of the group."""
    return "none" if not_by_std is True or not_at_all is True else "group"


def cap_low(limit: object) -> float:
    """The lower cap of CISPO, as a ratio."""
    return round(1 - float(str(limit)), 12)


def cap_high(own: object, both: object) -> float:
    """The upper cap of CISPO, as a ratio."""
    return round(1 + float(str(both if own is None else own)), 12)


def kl_coefficient(in_loss: object, uses_loss: object, in_reward: object, estimator: object) -> object:
    """The weight of the KL. Advantages of groups do not read the KL of the reward there."""
    of_loss = float(str(in_loss)) if uses_loss is True else 0.0
    of_reward = float(str(in_reward)) if estimator in ("ppo", "reinforce_plus_plus") else 0.0
    if of_loss and of_reward:
        raise NoCounterpart("a KL in the loss and one in the reward together have no row here")
    return in_loss if of_loss else in_reward if of_reward else 0.0


def kl_placement(in_loss: object, uses_loss: object, in_reward: object, estimator: object) -> object:
    """The place of the KL that is on."""
    weight = kl_coefficient(in_loss, uses_loss, in_reward, estimator)
    return "token_reward" if float(str(weight)) and not (uses_loss is True and float(str(in_loss))) else "loss"


def kl_estimator(estimator: object, uses_loss: object, in_loss: object) -> object:
    """The estimator of the KL, if it is in the loss."""
    if uses_loss is not True or not float(str(in_loss)):
        return SKIP
    return "k3" if estimator == "low_var_kl" else estimator


def one_if_given(value: object) -> object:
    """1 for a number."""
    return SKIP if value is None else 1.0


def zero_if_null(value: object) -> object:
    """0 for a period that is not given, which turns it off."""
    return value or 0


def required(value: object) -> object:
    """An option that slime needs."""
    if value is None:
        raise NoCounterpart("slime needs this option, and the file does not give it")
    return value


def dynamic_sampling(path: object) -> object:
    """The filter of groups."""
    if path is None:
        return "off"
    if str(path).endswith(".check_reward_nonzero_std"):
        return "refill"
    raise NoCounterpart("a filter of your own; here groups of equal rewards are drawn again (rollout.dynamic_sampling)")


def steps(rollouts: object, epochs: object) -> object:
    """The number of steps; epochs need the number of rows, which the file does not give."""
    if rollouts is not None:
        return rollouts
    return SKIP if epochs is not None else ToSet(SKIP, "train.steps: the file gives no number of rollouts")


def epochs(number: object, rollouts: object) -> object:
    """The passes over the data, unless the number of steps is given."""
    return SKIP if rollouts is not None or number is None else number


def sft_batch(rows: object, of_rollout: object) -> object:
    """The rows of an optimizer step."""
    return rows or of_rollout or SKIP


def minibatches(given: object, rows: object, prompts: object, group: object) -> object:
    """The number of minibatches of a rollout batch."""
    if given is not None:
        return given
    if rows is None or prompts is None:
        return 1
    whole = int(str(prompts)) * int(str(group))
    if int(str(rows)) <= 0 or whole % int(str(rows)):
        raise NoCounterpart(f"{whole} completions of a rollout are not whole batches of {rows}")
    return whole // int(str(rows))


def warmup_steps(number: object, share: object) -> object:
    """The steps of warm-up."""
    if share is not None and float(str(share)):
        return ToSet(SKIP, f"train.lr_warmup_steps: {share} of the steps there; set {share} x the steps")
    return number


def max_staleness(program: object, path: object) -> object:
    """The age of samples: train_async.py trains on samples of one version before."""
    if "fully_async" in str(path):
        return ToSet(1, "train.max_staleness: slime has no limit of the age in a fully asynchronous run; set yours")
    return 1 if "async" in str(program) else 0


def data_parallel(per_node: object, nodes: object, *degrees: object) -> object:
    """The data-parallel degree that fills the GPUs of the learner."""
    gpus = int(str(per_node)) * int(str(nodes))
    for degree in degrees:
        if gpus % int(str(degree)):
            raise NoCounterpart(f"{gpus} GPUs are not whole groups of {degree}")
        gpus //= int(str(degree))
    return gpus


def micro_batch_tokens(of_gpu: object, cp: object) -> object:
    """The tokens of a micro-batch over all ranks that share its sequences."""
    return SKIP if of_gpu is None else int(str(of_gpu)) * int(str(cp))


def one_if_full(granularity: object) -> object:
    """1 if every layer is computed again."""
    return 1 if granularity == "full" else SKIP


def memory_fraction(value: object, shares_gpus: object) -> object:
    """The engine's share of a GPU's memory; SGLang chooses it if it is not given."""
    if value is not None or shares_gpus is not True:
        return SKIP if value is None else value
    return ToSet(0.6, "rollout.server.memory_fraction=0.6: SGLang chooses it there; check that the learner has room")


def sinks(wandb: object, tensorboard: object) -> object:
    """The places that get metrics; TensorBoard's files are always written here."""
    return ["tensorboard", "wandb"] if wandb is True else SKIP


def seconds(minutes: object) -> object:
    """Minutes as seconds."""
    return float(str(minutes)) * 60


def run_name(folder: object) -> object:
    """The last folder of the checkpoints' path, as a name."""
    return SKIP if folder is None else folder_name(str(folder).rstrip("/").rsplit("/", 1)[-1])


def eval_file(given: object) -> object:
    """The file of the first evaluation set, which a name precedes there."""
    if isinstance(given, list) and len(given) > 1:
        return given[1] if len(given) == 2 else ToSet(given[1], "data.eval: only the first set; others are eval.sets")
    advice = "data.eval: the file names no evaluation set; give one, which shares no rows with data.train"
    return given if given is not None else ToSet("HELD_OUT.jsonl", advice)


def reward_function(kind: object, path: object, url: object) -> object:
    """The reward: a kind of slime's, or the user's function."""
    if path is not None:
        module, _, name = str(path).rpartition(".")
        advice = f"reward.function: slime calls {name}(args, sample); give it the arguments of docs/data.md"
        return ToSet(f"{module.rsplit('.', 1)[-1] or 'rewards'}:{name}", advice)
    if kind in ("math", "deepscaler", "dapo"):
        advice = f"reward.function: math_verify stands for --rm-type {kind}; they may read some answers differently"
        return ToSet("math_verify", advice)
    if kind is None:
        return ToSet(SKIP, "reward.function: the file names no reward; set one")
    raise NoCounterpart(f"no reward here is {kind}{f' at {url}' if url else ''}; write a function (docs/data.md)")
