"""What `intune doctor` found, as lines for a terminal of 80 columns and as JSON."""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from intune import _words
from intune.cli.facts import ChoiceFacts, CpuFacts, Facts, GpuFacts, LimitFacts, MemoryFacts, SoftwareFacts
from intune.cli.findings import Finding
from intune.control.journal import to_plain

COLUMNS = 80
_NAME = 20
"""Columns of the names, indent included."""


def to_json(facts: Facts, found: Sequence[Finding]) -> str:
    """One object in one line: the fields of `Facts`, and `findings`, each with the fields of `Finding`."""
    return json.dumps({**to_plain(facts), "findings": to_plain(found)}, allow_nan=False)


def to_lines(facts: Facts, found: Sequence[Finding]) -> Iterator[str]:
    """The same for a person, in lines of at most 80 columns but for words that are longer, such as paths."""
    yield "CPUs"
    yield from _cpu(facts.cpu)
    yield "Memory"
    yield from _memory(facts.memory)
    yield "Limits"
    yield from _limits(facts.limits)
    yield "Software"
    yield from _software(facts.software, facts.gpu)
    yield "A loader would choose"
    yield from _choices(facts.choices)
    yield "Findings"
    if not found:
        yield "  nothing to fix"
    for finding in found:
        yield from _wrapped(f"  {finding.severity:<10}", f"{finding.what[:1].upper()}{finding.what[1:]}.")
        yield from _wrapped(" " * 12, f"-> {finding.action}")


def _cpu(cpu: CpuFacts) -> Iterator[str]:
    source = cpu.read_from
    yield from _row("model", _or(cpu.model, "unknown"))
    yield from _row("online", _or(cpu.online, "unknown"), source["online"])
    yield from _row("affinity", str(cpu.affinity), source["affinity"])
    yield from _row("quota", "none" if cpu.quota is None else f"{cpu.quota:g}", source["quota"])
    yield from _row("processes of job", str(cpu.local_world_size), source["local_world_size"])
    yield from _row("for this process", str(cpu.cpus), source["cpus"])
    yield from _row("library threads", _or(cpu.library_threads, "not set"), source["library_threads"])
    yield from _row("throttled", _share(cpu.throttled_share), source["throttled_share"])
    yield from _row("stolen", _share(cpu.steal_share), source["steal_share"])
    yield from _row("frequency allowed", _share(cpu.frequency_share), source["frequency_share"])


def _memory(memory: MemoryFacts) -> Iterator[str]:
    source = memory.read_from
    yield from _row("physical", _words.size(memory.physical_bytes), source["physical_bytes"])
    yield from _row("available", _words.size(memory.available_bytes), source["available_bytes"])
    for limit in memory.limits:
        used = f"{_words.size(limit.limit_bytes)}, in use {_words.size(limit.used_bytes)}"
        yield from _row("limit", used, f"{limit.read_from}; {limit.used_from}")
    if not memory.limits:
        yield from _row("limit", "unknown", source["limit_bytes"])
    yield from _row("this process", _words.size(memory.own_bytes), source["own_bytes"])
    yield from _row("others", _words.size(memory.others_bytes), source["others_bytes"])
    yield from _row("room left", _words.size(memory.room_bytes), source["room_bytes"])
    if memory.swap_bytes == 0:
        yield from _row("swap", "none")
    else:
        yield from _row("swap", f"{_words.size(memory.swap_bytes)}, in use {_words.size(memory.swap_used_bytes)}")


def _limits(limits: LimitFacts) -> Iterator[str]:
    for task in limits.tasks:
        yield from _row("tasks", f"{_or(task.used, 'unknown')} of {task.limit:,}", task.read_from)
    if not limits.tasks:
        yield from _row("tasks", "no limit")
    most, hard = (
        "no limit" if limit is None else f"{limit:,}"
        for limit in (limits.descriptors_limit, limits.descriptors_hard_limit)
    )
    yield from _row("open files", f"{_or(limits.descriptors_used, 'unknown')} of {most}, which may be raised to {hard}")
    if limits.shm_bytes is None:
        yield from _row("/dev/shm", "none")
    else:
        yield from _row("/dev/shm", f"{_words.size(limits.shm_bytes)}, free {_words.size(limits.shm_free_bytes)}")
    yield from _row("memfd", "works" if limits.memfd else "does not work")


def _software(software: SoftwareFacts, gpu: GpuFacts) -> Iterator[str]:
    yield from _row("intune", software.intune)
    yield from _row("python", software.python)
    for name, version in software.packages.items():
        yield from _row(name, version or "not installed")
    yield from _row("NVIDIA driver", gpu.nvidia_driver or "not loaded")
    if gpu.devices is None:
        yield from _row("GPUs", "unknown" if gpu.asked else "not asked for; --gpu imports PyTorch and asks it")
    else:
        yield from _row("GPUs", "; ".join(gpu.devices) or "none that PyTorch sees")


def _choices(choices: ChoiceFacts) -> Iterator[str]:
    rows: Mapping[str, str] = {
        "cpus": str(choices.cpus),
        "slots": str(choices.slots),
        "max_threads": str(choices.max_threads),
        "max_processes": str(choices.max_processes),
        "memory": _words.size(choices.memory_bytes, "no limit"),
        "in flight": _words.size(choices.in_flight_bytes, "no limit"),
        "Arrow allocator": choices.arrow_allocator,
    }
    for name, value in rows.items():
        yield from _row(name, value)


def _or(value: object, otherwise: str) -> str:
    return otherwise if value is None else str(value)


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def _row(name: str, value: str, source: str = "") -> list[str]:
    return _wrapped(f"  {name:<{_NAME - 2}}", f"{value}  ({source})" if source else value)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
