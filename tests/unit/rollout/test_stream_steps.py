"""What steps take from a Stream over many of them, on a virtual clock: lengths, ages, waits, and faults."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rl_megatron.data.problems.prompt_stream import PromptStream
from rl_megatron.errors import DataError, EngineError
from rl_megatron.rollout.batch import Answered, Drawn
from rl_megatron.rollout.stream import Stream, StreamState
from rl_megatron.types import Prompt
from tests.streams import PROMPTS, Source, stream_over
from tests.virtual_time import run_at_once


def kolmogorov_smirnov(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest distance of the two distribution functions."""
    at = np.sort(np.concatenate((a, b)))
    return float(
        np.abs(
            np.searchsorted(np.sort(a), at, "right") / len(a) - np.searchsorted(np.sort(b), at, "right") / len(b)
        ).max()
    )


async def steps(stream: Stream, count: int, seconds: float) -> list[tuple[int, str, float]]:
    """The step, prompt and time of each group that ``count`` steps of ``seconds`` train on."""
    found = []
    for step in range(stream.version + 1, stream.version + count + 1):
        batch = await stream.take(step)
        now = asyncio.get_running_loop().time()
        found += [(step, group.prompt.id, now) for group in batch.groups]
        await asyncio.sleep(seconds)
        await stream.settled()
        stream.pushed(step)
    await stream.close()
    return found


def test_lengths_are_trained_as_they_are_drawn() -> None:
    """2,000 groups with a tail of 20 times the mean; what is finished first would be shorter."""
    rng, prompts = np.random.default_rng(0), [replace(PROMPTS[0], id=f"p{i}") for i in range(2200)]
    lengths = np.minimum(rng.lognormal(0, 1.3, (2, len(prompts))), 20)
    source = Source(lambda name: float(lengths[0, int(name[1:])]))
    trained = run_at_once(steps(stream_over(source, size=8, staleness=2, prompts=prompts), 250, 1.0))
    of_trained = [source.seconds(name) for _, name, _ in trained]
    assert len(of_trained) == len({name for _, name, _ in trained}) == 2000
    one_percent = 1.63 * (2 / 2000) ** 0.5
    assert kolmogorov_smirnov(of_trained, lengths[1, :2000].tolist()) < one_percent
    soonest = sorted(lengths[0, :2024])[:2000]
    assert np.mean(of_trained) > 1.02 * np.mean(soonest)  # a batch of 24 left behind each 2,000 would be seen


def test_servers_sample_what_steps_take_and_nothing_more_and_a_resume_makes_the_run_longer() -> None:
    source = Source(lambda name: float(1 + hash_of(name) % 11))
    stream = stream_over(source, size=4, staleness=2, last_step=6)
    found = run_at_once(steps(stream, 6, 1.0))
    assert sorted(ordinal for asked in source.asked for ordinal in asked) == list(range(4 * 6))
    state, position = stream.state(), stream._prompts.state()
    assert (state.drawn, state.places) == (4 * 6, ())
    longer = stream_over(source, size=4, staleness=2, last_step=9)
    longer._prompts.restore(position)
    longer.restore(state)
    found += run_at_once(steps(longer, 3, 1.0))
    order = [prompt.id for prompt in PromptStream(PROMPTS, seed=0).take(4 * 9)]
    assert sorted(name for _, name, _ in found) == sorted(order)
    assert longer.state().places == ()


@pytest.mark.parametrize("limit", [None, 24], ids=["all at once", "six groups at once"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_servers_are_asked_for_a_group_before_those_behind_it_are_drawn(staleness: int, limit: int | None) -> None:
    """A draw renders and tokenizes: behind a group that is asked for one more is drawn, at a start and after pushes."""
    drawn = dict[int, int]()  # how many were, when the group of this ordinal was asked for

    class Counted(Source):
        async def groups(self, asked: Sequence[Drawn]) -> list[Answered]:
            (one,) = asked
            drawn[one.ordinal] = self.stream.state().drawn
            return await super().groups(asked)

    async def run() -> int:
        source = Counted(lambda name: float(1 + hash_of(name) % 11))
        stream = stream_over(source, size=16, staleness=staleness, group_size=4, max_in_flight=limit)
        assert len(await steps(stream, 3, 1.0)) == 3 * 16
        return source.most

    most = run_at_once(run())
    assert sorted(drawn) == list(drawn)
    assert max(count - ordinal for ordinal, count in drawn.items()) == 2
    assert most == 6 if limit else most >= 16 * (1 + min(1, staleness))


def test_in_the_learners_processes_a_run_that_a_resume_makes_longer_is_that_of_as_many_steps() -> None:
    def run(lengths: Sequence[int]) -> list[tuple[int, str, int]]:
        source, found, before = Source(lambda _: 1.0), list[tuple[int, str, int]](), None
        for last in lengths:
            stream = stream_over(source, size=4, staleness=2, served=False, last_step=last)
            if before is not None:
                stream._prompts.restore(before._prompts.state())
                stream.restore(before.state())
            made = run_at_once(steps(stream, last - stream.version, 1.0))
            found += [(step, name, source.versions[name]) for step, name, _ in made]
            before = stream
        return found

    assert run([6, 9]) == run([9])


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (3, 0), (0, 3)])
def test_a_resume_with_another_staleness_drops_nothing_and_keeps_what_is_due(before: int, after: int) -> None:
    source = Source(lambda name: float(1 + hash_of(name) % 11))

    async def begun() -> tuple[StreamState, list[tuple[int, str, float]]]:
        stream = stream_over(source, size=4, staleness=before)
        stream.restore(replace(stream.state(), ahead=before))
        found = []
        for step in range(1, 7):
            found += [(step, group.prompt.id, 0.0) for group in (await stream.take(step)).groups]
            stream.pushed(step)
        await asyncio.sleep(0.5)  # groups are drawn one after the other, and none ends so soon
        state = stream.state()
        await stream.close()
        return state, found

    state, found = run_at_once(begun())
    old = {place.drawn.prompt.id: place.due for place in state.places}
    assert len(old) == 4 * (before + 1 if before else 0)
    stream = stream_over(source, size=4, staleness=after)
    stream._prompts.take(state.drawn)
    stream.restore(state)
    found += run_at_once(steps(stream, 12, 1.0))
    names = [name for _, name, _ in found]
    assert len(names) == len(set(names)) == 4 * 18
    order = [prompt.id for prompt in PromptStream(PROMPTS, seed=0).take(4 * 18)]
    assert set(order[: 4 * (18 - before - after)]) <= set(names)
    assert old.keys() <= set(names)
    for step, name, _ in found[24:]:
        bound = old[name] if name in old else source.versions[name] + after + 1
        assert step <= bound, (step, name, bound)


@pytest.mark.parametrize("limit", [None, 8], ids=["all at once", "two groups at once"])
def test_after_a_resume_without_staleness_nothing_is_sampled_while_the_learner_computes(limit: int | None) -> None:
    order = [prompt.id for prompt in PromptStream(PROMPTS, seed=0).take(len(PROMPTS))]
    source = Source(lambda name: 1.0 + order.index(name) / 4)  # what is due later takes longer

    async def run() -> tuple[int, list[int]]:
        stream = stream_over(source, size=4, staleness=3)
        stream.restore(replace(stream.state(), ahead=3))
        await steps(stream, 6, 0.5)
        state, position = stream.state(), stream._prompts.state()
        stream = stream_over(source, size=4, staleness=0, group_size=4, max_in_flight=limit)
        stream.restore(state)
        stream._prompts.restore(position)
        met = []
        for step in range(7, 14):
            assert len((await stream.take(step)).groups) == 4
            met.append(source.now)
            stream.pushed(step)
        await stream.close()
        return sum(place.answered is None for place in state.places), met

    left, met = run_at_once(run())
    assert left > 4
    assert met == [0] * 7


def hash_of(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16)


def test_sampling_is_as_far_ahead_as_the_learner_needs() -> None:
    """Where training is the slower half, batches are a push old, not 8; where a tail is long, they may be 8."""
    ages = {}
    for kind, seconds in (
        ("short", lambda name: 1.0 + hash_of(name) % 3),
        ("long", lambda name: 2.0 + hash_of(name) % 60),
    ):
        stream = stream_over(source := Source(seconds), size=4, staleness=8)
        found = run_at_once(steps(stream, 60, 8.0))
        ages[kind] = [step - 1 - source.versions[name] for step, name, _ in found[80:]]
        if kind == "short":
            at = sorted({when for _, _, when in found})[20:]
            assert np.diff(at).max() == pytest.approx(8.0)  # the learner never waits
    assert max(ages["short"]) <= 2
    assert max(ages["long"]) > 5


def test_a_row_says_how_much_sampling_and_training_overlap() -> None:
    """Batches of 3 seconds and steps of 2, both at work whenever a batch is there; then a tail that is due."""

    async def rows(served: bool) -> list[dict[str, float]]:
        stream = stream_over(Source(lambda _: 3.0), size=2, staleness=1, served=served, group_size=4)
        found = []
        for step in range(1, 6):
            await stream.take(step)
            await asyncio.sleep(2.0)
            await stream.settled()
            stream.pushed(step)
            found.append(stream.row())
        await stream.close()
        return found

    *_, last = run_at_once(rows(served=False))  # a push waits for the batch ahead
    assert last["overlap/fraction"] == pytest.approx(1 - 3 / (3 + 2))
    *_, last = run_at_once(rows(served=True))
    assert last["staleness/allowed"] == 1
    assert 0 < last["overlap/fraction"] < 0.5
    source = Source(lambda name: 500.0 if hash_of(name) % 5 == 0 else 1.0)

    async def waits() -> float:
        stream, total = stream_over(source, size=2, staleness=3), 0.0
        stream.restore(replace(stream.state(), ahead=3))
        for step in range(1, 9):
            await stream.take(step)
            stream.pushed(step)
            total += stream.row()["wait/due_seconds"]
        await stream.close()
        return total

    assert run_at_once(waits()) > 400


def test_a_wait_is_for_what_is_due_from_when_a_batch_is_finished_without_it() -> None:
    """Step 2 waits from second 1 to 50 for the first prompt, and from 2 on the fourth and the fifth are finished."""
    first, *_, sixth = (prompt.id for prompt in PromptStream(PROMPTS, seed=0).take(6))
    slow = {first: 50.0, sixth: 100.0}

    async def waits() -> list[float]:
        stream = stream_over(Source(lambda name: slow.get(name, 1.0)), size=2, staleness=1, group_size=4)
        found = []
        for step in (1, 2):
            await stream.take(step)
            stream.pushed(step)
            found.append(stream.row()["wait/due_seconds"])
        await stream.close()
        return found

    assert run_at_once(waits()) == [0.0, 48.0]


@pytest.mark.parametrize("served", [True, False], ids=["served", "local"])
def test_completions_in_flight_are_those_that_the_push_met_and_not_the_next_batch(served: bool) -> None:
    async def met() -> list[tuple[int, float]]:
        source, found = Source(lambda name: float(1 + hash_of(name) % 5)), []
        stream = stream_over(source, size=4, staleness=1, served=served, group_size=8)
        for step in range(1, 13):
            await stream.take(step)
            await asyncio.sleep(2.5)
            await stream.settled()
            under_way = source.now
            stream.pushed(step)
            await asyncio.sleep(0)
            found.append((8 * under_way, stream.row()["in_flight/completions"]))
        await stream.close()
        return found

    found = run_at_once(met())
    assert [said for _, said in found] == [there for there, _ in found]
    assert len({said for _, said in found}) == (3 if served else 1)


def test_a_group_that_hangs_holds_up_no_other_before_it_is_due() -> None:
    first = PromptStream(PROMPTS, seed=0).take(1)[0].id
    source = Source(lambda name: 500.0 if name == first else 1.0)
    stream = stream_over(source, size=4, staleness=3)
    stream.restore(replace(stream.state(), ahead=3))
    found = run_at_once(steps(stream, 6, 1.0))
    ((step, _, when),) = [one for one in found if one[1] == first]
    assert (step, when) == (4, 500.0)
    assert [now for at, _, now in found if at == 3] == [3.0] * 4


def test_a_fault_of_sampling_ends_the_step_that_waits_and_the_push_that_follows() -> None:
    async def fails(served: bool) -> None:
        def seconds(name: str) -> float:
            raise EngineError(f"no answer for {name}")

        stream = stream_over(Source(seconds), size=2, staleness=1, served=served)
        with pytest.raises(EngineError, match="no answer for p"):
            await stream.take(1)
        with pytest.raises(EngineError, match="no answer for p"):
            await stream.settled()
        await stream.close()

    run_at_once(fails(served=True))
    run_at_once(fails(served=False))


@pytest.mark.parametrize("served", [True, False], ids=["served", "local"])
def test_a_prompt_that_cannot_be_drawn_as_a_group_ends_fails_the_step_that_waits(
    served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails() -> None:
        first = {prompt.id for prompt in PromptStream(PROMPTS, seed=0).take(8)}
        source = Source(lambda _: 1.0, dropped=first.__contains__)
        stream = stream_over(source, size=4, staleness=1, served=served, dynamic_sampling="refill")
        take, drawn = PromptStream.take, 0

        def take_eight(prompts: PromptStream, n: int) -> list[Prompt]:
            nonlocal drawn
            drawn += n
            if drawn > 8:
                raise DataError("train.parquet: the file has changed")
            return take(prompts, n)

        monkeypatch.setattr(PromptStream, "take", take_eight)
        with pytest.raises(DataError, match="the file has changed"):
            await stream.take(1)
        await stream.close()

    run_at_once(fails())


def test_sampling_that_is_cancelled_before_the_stream_is_closed_fails_the_step_that_waits() -> None:
    def seconds(name: str) -> float:
        raise asyncio.CancelledError

    async def fails() -> None:
        stream = stream_over(Source(seconds), size=2, staleness=0)
        with pytest.raises(EngineError, match="was cancelled, but not by the run"):
            await stream.take(1)
        await stream.close()

    run_at_once(fails())
