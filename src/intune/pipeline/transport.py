"""How values travel between a process and its workers: pickles, an arena for what is large, frames on a socket.

A value is pickled with its large buffers (numpy, Arrow, torch) left out; those are copied into the arena, and the
receiver's arrays are views of it: a value crosses with one copy. Small values go over the socket.
"""

import contextlib
import functools
import io
import marshal
import os
import pickle
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from intune.pipeline.arena import Piece, room_for
from intune.pipeline.culprit import innermost_unpicklable
from intune.pipeline.errors import reduce_error

if TYPE_CHECKING:
    import numpy as np

IN_BAND_BYTES = 32 * 1024
"""A value smaller than this goes over the socket, a larger one through the arena."""

_LOOSE_BYTES = 1024  # a buffer smaller than this is left in the pickle

Wire = tuple[bytes | None, list[tuple[Any, ...]]]
"""What is sent of a value: its pickle, unless that lies in the arena as the first buffer; and by buffer whether it
is read-only, and its bytes or its start and size in the arena."""


class Packed(NamedTuple):
    """A pickled value.

    Attributes:
        stream: The pickle; None where it is too large for the socket and is the first of the views.
        views: The buffers that are not in the pickle. They share memory with the value until they are copied.
    """

    stream: bytes | None
    views: list[memoryview]

    @property
    def is_small(self) -> bool:
        """Whether it goes over the socket."""
        return self.stream is not None and len(self.stream) + room_for(self.views) < IN_BAND_BYTES

    def inline(self) -> Wire:
        """What to send of a small value."""
        return self.stream, [(view.readonly, view.tobytes()) for view in self.views]

    def placed(self, pieces: Sequence[Piece]) -> Wire:
        """What to send of a value whose views lie in these ranges of the arena."""
        return self.stream, [(view.readonly, *piece) for view, piece in zip(self.views, pieces, strict=True)]


def pack(value: Any) -> Packed:
    """Pickle a value.

    Raises:
        Exception: If it cannot be pickled; with a note that names the innermost part which cannot.
    """
    file, views = io.BytesIO(), list[memoryview]()

    def leave_out(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _LOOSE_BYTES:
            return False
        views.append(view)
        return True

    try:
        _Pickler(file, _REDUCERS, leave_out).dump(value)
    except Exception as error:
        error.add_note(f"intune: what cannot be pickled is {innermost_unpicklable(value, dumps)}")
        raise
    stream = file.getbuffer()
    return Packed(bytes(stream), views) if stream.nbytes < IN_BAND_BYTES else Packed(None, [stream, *views])


def unpack(wire: Wire, view: Callable[[Piece], memoryview]) -> Any:
    """Rebuild a value whose arrays are views of what `view` gives for a range, writable where they were."""
    stream, places = wire
    buffers: list[Any] = []
    for readonly, *place in places:
        if len(place) == 1:
            buffers.append(place[0] if readonly else bytearray(place[0]))
        else:
            part = view(Piece(*place))
            buffers.append(part.toreadonly() if readonly else part)
    return pickle.loads(stream if stream is not None else buffers.pop(0), buffers=buffers)


def dumps(value: Any) -> bytes:
    """A value as one stream that holds everything."""
    return _dumps(value, _REDUCERS)


def _dumps(value: Any, reducers: "_Reducers") -> bytes:
    file = io.BytesIO()
    _Pickler(file, reducers).dump(value)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles whatever a function may be made of or may be given.

    Functions and classes that a worker could not import go by value.
    """

    def __init__(
        self, file: io.BytesIO, reducers: "_Reducers", leave_out: Callable[[pickle.PickleBuffer], bool] | None = None
    ) -> None:
        def in_stream(buffer: pickle.PickleBuffer) -> bool:
            return leave_out is None or not leave_out(buffer)

        super().__init__(file, protocol=5, buffer_callback=in_stream)
        self._reducers = reducers

    def reducer_override(self, obj: Any) -> Any:
        """What pickle asks first for nearly every object."""
        if isinstance(obj, type | types.FunctionType):
            module = _module_to_inline(obj)
            with _by_value(module) if module is not None else contextlib.nullcontext():
                return super().reducer_override(obj)
        if isinstance(obj, types.CodeType):  # cloudpickle forgets which file it is from, which tracebacks want to know
            return marshal.loads, (marshal.dumps(obj),)
        for name, type_name, reduce in self._reducers:
            known = getattr(sys.modules.get(name), type_name, None)
            if known is not None and isinstance(obj, known):
                return reduce(obj)
        return super().reducer_override(obj)


def _module_to_inline(definition: Any) -> types.ModuleType | None:
    """The module of a function or class if it lives here but a worker could not import it."""
    module = sys.modules.get(getattr(definition, "__module__", None) or "__main__")
    if module is None or module.__name__ == "__main__":
        return None  # cloudpickle takes these by value anyway
    root = sys.modules.get(module.__name__.partition(".")[0])
    return module if root is not None and not _is_importable(root) else None


@functools.cache
def _is_importable(module: types.ModuleType) -> bool:
    """Whether a worker that is given our `sys.path` finds the same module under that name."""
    if module.__name__ in sys.stdlib_module_names:
        return True
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # a finder that cannot answer is as good as none
            spec = finder.find_spec(module.__name__, None)
            if spec is not None:
                return _homes(getattr(module, "__file__", None), getattr(module, "__path__", ())) <= _homes(
                    spec.origin, spec.submodule_search_locations or ()
                )
    return False


def _homes(file: str | None, folders: Iterable[str]) -> set[str]:
    """Where a module is from: its file, or the folders of a package that has none."""
    return {os.path.realpath(path) for path in ([file] if file else folders)} or {"made up"}


_registry = threading.RLock()


@contextlib.contextmanager
def _by_value(module: types.ModuleType) -> Iterator[None]:
    """Within it cloudpickle takes what the module defines by value; its list is everybody's, so leave no trace."""
    with _registry:
        if module.__name__ in cloudpickle.list_registry_pickle_by_value():
            yield
            return
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)


def _reduce_array(array: "np.ndarray") -> Any:
    """Numpy writes strided arrays and times into the stream, byte by byte; show it what it can leave out."""
    import numpy as np

    if type(array) is not np.ndarray or array.dtype.hasobject or array.nbytes < _LOOSE_BYTES:
        return NotImplemented
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        return rebuild_array, (np.ascontiguousarray(array), array.dtype)
    if array.dtype.kind in "mM":
        return rebuild_array, (array.view(np.int64), array.dtype)
    return NotImplemented


def rebuild_array(array: "np.ndarray", dtype: "np.dtype[Any]") -> "np.ndarray":
    """The array with the type of element that it had."""
    return array if array.dtype == dtype else array.view(dtype)


def _reduce_arrow(array: Any) -> Any:
    """Arrow pickles the whole of every buffer that a slice touches; cut it down to what the slice shows."""
    import pyarrow as pa

    if array.get_total_buffer_size() <= 1.5 * array.nbytes + _LOOSE_BYTES:
        return NotImplemented
    return pa.concat_arrays([array, array.slice(0, 0)]).__reduce_ex__(5)


def _reduce_tensor(tensor: Any) -> Any:
    """Torch saves tensors as files; share their memory by way of numpy instead."""
    import torch

    if tensor.device.type != "cpu":
        raise TypeError(
            f"a tensor on {tensor.device} cannot go between processes; use .cpu() on it, and let "
            'to_torch(device="cuda") move whole batches'
        )
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return NotImplemented
    if tensor.requires_grad or tensor.numel() * tensor.element_size() < _LOOSE_BYTES:
        return NotImplemented
    plain = tensor.resolve_conj().resolve_neg()
    try:
        return rebuild_tensor, (plain.numpy(), None, None)
    except TypeError:  # a type of element that numpy has not, such as bfloat16
        raw = plain.contiguous().reshape(-1).view(torch.uint8).numpy()
        return rebuild_tensor, (raw, tensor.dtype, tuple(tensor.shape))


def rebuild_tensor(array: "np.ndarray", dtype: Any, shape: Any) -> Any:
    """A tensor that shares the memory of an array."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(dtype).reshape(shape)


def _reduce_error(error: BaseException) -> Any:
    return reduce_error(error, functools.partial(_dumps, reducers=_REDUCERS[1:]))


_Reducers = tuple[tuple[str, str, Callable[[Any], Any]], ...]
_REDUCERS: _Reducers = (
    ("builtins", "BaseException", _reduce_error),
    ("numpy", "ndarray", _reduce_array),
    ("pyarrow", "Array", _reduce_arrow),
    ("torch", "Tensor", _reduce_tensor),
)
"""By module and type: only what is imported anyway is looked at."""


class Link:
    """One end of a socket for whole messages, which two sides send in turns: tuples of what marshal knows."""

    _LENGTH = struct.Struct("<Q")

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def send(self, *message: Any) -> bool:
        """Send a message; False if the other side is gone."""
        data = marshal.dumps(message)
        try:
            self.end.sendall(self._LENGTH.pack(len(data)) + data)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[Any, ...] | None:
        """The next message; None if the other side is gone or sends no more."""
        data, wanted = bytearray(), self._LENGTH.size
        while len(data) < wanted:
            try:
                part = self.end.recv(max(1 << 16, min(wanted - len(data), 1 << 22)))
            except OSError:
                return None
            if not part:
                return None
            data += part
            if wanted == self._LENGTH.size and len(data) >= wanted:
                wanted += self._LENGTH.unpack_from(data)[0]
        message: tuple[Any, ...] = marshal.loads(memoryview(data)[self._LENGTH.size :])
        return message
