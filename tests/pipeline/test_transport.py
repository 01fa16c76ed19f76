"""What crosses between processes comes out equal, writable where it was, and as a view where that is possible."""

import collections
import datetime
import decimal
import socket
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from intune.pipeline.arena import Arena, room_for
from intune.pipeline.transport import IN_BAND_BYTES, Link, dumps, pack, unpack


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(1 << 28)
    yield arena
    arena.close()


def send(value: Any, arena: Arena) -> Any:
    """One way, as between two processes."""
    packed = pack(value)
    if packed.is_small:
        return unpack(packed.inline(), arena.memory.at)
    piece = arena.allocate(room_for(packed.views))
    wire = packed.placed(arena.memory.write(piece.start, packed.views))
    loan = arena.lend(piece)
    return unpack(wire, lambda part: loan[part.start - piece.start : part.end - piece.start])


def shares(array: np.ndarray, arena: Arena) -> bool:
    return 0 <= arena.memory.position(memoryview(np.atleast_1d(array).view(np.uint8).reshape(-1))) < arena.capacity


@dataclass
class Sample:
    name: str
    image: np.ndarray
    more: Any = None


Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.parametrize("length", [0, 1, 100, 5_000, 200_000])
@pytest.mark.parametrize(
    "dtype", ["u1", "i8", "f2", "f4", "c16", "?", ">i4", "U3", "S5", "M8[ns]", "m8[s]", [("x", "<i8"), ("y", "U2")]]
)
def test_numpy_arrays(length: int, dtype: Any, arena: Arena) -> None:
    array = np.zeros(length, dtype)
    raw = array.view(np.uint8) if array.dtype.kind != "U" else np.empty(0, np.uint8)
    if isinstance(dtype, str) and array.dtype.kind not in "Uf?c":
        raw[:] = np.arange(raw.size) % 251
    again = send(array, arena)
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)
    assert again.flags.writeable
    if array.nbytes > IN_BAND_BYTES:
        assert shares(again, arena)


@given(array=st_numpy.arrays(st.sampled_from([np.uint8, np.float32, np.int64]), st_numpy.array_shapes(max_side=40)))
def test_arrays_of_any_shape(array: np.ndarray) -> None:
    arena = Arena(1 << 26)
    for view in (array, array.T, array[::2], array[..., ::-1]):
        again = send(view, arena)
        assert again.shape == view.shape
        assert again.tobytes() == view.tobytes()
        assert again.flags.writeable
    del again, view
    arena.close()


def test_order_in_memory_and_readonly_stay(arena: Arena) -> None:
    columns = np.asfortranarray(np.arange(40_000.0).reshape(200, 200))
    assert send(columns, arena).flags.f_contiguous
    columns.flags.writeable = False
    again = send(columns, arena)
    assert not again.flags.writeable
    np.testing.assert_array_equal(again, columns)


@pytest.mark.parametrize("strided", [True, False])
def test_a_view_sends_only_what_it_shows(strided: bool) -> None:
    array = np.zeros((2_000, 1_000))
    packed = pack(array[::20, ::2] if strided else array[:100])
    assert sum(view.nbytes for view in packed.views) == (400_000 if strided else 800_000)


def test_strided_arrays_stay_out_of_the_pickle() -> None:
    packed = pack([np.zeros((500, 500))[::2], np.zeros(20_000, "M8[s]")])
    assert packed.stream is not None
    assert len(packed.stream) < 1_000
    assert len(packed.views) == 2


@pytest.mark.parametrize(
    "value",
    [
        None,
        0,
        "text" * 50_000,
        b"bytes" * 50_000,
        bytearray(b"x" * 100_000),
        {"a": [1, (2.5, "x")], "b": {3}},
        list(range(50_000)),
        [f"row {i}" for i in range(20_000)],
        decimal.Decimal("1.5"),
        datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
        Pair(1, [2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values(value: Any, arena: Arena) -> None:
    again = send(value, arena)
    assert again == value
    assert type(again) is type(value)
    assert arena.in_use == 0  # nothing of them is a view


def test_nested_structures_share_memory(arena: Arena) -> None:
    image = np.arange(30_000, dtype=np.int32)
    again = send(Sample("a", image, {"list": [image, image[:10], Pair("x", image * 2)]}), arena)
    assert again.name == "a"
    assert again.image is again.more["list"][0]
    np.testing.assert_array_equal(again.more["list"][1], image[:10])
    np.testing.assert_array_equal(again.more["list"][2].right, image * 2)
    assert shares(again.image, arena)


def test_subclasses_and_object_arrays_stay_what_they_are(arena: Arena) -> None:
    masked = np.ma.masked_array(np.arange(10_000), mask=np.arange(10_000) % 2 == 0)
    again = send(masked, arena)
    assert isinstance(again, np.ma.MaskedArray)
    assert again.sum() == masked.sum()
    objects = np.array([[1, 2], "x", None] * 2_000, dtype=object)
    assert send(objects, arena).tolist() == objects.tolist()


def batch(rows: int) -> pa.RecordBatch:
    words = pa.array([None if i % 7 == 0 else f"word {i}" for i in range(rows)])
    return pa.record_batch(
        {
            "int": np.arange(rows),
            "bool": pa.array([i % 3 == 0 for i in range(rows)]),
            "word": words,
            "code": words.dictionary_encode(),
            "list": pa.array([[i, i + 1] if i % 5 else None for i in range(rows)]),
            "struct": pa.array([{"k": i, "l": str(i)} for i in range(rows)]),
            "null": pa.nulls(rows),
            "time": pa.array(range(rows), pa.timestamp("us", "UTC")),
        }
    )


@pytest.mark.parametrize("rows", [0, 1, 100, 10_000])
def test_arrow_batches(rows: int, arena: Arena) -> None:
    whole = batch(rows)
    for value in (whole, whole.slice(rows // 3, rows // 4), pa.Table.from_batches([whole, whole.slice(1)])):
        again = send(value, arena)
        again.validate(full=True)
        assert type(again) is type(value)
        assert again.schema == value.schema
        assert again.equals(value)


def test_arrow_schema_metadata_stays(arena: Arena) -> None:
    value = batch(10).replace_schema_metadata({"made": "here"})
    assert send(value, arena).schema.metadata == {b"made": b"here"}


def test_arrow_slices_send_only_what_they_show() -> None:
    packed = pack(batch(50_000).slice(11, 100))
    assert packed.stream is not None
    # The words of the dictionary belong to every slice.
    assert len(packed.stream) + sum(view.nbytes for view in packed.views) < 50_000 * 30


def test_arrow_buffers_are_views_of_the_arena(arena: Arena) -> None:
    again = send(pa.record_batch({"x": np.arange(100_000)}), arena)
    assert shares(again.column(0).to_numpy(), arena)


def torch_values() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    return {
        "float": torch.arange(50_000.0),
        "grid": torch.arange(60_000).reshape(200, 300),
        "turned": torch.arange(60_000).reshape(200, 300).T,
        "steps": torch.arange(60_000)[::3],
        "bfloat16": torch.arange(50_000.0).to(torch.bfloat16).reshape(100, 500),
        "bool": torch.arange(50_000) % 3 == 0,
        "complex": torch.complex(torch.ones(20_000), torch.arange(20_000.0)).conj(),
        "small": torch.tensor([1, 2]),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "sparse": torch.eye(10).to_sparse(),
        "grad": torch.ones(10_000, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(10_000)),
    }


@pytest.mark.slow
def test_torch_tensors(arena: Arena) -> None:
    torch = pytest.importorskip("torch")
    values = torch_values()
    again = send(values, arena)
    for name, value in values.items():
        other = again[name]
        assert type(other) is type(value), name
        assert (other.dtype, other.shape, other.requires_grad) == (value.dtype, value.shape, value.requires_grad), name
        assert torch.equal(other.to_dense(), value.to_dense()), name
    assert shares(again["float"].numpy(), arena)
    assert shares(again["bfloat16"].view(torch.int16).numpy(), arena)
    again["float"][0] = 5.0
    assert again["float"][0] == 5.0


@pytest.mark.slow
def test_torch_tensors_stay_out_of_the_pickle() -> None:
    torch = pytest.importorskip("torch")
    packed = pack({"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20, dtype=torch.bfloat16)})
    assert packed.stream is not None
    assert len(packed.stream) < 1_000


@pytest.mark.slow
def test_a_tensor_elsewhere_than_on_the_cpu_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"tensor on meta cannot go between processes.*\.cpu\(\)"):
        pack(torch.empty(10, device="meta"))


def test_definitions_that_cannot_be_imported_go_by_value() -> None:
    module = types.ModuleType("made_on_the_fly")
    exec("class Point:\n    def norm(self): return abs(self.x) + scale()\ndef scale(): return 100", vars(module))
    sys.modules["made_on_the_fly"] = module
    try:
        point = module.Point()  # type: ignore[attr-defined]
        point.x = -3
        data = dumps(point)
    finally:
        del sys.modules["made_on_the_fly"]
    assert unpack((data, []), lambda _: memoryview(b"")).norm() == 103


def test_definitions_that_can_be_imported_go_by_name() -> None:
    assert len(dumps(Link)) < 100
    assert len(dumps(np.linalg.norm)) < 100


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    left, right = socket.socketpair()
    yield Link(left), Link(right)
    left.close()
    right.close()


@pytest.mark.parametrize("size", [0, 1, 65_000, 65_536, 5_000_000])
def test_messages_arrive_whole(size: int, links: tuple[Link, Link]) -> None:
    left, right = links
    message = ("name", None, -(2**80), b"x" * size, [(True, 1, 2)])
    sender = threading.Thread(target=left.send, args=message)
    sender.start()
    assert right.receive() == message
    sender.join()


def test_the_end_of_the_other_side_is_seen(links: tuple[Link, Link]) -> None:
    left, right = links
    assert left.send("last")
    left.end.close()
    assert right.receive() == ("last",)
    assert right.receive() is None
    assert not right.send("too late")


def test_a_message_that_breaks_off_is_none(links: tuple[Link, Link]) -> None:
    left, right = links
    left.end.sendall((100).to_bytes(8, "little") + b"half")
    left.end.close()
    assert right.receive() is None
