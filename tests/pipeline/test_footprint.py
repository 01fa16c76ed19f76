"""What a payload keeps alive: each buffer once, a slice all that it holds on to."""

import sys
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune.pipeline.footprint import Footprint, footprint, run_bytes

KIB = 1024


def total(payload: Any) -> int:
    return sum(footprint(payload).values())


def together(*payloads: Any) -> int:
    """Bytes of several payloads when what they share is counted once."""
    merged: Footprint = {}
    for payload in payloads:
        merged |= footprint(payload)
    return sum(merged.values())


leaves = st.sampled_from([pa.int8(), pa.int64(), pa.float32(), pa.string(), pa.large_binary(), pa.bool_()])
types = st.recursive(
    leaves,
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda kind: pa.list_(kind, 2)),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda kinds: pa.struct([(str(i), k) for i, k in enumerate(kinds)])
        ),
    ),
    max_leaves=4,
)
texts = leaves.filter(lambda kind: kind in (pa.string(), pa.int64())).map(lambda kind: pa.dictionary(pa.int16(), kind))


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_dictionary(kind):
        return values(kind.value_type)
    if pa.types.is_struct(kind):
        return st.none() | st.fixed_dictionaries(
            {kind.field(i).name: values(kind.field(i).type) for i in range(kind.num_fields)}
        )
    if pa.types.is_fixed_size_list(kind):
        return st.none() | st.lists(values(kind.value_type), min_size=2, max_size=2)
    if pa.types.is_nested(kind):
        return st.none() | st.lists(values(kind.value_type), max_size=3)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        pa.string(): st.text(max_size=5),
        pa.large_binary(): st.binary(max_size=5),
        pa.bool_(): st.booleans(),
        pa.float32(): st.just(1.5),
    }
    return st.none() | plain.get(kind, st.integers(-100, 100))


class TestArrow:
    @pytest.mark.slow
    @given(st.data())
    def test_is_each_buffer_of_a_batch_once(self, data: st.DataObject) -> None:
        rows = data.draw(st.integers(0, 6))
        kinds = data.draw(st.lists(types | texts, min_size=1, max_size=3))
        columns = [pa.array([data.draw(values(kind)) for _ in range(rows)], kind) for kind in kinds]
        batch = pa.RecordBatch.from_arrays(columns, [str(i) for i in range(len(columns))])
        assert total(batch) == batch.get_total_buffer_size()
        start = data.draw(st.integers(0, rows))
        part = batch.slice(start, data.draw(st.integers(0, rows - start)))
        assert footprint(part) == footprint(batch)  # it keeps all of it alive
        assert footprint([column for column in batch.columns]).items() >= footprint(batch).items()

    def test_dictionaries_count_at_whatever_depth(self) -> None:
        words = pa.array([f"a word of some length {i}" for i in range(1000)])
        coded = pa.DictionaryArray.from_arrays(pa.array(np.arange(1000, dtype=np.int16)), words)
        nested = pa.ListArray.from_arrays(pa.array([0, 500, 1000], pa.int32()), coded)
        record = pa.StructArray.from_arrays([nested], ["inner"])
        assert footprint(words).items() <= footprint(coded).items()
        assert footprint(coded).items() <= footprint(nested).items()
        assert footprint(nested).items() <= footprint(record).items()
        assert total(record) == record.get_total_buffer_size()

    def test_an_extension_counts_as_what_it_stores(self) -> None:
        storage = pa.array(["x", "y", "x"]).dictionary_encode()
        kind = pa.opaque(storage.type, "name", "vendor")
        assert footprint(pa.ExtensionArray.from_storage(kind, storage)) == footprint(storage)

    def test_a_buffer_cut_out_of_a_larger_one_counts_whole(self) -> None:
        whole = pa.py_buffer(bytes(100 * KIB))
        array = pa.Array.from_buffers(pa.int8(), KIB, [None, whole.slice(5 * KIB, KIB)])
        assert footprint(array) == {whole.address: 100 * KIB}
        assert footprint(whole.slice(3, 4)) == {whole.address: 100 * KIB}

    def test_batches_of_one_table_share_it(self) -> None:
        table = pa.table({"a": np.arange(1000)})
        parts = table.to_batches(max_chunksize=100)
        assert len(parts) == 10
        assert together(*parts) == total(table) == 8000
        assert footprint(table.column("a")) == footprint(table)


class TestArrays:
    def test_a_view_counts_as_its_base(self) -> None:
        array = np.zeros((100, 10))
        for view in (array, array[5:6], array.T, array.reshape(-1)[::3], array[3], array[50:][:, 2]):
            assert total(view) == 8000
            assert footprint(view) == footprint(array)

    def test_a_dict_of_slices_shares_with_the_whole(self) -> None:
        block = {"a": np.zeros(1000), "b": np.zeros((1000, 4), np.float32)}
        first, second = ({name: column[part] for name, column in block.items()} for part in (slice(10), slice(10, 900)))
        assert together(first, second) - 2 * sys.getsizeof(first) == 8000 + 16000

    def test_arrays_over_other_memory_count_as_that(self) -> None:
        numbers = pa.array(range(1000))
        assert footprint(numbers.slice(100, 10).to_numpy()) == footprint(numbers)
        data = bytes(10 * KIB)
        for view in (np.frombuffer(data, np.uint8, 5), np.frombuffer(memoryview(data)[100:], np.uint8)[7:]):
            assert footprint(view) == footprint(data)
        buffer = pa.py_buffer(data)
        assert footprint(np.frombuffer(buffer, np.uint8)[5:]) == footprint(buffer)

    def test_a_part_of_a_foreign_buffer_counts_as_that_part(self) -> None:
        class Lent(np.ndarray):
            """Memory behind a memoryview, as a worker's results come."""

        arena = np.zeros(100 * KIB, np.uint8).view(Lent)
        part = np.frombuffer(arena.data[KIB : 3 * KIB], np.uint8)
        assert list(footprint(part[7:]).values()) == [2 * KIB]

    def test_objects_in_an_array_count(self) -> None:
        big = np.zeros(1000)
        array = np.array([None, "text", big], dtype=object)
        assert total(array) == 24 + sys.getsizeof("text") + 8000

    def test_numbers_of_numpy_count(self) -> None:
        assert total(np.float32(1)) == sys.getsizeof(np.float32(1))


class TestTensors:
    def test_a_view_counts_as_its_storage(self) -> None:
        torch = pytest.importorskip("torch")
        tensor = torch.zeros(100, 10)
        for view in (tensor, tensor[3], tensor.t(), tensor[50:, 2], tensor[5:7].numpy(), tensor.detach()):
            assert list(footprint(view).values()) == [4000]
            assert footprint(view) == footprint(tensor)

    def test_a_tensor_over_an_array_shares_its_key(self) -> None:
        torch = pytest.importorskip("torch")
        array = np.zeros(1000)
        assert footprint(torch.from_numpy(array)) == footprint(array)

    def test_a_tensor_elsewhere_takes_no_memory_here(self) -> None:
        torch = pytest.importorskip("torch")
        assert total(torch.zeros(100_000, device="meta")) < KIB

    @pytest.mark.filterwarnings("ignore:Sparse")
    def test_a_sparse_tensor_counts_what_it_has(self) -> None:
        torch = pytest.importorskip("torch")
        dense = torch.zeros(1000, 1000)
        dense[5, :10] = 1
        assert total(dense.to_sparse()) == 10 * (4 + 16)


@dataclass
class Sample:
    features: np.ndarray
    label: int


Pair = namedtuple("Pair", ["left", "right"])


class TestContainers:
    def test_count_themselves_and_what_is_in_them(self) -> None:
        array, text = np.zeros(1000), "some text"
        inside = 8000 + sys.getsizeof(text)
        for payload in ([array, text], (array, text), {"a": array, "b": text}, Pair(array, text)):
            assert total(payload) == sys.getsizeof(payload) + inside
        assert total({text, 3.5}) == sys.getsizeof({text, 3.5}) + sys.getsizeof(text) + 24

    def test_what_is_in_them_twice_counts_once(self) -> None:
        array = np.zeros(1000)
        inner = [array]
        assert total([inner, inner, array, array[1:]]) == sys.getsizeof([1, 2, 3, 4]) + sys.getsizeof(inner) + 8000

    def test_attributes_count(self) -> None:
        assert 8000 < total(Sample(np.zeros(1000), 3)) < 8000 + KIB

    def test_keys_that_are_no_names_count(self) -> None:
        key = b"x" * 10 * KIB
        assert total({key: 1}) > 10 * KIB

    def test_cycles_end(self) -> None:
        cycle: list[Any] = [np.zeros(1000)]
        cycle.append({"back": cycle})
        assert 8000 < total(cycle) < 8000 + KIB
        sample = Sample(np.zeros(1000), 3)
        sample.label = sample  # type: ignore[assignment]
        assert 8000 < total(sample) < 8000 + KIB

    def test_texts_and_numbers(self) -> None:
        assert total("é" * KIB) == sys.getsizeof("é" * KIB)
        assert total(bytearray(KIB)) >= KIB
        assert (total(None), total(True), total(7), total(2.5), total(1j)) == (0, 0, 32, 24, 32)


class TestRuns:
    def test_plain_numbers_are_cheap_and_counted(self) -> None:
        assert run_bytes([1, 2, 3]) == 3 * (8 + 32)
        assert run_bytes([]) == 0

    def test_what_samples_share_counts_once(self) -> None:
        block = np.zeros((10_000, 10))
        samples = [{"features": row, "label": 1} for row in block[:100]]
        assert 800_000 < run_bytes(samples) < 800_000 + 100 * 512

    def test_each_sample_counts(self) -> None:
        assert run_bytes([np.zeros(100), "text", 1]) == 3 * 8 + 800 + sys.getsizeof("text") + 32
