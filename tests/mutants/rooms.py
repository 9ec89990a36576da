"""The rooms that `make mutants` draws faults from: how many of each, and the tests that can see them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """``paths`` are files, and folders: of these the files that no other room names, without those of their folders.
    ``mutants`` are drawn.

    ``first`` are the tests that are likely to see a fault; ``after`` are tried where these do not. A test that is
    missing here can only make more mutants live.
    """

    name: str
    paths: tuple[str, ...]
    mutants: int
    first: tuple[str, ...]
    after: tuple[str, ...]


def _under(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}" for name in names)


_ALGORITHMS = "tests/unit/algorithms"
_UPDATE = "tests/unit/training"
_ADVANTAGES = "tests/property/test_advantages.py"
_LOSSES = _under("tests/property", "test_losses.py", "test_losses_metrics.py")

ROOMS = (
    Room(
        name="credit",
        paths=(
            "rl_megatron/training/credit.py",
            *_under("rl_megatron/algorithms", "advantages.py", "returns.py", "segments.py"),
        ),
        mutants=106,
        first=("tests/unit/training/test_credit.py", "tests/unit/algorithms/test_advantages.py", _ADVANTAGES),
        after=(_ALGORITHMS, _UPDATE, "tests/unit/test_every_key_acts.py"),
    ),
    Room(
        name="losses", paths=("rl_megatron/algorithms",), mutants=204, first=(_ALGORITHMS, *_LOSSES), after=(_UPDATE,)
    ),
    Room(
        name="update",
        paths=_under("rl_megatron/training", "update.py", "scores.py", "optimizer_steps.py"),
        mutants=56,
        first=(_UPDATE,),
        after=(_ALGORITHMS, "tests/unit/test_every_key_acts.py"),
    ),
    Room(
        name="packing",
        paths=("rl_megatron/data/packing.py",),
        mutants=34,
        first=("tests/property/test_packing_properties.py",),
        after=("tests/unit/data/test_samples.py", _UPDATE),
    ),
    Room(
        name="data",
        paths=_under("rl_megatron/data", "samples.py", "rows.py"),
        mutants=60,
        first=("tests/unit/data/test_samples.py", "tests/property/test_samples_properties.py"),
        after=(
            *_under("tests/unit/data", "test_context_of_rows.py", "test_curriculum.py", "test_written_rows.py"),
            "tests/unit/launcher/test_ranks.py",
            _UPDATE,
        ),
    ),
    Room(
        name="learner",
        paths=_under("rl_megatron/learner", "packed.py", "heads.py"),
        mutants=60,
        first=("tests/unit/learner/test_logprobs.py", "tests/property/test_packing_properties.py"),
        after=("tests/unit/learner",),
    ),
    Room(
        name="layouts",
        paths=_under(
            "rl_megatron", *_under("weights", "boxes.py", "layouts", "layouts/tables", "plans"), "features/lora/rows.py"
        ),
        mutants=60,
        first=(*_under("tests/unit/weights", "test_layout.py", "test_families.py"), "tests/property/test_plan.py"),
        after=(
            *_under("tests/unit/weights", "test_drafts.py", "test_checks.py", "test_transports.py"),
            "tests/processes/tools/test_convert.py",
            "tests/tools/planner/test_pushes.py",
        ),
    ),
    Room(
        name="routes",
        paths=_under("rl_megatron/weights/routes", "ends.py", "last_hop.py"),
        mutants=60,
        first=("tests/unit/weights/test_transports.py", "tests/distributed/test_carried.py"),
        after=(
            "tests/property/test_plan.py",
            *_under("tests/distributed", "test_transport.py", "test_engine_ends.py"),
        ),
    ),
    Room(
        name="checks",
        paths=("rl_megatron/weights/checks",),
        mutants=60,
        first=_under("tests/unit/weights", "test_checks.py", "test_served_weights.py"),
        after=(
            *_under("tests/unit/rollout", "test_window.py", "test_answers.py", "test_engine_servers.py"),
            *_under("tests/unit/weights", "test_transports.py"),
            "tests/processes/launcher/test_versions.py",
        ),
    ),
    Room(
        name="formats",
        paths=_under("rl_megatron", "weights/formats/quantize.py", "features/quantize/encoding.py"),
        mutants=60,
        first=_under("tests/unit/weights", "test_quantize.py", "test_served_weights.py"),
        after=(
            "tests/unit/launcher/test_servers.py",
            *_under("tests/unit/weights", "test_families.py"),
            *_under("tests", "distributed/test_engine_ends.py", "processes/tools/test_convert.py"),
        ),
    ),
    Room(
        name="config",
        paths=(
            "rl_megatron/rules.py",
            "rl_megatron/config/reads.py",
            *_under("rl_megatron/config", "beside.py", "checks.py", "rules.py"),
            *_under("rl_megatron/config", "io.py", "resume.py"),
        ),
        mutants=60,
        first=_under("tests/unit", "test_config_checks.py", "test_config_io.py", "test_transport_key.py"),
        after=(
            "tests/unit/test_every_key_acts.py",
            "tests/unit/launcher/test_resuming.py",
        ),
    ),
    Room(
        name="stream",
        paths=_under("rl_megatron/rollout", "stream.py", "sampler.py"),
        mutants=60,
        first=_under("tests/unit/rollout", "test_stream.py", "test_rollout_sampler.py"),
        after=(
            *_under("tests/unit/rollout", "test_asynchronous.py", "test_environments_that_fail.py", "test_suspects.py"),
            *_under("tests/unit", "training/test_checkpoints.py", "data/test_broken_data.py", "data/test_mixture.py"),
        ),
    ),
    Room(
        name="requests",
        paths=_under("rl_megatron/engines", "requests.py", "answers.py"),
        mutants=60,
        first=_under("tests/unit/rollout", "test_answers.py", "test_requests.py", "test_suspects.py"),
        after=(
            *_under("tests/unit/rollout", "test_engine_servers.py", "test_local_engine.py", "test_engine_routes.py"),
            "tests/processes/rollout/test_embedded_server.py",
        ),
    ),
    Room(
        name="controller",
        paths=("launcher/controller",),
        mutants=30,
        first=("tests/unit/launcher/test_ranks.py", "tests/processes/launcher/test_arrivals.py"),
        after=(
            *_under("tests/unit/launcher", "test_colocated.py", "test_resuming.py"),
            *_under("tests/unit/training", "test_checkpoints.py", "test_scoring.py"),
        ),
    ),
    Room(
        name="runs",
        paths=("launcher/runs",),
        mutants=30,
        first=(
            "tests/unit/launcher/test_resuming.py",
            "tests/processes/launcher/test_versions.py",
            "tests/processes/launcher/test_job_script.py",
        ),
        after=("tests/unit/test_config_io.py",),
    ),
    Room(
        name="placement",
        paths=("rl_megatron/placement",),
        mutants=60,
        first=(
            *_under("tests/unit/launcher", "test_placement.py", "test_memory.py"),
            "tests/processes/launcher/test_seats.py",
            "tests/processes/launcher/test_node.py",
        ),
        after=(
            "tests/unit/launcher/test_roles.py",
            "tests/unit/test_transport_key.py",
        ),
    ),
)


def files_of(room: Room, repository: Path = REPO) -> list[str]:
    """The room's files, sorted. Raises FileNotFoundError for a path or a test that the table lists and that is not
    there."""
    files = []
    for path in (*room.paths, *room.first, *room.after):
        if not (repository / path).exists():
            raise FileNotFoundError(
                f"{path} of room {room.name} does not exist; name in tests/mutants/rooms.py what it has become, or "
                "leave it out"
            )
    named = {repository / path for other in ROOMS if other is not room for path in other.paths}
    for path in room.paths:
        at = repository / path
        files += sorted({*at.glob("*.py")} - named) if at.is_dir() else [at]
    return [str(file.relative_to(repository)) for file in files if file.name != "__init__.py"]
