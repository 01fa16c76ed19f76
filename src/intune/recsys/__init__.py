"""Click-through data and models: features, Criteo files, a generator, DLRM and a training loop.

What turns columns into the inputs of a model is here: a `FeatureSpec` of `Dense`, `Sparse`, `MultiHot` and `Padded`
features, whose values go through `Number` or one of the encoders (`Buckets`, `Hash`, `Hex`, `Modulo`, `Vocabulary`,
`Cross`). `criteo`, `transforms`, `generate` and `metrics` are modules of their own and need the core only; `dlrm` and
`train` need PyTorch (`pip install "intune[torch]"`).
"""

from intune.recsys.features import Buckets, Encoder, Hex, Modulo, Number
from intune.recsys.hashing import Cross, Hash, hash64
from intune.recsys.lists import MultiHot, Padded, list_parts, pad, padding_mask, truncate
from intune.recsys.spec import Dense, FeatureSpec, Sparse
from intune.recsys.vocabulary import Vocabulary

__all__ = [
    "Buckets",
    "Cross",
    "Dense",
    "Encoder",
    "FeatureSpec",
    "Hash",
    "Hex",
    "Modulo",
    "MultiHot",
    "Number",
    "Padded",
    "Sparse",
    "Vocabulary",
    "hash64",
    "list_parts",
    "pad",
    "padding_mask",
    "truncate",
]
