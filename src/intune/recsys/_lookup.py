"""Where values stand among very many keys, by an index that is built once.

Arrow's own `index_in` builds its table anew for every column, some 60 ns a key: with a million keys six times what all
else costs that is done to a block.
"""

import itertools

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from intune.recsys._columns import is_text
from intune.recsys.hashing import hash64

_HIGHEST = np.uint64(0xFFFFFFFFFFFFFFFF)


class KeyIndex:
    """Distinct keys in the order of their 64-bit hashes, and where each range of hashes begins.

    There are about as many ranges as keys, so that a value is found in a few steps. Never changed once built, so safe
    in several threads. Takes 24 to 32 bytes a key, beside the keys.

    Args:
        keys: Distinct integers or large_binary, at least one, none missing.
    """

    def __init__(self, keys: pa.Array) -> None:
        self._keys = keys
        for seed in itertools.count():  # two texts may have the same hash, but hardly for another seed too
            hashes, _ = hash64(keys, seed)
            order = np.argsort(hashes)
            ordered = hashes[order]
            if (ordered[1:] != ordered[:-1]).all():
                break
        self._seed = seed
        bits = max(1, (len(keys) - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        ranges = np.arange((1 << bits) + 1)
        starts = np.searchsorted((ordered >> self._shift).astype(np.int64), ranges)
        self._starts = starts[:-1]
        self._steps = int(np.diff(starts).max())
        self._ordered = np.append(ordered, _HIGHEST)  # where a search beyond the last one ends
        self._order = np.append(order, order[-1])

    def find(self, values: pa.Array) -> npt.NDArray[np.int64]:
        """Places of n values among the keys, -1 for those that are none; anything where missing.

        Args:
            values: Of the type of the keys.

        Returns:
            int64[n].
        """
        hashes, _ = hash64(values, self._seed)
        at = self._starts[hashes >> self._shift]
        for _ in range(self._steps):
            at += self._ordered[at] < hashes
        places: npt.NDArray[np.int64] = self._order[at]
        found = self._ordered[at] == hashes
        if is_text(values.type):
            same = pc.equal(self._keys.take(pa.array(places)), values)
            found &= pc.fill_null(same, False).to_numpy(zero_copy_only=False)
        else:
            found &= at < len(self._keys)  # integers have a hash of their own each, but one has the highest
        places[~found] = -1
        return places
