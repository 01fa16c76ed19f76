"""Facts about real click logs that made-up rows are drawn from.

Measured on the first 10,000 rows of Criteo's Kaggle file; sizes of vocabularies are those of the whole file. Nothing
here is a row: rates, quantiles, shares and parameters of fitted laws only.
"""

from dataclasses import dataclass

LABEL_RATE = 0.218

QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 0.9999)
"""Shares of the present counts to which `CountFacts.values` belong; the last stands for the greatest of 10,000."""


@dataclass(frozen=True)
class CountFacts:
    """What is known of a column of counts, as far as it is present.

    Attributes:
        zero: Share of zeros.
        values: The counts at `QUANTILES`.
        negative: Shares of negative counts: -1, -2, ...
        limit: A value that counts saturate at, where there is one.
    """

    zero: float
    values: tuple[int, ...]
    negative: tuple[float, ...] = ()
    limit: int | None = None


COUNTS = (
    CountFacts(0.4753, (0, 0, 0, 0, 1, 3, 8, 15, 44, 99, 214)),
    CountFacts(0.1795, (-1, -1, 0, 0, 3, 38, 192, 573, 2214, 3582, 18522), negative=(0.0969, 0.0006)),
    CountFacts(0.0080, (1, 1, 1, 2, 7, 21, 52, 93, 303, 2831, 65535), limit=65535),
    CountFacts(0.0714, (0, 0, 1, 2, 4, 10, 20, 28, 44, 79, 280)),
    CountFacts(0.0166, (0, 2, 12, 272, 2480, 10491, 32443, 51169, 312261, 760973, 1618112)),
    CountFacts(0.0629, (0, 0, 2, 9, 40, 129, 334, 590, 1733, 3925, 12167)),
    CountFacts(0.2525, (0, 0, 0, 0, 3, 10, 30, 58, 190, 709, 1658)),
    CountFacts(0.1177, (0, 0, 0, 2, 7, 20, 35, 42, 48, 70, 682)),
    CountFacts(0.0318, (0, 1, 2, 10, 41, 123, 308, 502, 1228, 3171, 7335)),
    CountFacts(0.5015, (0, 0, 0, 0, 0, 1, 1, 2, 3, 4, 6)),
    CountFacts(0.2649, (0, 0, 0, 0, 1, 2, 5, 9, 22, 52, 79)),
    CountFacts(0.7364, (0, 0, 0, 0, 0, 1, 2, 4, 14, 39, 98)),
    CountFacts(0.0616, (0, 0, 1, 2, 5, 13, 27, 38, 74, 223, 770)),
)
"""I1..I13."""

COUNT_RANK_CORRELATIONS = (
    (),
    (0.0,),
    (0.07, -0.09),
    (0.10, -0.09, 0.37),
    (-0.75, -0.01, -0.09, -0.16),
    (-0.62, 0.02, 0.10, 0.13, 0.63),
    (0.33, 0.01, 0.03, 0.13, -0.39, -0.23),
    (0.05, 0.04, 0.30, 0.58, -0.21, 0.21, 0.19),
    (-0.21, 0.04, 0.07, 0.30, 0.05, 0.50, 0.42, 0.44),
    (0.88, 0.01, 0.05, 0.07, -0.78, -0.64, 0.19, 0.04, -0.21),
    (0.17, 0.01, 0.02, 0.13, -0.41, -0.23, 0.88, 0.21, 0.48, 0.19),
    (0.18, -0.01, 0.02, 0.01, -0.27, -0.20, 0.10, 0.04, -0.10, 0.17, 0.07),
    (-0.15, -0.06, 0.37, 0.76, 0.06, 0.41, 0.03, 0.60, 0.35, -0.16, 0.04, -0.04),
)
"""Spearman's, of each count with those before it."""


@dataclass(frozen=True)
class CategoryFacts:
    """What is known of a column of categories, as far as it is present.

    The value of rank r (from 1) has the share `head[r - 1]`; ranks after the head share what is left in proportion to
    (r + q) ** -s, Zipf-Mandelbrot's law.

    Attributes:
        vocabulary: Distinct values.
        s: Exponent of the law.
        q: Offset of the law.
        head: Shares of the most frequent values where the law does not fit them; the shares of all of them but the
            never seen ones for a small vocabulary.
    """

    vocabulary: int
    s: float
    q: float
    head: tuple[float, ...] = ()


CATEGORIES = (
    CategoryFacts(1460, 1.95, 0.2687),
    CategoryFacts(583, 3.5, 92.5, (0.1235, 0.0652, 0.0467, 0.0348, 0.0346, 0.0331, 0.0303, 0.0229, 0.0224, 0.0189)),
    CategoryFacts(10_131_227, 1.05, 0.8751),
    CategoryFacts(2_202_608, 1.1, 0.691),
    CategoryFacts(305, 2.6, 0.3403),
    CategoryFacts(24, 2.0, 0.0, (0.5298, 0.2238, 0.1417, 0.0477, 0.0395, 0.0168, 0.0003)),
    CategoryFacts(12_517, 1.3, 65.8, (0.0105, 0.0086, 0.0083, 0.0082, 0.0075, 0.0066, 0.0065, 0.0057, 0.0056, 0.0052)),
    CategoryFacts(633, 2.275, 0.3403),
    CategoryFacts(3, 1.0, 0.0, (0.8871, 0.1125)),
    CategoryFacts(93_145, 1.4, 92.5, (0.2757, 0.0105, 0.0104, 0.0069, 0.0067, 0.0065, 0.0064, 0.0052, 0.0051, 0.0045)),
    CategoryFacts(5683, 1.7, 130.2, (0.0203, 0.0197, 0.0133, 0.0102, 0.0092, 0.0083, 0.0078, 0.0078, 0.007, 0.0067)),
    CategoryFacts(8_351_593, 1.05, 0.8751),
    CategoryFacts(3194, 1.8, 130.2, (0.0221, 0.0204, 0.0149, 0.0129, 0.0119, 0.0118, 0.011, 0.0102, 0.0082, 0.0078)),
    CategoryFacts(27, 3.0, 3.6094, (0.3629, 0.3456, 0.1604, 0.0362, 0.0245, 0.0226, 0.014, 0.0108, 0.007, 0.0045)),
    CategoryFacts(14_992, 1.9, 130.2, (0.0195, 0.015, 0.0119, 0.01, 0.0099, 0.0099, 0.0091, 0.0088, 0.0078, 0.0077)),
    CategoryFacts(5_461_306, 1.075, 1.1082),
    CategoryFacts(10, 1.0, 0.0, (0.4304, 0.1333, 0.1269, 0.0769, 0.0602, 0.0494, 0.0442, 0.042, 0.0366)),
    CategoryFacts(5652, 2.0, 65.8, (0.051, 0.029, 0.0223, 0.0205, 0.0189, 0.0175, 0.0164, 0.0149, 0.0146, 0.0136)),
    CategoryFacts(2173, 1.4, 11.9, (0.6013, 0.0365, 0.0219, 0.0154)),
    CategoryFacts(4, 1.0, 0.0, (0.3615, 0.3219, 0.3164)),
    CategoryFacts(7_046_547, 1.075, 1.1082),
    CategoryFacts(18, 2.0, 0.0, (0.5258, 0.3839, 0.0374, 0.0319, 0.0181, 0.0022)),
    CategoryFacts(15, 2.0, 0.0, (0.4515, 0.2024, 0.1045, 0.0724, 0.0605, 0.0406, 0.0315, 0.0141, 0.0107, 0.0049)),
    CategoryFacts(286_181, 1.3, 23.6, (0.0783, 0.0773, 0.0713, 0.0599, 0.035, 0.0238, 0.0156, 0.0109, 0.0095)),
    CategoryFacts(
        105,
        20.0,
        100.0,
        (0.3283, 0.1985, 0.113, 0.0654, 0.0448, 0.0437, 0.0348, 0.0279, 0.0276, 0.0227, 0.0174, 0.0118, 0.0118),
    ),
    CategoryFacts(142_572, 1.2, 11.9, (0.0824, 0.0327, 0.0274, 0.0236, 0.0225, 0.0199, 0.0196, 0.0194, 0.0148)),
)
"""C1..C26."""

PARENTS = {
    "C12": "C3",
    "C21": "C12",
    "C16": "C21",
    "C4": "C16",
    "C24": "C4",
    "C14": "C15",
    "C18": "C15",
    "C2": "C18",
    "C11": "C7",
    "C13": "C11",
}
"""Columns that follow from another: C3 -> C12 -> C21 -> C16 -> C4 -> C24, C15 -> C14, C15 -> C18 -> C2,
C7 -> C11 -> C13.

All do exactly but C11, which strays; C13 follows exactly from C7 as well as from C11. (C14 did in the real rows, too,
but for a few of 10,000.)
"""

C11_FOLLOWS_C7 = 0.945
"""In at least this share of the rows."""


@dataclass(frozen=True)
class MissingFacts:
    """Columns that are missing together, all of them or none.

    Attributes:
        columns: Their names.
        rate: How often they are.
        cause: A column before these whose absence makes theirs more likely; None = they go missing on their own.
        rate_with_cause: How often they are missing where the cause is.
    """

    columns: tuple[str, ...]
    rate: float
    cause: str | None = None
    rate_with_cause: float = 0.0


MISSING = (
    MissingFacts(("I1", "I10"), 0.4481),
    MissingFacts(("I3",), 0.2037),
    MissingFacts(("I4", "I13"), 0.1978, "I3", 0.5325),
    MissingFacts(("I6",), 0.2511, "I1", 0.5076),
    MissingFacts(("I5",), 0.0494, "I6", 0.1953),
    MissingFacts(("I7", "I9", "I11"), 0.0492, "I6", 0.1959),
    MissingFacts(("I8",), 0.001),
    MissingFacts(("I12",), 0.7735),
    MissingFacts(("C3", "C4", "C12", "C16", "C21", "C24"), 0.0357),
    MissingFacts(("C6",), 0.1332),
    MissingFacts(("C19", "C20", "C25", "C26"), 0.4496),
    MissingFacts(("C22",), 0.8182),
)
"""A cause stands before what it causes; columns that are not named are never missing."""
