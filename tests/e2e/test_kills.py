"""A run with servers and staleness, killed at seven points of its steps, loses no prompt and trains on none twice.

``python -m tests.kills.run`` does the same at a hundred points that are drawn.
"""

from __future__ import annotations

import pytest

from rl_megatron.observability.timeline import read_trace
from tests.e2e.processes import Place, Run
from tests.kills.points import KILLED, Point, function_of
from tests.kills.reader import Found, found, lines_of, trained_by_the_learner
from tests.kills.run import SIZE, STALENESS, Series, points
from tests.perfetto import check_trace

STREAM, LEDGER = "rl_megatron.rollout.stream:RolloutStream", "rl_megatron.rollout.stream:Ledger"
SAVES, PUSHES = "rl_megatron.training.checkpoints", "rl_megatron.engines.local.adapter:EmbeddedAdapter"
MIXED = 5  # completions of the last start that the run is awaited to continue over a push
POINTS = (
    Point(name="a step trains, before the first checkpoint", call="rl_megatron.training.update:PolicyUpdate.__call__"),
    Point(name="one server of two has loaded the third push", call=f"{PUSHES}.load", nth=7, after=True),
    Point(name="ranks have written a checkpoint", call=f"{SAVES}:CheckpointStore._publish", nth=2),
    Point(name="a checkpoint has its name, the next lines are not written", call=f"{SAVES}:publish_folder", after=True),
    Point(name="a resume has cut the ledger", call=f"{LEDGER}.restore", after=True),
    Point(name="lines are on disk, one torn, the row is not", call=f"{LEDGER}.write", nth=2, after=True, torn=True),
    Point(name="servers were interrupted for a checkpoint", call=f"{STREAM}.collect_partials", nth=2, after=True),
)


@pytest.fixture(scope="module")
def finished(place: Place) -> Run:
    series = Series(place=place)
    for point in POINTS:
        there = series.kill(point)
        assert there is None or (there.lost, there.twice) == ([], []), point
    return series.finish_after(completions=MIXED)


@pytest.fixture(scope="module")
def read(finished: Run) -> Found:
    return found(finished.folder)


@pytest.mark.slow
def test_every_kill_found_work_under_way(finished: Run, place: Place) -> None:
    """The fixture's eight starts of controller, rank and two servers take 20 s of CPU."""
    kills = lines_of(place.folder / KILLED)
    assert [kill["point"] for kill in kills] == [point.name for point in POINTS]
    assert sum(kill["ledger/in_flight"] + kill["ledger/queued"] > 0 for kill in kills) >= 4
    assert all(kill["ledger/drawn"] > kill["ledger/trained"] for kill in kills)


def test_every_prompt_is_trained_on_once_or_waits(read: Found) -> None:
    assert (read.lost, read.twice) == ([], [])
    assert read.step >= 5
    assert {step: len(prompts) for step, prompts in read.trained.items()} == dict.fromkeys(
        range(1, read.step + 1), SIZE
    )
    assert max(read.ages) == STALENESS


def test_the_ledger_is_what_the_learner_trained_on_last(read: Found, place: Place) -> None:
    assert trained_by_the_learner(place.folder) == read.trained


def test_rows_and_samples_are_those_of_the_ledger(finished: Run, read: Found) -> None:
    rows = [row for row in finished.rows() if row["step"]]
    assert [(row["step"], row["groups/trained"]) for row in rows] == [(step, SIZE) for step in read.trained]
    expected = [(SIZE * step, True) for step in read.trained]
    assert [(row["ledger/trained"], row["staleness/max"] <= STALENESS) for row in rows] == expected
    samples = [(row["step"], row["prompt"]) for row in lines_of(finished.folder / "samples.jsonl")]
    drawn = [(step, f"{prompt}=") for step, prompts in read.trained.items() for prompt in prompts]
    assert samples == [one for one in drawn for _ in range(4)]  # the completions of a group


def test_what_make_test_kills_draws_is_there() -> None:
    drawn = points(18, 100)
    assert len({point.name for point in drawn}) > 80
    assert all(callable(function_of(point.call)[2]) for point in drawn if isinstance(point, Point))


def test_the_timeline_has_the_servers_requests_under_the_generations_that_they_answer(finished: Run) -> None:
    """An arrow goes from each generation of the last start to its request by a server; some go on over a push."""
    check_trace(finished.folder / "trace.json")
    events = read_trace(finished.folder)
    generations = {e.flow: e for e in events if e.name == "generate" and e.flow is not None}
    attempts = [e for e in events if e.name == "attempt" and e.flow in generations]
    assert len(attempts) >= len(generations) > SIZE
    assert {e.process for e in attempts} == {"replica 0", "replica 1"}
    assert all(generations[e.flow].begin <= e.begin <= e.end <= generations[e.flow].end for e in attempts)
    commits = [e.end for e in events if (e.thread, e.name) == ("pushes", "commit")]
    assert any(e.begin < moment < e.end for e in attempts for moment in commits)
