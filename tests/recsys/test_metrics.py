"""AUC and log loss against the definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune.recsys.metrics import auc, log_loss

# Few distinct scores, so that ties are common.
SCORES = st.sampled_from([-2.0, -0.5, 0.0, 0.5, 3.0]) | st.floats(-1e6, 1e6)
ROWS = st.lists(st.tuples(st.integers(0, 1), SCORES), max_size=40)


@given(ROWS)
def test_auc_is_the_share_of_pairs_in_order(rows: list[tuple[int, float]]) -> None:
    ones = [score for label, score in rows if label]
    zeros = [score for label, score in rows if not label]
    labels, scores = [label for label, _ in rows], [score for _, score in rows]
    if not ones or not zeros:
        assert auc(labels, scores) is None
        return
    halves = sum((one > zero) + (one >= zero) for one in ones for zero in zeros)
    assert auc(labels, scores) == halves / (2 * len(ones) * len(zeros))


@given(ROWS.filter(bool))
def test_log_loss_is_the_mean_negative_log_likelihood(rows: list[tuple[int, float]]) -> None:
    labels, logits = [label for label, _ in rows], [score for _, score in rows]
    # -log(sigmoid(x)) = log(1 + exp(-x)), which for large -x is -x.
    each = [math.log1p(math.exp(-x)) if x > -700 else -x for x in ((z if y else -z) for y, z in rows)]
    assert log_loss(labels, logits) == pytest.approx(sum(each) / len(each), rel=1e-12)


def test_known_values() -> None:
    assert auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]) == 0.75
    assert auc([0, 1], [5.0, 5.0]) == 0.5
    assert auc([0, 1], [-math.inf, math.inf]) == 1.0
    assert log_loss([1, 0], [0.0, 0.0]) == pytest.approx(math.log(2))


def test_float32_logits_and_labels_as_they_come_from_a_model() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=5000).round(1).astype(np.float32)
    labels = (random.random(5000) < 0.3).astype(np.float32)
    ones, zeros = logits[labels == 1][:, None], logits[labels == 0][None, :]
    assert auc(labels, logits) == pytest.approx(((ones > zeros) + 0.5 * (ones == zeros)).mean(), abs=1e-15)


def test_no_rows() -> None:
    assert auc([], []) is None
    assert log_loss([], []) is None


@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([0, 1], [1.0], "equally long"),
        ([[0, 1]], [[1.0, 2.0]], "one-dimensional"),
        ([0, 2], [1.0, 2.0], "labels must be 0 or 1, got 2"),
        ([0, 1], [1.0, math.nan], "score 1 is NaN"),
    ],
)
@pytest.mark.parametrize("metric", [auc, log_loss])
def test_what_cannot_be_judged_is_refused(metric: object, labels: list[int], scores: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric(labels, scores)  # type: ignore[operator]
