"""Made-up rows against the facts that they are drawn from: gaps, quantiles, skew, and what follows from what."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from intune.recsys.clicks import draw_chunk
from intune.recsys.criteo import CATEGORY_COLUMNS, COUNT_COLUMNS, criteo_schema
from intune.recsys.criteo_facts import MISSING, PARENTS
from intune.recsys.generate import CHUNK_ROWS, generate_rows

pytestmark = pytest.mark.slow

GROUPS = [facts.columns for facts in MISSING if len(facts.columns) > 1]
SAMPLE_ROWS = 10_000  # of which the facts are


@pytest.fixture(scope="module")
def made() -> pa.Table:
    return table(2 * CHUNK_ROWS, seed=7)


@pytest.fixture(scope="module")
def facts(shared_data: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shared_data / "criteo_stats.json").read_text())
    return found


def table(rows: int, **options: Any) -> pa.Table:
    return pa.Table.from_batches(generate_rows(rows, **options), criteo_schema()).combine_chunks()


def present(rows: pa.Table, name: str) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = rows[name].drop_null().to_numpy()
    return values


def children(rows: pa.Table, parent: str, child: str) -> float:
    """Distinct values of the child by each value of the parent, on average."""
    both = rows.select([parent, child]).drop_null()
    pairs = both[parent].to_numpy().astype(np.uint64) << np.uint64(32) | both[child].to_numpy().astype(np.uint64)
    return len(np.unique(pairs)) / pc.count_distinct(both[parent]).as_py()


def commonest(rows: pa.Table, name: str, count: int) -> set[int]:
    values, counts = np.unique(present(rows, name), return_counts=True)
    return set(values[np.argsort(counts)[-count:]].tolist())


# ---- absences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: "-".join(group))
def test_a_group_is_missing_together_or_not_at_all(made: pa.Table, group: tuple[str, ...]) -> None:
    absent = [made[name].is_null() for name in group]
    assert 0 < pc.sum(absent[0]).as_py() < made.num_rows
    assert all(one.equals(other) for one, other in pairwise(absent))


def test_the_groups_are_those_of_the_facts(facts: dict[str, Any]) -> None:
    assert sorted(map(tuple, facts["missing_groups_kaggle"])) == sorted(GROUPS)


def test_columns_are_missing_as_often_as_the_facts_say(made: pa.Table, facts: dict[str, Any]) -> None:
    head = facts["kaggle_train_head_10k"]
    for known in head["dense"] + head["categorical"]:
        rate = made[known["name"]].null_count / made.num_rows
        assert rate == pytest.approx(known["missing_rate"], abs=0.006), known["name"]
    for one, other, phi in head["missingness_phi_gt_0.3"]:
        absent = [made[name].is_null().to_numpy().astype(float) for name in (one, other)]
        assert np.corrcoef(absent)[0, 1] == pytest.approx(phi, abs=0.03), (one, other)


# ---- labels and counts ----------------------------------------------------------------------------------------------


def test_the_label_rate_is_that_of_the_facts(made: pa.Table, facts: dict[str, Any]) -> None:
    assert pc.mean(made["label"]).as_py() == pytest.approx(facts["kaggle_train_head_10k"]["label_rate"], abs=0.01)


@pytest.mark.parametrize("column", range(len(COUNT_COLUMNS)), ids=COUNT_COLUMNS)
def test_quantiles_are_those_of_the_facts(made: pa.Table, facts: dict[str, Any], column: int) -> None:
    known = facts["kaggle_train_head_10k"]["dense"][column]
    values = present(made, known["name"])
    for percent, value in known["quantiles"].items():
        share = float(percent) / 100
        near = min(0.02, 0.6 * (1 - share))
        assert np.mean(values < value) - near <= share <= np.mean(values <= value) + near, percent
    assert np.mean(values == 0) == pytest.approx(known["zero_share_of_present"], abs=0.01)
    assert np.mean(values < 0) == pytest.approx(known["negative_share_of_present"], abs=0.01)
    assert values.min() == known["min"]
    assert 0.9 * known["max"] < values.max() < 100 * known["max"] + 100


def test_a_count_saturates_where_the_real_one_does(made: pa.Table) -> None:
    assert present(made, "I3").max() == 65_535


def test_counts_depend_on_each_other_as_the_facts_say(made: pa.Table, facts: dict[str, Any]) -> None:
    known = facts["kaggle_train_head_10k"]["dense_spearman"]
    for i, one in enumerate(COUNT_COLUMNS):
        for j, other in enumerate(COUNT_COLUMNS[:i]):
            both = made.select([one, other]).drop_null().slice(0, 10_000)
            ranks = [mean_ranks(both[name].to_numpy()) for name in (one, other)]
            assert np.corrcoef(ranks)[0, 1] == pytest.approx(known[i][j], abs=0.13), (one, other)


def mean_ranks(values: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: npt.NDArray[np.float64] = (np.cumsum(count) - (count - 1) / 2)[place]
    return ranks


# ---- categories -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", range(len(CATEGORY_COLUMNS)), ids=CATEGORY_COLUMNS)
def test_categories_are_as_skewed_as_the_facts_say(made: pa.Table, facts: dict[str, Any], column: int) -> None:
    known = facts["kaggle_train_head_10k"]["categorical"][column]
    values = present(made.slice(0, SAMPLE_ROWS), known["name"])
    shares = np.sort(np.unique(values, return_counts=True)[1])[::-1] / len(values)
    assert shares[0] == pytest.approx(known["top1_share"], abs=0.025)
    assert shares[:10].sum() == pytest.approx(known["top10_share"], abs=0.03)
    assert shares[:100].sum() == pytest.approx(known["top100_share"], abs=0.055)
    assert len(shares) == pytest.approx(known["distinct_in_sample"], rel=0.15, abs=7)


def test_no_column_has_more_values_than_its_vocabulary(made: pa.Table, facts: dict[str, Any]) -> None:
    for known in facts["kaggle_train_head_10k"]["categorical"]:
        assert pc.count_distinct(made[known["name"]]).as_py() <= known["full_kaggle_cardinality"] + 1


def test_categories_follow_from_others_as_the_facts_say(made: pa.Table, facts: dict[str, Any]) -> None:
    for link in facts["exact_functional_dependencies_kaggle_head_10k"]["chain"]:
        parent, child = link.split("->")
        assert children(made, parent, child) == 1, link
        assert children(made, child, parent) > 1, link  # it tells less than its parent


def test_c11_follows_from_c7_in_most_rows_only(made: pa.Table) -> None:
    assert 1.0 < children(made, "C7", "C11") < 1.5


# ---- drift ----------------------------------------------------------------------------------------------------------


def test_without_drift_days_differ_in_their_rows_but_not_in_their_distribution() -> None:
    one, other = table(40_000, day=0), table(40_000, day=9)
    assert not one["C3"].equals(other["C3"])
    for name in ("C3", "C10", "C15"):
        assert len(commonest(one, name, 10) & commonest(other, name, 10)) >= 8
    assert pc.mean(one["label"]).as_py() == pytest.approx(pc.mean(other["label"]).as_py(), abs=0.015)


def test_drift_shifts_vocabularies_and_rates_slowly() -> None:
    days = [table(40_000, day=day, drift=0.03) for day in (0, 1, 20)]
    assert days[0].equals(table(40_000))
    names = [name for name in CATEGORY_COLUMNS if pc.count_distinct(days[0][name]).as_py() > 100]
    kept = [sum(len(commonest(days[0], name, 20) & commonest(day, name, 20)) for name in names) for day in days]
    assert kept[0] == 20 * len(names)
    assert 0.85 < kept[1] / kept[0] < 1
    assert 0.2 < kept[2] / kept[0] < 0.7
    labels = [pc.mean(day["label"]).as_py() for day in days]
    assert labels[0] + 0.05 < labels[2] < labels[0] + 0.2
    missing = [[day[name].null_count / day.num_rows for name in ("C6", "C22", "I12")] for day in days]
    assert all(abs(now - then) < 0.02 for now, then in zip(missing[0], missing[1], strict=True))
    assert all(abs(now - then) > 0.03 for now, then in zip(missing[0], missing[2], strict=True))


def test_what_follows_from_what_stays_the_same_over_the_days() -> None:
    both = pa.concat_tables([table(30_000, day=day, drift=0.2) for day in (0, 1, 2)])
    assert all(children(both, parent, child) == 1 for child, parent in PARENTS.items() if child != "C11")
    assert all(both[one].is_null().equals(both[other].is_null()) for group in GROUPS for one, other in pairwise(group))


def test_all_chance_comes_from_the_given_generator() -> None:
    one, other = (draw_chunk(100, np.random.default_rng(4)) for _ in range(2))
    assert one.batch.equals(other.batch)
    assert (one.logit == other.logit).all()
