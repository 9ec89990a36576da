"""Each key of the algorithm, of rewards, of sampling and of training, set to another value in each shipped row: it
changes what one stored step asks of the models (batches, losses, steps, requests), or it is refused by name.

The real trainer, sampler, update and losses run over models of one table each, without processes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError
from rich.console import Console
from typing_extensions import override

from launcher.build import jobs
from launcher.build.jobs import LearnedRows
from rl_megatron.config.io import load_config
from rl_megatron.config.run import RunConfig
from rl_megatron.config.sections.jobs import DpoSection, LogSection
from rl_megatron.data.problems.pool import PromptStream
from rl_megatron.errors import DataError, RLMegatronError
from rl_megatron.interfaces import RunComponents
from rl_megatron.models.tiny import byte_tokenizer
from rl_megatron.observability.progress import Progress
from rl_megatron.observability.recorder import Recorder, Stopwatch
from rl_megatron.rewards.registry import resolve_reward
from rl_megatron.rollout.sampler import RolloutSampler
from rl_megatron.rollout.stream import Draw, GroupResult, Ledger, LedgerState
from rl_megatron.training.evaluation import Evaluator
from rl_megatron.training.jobs.rl import RLJob, make_stream
from rl_megatron.training.jobs.written import fit_rows, make_units
from rl_megatron.training.update import PolicyUpdate
from rl_megatron.types import Completion, Prompt, RolloutGroup, Trajectory
from tests.completions import completion
from tests.rows import BESIDE, NAMES, WITH_TURNS
from tests.toy_roles import VOCABULARY, Toy, ToyEngine, ToyWeights, decode, table

REPO = Path(__file__).parents[2]
ROWS = [name for name in NAMES if name not in WITH_TURNS]  # of turns: test_keys_of_turns_change_…
SECTIONS = ("algorithm", "reward", "rollout", "train", "roles")
STARTED = 60  # beyond the steps that train a critic alone
BASE = [
    *("reward.function=tests.toy_roles:grade", "reward.on_error=drop", "rollout.prompts_per_step=4"),
    *("rollout.group_size=4", "rollout.max_new_tokens=6", "train.steps=100", "train.learning_rate=100.0"),
    "learner.ep=1",
]
LONGER_RANGE = ["algorithm.overlong_buffer=1", "algorithm.overlong_factor=2.0"]  # else rewards are 0 .. 1 already
TWO_STEPS = ["train.minibatches=2"]  # in a batch's first optimizer step ratios are 1, as without them
NARROW = ["algorithm.clip_high=0.01"]  # else no good token of the few that are trained on is clipped
OF_ROWS = {
    **dict.fromkeys(("dr_grpo", "luffy", "otb"), LONGER_RANGE),
    "rloo": [*LONGER_RANGE, *TWO_STEPS],
    **dict.fromkeys(("reinforce", "remax"), TWO_STEPS),
    "grpo_process": ["reward.function=tests.toy_roles:grade_steps"],
    "gdpo": [
        *BESIDE["gdpo"][:1],
        "reward.parts.grade.function=tests.toy_roles:grade",
        "reward.parts.brief.function=tests.toy_roles:brief",
    ],
    "passk": ["algorithm.best_of=2", *NARROW],  # of four completions
    "top_entropy": NARROW,
    "luspo": ["train.learning_rate=30.0"],  # at 100 times lengths no ratio is near its limits
}
NOT_OF_A_STEP = ("rollout.engine", "rollout.python", "rollout.server", "rollout.stop")  # what samples: tests of engines
ELSEWHERE = {  # keys that act outside of a step, and where that is shown
    "algorithm.kl.top_k": "tests/distributed/test_losses_in_layouts.py",
    "algorithm.kl.teachers": "tests/e2e/test_teacher.py",
    "algorithm.critic.backbone": "tests/unit/algorithms/test_pair_losses.py",
    "algorithm.critic.coefficient": "tests/unit/algorithms/test_pair_losses.py",
    "reward.timeout_seconds": "tests/unit/rollout/test_rollout_sampler.py",
    "roles.critic": "tests/unit/launcher/test_memory.py",
    "roles.reference": "tests/unit/launcher/test_memory.py",
    "rollout.max_prompt_tokens": "tests/unit/data/test_prompts.py",
    "rollout.on_long_prompt": "tests/unit/rollout/test_environments_that_fail.py",
    "rollout.interrupt": "tests/unit/rollout/test_rollout_sampler.py",
    "rollout.slots": "tests/unit/rollout/conftest.py",
}
OTHER_TEXTS = {"reward.format.pattern": ["a+"], "reward.model.label": ["a"]}
OTHER_TEXTS["reward.function"] = ["exact_match", "length"]
BATCHES = ("no step", f"step {STARTED + 1}:")  # in the second all groups of the first step have equal rewards
NUMBERS = [0.01, 2, 0.3, 0.5, 0.9, 1, 1.01, 3, 7, 100]  # the first two act in most places


def leaves(name: str, section: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    for key, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(f"{name}.{key}", field.annotation)
        elif key == "parameters":  # a mapping of numbers by names of ours
            yield from ((f"{name}.{key}.{one}", float) for one in field.get_default())
        else:
            yield f"{name}.{key}", field.annotation


EVERY_KEY = {
    key: annotation
    for section in SECTIONS
    for key, annotation in leaves(section, RunConfig.model_fields[section].annotation)  # type: ignore[arg-type]
    if not key.startswith(NOT_OF_A_STEP)
}


DROP = ("dpo.on_long=drop", "dpo.on_refused=drop")
KEYS_OF_DPO = dict(leaves("dpo", DpoSection))


def alternatives(key: str, annotation: Any) -> Iterator[list[object]]:
    """Lists of values of which one at least must act, or be refused; each name of a choice is a list of its own."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from alternatives(key, inside[0])
    elif origin in (Union, UnionType):
        for one in inside:
            yield from alternatives(key, one)
    elif origin is Literal:
        yield from ([name] for name in inside)
    elif annotation is NoneType:
        yield [None]
    elif annotation is bool:
        yield [False, True]
    elif annotation in (int, float):
        yield [annotation(number) for number in NUMBERS if number == annotation(number)]
    elif annotation is Path:
        yield [Path("another")]
    elif annotation is str:
        yield OTHER_TEXTS.get(key, ["another"])
    elif key == "algorithm.kl.teachers":
        yield [{"t": {"server": "http://127.0.0.1:9", "engine": "vllm", "path": "tests"}}]
    elif key == "roles.layouts":  # on the learner's ranks: refused; else tests/distributed/test_role_layouts.py
        yield [{"critic": {"tp": 2}}]
    else:
        assert key == "reward.parts", (key, annotation)
        yield [{"exact_match": {"weight": 0.5}}]


def value_at(tree: dict[str, Any], key: str) -> Any:
    return functools.reduce(lambda inner, name: inner[name], key.split("."), tree)


def with_value(tree: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    name, _, rest = key.partition(".")
    return tree | {name: with_value(tree[name], rest, value) if rest else value}


class InTwoTurns(RolloutSampler):
    """Cuts each completion behind its first token: a turn with a reward of its own, and the rest."""

    async def groups(self, drawn: Sequence[Draw]) -> Sequence[GroupResult]:
        return [one if one.group is None else self._cut(one, one.group) for one in await super().groups(drawn)]

    def _cut(self, answered: GroupResult, group: RolloutGroup) -> GroupResult:
        return replace(answered, group=replace(group, trajectories=tuple(map(self._in_two, group.trajectories))))

    def _in_two(self, one: Trajectory) -> Trajectory:
        (row,) = one.chains
        (turn,) = row.turns
        if len(turn.logprobs) < 2:
            return one
        reward = 0.1 * (int(row.token_ids[turn.start]) % 3)
        first = replace(turn, logprobs=turn.logprobs[:1].copy(), reward=reward, finish_reason="stop")
        rest = replace(turn, start=turn.start + 1, logprobs=turn.logprobs[1:].copy())
        return replace(one, chains=(replace(row, turns=(first, rest)),))


class InThisThread(asyncio.SelectorEventLoop):
    """Calls at once what is for a thread: a step of these models has twenty such calls, each shorter than a thread's
    turn, or than waking the loop that waits for it."""

    @override
    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  the future raises it
            future.set_exception(error)
        return future


class AnotherCallError(RLMegatronError):
    """A model or the engine is asked what it was not before."""


class Heard(list[object]):
    """The calls of a model or the engine; the first that is not the ``known`` one in its place ends the step."""

    def __init__(self, known: Sequence[object] | None) -> None:
        self._known = known

    @override
    def append(self, call: object) -> None:
        place = len(self)
        super().append(call)
        if self._known is not None and self._known[place : place + 1] != [call]:
            raise AnotherCallError(f"call {place + 1} is another")


def shown(prompt: Prompt) -> Completion:
    """The demonstration of a prompt: twice its tokens, of an even sum."""
    return completion([*prompt.token_ids, *prompt.token_ids], [0.0] * 4, spans=())


class Rig:
    """What a step needs beside its configuration; files are shared, since nobody reads them, and so is the loop."""

    sampler: type[RolloutSampler] = RolloutSampler

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.folder, self._loop = folder, loop
        progress = Progress(1, "plain", console=Console(file=StringIO()))
        self.recorder = Recorder(folder, LogSection(samples_per_step=0), progress)
        self.prompts = [Prompt(id=f"p{i}", text="", token_ids=(i, i + 1), answer=decode((i, i + 1))) for i in range(8)]

    def heard(
        self, config: RunConfig, says_one_thing: str = "no step", known: Sequence[Any] | None = None
    ) -> list[object]:
        """Everything that models and engine are asked in two steps, or the error that ends them: with the first call
        that is not the ``known`` one."""
        return self._loop.run_until_complete(self._heard(config, says_one_thing, known))

    async def _heard(self, config: RunConfig, says_one_thing: str, known: Sequence[Any] | None) -> list[object]:
        heard = [Heard(calls) for calls in known or [None] * 4]
        policy, value = Toy(table(VOCABULARY, VOCABULARY, seed=1), heard[0]), Toy(table(VOCABULARY, seed=2), heard[1])
        reference = Toy(table(VOCABULARY, VOCABULARY, seed=3), heard[2])
        engine = ToyEngine(policy, STARTED, says_one_thing, heard[3])
        weights, needs = ToyWeights(engine), config.algorithm
        roles: Any = RunComponents(
            learners={"policy": policy, **({"critic": value} if needs.needs_critic else {})},
            frozen_models={"reference": reference} if needs.needs_reference else {},
            engine=engine,
            weight_sync=weights,
        )
        trainer = self._trainer(config, roles)
        try:
            await trainer.start_models(fresh=True)
            for number in (1, 2):
                await trainer.step(STARTED + number, Stopwatch())
        except RLMegatronError as error:
            return [*heard, str(error)]
        finally:
            await trainer.close()
        return [*heard]

    def _trainer(self, config: RunConfig, roles: RunComponents) -> RLJob:
        sampler = self.sampler(
            engine=roles.engine,
            reward_function=resolve_reward(config.reward),
            decode=decode,
            rollout=config.rollout,
            reward=config.reward,
            stop_token_ids=() if config.rollout.ignore_eos else (0,),
            seed=config.seed,
            greedy_baseline=config.algorithm.advantage_mean == "greedy",
            columns=("routes",) if config.algorithm.routing_replay == "r3" else (),
            demonstrate=None if config.algorithm.demonstration_gamma is None else shown,
        )
        decay, size = config.algorithm.track_decay, config.rollout.prompts_per_step
        prompts = PromptStream(self.prompts, seed=0, track_decay=decay)
        if prompts.table is not None:
            prompts.table.track([(one.id, (1.0,)) for one in self.prompts[::2]])
        train = config.train.model_copy(update={"steps": STARTED + 2})  # whatever the key is: two steps are made
        stream = make_stream(config.model_copy(update={"train": train}), prompts, sampler, Ledger())
        started = LedgerState(trained=STARTED * size)
        stream.restore(replace(stream.state(), version=STARTED, drawn=STARTED * size, ledger=started))
        return RLJob(
            config=config,
            roles=roles,
            stream=stream,
            prompts=prompts,
            evaluation=Evaluator(sampler=sampler, sets=(), section=config.eval, last_step=0),
            update=PolicyUpdate(
                config=config,
                roles=roles,
                attention_cost=0.0,
                tracked=None if prompts.table is None else prompts.table.prompt_value,
            ),
            start_folder=self.folder / "hf_start",
            recorder=self.recorder,
            push_route="memory",
        )


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with asyncio.Runner(loop_factory=InThisThread) as runner:
        rig = Rig(tmp_path, runner.get_loop())
        yield rig
        rig.recorder.close()


@pytest.mark.parametrize("row", ROWS)
def test_every_key_changes_what_a_step_does_or_is_refused(row: str, rig: Rig) -> None:
    tree = load_config("tiny_cpu", [f"algorithm={row}", *BASE, *OF_ROWS.get(row, [])]).model_dump()
    before = [rig.heard(RunConfig.model_validate(tree), batch) for batch in BATCHES]
    assert all(isinstance(heard[-1], list) for heard in before), before
    silent = []
    for key, annotation in EVERY_KEY.items():
        for values in alternatives(key, annotation):
            others = [value for value in values if value != value_at(tree, key)]
            if others and not any(acts(rig, with_value(tree, key, value), key, before) for value in others):
                silent.append((key, others))
    if tree["algorithm"]["gamma"] == 1:  # the return from each token on is then the completion's reward
        silent = [(key, others) for key, others in silent if key != "algorithm.credit"]
    if row == "cispo":  # dppo_kl is its loss up to a limit, which no token of the stored steps reaches
        silent = [(key, others) for key, others in silent if (key, others) != ("algorithm.objective", ["dppo_kl"])]
    assert not silent


@pytest.mark.parametrize("key", KEYS_OF_DPO)
def test_every_key_of_answers_with_labels_changes_their_job_or_is_refused(key: str) -> None:
    tree = load_config(
        "dpo_tiny", ["data.type=files", "data.train=a", "data.eval=b", "dpo.loss=kto", *DROP]
    ).model_dump()
    before = learned_labels(RunConfig.model_validate(tree))

    def acts_on_labels(value: object) -> bool:
        try:
            config = RunConfig.model_validate(with_value(tree, key, value))
        except ValidationError as error:  # the loss of pairs needs another field of the data
            return key == "dpo.loss" or all(key.rpartition(".")[2] in str(e) for e in error.errors())
        return learned_labels(config) != before

    for values in alternatives(key, KEYS_OF_DPO[key]):
        others = [value for value in values if value != value_at(tree, key)]
        assert not others or any(map(acts_on_labels, others)), others


def learned_labels(config: RunConfig) -> list[object]:
    """What the job asks for, of rows of which one is too long and one has no label: which it trains on, for how many
    steps, and what it compares them by."""
    lengths = [(3, True), (2, False), (600, True), (3, None)]
    prompts = [
        Prompt(id=f"p:{i}", text="1", token_ids=(7, 5), answer="2" * length, meta={"label": label})
        for i, (length, label) in enumerate(lengths)
    ]
    made = LearnedRows(tokenizer=byte_tokenizer(), stop_token_ids=[1], end_token_ids={"": 1}, vocab_size=300)
    units_of: Any = made.units(config)
    nothing: Any = SimpleNamespace(policy=None, critic=None, reference=None)
    parts, data = cast(Any, SimpleNamespace(config=config, folder=Path())), SimpleNamespace(held_out=prompts[:2])
    try:
        built: Any = jobs._objective(parts, nothing, cast(Any, data), units_of, 0.0, nothing)
        units, left_out = make_units(prompts, units_of, config)
        kept = fit_rows(units, config)
    except DataError as error:
        return [str(error)]
    rows = [(row.id, row.token_ids.tolist(), row.margin) for (row,) in kept.units]
    steps = config.written_epochs, config.completions_per_step
    return [rows, left_out, kept.num_dropped, steps, built.loss, built.max_length, built.reference.folder]


@pytest.mark.parametrize("row", ["gspo", "grpo", "cispo"])
def test_keys_of_turns_change_what_a_step_of_two_turns_does(row: str, rig: Rig) -> None:
    rig.sampler = InTwoTurns
    tree = load_config("tiny_cpu", [f"algorithm={row}", *BASE]).model_dump()
    chains: list[list[tuple[str, object]]] = [
        [("credit", "turn"), ("gamma_turn", 0.5), ("turn_baseline", "index")],
        [("credit", "turn"), ("gamma_turn", 0.5), ("turn_compared", "returns"), ("turn_baseline", "state")],
        [("credit", "turn"), ("turn_weight", 0.5), ("turn_weight", 2.0)],
        [("ratio_level", "turn")],
    ]
    for keys in chains:
        configs = [RunConfig.model_validate(tree)]
        for key, value in keys:  # the rig samples without an environment, for which these keys are refused
            algorithm = type(configs[0].algorithm).model_validate({**configs[-1].algorithm.model_dump(), key: value})
            configs.append(configs[-1].model_copy(update={"algorithm": algorithm}))
        heard = [rig.heard(each) for each in configs]
        assert all(isinstance(one[-1], list) for one in heard)
        assert all(one != other for one, other in pairwise(heard)), keys


def acts(rig: Rig, tree: dict[str, Any], key: str, before: list[list[object]]) -> bool:
    """Whether the value is refused by the key's name, acts elsewhere, or changes what is asked for a batch."""
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        return all(key.rpartition(".")[2] in str(e) for e in error.errors())
    if key.startswith(tuple(ELSEWHERE)):
        return True
    return any(rig.heard(config, batch, heard) != heard for batch, heard in zip(BATCHES, before, strict=True))


def test_keys_that_act_outside_of_a_step_are_shown_where_it_says() -> None:
    for key, path in ELSEWHERE.items():
        assert key.rpartition(".")[2] in (REPO / path).read_text(), (key, path)
