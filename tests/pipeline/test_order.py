"""Which rows a rank reads: complete, disjoint, the same for whoever computes it."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune.pipeline.order import OnUneven, RankPlan, epoch_order, generator, plan_rank, rank_range

Row = tuple[int, int]
"""A row as (unit, place in it)."""

units_of_rows = st.lists(st.integers(0, 9), max_size=12)
worlds = st.integers(1, 7)
seeds = st.none() | st.integers(0, 2**40)
epochs = st.integers(0, 1000)


def rows_of(plan: RankPlan, unit_rows: list[int]) -> tuple[list[Row], list[Row]]:
    """What a plan reads: own rows, and those that it repeats, in order."""
    own: list[Row] = []
    repeated: list[Row] = []
    for position in range(len(plan)):
        unit, start, stop, padding = plan[position]
        stop = unit_rows[unit] if stop is None else stop
        assert 0 <= start <= stop <= unit_rows[unit]
        (repeated if padding else own).extend((unit, row) for row in range(start, stop))
    return own, repeated


def plans(unit_rows: list[int], seed: int | None, epoch: int, world: int, on_uneven: OnUneven) -> list[RankPlan]:
    """Each rank computes everything anew, as it would on a machine of its own."""
    return [
        plan_rank(epoch_order(len(unit_rows), seed, epoch), list(unit_rows), rank, world, on_uneven)
        for rank in range(world)
    ]


def in_order(unit_rows: list[int], seed: int | None, epoch: int) -> list[Row]:
    order = epoch_order(len(unit_rows), seed, epoch)
    return [(int(unit), row) for unit in order for row in range(unit_rows[int(unit)])]


class TestOrderOfUnits:
    @given(st.integers(0, 200), seeds, epochs)
    def test_is_a_permutation_and_the_same_for_the_same_seed(self, count: int, seed: int | None, epoch: int) -> None:
        order = epoch_order(count, seed, epoch)
        assert sorted(order.tolist()) == list(range(count))
        assert order.dtype == np.int64
        assert order.tolist() == epoch_order(count, seed, epoch).tolist()

    def test_without_a_seed_is_as_files_stand(self) -> None:
        assert epoch_order(5, None, 3).tolist() == [0, 1, 2, 3, 4]

    @given(st.integers(0, 2**40), st.integers(0, 50))
    def test_differs_between_epochs_and_seeds(self, seed: int, epoch: int) -> None:
        several = [epoch_order(100, seed + more, epoch + later).tolist() for more in (0, 1) for later in (0, 1)]
        assert all(one != other for one, other in itertools.combinations(several, 2))

    def test_is_fixed_for_good(self) -> None:
        """A saved state stands for rows in this order: another one needs another plan version."""
        assert epoch_order(8, 7, 2).tolist() == [7, 6, 0, 5, 2, 3, 4, 1]
        assert generator(1, 2, 3).integers(0, 1000, 4).tolist() == [288, 719, 299, 12]

    def test_has_a_stream_of_its_own(self) -> None:
        """Windows of a shuffle draw from (seed, epoch, stage, window): no number of a stage gives the units' stream."""
        order = epoch_order(50, 7, 0).tolist()
        assert all(generator(7, 0, stage).permutation(50).tolist() != order for stage in range(100))


class TestRanks:
    @given(units_of_rows, seeds, epochs, worlds)
    def test_drop_gives_each_the_same_and_leaves_less_than_one_row_a_rank_out(
        self, unit_rows: list[int], seed: int | None, epoch: int, world: int
    ) -> None:
        total = sum(unit_rows)
        read = [rows_of(plan, unit_rows) for plan in plans(unit_rows, seed, epoch, world, "drop")]
        assert all(not repeated for _, repeated in read)
        assert {len(own) for own, _ in read} == {total // world}
        together = [row for own, _ in read for row in own]
        assert together == in_order(unit_rows, seed, epoch)[: len(together)]
        assert total - len(together) < world

    @given(units_of_rows, seeds, epochs, worlds)
    def test_pad_gives_each_the_same_and_marks_what_is_repeated(
        self, unit_rows: list[int], seed: int | None, epoch: int, world: int
    ) -> None:
        total = sum(unit_rows)
        share = -(-total // world)
        read = [rows_of(plan, unit_rows) for plan in plans(unit_rows, seed, epoch, world, "pad")]
        assert {len(own) + len(repeated) for own, repeated in read} == {share}
        assert [row for own, _ in read for row in own] == in_order(unit_rows, seed, epoch)
        assert sum(len(repeated) for _, repeated in read) == share * world - total
        first = in_order(unit_rows, seed, epoch)[:share]
        for _, repeated in read:
            whole, rest = divmod(len(repeated), max(1, total))
            assert repeated == in_order(unit_rows, seed, epoch) * whole + first[:rest]

    @given(units_of_rows, seeds, epochs, worlds)
    def test_uneven_reads_each_row_once_and_differs_by_one(
        self, unit_rows: list[int], seed: int | None, epoch: int, world: int
    ) -> None:
        read = [rows_of(plan, unit_rows) for plan in plans(unit_rows, seed, epoch, world, "uneven")]
        assert all(not repeated for _, repeated in read)
        assert [row for own, _ in read for row in own] == in_order(unit_rows, seed, epoch)
        sizes = [len(own) for own, _ in read]
        assert max(sizes) - min(sizes) <= 1

    @given(units_of_rows, seeds, epochs, worlds, st.sampled_from(["drop", "pad", "uneven"]))
    def test_each_knows_its_number_of_rows_before_reading(
        self, unit_rows: list[int], seed: int | None, epoch: int, world: int, on_uneven: OnUneven
    ) -> None:
        for rank, plan in enumerate(plans(unit_rows, seed, epoch, world, on_uneven)):
            own, repeated = rows_of(plan, unit_rows)
            assert plan.rows == len(own) + len(repeated)
            start, stop, again = rank_range(sum(unit_rows), rank, world, on_uneven)
            assert (stop - start, again if sum(unit_rows) else 0) == (len(own), len(repeated))

    @given(units_of_rows, worlds, st.sampled_from(["drop", "pad", "uneven"]))
    def test_reads_no_unit_of_which_it_takes_no_row(
        self, unit_rows: list[int], world: int, on_uneven: OnUneven
    ) -> None:
        for plan in plans(unit_rows, 3, 0, world, on_uneven):
            own, repeated = rows_of(plan, unit_rows)
            wanted = {unit for unit, _ in own + repeated}
            read = {plan[position].unit for position in range(len(plan))}
            assert {unit for unit in read if unit_rows[unit]} == wanted

    def test_one_rank_needs_no_counts(self) -> None:
        plan = plan_rank(epoch_order(3, None, 0), None)
        assert [plan[i] for i in range(len(plan))] == [(0, 0, None, False), (1, 0, None, False), (2, 0, None, False)]
        assert plan.rows is None

    def test_several_ranks_do(self) -> None:
        with pytest.raises(ValueError, match="rows of each unit are needed"):
            plan_rank(epoch_order(3, None, 0), None, 0, 2)


class TestFieldCases:
    """Numbers at which ranks of other loaders hung or repeated rows."""

    def batches(self, unit_rows: list[int], world: int, on_uneven: OnUneven, size: int) -> list[int]:
        return [-(-(plan.rows or 0) // size) for plan in plans(unit_rows, None, 0, world, on_uneven)]

    def test_five_rows_on_two_ranks(self) -> None:
        assert self.batches([5], 2, "drop", 2) == [1, 1]
        assert self.batches([5], 2, "pad", 2) == [2, 2]
        assert self.batches([5], 2, "uneven", 2) == [1, 2]
        read = [rows_of(plan, [5]) for plan in plans([5], None, 0, 2, "pad")]
        assert [len(repeated) for _, repeated in read] == [0, 1]
        assert Counter(row for own, again in read for row in own + again).most_common(1) == [((0, 0), 2)]

    def test_files_that_do_not_divide(self) -> None:
        unit_rows = [700, 200, 103]
        read = [rows_of(plan, unit_rows)[0] for plan in plans(unit_rows, 11, 4, 4, "drop")]
        assert [len(own) for own in read] == [250] * 4  # 5 batches of 50 each
        assert len({row for own in read for row in own}) == 1000

    def test_fewer_row_groups_than_ranks(self) -> None:
        read = [rows_of(plan, [50, 50])[0] for plan in plans([50, 50], 5, 0, 4, "drop")]
        assert [len(own) for own in read] == [25] * 4
        assert len({row for own in read for row in own}) == 100

    @pytest.mark.parametrize(
        ("on_uneven", "rows"), [("drop", [0, 0, 0, 0]), ("pad", [1] * 4), ("uneven", [0, 1, 1, 1])]
    )
    def test_fewer_rows_than_ranks(self, on_uneven: OnUneven, rows: list[int]) -> None:
        assert [plan.rows for plan in plans([2, 1], None, 0, 4, on_uneven)] == rows

    @pytest.mark.parametrize("on_uneven", ["drop", "pad", "uneven"])
    def test_no_rows_at_all(self, on_uneven: OnUneven) -> None:
        assert [(len(plan), plan.rows) for plan in plans([0, 0], 1, 0, 3, on_uneven)] == [(0, 0)] * 3
