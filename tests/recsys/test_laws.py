"""The laws of single columns, against sums that are added up one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune.recsys.criteo_facts import CATEGORIES, COUNT_RANK_CORRELATIONS, COUNTS, CategoryFacts
from intune.recsys.laws import CategoryLaw, CountLaw, category_ids, normal_factor

LONG = CategoryFacts(60_000, 1.1, 2.5, head=(0.3, 0.01))


def shares_of(facts: CategoryFacts) -> np.ndarray:
    weights = (np.arange(len(facts.head) + 1, facts.vocabulary + 1) + facts.q) ** -facts.s
    return np.concatenate([facts.head, weights * (1 - sum(facts.head)) / weights.sum()])


def test_uniform_numbers_become_ranks_by_their_shares() -> None:
    ends = shares_of(LONG).cumsum()
    uniform = np.linspace(0, 1, 50_000, endpoint=False)
    rank = CategoryLaw(LONG).rank(uniform)
    exact = np.minimum(ends.searchsorted(uniform, side="right"), LONG.vocabulary - 1)
    assert (np.diff(rank) >= 0).all()
    assert rank[0] == 0
    assert np.abs(ends[rank] - ends[exact]).max() < 1e-4


@given(st.integers(0, len(CATEGORIES) - 1), st.floats(0, 1, exclude_max=True))
def test_the_middle_of_a_rank_gives_the_rank(column: int, uniform: float) -> None:
    law = CategoryLaw(CATEGORIES[column])
    rank = law.rank(np.array([uniform, 0.0, 1 - 2**-53]))
    assert rank.min() == 0
    assert rank.max() < CATEGORIES[column].vocabulary
    assert (law.rank(law.middle(rank)) == rank).all()


def test_a_head_leaves_shares_for_all_other_ranks() -> None:
    assert all(sum(facts.head) < 1 for facts in CATEGORIES)
    law = CategoryLaw(CATEGORIES[19])
    assert set(law.rank(np.linspace(0, 1, 30_000, endpoint=False)).tolist()) == {0, 1, 2, 3}


def test_a_greater_number_never_gives_a_smaller_count() -> None:
    normal = np.linspace(-7, 7, 5000)
    for facts in COUNTS:
        count = CountLaw(facts).count(normal)
        assert (np.diff(count) >= 0).all()
        assert count[0] == -len(facts.negative)
        assert facts.values[-1] <= count[-1] <= (facts.limit or 2**31)


def test_correlations_that_no_numbers_can_have_become_the_nearest_that_they_can() -> None:
    factor = normal_factor(COUNT_RANK_CORRELATIONS)
    assert (factor**2).sum(axis=1) == pytest.approx(1, abs=1e-5)
    assert (factor == np.tril(factor)).all()
    impossible = normal_factor(((), (0.9,), (0.9, -0.9)))
    correlations = impossible @ impossible.T
    assert np.linalg.eigvalsh(correlations).min() > 0
    assert correlations[1, 0] == pytest.approx(-correlations[2, 1])
    assert 0.3 < correlations[1, 0] < 0.9


def test_ids_are_distinct_and_use_all_bits() -> None:
    ids = category_ids(3, np.arange(1_000_000))
    assert len(np.unique(ids)) == 1_000_000
    assert ids.min() >= 0
    assert ids.max() < 2**32
    assert all(abs((ids >> bit & 1).mean() - 0.5) < 0.01 for bit in range(32))
    assert not np.isin(category_ids(4, np.arange(100)), ids[:100]).any()
    assert category_ids(0, np.array([0, 1])).tolist() == category_ids(0, np.array([0, 1, 2])).tolist()[:2]


@given(st.integers(0, 51), st.integers(0, 2**32 - 1))
def test_ids_are_those_of_murmur_hash_on_every_machine(column: int, identity: int) -> None:
    x = identity + (column + 1) * 0x9E3779B1 & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ x >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    assert category_ids(column, np.array([identity])).tolist() == [x ^ x >> 16]
