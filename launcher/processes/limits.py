"""Raises a process's system limits if allowed, and names the limit that ended a process."""

from __future__ import annotations

import resource

_MOST_FILES = 1 << 20  # a hard limit may be infinite, and some programs visit every number below the soft one
_FILES_OF_A_RANK, _FILES_OF_A_PEER = 85, 11  # measured on CPUs: worlds of 2 and 4, all groups shared
_FILES_OF_CONTROLLER = 256  # excludes the streams of ranks
_FILES_OF_A_TRAJECTORY = 3  # files of its event loop
_LOOP = "Symlink loop from "  # start of pathlib's RuntimeError before Python 3.13
_THREADS = "no thread could be started: raise the limit of processes (ulimit -u) or of memory (ulimit -v)"
_SIGNS = {
    "Too many open files": "the limit of open files is reached; raise the hard one (ulimit -Hn), or have fewer ranks a "
    "machine, or a lower environment.concurrency or rollout.server.max_concurrent_groups",
    "can't start new thread": _THREADS,
    "unable to start watchdog thread": _THREADS,
    "File too large": "the limit of a file's size is reached; raise it (ulimit -f)",
}


def raise_open_files() -> int:
    """Raises the soft limit of open files to the hard one, for this process and its children. Returns the limit.

    A rank holds sockets to every other rank in each of its groups, and 1,024 is the usual soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def problem_of_ranks(ranks: int) -> str:
    """Returns why this machine's limit of open files rejects a run of this many ranks on its CPUs; or empty."""
    needed = _FILES_OF_A_RANK + _FILES_OF_A_PEER * ranks
    return problem_of_controller(ranks) or _beyond(needed, f"{ranks} ranks: each of them", "have fewer ranks")


def problem_of_controller(ranks: int, requests: int = 0, trajectories: int = 0) -> str:
    """Returns why this machine's limit of open files rejects this many ranks, concurrent requests at servers and
    trajectories in the controller; empty if it does not."""
    counted = {
        "ranks": ranks,
        "requests at servers (rollout.server.max_concurrent_groups * rollout.group_size at most)": requests,
        "trajectories (environment.concurrency)": trajectories,
    }
    what = ", ".join(f"{count} {what}" for what, count in counted.items() if count)
    needed = ranks + requests + _FILES_OF_A_TRAJECTORY * trajectories + _FILES_OF_CONTROLLER
    advice = "lower these keys" if requests or trajectories else "have fewer ranks"
    return _beyond(needed, f"{what}: the controller", advice)


def _beyond(needed: int, who: str, advice: str) -> str:
    if needed <= (limit := raise_open_files()):
        return ""
    return (
        f"{who} opens about {needed} files, but the limit here is {limit}; raise the hard limit of open files "
        f"(ulimit -Hn), or {advice}"
    )


def describe_open_files() -> str:
    """Returns the limit, and how many ranks a run on CPUs may have under it."""
    limit = raise_open_files()
    ranks = max(0, (limit - _FILES_OF_A_RANK) // _FILES_OF_A_PEER)
    return (
        f"open files: {limit} a process; each rank of a run on CPUs opens about {_FILES_OF_A_RANK}, and "
        f"{_FILES_OF_A_PEER} for each rank of the run, so up to {ranks} ranks"
    )


def refusal(error: OSError | RuntimeError) -> str | None:
    """Returns what the system refused, and how to allow it; None if the error is not the system's."""
    if isinstance(error, OSError):
        if error.errno is None:
            return None
        paths = [str(p) for p in (error.filename, error.filename2) if p is not None]
        return explain_limit_error(": ".join([*paths, str(error.strerror)]))
    if str(error).startswith(_LOOP):
        return f"{str(error).removeprefix(_LOOP)}: a symbolic link that leads to itself; give a path without one"
    text = explain_limit_error(str(error))
    return text if text != str(error) else None


def explain_limit_error(text: str) -> str:
    """Returns ``text``, a process's last output, with a line for each limit that it mentions."""
    signs = dict.fromkeys(what for sign, what in _SIGNS.items() if sign in text)
    return "\n".join([text, *signs])
