"""How well a shuffle mixes what lies sorted in the files."""

from intune._words import count
from intune.pipeline.chain import Pipeline
from intune.pipeline.source import BlockSource

ENOUGH = 8
"""With rows of so many units in a window, a batch of sorted files is seldom of one kind."""


def units_a_window(pipeline: Pipeline) -> tuple[float, int] | None:
    """Units of the source whose rows share a window of the first shuffle, on average, and units in all.

    Filters before it make that more: they are not counted. None if nothing is shuffled, or rows are not known before
    reading, or a flat_map changes them.
    """
    source = pipeline.source
    kinds = [stage.kind for stage in pipeline.stages]
    if "shuffle" not in kinds or not isinstance(source, BlockSource):
        return None
    first = kinds.index("shuffle")
    rows = source.unit_rows()
    if rows is None or not sum(rows) or "flat_map" in kinds[:first]:
        return None
    window: int = pipeline.stages[first].options["rows"]
    units = sum(1 for each in rows if each)
    return min(units, window * units / sum(rows)), units


def describe_mixing(pipeline: Pipeline) -> str | None:
    """A sentence for a person, or None where nothing is known."""
    found = units_a_window(pipeline)
    if found is None:
        return None
    mixed, units = found
    text = f"Shuffle: a window mixes rows of about {mixed:.1f} of {count(units, 'unit')} of the source."
    if mixed >= min(ENOUGH, units):
        return text
    return (
        f"{text} With fewer than {ENOUGH}, rows that lie sorted in the files stay together: a larger window mixes more."
    )
