"""Renders a job's script from slurm/train.sbatch.j2, with values quoted so that bash and sbatch only read names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rl_megatron.config.run import RunConfig
from rl_megatron.errors import ConfigError
from rl_megatron.files import shipped
from rl_megatron.placement.ranks import extra_role_nodes

_HERE = Path(__file__).resolve().parents[3]
_CODE = ("rl_megatron", "launcher", "tools")
_UNREAD = re.compile(r"[^\w./+:=@,~-]")  # not allowed in a line of #SBATCH: quotes, %, spaces, newlines


def job_script(config: RunConfig, *, folder: Path, python: str, package: Path) -> str:
    """Returns the job's script. It runs in ``folder``, the base of relative paths. ``package`` is this code's folder.

    Only ``slurm.setup`` is executed: other values are quoted, or have only characters without a meaning to bash and
    sbatch. Raises ConfigError for a run's folder with other characters.
    """
    environment = Environment(
        loader=FileSystemLoader(shipped("slurm")),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # bash, not HTML
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    environment.filters["sbatch"] = _quoted
    slurm, run = config.slurm, folder / config.run.dir / str(config.run.name)
    if found := _UNREAD.search(str(run)):
        raise ConfigError(
            f"{str(run)!r}: sbatch cannot read {found[0]!r} in the path of the run's folder, which may "
            "have letters, digits and ._-/+:=@,~; run from another folder, or set run.dir"
        )
    return environment.get_template("train.sbatch.j2").render(
        slurm=slurm,
        total_nodes=slurm.nodes + sum(extra_role_nodes(config).values()),
        tasks_per_node=config.slurm.tasks_per_node(config.learner.dims.world_size),
        name=config.run.name,
        run=run,
        folder=folder,
        python=config.slurm.python or python,
        package=package,
    )


def _quoted(option: str) -> str:
    """Returns an option as sbatch reads it in a line of a script."""
    name, equals, value = option.partition("=")
    return option if not _UNREAD.search(value) else name + equals + '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def code_folder(run: Path) -> Path:
    """Returns the folder with this code that a job has on PYTHONPATH: the checkout, or the ``code`` of ``run``. An
    installed wheel, which lies next to the learner's other packages, needs the latter, which `show_code` makes."""
    return run / "code" if (_HERE / "rl_megatron" / "conf").is_dir() else _HERE


def show_code(run: Path) -> None:
    """Makes `code_folder` hold this code alone: other interpreters of the job, for example an engine's, read it too."""
    if (folder := code_folder(run)) == _HERE:
        return
    folder.mkdir(exist_ok=True)
    for name in _CODE:
        if (link := folder / name).resolve() != _HERE / name:  # an earlier job may read by it now
            link.unlink(missing_ok=True)
            link.symlink_to(_HERE / name)
