import tracemalloc
import zipfile
from collections.abc import Callable
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from intune._errors import PipelineError
from intune.tuners import DQN, LearnedModel, _weights, dqn, learned_model

KIND, SIZES = "a test 1", (3, 4, 2)


def layers(seed: int = 0, sizes: tuple[int, ...] = SIZES) -> _weights.Layers:
    random = np.random.default_rng(seed)
    return tuple((random.normal(size=pair), random.normal(size=pair[1])) for pair in pairwise(sizes))


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = layers()
    _weights.write(tmp_path / "w.npz", KIND, written)
    for had, has in zip(written, _weights.read(tmp_path / "w.npz", KIND, SIZES), strict=True):
        for before, after in zip(had, has, strict=True):
            assert (after == np.float32(before)).all()


def test_the_same_weights_give_the_same_file(tmp_path: Path) -> None:
    for name in "ab":
        _weights.write(tmp_path / name, KIND, layers())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_units_between_layers_are_rectified() -> None:
    one = np.array([[1.0, -1.0]]), np.zeros(2)
    two = np.array([[10.0], [100.0]]), np.array([1.0])
    assert _weights.forward((one, two), np.array([[2.0], [-3.0]])).tolist() == [[21.0], [301.0]]


def missing(path: Path) -> None:
    path.unlink()


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def flipped(path: Path) -> None:
    with zipfile.ZipFile(path) as file:
        info = file.getinfo("matrix_0.npy")
        begin = info.header_offset + 30 + len(info.filename)
    data = bytearray(path.read_bytes())
    data[begin + 150] ^= 0xFF
    path.write_bytes(data)


def no_archive(path: Path) -> None:
    path.write_bytes(b"PK but no archive")


def one_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


def pickled(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, format=np.array([object()]))


@pytest.mark.parametrize("break_it", [missing, torn, flipped, no_archive, one_array, pickled])
def test_a_file_that_cannot_be_read_is_refused(break_it: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    _weights.write(path, KIND, layers())
    break_it(path)
    with pytest.raises(PipelineError, match=r"w\.npz holds no weights that can be read"):
        _weights.read(path, KIND, SIZES)


def test_a_file_for_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    _weights.write(path, KIND, layers())
    with pytest.raises(PipelineError, match="is of the format 'a test 1', wanted 'a test 2'"):
        _weights.read(path, "a test 2", SIZES)
    with path.open("wb") as file:
        np.savez(file, matrix_0=np.zeros((3, 4)))
    with pytest.raises(PipelineError, match="is of the format None"):
        _weights.read(path, KIND, SIZES)


def test_other_shapes_and_what_is_no_number_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    _weights.write(path, KIND, layers(sizes=(3, 5, 2)))
    with pytest.raises(PipelineError, match=r"matrix_0 must be float32\[3, 4\], the file has float32\[3, 5\]"):
        _weights.read(path, KIND, SIZES)
    _weights.write(path, KIND, layers()[:1])
    with pytest.raises(PipelineError, match=r"matrix_1 must be float32\[4, 2\], the file has none"):
        _weights.read(path, KIND, SIZES)
    broken = layers()
    broken[1][0][2, 0] = np.nan
    _weights.write(path, KIND, broken)
    with pytest.raises(PipelineError, match="matrix_1 holds what is no finite number"):
        _weights.read(path, KIND, SIZES)


@pytest.mark.parametrize(
    ("name", "kind", "sizes"),
    [("dqn", dqn.FORMAT, dqn.SIZES), ("learned_model", learned_model.FORMAT, learned_model.SIZES)],
)
def test_the_library_comes_with_weights_that_are_small(name: str, kind: str, sizes: tuple[int, ...]) -> None:
    path = files("intune.tuners") / f"{name}.npz"
    assert path.is_file()
    assert len(path.read_bytes()) < 300_000
    _weights.read(path, kind, sizes)


def test_one_tuner_does_not_take_the_weights_of_the_other(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    path.write_bytes((files("intune.tuners") / "learned_model.npz").read_bytes())
    LearnedModel(path)
    with pytest.raises(PipelineError, match="of the format 'intune learned-model 1', wanted 'intune dqn 1'"):
        DQN(path)
    path.write_bytes((files("intune.tuners") / "dqn.npz").read_bytes())
    DQN(path)
    with pytest.raises(PipelineError, match="of the format 'intune dqn 1', wanted 'intune learned-model 1'"):
        LearnedModel(str(path))


def test_of_a_file_that_holds_gigabytes_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    """A small file whose arrays are huge once they are unpacked: one that nobody asks for, and one that is wanted."""
    path = tmp_path / "w.npz"
    path.write_bytes((files("intune.tuners") / "dqn.npz").read_bytes())
    huge = np.zeros(2**24, np.float32)  # 64 MiB of zeros take 64 KiB
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("extra.npy", "w") as member:
        np.lib.format.write_array(member, huge)
    tracemalloc.start()
    try:
        DQN(path)
        arrays = {"format": np.array(dqn.FORMAT), "matrix_0": huge}
        np.savez_compressed(path, **arrays)
        with pytest.raises(PipelineError, match="matrix_0"):
            DQN(path)
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()
