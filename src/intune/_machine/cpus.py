"""CPUs that this process may use: affinity and quota, shared with the other ranks of this host."""

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from intune._machine.cgroups import Level, levels
from intune._machine.system import System, read

_RANKS_ON_HOST = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
"""Set by torchrun, Open MPI, Intel MPI and MPICH, MVAPICH: processes of this job on this host."""


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPUs that this process may use, and why.

    Attributes:
        cpus: Whole CPUs for this process, at least 1.
        affinity: CPUs in its affinity mask.
        quota: CPUs that the tightest of its control groups may use; None = no quota.
        local_world_size: Processes of this job on this host that share them.
        read_from: By attribute, the file, call or variable that it was read from; "cpus" names what decided.
    """

    cpus: int
    affinity: int
    quota: float | None
    local_world_size: int
    read_from: Mapping[str, str]


def cpu_reading(system: System) -> CpuReading:
    """CPUs for this process: max(1, floor(min(affinity, quota at every level) / processes of the job here)).

    Affinity that Slurm has already split between the tasks of a step is not divided again.

    Warns:
        RuntimeWarning: Once, if a quota or the number of processes cannot be read; then as if there were none.
    """
    reading, problems = read_cpus(system)
    if problems:
        warnings.warn(
            f"{'; '.join(problems)}. Counting on {reading.cpus} CPUs (affinity {reading.affinity}). "
            "Pass cpus= to the loader if that is wrong.",
            RuntimeWarning,
            stacklevel=2,
        )
    return reading


def read_cpus(system: System) -> tuple[CpuReading, list[str]]:
    """What `cpu_reading` says, with what it would warn of."""
    problems: list[str] = []
    affinity = system.affinity()
    quota, quota_from = _quota(system, problems)
    ranks, ranks_from = _ranks_on_host(system.environ, problems)
    split = _affinity_is_split(system.environ, ranks_from, ranks, affinity)
    share = affinity if split else affinity / ranks
    decided = "os.sched_getaffinity, split by Slurm" if split else "os.sched_getaffinity"
    if quota is not None and quota / ranks < share:
        share, decided, split = quota / ranks, quota_from, False
    if ranks > 1 and not split:
        decided += f" / {ranks_from}"
    read_from = {
        "cpus": decided,
        "affinity": "os.sched_getaffinity",
        "quota": quota_from,
        "local_world_size": ranks_from,
    }
    return CpuReading(max(1, math.floor(share)), affinity, quota, ranks, read_from), problems


def _quota(system: System, problems: list[str]) -> tuple[float | None, str]:
    """The tightest quota in CPUs over all levels, and its file."""
    tightest: tuple[float, str] | None = None
    seen: list[str] = []
    groups = levels(system, "cpu")
    for level in groups:
        file = level.file("cpu.max" if level.version == 2 else "cpu.cfs_quota_us")
        try:
            quota = _level_quota(level)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            problems.append(f"CPU quota cannot be read from {file}: {error}")
            continue
        seen.append(file)
        if quota is not None and (tightest is None or quota < tightest[0]):
            tightest = quota, file
    if tightest is not None:
        return tightest
    if not seen and not problems and not (groups and all(level.is_machine_root for level in groups)):
        problems.append("no CPU quota file (cpu.max, cpu.cfs_quota_us) was found for this process")
    return None, f"no quota in {', '.join(seen)}" if seen else "no quota file"


def _level_quota(level: Level) -> float | None:
    """Quota of one level in CPUs; None = it sets none.

    Raises:
        ValueError: If what stands there is not a quota.
    """
    if level.version == 2:
        words = read(level.file("cpu.max")).split()
        if len(words) != 2:
            raise ValueError(f"expected '<quota or max> <period>', found {' '.join(words)!r}")
    else:
        words = [read(level.file("cpu.cfs_quota_us")).strip()]
        if words == ["-1"]:
            return None
        words.append(read(level.file("cpu.cfs_period_us")).strip())
    period = _positive(words[1], "period")
    return None if words[0] == "max" else _positive(words[0], "quota") / period


def _positive(word: str, what: str) -> int:
    if not word.isdecimal() or int(word) == 0:
        raise ValueError(f"expected a {what} in microseconds above 0, found {word!r}")
    return int(word)


def _ranks_on_host(environ: Mapping[str, str], problems: list[str]) -> tuple[int, str]:
    """Processes of this job on this host, and the variable that says so."""
    for name, text in _rank_counts(environ):
        if text.isdecimal() and int(text) > 0:
            return int(text), name
        problems.append(f"the number of processes on this host cannot be read from {name}={text!r}")
    return 1, "no variable says otherwise"


def _rank_counts(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables that are set, most trusted first, with the count as text."""
    for name in _RANKS_ON_HOST:
        if name in environ:
            yield name, environ[name]
    if step := environ.get("SLURM_STEP_TASKS_PER_NODE"):
        yield "SLURM_STEP_TASKS_PER_NODE", _slurm_tasks_here(step, environ.get("SLURM_NODEID", "0"))
    # Outside a step (in the batch script itself) it says what later steps will start, not what runs now.
    if "SLURM_NTASKS_PER_NODE" in environ and ("SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ):
        yield "SLURM_NTASKS_PER_NODE", environ["SLURM_NTASKS_PER_NODE"]


def _slurm_tasks_here(text: str, node: str) -> str:
    """The entry of one node in Slurm's "4(x2),3"; the whole text where it cannot be understood."""
    counts: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return text
        counts.extend([match[1]] * int(match[2] or 1))
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else text


def _affinity_is_split(environ: Mapping[str, str], ranks_from: str, ranks: int, affinity: int) -> bool:
    """Whether Slurm has bound each task of the step to CPUs of its own."""
    each = environ.get("SLURM_CPUS_PER_TASK", "")
    # All tasks together were given ranks * each CPUs: a mask smaller than that is not the shared one.
    return ranks > 1 and ranks_from.startswith("SLURM") and each.isdecimal() and affinity < ranks * int(each)
