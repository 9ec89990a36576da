"""Reads TRL's configurations: YAML files, calls of Config and Trainer in Python, and command lines. It runs nothing.

Keys are the names of the arguments. ``trainer`` is the trainer's class, and ``trainer.<name>`` an argument of its call.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from rl_megatron.config.yaml_text import scalar
from rl_megatron.errors import ConfigError
from tools.migrate.conversions import folder_name
from tools.migrate.given import SKIP, Given, NoCounterpart, ToSet, Value
from tools.migrate.shell import Word, commands

FRAMEWORK = "TRL"
_MARK = re.compile(
    r"\b(?:[A-Z]\w*Trainer\(|TrlParser\b|(?:GRPO|RLOO|DPO|SFT|KTO|ORPO|CPO|GKD|PPO|Reward)Config\b|model_name_or_path\b"
    r"|per_device_train_batch_size\b|max_completion_length\b|num_generations\b)"
)
_CLASS = re.compile(r"(?P<name>[A-Z]\w*?)(?P<kind>Config|Trainer)")
_OTHER_CONFIGS = {
    "Lora",
    "Model",
    "Generation",
    "BitsAndBytes",
    "Mxfp4",
    "Peft",
    "Dataset",
    "Auto",
    "Accelerator",
    "Script",
}
_TRAINERS = {
    name.lower(): f"{name}Trainer"
    for name in ("GRPO", "RLOO", "GSPO", "DPO", "SFT", "KTO", "ORPO", "CPO", "GKD", "GOLD", "PPO", "BCO", "PRM", "XPO")
} | {"gspo": "GRPOTrainer", "reward": "RewardTrainer", "nash": "NashMDTrainer", "online": "OnlineDPOTrainer"}
_COMMAND = re.compile(r"[ \t]*(?:\w+=\S+[ \t]+)*(?:accelerate[ \t]+launch|python3?|torchrun|trl|uv[ \t]+run)[ \t]")
_OPTION = re.compile(r"--[A-Za-z][\w-]*")
_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_MAX_NODES = 1 << 16
_MAX_DEPTH = 32


def recognizes(text: str, path: Path) -> bool:
    """True if the text names arguments or classes of TRL."""
    return _MARK.search(text) is not None


def read(text: str, path: Path) -> Given:
    """Returns the arguments that a file gives. Raises ConfigError, with the line, for text that it cannot read."""
    notes = list[str]()
    if path.suffix in {".yaml", ".yml"}:
        values = _read_yaml(text)
    elif path.suffix == ".py":
        values = _Module(text, notes).values()
    else:
        values = _read_commands(text, 0, notes)
    if not values:
        raise ConfigError("names no argument of TRL")
    if "trainer" not in values:
        values = {"trainer": Value(_named_trainer(path, values), 1), **values}
        notes.append(f"trainer: the file names no trainer; its name and its arguments say {values['trainer'].value}")
    return Given(framework=FRAMEWORK, values=values, notes=tuple(notes))


def _named_trainer(path: Path, values: Mapping[str, Value]) -> str:
    """The trainer that the file's name, its folder or its arguments say. Raises ConfigError if none does."""
    for name in (path.name, path.parent.name):
        for word in re.split(r"[^a-z]+", name.lower()):
            if word in _TRAINERS:
                return _TRAINERS[word]
    if values.keys() & {"num_generations", "max_completion_length"}:
        return "GRPOTrainer"
    if values.keys() & {"packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field"}:
        return "SFTTrainer"
    raise ConfigError("names no trainer; rename the file so that its name does, for example to dpo.yaml")


def _read_yaml(text: str) -> dict[str, Value]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"cannot be read as YAML: {' '.join(str(error).split()):.300}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("line 1: not a YAML mapping of arguments to values")
    left = [_MAX_NODES]
    return {str(key.value): Value(_plain(value, left), key.start_mark.line + 1) for key, value in root.value}


def _plain(node: yaml.Node, left: list[int], depth: int = 0) -> object:
    """A node's value. Raises ConfigError if nodes, counted again for each alias, are too many or too deep."""
    left[0] -= 1
    if left[0] < 0 or depth > _MAX_DEPTH:
        raise ConfigError(f"line {node.start_mark.line + 1}: too many values, or too many levels of them")
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style in ("'", '"') else scalar(node.value)
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain(value, left, depth + 1) for key, value in node.value}
    return [_plain(one, left, depth + 1) for one in node.value]


def _read_commands(text: str, line: int, notes: list[str]) -> dict[str, Value]:
    """The arguments of the first command that has some; the text begins after ``line`` lines of the file."""
    values = dict[str, Value]()
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        begin = at
        while lines[at].endswith("\\") and at + 1 < len(lines):
            at += 1
        at += 1
        if _COMMAND.match(lines[begin]) is None:
            continue
        words = next(iter(commands("\n".join(lines[begin:at]))), [])
        words = [Word(one.text, one.line + line + begin, one.unresolved) for one in words]
        found = _options(words, [] if values else notes)
        if found and values:
            notes.append(f"line {line + begin + 1}: this is another command; only the first was read")
        values = values or found
    return values


def _options(words: Sequence[Word], notes: list[str]) -> dict[str, Value]:
    """The options of a script, after the launcher's own."""
    start, trainer = 0, ""
    for at, word in enumerate(words):
        module = at > 0 and words[at - 1].text == "-m"
        if word.text.endswith(".py") or module or (at and words[at - 1].text == "trl"):
            start, trainer = at + 1, word.text
            break
    given = dict[str, tuple[int, list[Word]]]()
    last: list[Word] = []
    for word in words[start:]:
        option, equals, first = word.text.partition("=")
        if _OPTION.fullmatch(option):
            last = [Word(first, word.line, word.unresolved)] if equals else []
            given[option.lstrip("-").replace("-", "_")] = (word.line, last)
        else:
            last.append(word)
    values = dict[str, Value]()
    for name, (line, found) in given.items():
        if name == "config":
            notes.append(f"line {line}: the file of --config was not read; set its arguments yourself")
            continue
        parts = [_parse_text(one.text) for one in found]
        value: object = True if not parts else parts[0] if len(parts) == 1 else parts
        if name.startswith("no_") and not found:
            name, value = name.removeprefix("no_"), False
        values[name] = Value(value, line, tuple(part for one in found for part in one.unresolved))
    if values:
        for part in re.split(r"[^a-z]+", trainer.rsplit("/", 1)[-1].lower()):
            if part in _TRAINERS:
                return {"trainer": Value(_TRAINERS[part], words[0].line), **values}
    return values


def _parse_text(text: str) -> object:
    """A value of a command line: a mapping in JSON, or one scalar of YAML."""
    if text.startswith("{"):
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return text
    return {"True": True, "False": False, "None": None}.get(text, scalar(text))


class _Module:
    """The calls of a Python file that give arguments. A name that is assigned once stands for its value."""

    def __init__(self, text: str, notes: list[str]) -> None:
        self.text, self.notes, self.left = text, notes, _MAX_NODES
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise ConfigError(f"line {error.lineno}: cannot be read as Python: {error.msg}") from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"cannot be read as Python: {error}") from error
        self.nodes = list(ast.walk(self.tree))
        bound = Counter(
            node.id if isinstance(node, ast.Name) else node.arg
            for node in self.nodes
            if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load))
        )
        self.constants: dict[str, ast.expr] = {
            target.id: node.value
            for node in self.nodes
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and bound[target.id] == 1
        }

    def values(self) -> dict[str, Value]:
        """The arguments of the first Config and of the first Trainer, or of the first command in the docstring."""
        calls = sorted(
            (node for node in self.nodes if isinstance(node, ast.Call) and _CLASS.fullmatch(_called(node.func))),
            key=lambda call: call.lineno,
        )
        trainers = [call for call in calls if _called(call.func).endswith("Trainer")]
        configs = [call for call in calls if call not in trainers and self._kind(call) not in _OTHER_CONFIGS]
        values = dict[str, Value]()
        if configs:
            values |= self._arguments(configs[0], "")
        elif documentation := ast.get_docstring(self.tree, clean=False):
            first = self.tree.body[0]
            source = "\n".join(self.text.split("\n")[first.lineno - 1 : first.end_lineno])
            values |= _read_commands(source, first.lineno - 1, self.notes) if documentation else {}
        if trainers:
            values |= self._arguments(trainers[0], "trainer.")
            values["trainer"] = Value(_called(trainers[0].func), trainers[0].lineno)
        elif configs:
            values["trainer"] = Value(f"{self._kind(configs[0])}Trainer", configs[0].lineno)
        for call in (*configs[1:], *trainers[1:]):
            self.notes.append(f"line {call.lineno}: this is another {_called(call.func)}; only the first was read")
        self._changes()
        return values

    def _kind(self, call: ast.Call) -> str:
        match = _CLASS.fullmatch(_called(call.func))
        return match["name"] if match else ""

    def _changes(self) -> None:
        """Adds a note for each argument that the program sets after the call."""
        for node in self.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                owner = node.targets[0].value
                if isinstance(owner, ast.Name) and re.search("args$|config$", owner.id):
                    where = f"{owner.id}.{node.targets[0].attr}"
                    self.notes.append(f"line {node.lineno}: the program sets {where}; look whether it changes the loss")

    def _arguments(self, call: ast.Call, prefix: str) -> dict[str, Value]:
        names = ("model", "ref_model" if _called(call.func) in {"DPOTrainer", "KTOTrainer"} else "reward_funcs")
        given = [(name, value) for name, value in zip(names, call.args, strict=False) if not _is_ellipsis(value)]
        for keyword in call.keywords:
            if keyword.arg is None:
                shown = _source(keyword.value)
                self.notes.append(f"line {call.lineno}: the arguments in **{shown} were not read; set them yourself")
            else:
                given.append((keyword.arg, keyword.value))
        values = dict[str, Value]()
        for name, node in given:
            if prefix and name == "args":
                continue
            if isinstance(node, ast.Call) and _called(node.func) == "LoraConfig":
                values |= self._arguments(node, "peft_config.")
                values["use_peft"] = Value("LoraConfig", node.lineno)
                continue
            missing = list[str]()
            value = self._literal(node, missing, _MAX_DEPTH)
            full = "model_name_or_path" if prefix and name == "model" and not missing else prefix + name
            values[full] = Value(value, node.lineno, () if name == "reward_funcs" else tuple(missing))
        return values

    def _literal(self, node: ast.expr, missing: list[str], depth: int) -> object:
        """The value of an expression; a part that only the program knows stays as its text, and goes to ``missing``."""
        self.left -= 1
        match node:
            case _ if not depth or self.left < 0:
                pass
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.Name(id=name) if name in self.constants:
                return self._literal(self.constants[name], missing, depth - 1)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self._literal(one, missing, depth - 1) for one in parts]
            case ast.Dict(keys=keys, values=parts) if all(isinstance(key, ast.Constant) for key in keys):
                names = [str(key.value) for key in keys if isinstance(key, ast.Constant)]
                return dict(zip(names, [self._literal(one, missing, depth - 1) for one in parts], strict=True))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                one, other = (self._literal(end, [], depth - 1) for end in (left, right))
                if _is_small(one) and _is_small(other) and other != 0:
                    return _OPERATORS[type(op)](one, other)
        missing.append(_source(node))
        return missing[-1]


def _called(node: ast.expr) -> str:
    """The name of a function or a class that is called, without its module."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_small(value: object) -> bool:
    return type(value) in (int, float) and abs(cast(float, value)) < 1e15


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _source(node: ast.expr) -> str:
    """The start of an expression's text."""
    try:
        return f"{ast.unparse(node):.60}"
    except RecursionError:
        return type(node).__name__


# Conversions: the values of the arguments that trl.yaml lists in `from`, in that order.

_AGGREGATIONS = {
    "grpo": "seq_mean_token_mean",
    "sapo": "seq_mean_token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
    "luspo": "seq_mean_token_sum",
}
_PAIR_LOSSES = {
    "sigmoid": ("dpo", False),
    "sigmoid_norm": ("dpo", True),
    "ipo": ("ipo", True),
    "hinge": ("hinge", False),
    "simpo": ("dpo", True),
    "kto": ("kto", False),
    "orpo": ("orpo", True),
}
_DECAYS = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "none",
    "constant_with_warmup": "none",
}
_PROCESSES = "the file gives no number of processes; multiply by theirs"


def aggregation(loss: object) -> object:
    """The mean of the tokens' losses."""
    if loss == "bnpo":
        return ToSet("token_mean", "algorithm.aggregation: bnpo divides by the tokens of a micro-batch; here all count")
    if loss not in _AGGREGATIONS:
        raise NoCounterpart("no aggregation here is that of this loss")
    return _AGGREGATIONS[str(loss)]


def chosen_tokens(share: object) -> str:
    """The choice of tokens."""
    return "top_entropy" if float(str(share)) < 1 else "all"


def token_share(share: object) -> object:
    """The share of tokens that are trained on."""
    return share if float(str(share)) < 1 else SKIP


def if_true(is_on: object, value: object) -> object:
    """The value, if the other argument turns it on."""
    return value if is_on is True else SKIP


def correction_mode(mode: object, corrects: object, uses_vllm: object) -> object:
    """The correction for the engine's log-probs, which TRL has with vLLM alone."""
    if uses_vllm is not True or corrects is not True:
        return "none"
    if str(mode).split("_")[-1] not in {"mask", "truncate"}:
        raise NoCounterpart("algorithm.correction.mode is truncate or mask here")
    return str(mode).split("_")[-1]


def correction_level(mode: object, corrects: object, uses_vllm: object) -> object:
    """The level of the weights: TRL's of sequences is the product over the tokens."""
    if uses_vllm is not True or corrects is not True:
        return SKIP
    return "product" if str(mode).startswith("sequence") else "token"


def correction_high(limit: object, corrects: object, uses_vllm: object) -> object:
    """The greatest weight."""
    return limit if uses_vllm is True and corrects is True else SKIP


def engine(uses_vllm: object) -> object:
    """The engine."""
    if uses_vllm is True:
        return "vllm"
    return ToSet("vllm", "rollout.engine=vllm: TRL samples with transformers here; rollout=local does so on a laptop")


def colocated(uses_vllm: object, mode: object) -> object:
    """True if TRL's vLLM shares the GPUs of training; without it nothing is written."""
    return mode == "colocate" if uses_vllm is True else SKIP


def if_colocated(uses_vllm: object, mode: object, value: object) -> object:
    """A key of vLLM that TRL reads only if vLLM shares the GPUs of training."""
    return value if colocated(uses_vllm, mode) is True else SKIP


def prompts_per_step(
    rows: object, group: object, accumulation: object, steps_of_batch: object, whole: object
) -> object:
    """The prompts of a rollout batch; without generation_batch_size they depend on the number of processes."""
    completions = int(str(whole or int(str(rows)) * int(str(steps_of_batch or accumulation))))
    prompts = max(1, completions // int(str(group)))
    if whole is not None:
        return prompts
    return ToSet(
        prompts, f"rollout.prompts_per_step: {completions} completions a process, in groups of {group}; {_PROCESSES}"
    )


def rows_of_step(rows: object, accumulation: object) -> object:
    """The rows of an optimizer step on one process."""
    count = int(str(rows)) * int(str(accumulation))
    return ToSet(count, f"batch_size: {rows} rows x {accumulation} a process; {_PROCESSES}")


def on_long_prompt(limit: object) -> object:
    """Leaves out longer prompts, which older TRL cuts."""
    return (
        SKIP if limit is None else ToSet("drop", "rollout.on_long_prompt=drop: TRL cuts longer prompts; here none is")
    )


def minibatches(steps_of_batch: object, accumulation: object, whole: object) -> object:
    """The optimizer steps of a rollout batch."""
    if whole is not None:
        advice = "train.minibatches: set generation_batch_size / (rows x processes x gradient_accumulation_steps)"
        return ToSet(1, advice)
    number, part = int(str(steps_of_batch or accumulation)), int(str(accumulation))
    if part <= 0 or number % part:
        raise NoCounterpart(f"{number} steps of a batch are not whole optimizer steps of {part}")
    return number // part


def single_step(steps_of_batch: object, accumulation: object, iterations: object) -> int:
    """Accepts only one optimizer step of a rollout batch, the case of RLOOTrainer that is here."""
    if minibatches(steps_of_batch, accumulation, None) != 1 or iterations != 1:
        raise NoCounterpart(
            "RLOOTrainer clips the product of a completion's ratios, which no objective here does; with one optimizer "
            "step a batch (steps_per_generation equal to gradient_accumulation_steps) it is algorithm=rloo"
        )
    return 1


def micro_batch_tokens(completion: object, prompt: object, row: object, trainer: object) -> object:
    """Room for the longest sequence, or for both of a pair, if the default of 8,192 tokens is too small."""
    tokens = int(str(completion)) + int(str(prompt or 256))  # 256: the default of rollout.max_prompt_tokens
    if trainer not in ("GRPOTrainer", "RLOOTrainer"):
        tokens = int(str(row or 0)) * (1 if trainer == "SFTTrainer" else 2)
    return tokens if tokens > 8192 else SKIP


def steps(total: object, epochs_there: object, accumulation: object, steps_of_batch: object) -> object:
    """The rollout batches; TRL counts optimizer steps."""
    if total is None or int(str(total)) <= 0:
        named = f"num_train_epochs={epochs_there}"
        advice = f"train.steps: {named} there; set {epochs_there} x the rows / rollout.prompts_per_step"
        return ToSet(SKIP, advice)
    return -(-int(str(total)) // max(1, int(str(steps_of_batch or accumulation)) // int(str(accumulation))))


def epochs(number: object, total: object) -> object:
    """The passes over the data, unless max_steps is given."""
    return SKIP if total is not None and int(str(total)) > 0 else number


def warmup_steps(number: object, ratio: object, total: object) -> object:
    """The steps of warm-up; a number below 1 is a share of all."""
    share = float(str(number)) if number and float(str(number)) < 1 else float(str(ratio or 0))
    if number and float(str(number)) >= 1:
        return int(float(str(number)))
    if not share:
        return 0
    if total is not None and int(str(total)) > 0:
        return int(share * int(str(total)))
    return ToSet(SKIP, f"train.lr_warmup_steps: {share:g} of the steps there; set {share:g} x the steps")


def lr_decay(name: object) -> object:
    """The schedule of the learning rate."""
    if name not in _DECAYS:
        raise NoCounterpart("train.lr_decay is none, linear or cosine")
    return _DECAYS[str(name)]


def lr_min(options: object, name: object, rate: object) -> object:
    """The learning rate at the end of the decay."""
    if not isinstance(options, Mapping) or name != "cosine_with_min_lr":
        return SKIP
    share = options.get("min_lr_rate")
    return options.get("min_lr", SKIP) if share is None else float(f"{float(str(share)) * float(str(rate)):.6g}")


def one_if_true(value: object) -> object:
    """1 if every layer is computed again."""
    return 1 if value is True else SKIP


def lora_value(uses_adapters: object, of_option: object, of_config: object) -> object:
    """A number of the adapters, from the options or from LoraConfig."""
    return of_option if uses_adapters is True else of_config if uses_adapters == "LoraConfig" else SKIP


def run_name(name: object, folder: object) -> object:
    """The run's name, or the last folder of its output."""
    return folder_name(name or str(folder).rstrip("/").rsplit("/", 1)[-1])


def dataset(name: object) -> object:
    """The file to write a data set to."""
    shown = name or "the program's data set"
    return ToSet("TRAIN.jsonl", f"data.train: write the training rows of {shown} to a .jsonl or .parquet file")


def held_out(name: object) -> object:
    """The file to write held-out rows to."""
    return ToSet("HELD_OUT.jsonl", f"data.eval: write held-out rows of {name or 'the data set'} to a file")


def messages(only_assistant: object) -> object:
    """The column of conversations."""
    if only_assistant is True:
        return "messages"
    return ToSet(
        "messages",
        "data.fields.messages: TRL trains on all tokens of a conversation unless assistant_only_loss=True; here only "
        "the assistant's turns are trained. For rows of prompt and completion set context=prompt messages=completion",
    )


def length_limit(tokens: object) -> object:
    """The most tokens of a row."""
    return tokens or ToSet(SKIP, "max_tokens: TRL has no limit here; set the longest row")


def reward_function(call: object, named: object, weights: object) -> object:
    """The rewards, which are functions of the user."""
    names = call if call is not None else named
    shown = ", ".join(map(str, names)) if isinstance(names, list) else str(names)
    weighted = f" with the weights {weights}" if weights is not None else ""
    punished = "; get_soft_overlong_punishment is algorithm.overlong_buffer" if "soft_overlong" in shown else ""
    return ToSet(
        "rewards:reward",
        f"reward.function: TRL's functions run as they are; yours are {shown}{weighted}{punished}. Name one, or "
        "several in reward.parts (docs/data.md)",
    )


def eval_every(every: object, strategy: object) -> object:
    """The steps between evaluations; 0 without them."""
    if strategy != "steps" or every is None:
        return 0
    return int(float(str(every))) or ToSet(0, f"eval.every: {every} of the steps there; set it")


def save_every(every: object, strategy: object) -> object:
    """The steps between checkpoints; 0 is after the last one alone."""
    if strategy != "steps":
        return 0
    return int(float(str(every))) or ToSet(0, f"checkpoint.every: {every} of the steps there; set it")


def _pair(loss: object) -> tuple[str, bool, bool]:
    """The loss of a pair, if it is per token, and if the NLL of the better answer is added."""
    kinds = [str(one) for one in loss] if isinstance(loss, list) else [str(loss)]
    first = [one for one in kinds if one != "sft"]
    if len(first) != 1 or first[0] not in _PAIR_LOSSES or len(kinds) > 2:
        raise NoCounterpart("the losses of pairs here are " + ", ".join(_PAIR_LOSSES) + ", with sft in addition")
    return (*_PAIR_LOSSES[first[0]], "sft" in kinds)


def pair_loss(loss: object) -> object:
    """The loss of a pair."""
    return _pair(loss)[0]


def per_token(loss: object) -> object:
    """True for means over tokens."""
    return _pair(loss)[1]


def nll(loss: object, weights: object) -> object:
    """The weight of the NLL of the better answer."""
    if not _pair(loss)[2]:
        return 0.0
    if not isinstance(weights, list):
        return 1.0
    kinds = list(cast(list[object], loss))
    if float(str(weights[1 - kinds.index("sft")])) != 1:
        raise NoCounterpart("the loss of the pair has weight 1 here; divide the weights by its own")
    return weights[kinds.index("sft")]
