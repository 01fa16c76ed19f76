"""A run as a picture; needs matplotlib, of the extra `sim`."""

from pathlib import Path
from typing import Any

from intune._errors import PipelineError
from intune.sim.play import Trace
from intune.sim.writable import check_file

ENDINGS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Find out before anything is run whether a picture can be made and written there.

    Raises:
        PipelineError: If matplotlib is not installed, or the file's ending is none of a picture.
        OSError: If the file cannot be written.
    """
    if path.suffix not in ENDINGS:
        raise PipelineError(f"{path}: the ending of a plot must be one of {', '.join(ENDINGS)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise PipelineError('a plot needs matplotlib: pip install "intune[sim]"') from error
    check_file(path)


def plot(trace: Trace, title: str, path: Path) -> None:
    """Draw rates, concurrency by stage, and CPUs and memory over time.

    Args:
        trace: The run.
        title: Stands above it.
        path: File to write, over one of that name.

    Raises:
        PipelineError: As of `check_plot`.
        OSError: If the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), layout="constrained")
    rates, numbers, machine = figure.subplots(3, 1, sharex=True)
    ends = [each.seconds for each in trace.intervals]
    lengths = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    rates.step(ends, [each.rows / length for each, length in zip(trace.intervals, lengths, strict=True)], where="pre")
    rates.set(ylabel="rows a second", title=title, ylim=(0, None))
    names = list(trace.intervals[0].concurrency) if trace.intervals else []
    for name in names:
        _stage(numbers, name, ends, [each.concurrency[name] for each in trace.intervals])
    numbers.step(ends, [each.slots for each in trace.intervals], "k:", where="pre", label="slots")
    numbers.set(ylabel="concurrency (a gap = open)", ylim=(0, None))
    numbers.legend(fontsize="small", ncols=2)
    used = [each.cpu_seconds / length for each, length in zip(trace.intervals, lengths, strict=True)]
    machine.step(ends, used, where="pre", label="CPUs used")
    machine.set(ylabel="CPUs", xlabel="seconds", ylim=(0, None))
    memory = machine.twinx()
    memory.plot(ends, [each.memory_bytes / 2**20 for each in trace.intervals], "C1", label="memory")
    memory.set(ylabel="MiB", ylim=(0, None))
    if trace.died is not None:
        rates.axvline(ends[-1] if ends else 0.0, color="r")
    figure.savefig(path)


def _stage(axes: Any, name: str, ends: list[float], values: list[int | None]) -> None:
    shown = [float("nan") if value is None else float(value) for value in values]
    axes.step(ends, shown, where="pre", label=name)
