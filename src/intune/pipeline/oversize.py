"""Parquet row groups of which even one block is more than may be in flight."""

from intune._words import count, size
from intune.pipeline.chain import Pipeline
from intune.pipeline.source import BlockSource

_KIND = "read_parquet"


def describe_oversize(pipeline: Pipeline, limit: int | None) -> str | None:
    """A sentence that names the largest row group that does not fit, and what to do; None where all do.

    What does not fit is read all the same, alone, once all else is done: slowly, and beyond the limit.

    Args:
        pipeline: The chain.
        limit: Bytes that may be in flight; None = no limit.
    """
    source = pipeline.source
    if limit is None or not isinstance(source, BlockSource) or source.kind != _KIND or not source.unit_count():
        return None
    bounds = [source.read_bound(unit) for unit in range(source.unit_count())]
    over = sum(bound > limit for bound in bounds)
    if not over:
        return None
    largest = max(range(len(bounds)), key=bounds.__getitem__)
    return (
        f"{over:,} of {count(len(bounds), 'row group')} may each need more memory to be read than may be in flight "
        f"({size(limit)}); the largest, {source.describe(largest)}, about {size(bounds[largest])}. Such a group is "
        "read alone, and may pass the limit: read fewer columns=, lower block_rows=, write the files anew with smaller "
        "row groups, or raise memory="
    )
