"""The best AUC that is stated: by hand, on other rows, and from what a model sees."""

import numpy as np
import pyarrow.compute as pc
import pytest

from intune import PipelineError
from intune.recsys.clicks import draw_chunk
from intune.recsys.criteo import CATEGORY_COLUMNS
from intune.recsys.generate import stated_auc
from intune.recsys.laws import category_ids
from intune.recsys.metrics import auc
from intune.recsys.truth import CATEGORY_EFFECTS, COUNT_WEIGHTS, INTERCEPT, IdealAuc


def test_the_ideal_auc_is_the_expectation_over_labels() -> None:
    logit = np.random.default_rng(0).normal(-1, 1.5, 300)
    logit[:20] = logit[20:40]  # ties
    p = 1 / (1 + np.exp(-logit))
    wins = (logit[:, None] > logit) + 0.5 * (logit[:, None] == logit)
    expected = (p[:, None] * (1 - p) * wins).sum() / (p.sum() * (1 - p).sum())
    ideal = IdealAuc()
    assert ideal.value is None
    for part in np.split(logit, [7, 150]):
        ideal.add(part)
    assert ideal.value == pytest.approx(expected, abs=1e-4)  # the ranges of logits blur it by less
    assert ideal.click_rate == pytest.approx(p.mean())


def test_logits_beyond_all_ranges_count_as_the_last() -> None:
    ideal = IdealAuc()
    ideal.add(np.array([-1000.0, 1000.0]))
    assert ideal.value == pytest.approx(1, abs=1e-6)
    assert ideal.click_rate == pytest.approx(0.5)


@pytest.mark.slow
def test_the_true_logits_reach_the_stated_auc_on_fresh_rows() -> None:
    stated = stated_auc(rows=100_000)
    assert 0.75 < stated < 0.80
    fresh = draw_chunk(200_000, np.random.default_rng(99))
    labels = fresh.batch["label"].to_numpy()
    reached = auc(labels, fresh.logit)
    assert reached == pytest.approx(stated, abs=0.006)  # labels of 200,000 rows: four standard errors
    assert labels.mean() == pytest.approx((1 / (1 + np.exp(-fresh.logit))).mean(), abs=0.004)


@pytest.mark.slow
def test_the_stated_auc_is_that_of_every_seed() -> None:
    assert stated_auc(rows=100_000, seed=1) == pytest.approx(stated_auc(rows=100_000, seed=2, day=3), abs=0.004)


@pytest.mark.slow
def test_drift_has_a_stated_auc_as_well() -> None:
    stated = stated_auc(rows=100_000, day=10, drift=0.05)
    assert stated < stated_auc(rows=100_000) - 0.002  # categories that carried the signal are gone
    fresh = draw_chunk(200_000, np.random.default_rng(98), drift=0.5)
    assert auc(fresh.batch["label"].to_numpy(), fresh.logit) == pytest.approx(stated, abs=0.006)


def test_a_model_sees_all_that_the_label_rests_on() -> None:
    chunk = draw_chunk(5000, np.random.default_rng(1))
    logit = np.full(5000, INTERCEPT)
    for name, weight in COUNT_WEIGHTS.items():
        logit += weight * np.log1p(np.maximum(pc.fill_null(chunk.batch[name], 0).to_numpy(), 0))
    for name, effects in CATEGORY_EFFECTS.items():
        ids = category_ids(CATEGORY_COLUMNS.index(name), np.arange(len(effects)))
        values = pc.fill_null(chunk.batch[name], -1).to_numpy()
        for value, effect in zip(ids, effects, strict=True):
            logit += effect * (values == value)
    assert chunk.logit == pytest.approx(logit)


def test_no_rows_have_no_auc() -> None:
    with pytest.raises(PipelineError, match="rows must be at least 1, got 0"):
        stated_auc(rows=0)
