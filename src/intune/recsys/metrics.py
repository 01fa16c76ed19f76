"""How good predictions of clicks are, exactly and in numpy."""

from typing import Any

import numpy as np
import numpy.typing as npt


def auc(labels: npt.ArrayLike, scores: npt.ArrayLike) -> float | None:
    """Area under the ROC curve: the share of (1, 0) pairs in which the 1 has the higher score, a tie counting half.

    Args:
        labels: [n], 0 or 1.
        scores: [n], finite or infinite, higher = more likely 1; logits and probabilities give the same.

    Returns:
        A float in [0, 1], or None where it is undefined: all labels are the same, or there are none.

    Raises:
        ValueError: If lengths differ, a label is neither 0 nor 1, or a score is NaN.
    """
    truth, values = _checked(labels, scores)
    ones = int(truth.sum())
    zeros = len(truth) - ones
    if not ones or not zeros:
        return None
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    # Twice the mean rank of each group of ties: whole numbers, so nothing is rounded before the last line.
    double_rank = 2 * np.cumsum(count) - count + 1
    wins = int(double_rank[place][truth].sum()) - ones * (ones + 1)
    return wins / (2 * ones * zeros)


def log_loss(labels: npt.ArrayLike, logits: npt.ArrayLike) -> float | None:
    """Mean negative log likelihood of labels under sigmoid(logit), in nats.

    Args:
        labels: [n], 0 or 1.
        logits: [n].

    Returns:
        A float of at least 0, or None for no rows.

    Raises:
        ValueError: If lengths differ, a label is neither 0 nor 1, or a logit is NaN.
    """
    truth, values = _checked(labels, logits)
    if not len(truth):
        return None
    values = values.astype(np.float64)
    # log(1 + exp(x)) written so that no exponential can overflow; the loss is that of x = logit, or -logit for a 1.
    return float(np.logaddexp(0, np.where(truth, -values, values)).mean())


def _checked(labels: npt.ArrayLike, scores: npt.ArrayLike) -> tuple[npt.NDArray[np.bool_], npt.NDArray[Any]]:
    truth, values = np.asarray(labels), np.asarray(scores)
    if truth.ndim != 1 or truth.shape != values.shape:
        raise ValueError(
            f"labels and scores must be one-dimensional and equally long, got {truth.shape} and {values.shape}"
        )
    if not np.isin(truth, (0, 1)).all():
        raise ValueError(f"labels must be 0 or 1, got {truth[~np.isin(truth, (0, 1))][0]}")
    if np.isnan(values).any():
        raise ValueError(f"score {int(np.isnan(values).argmax())} is NaN")
    return truth == 1, values
