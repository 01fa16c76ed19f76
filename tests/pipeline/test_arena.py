"""The arena: ranges are handed out once, freed with their last view, and given back to the system."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from intune._errors import LoaderError, MemoryLimitError
from intune.pipeline.arena import Arena, FreeList, Piece, room_for

PAGE = 4096


class Tidy(Arena):
    """Takes back in the end what a test did not free itself."""

    def close(self) -> None:
        before = 0
        for free in [*self._free.ranges, Piece(self.capacity, 0)]:
            if free.start > before:
                self.free(Piece(before, free.start - before))
            before = free.end
        super().close()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Tidy(1 << 26)
    yield arena
    arena.close()
    assert arena.fd == -1


def fill(arena: Arena, piece: Piece, value: int = 1) -> None:
    arena.memory.write(piece.start, [memoryview(bytes([value]) * piece.size)])


@given(st.data())
def test_free_list_agrees_with_a_set_of_bytes(data: st.DataObject) -> None:
    capacity = 40
    free, model, out = FreeList(capacity), set(range(capacity)), list[Piece]()
    for _ in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(["take", "give", "part", "carve"]))
        if action == "take":
            size = data.draw(st.integers(1, 12))
            piece = free.take(size)
            fits = [start for start in range(capacity) if model >= set(range(start, start + size))]
            assert piece == (Piece(fits[0], size) if fits else None)
            if piece is not None:
                model -= set(range(piece.start, piece.end))
                out.append(piece)
        elif action == "carve":
            low, high = sorted(data.draw(st.tuples(st.integers(0, capacity), st.integers(0, capacity))))
            pieces = free.carve(low, high)
            assert {byte for piece in pieces for byte in range(piece.start, piece.end)} == model & set(range(low, high))
            model -= set(range(low, high))
            out += pieces
        elif out:
            piece = out.pop(data.draw(st.integers(0, len(out) - 1)))
            if action == "part" and piece.size > 1:
                cut = data.draw(st.integers(1, piece.size - 1))
                out.append(Piece(piece.start, cut))
                piece = Piece(piece.start + cut, piece.size - cut)
            free.give(piece)
            model |= set(range(piece.start, piece.end))
        assert {byte for piece in free.ranges for byte in range(piece.start, piece.end)} == model
        assert all(before.end < after.start for before, after in zip(free.ranges, free.ranges[1:], strict=False))


@pytest.mark.parametrize("piece", [Piece(0, 4), Piece(2, 4), Piece(6, 4), Piece(9, 1), Piece(4, 3)])
def test_a_range_that_is_free_cannot_be_freed(piece: Piece) -> None:
    free = FreeList(10)
    assert free.take(6) == Piece(0, 6)
    free.give(Piece(0, 4))
    with pytest.raises(ValueError, match="free already"):
        free.give(piece)


def test_ranges_do_not_overlap_and_are_reused_from_the_low_end(arena: Arena) -> None:
    first, second = arena.allocate(10), arena.allocate(PAGE + 1)
    assert (first, second) == (Piece(0, PAGE), Piece(PAGE, 2 * PAGE))
    assert arena.in_use == 3 * PAGE
    arena.free(first)
    assert arena.allocate(1) == Piece(0, PAGE)


def test_what_is_written_lies_aligned_and_can_be_found(arena: Arena) -> None:
    sources = [memoryview(np.arange(size, dtype=np.uint8)) for size in (1, 100, 64)]
    piece = arena.allocate(room_for(sources))
    pieces = arena.memory.write(piece.start, sources)
    for source, place in zip(sources, pieces, strict=True):
        view = arena.memory.at(place)
        assert view == source
        assert place.start % 64 == 0
        assert arena.memory.position(view) == place.start
    assert pieces[-1].end <= piece.start + room_for(sources)
    assert not 0 <= arena.memory.position(sources[0]) < arena.capacity


def test_a_lent_range_is_free_when_its_last_view_dies(arena: Arena) -> None:
    loan = arena.lend(arena.allocate(PAGE))
    array = np.frombuffer(loan[64:128], np.int32)
    del loan
    part = array[3:5]
    del array
    assert arena.in_use == PAGE
    part[:] = 7
    assert part.tolist() == [7, 7]
    del part
    assert arena.in_use == 0


def test_shrinking_frees_the_rest(arena: Arena) -> None:
    kept = arena.shrink(arena.allocate(10 * PAGE), PAGE + 1)
    assert kept == Piece(0, 2 * PAGE)
    assert arena.in_use == 2 * PAGE
    assert arena.allocate(1).start == 2 * PAGE


def test_trim_keeps_what_was_reached_since_the_last_one(arena: Arena) -> None:
    large = arena.allocate(100 * PAGE)
    fill(arena, large)
    arena.free(large)
    arena.trim()
    assert arena.bytes_held == 100 * PAGE  # in use a moment ago: the next item will want it
    small = arena.allocate(10 * PAGE)
    arena.trim()
    assert arena.bytes_held == 10 * PAGE
    assert arena.memory.at(small)[0] == 1
    arena.free(small)
    arena.trim()
    assert arena.bytes_held == 0
    assert arena.in_use == 0
    assert arena.allocate(PAGE) == Piece(0, PAGE)


def test_trim_spares_what_is_lent(arena: Arena) -> None:
    pieces = [arena.allocate(PAGE) for _ in range(6)]
    for piece in pieces:
        fill(arena, piece, 5)
    for piece in pieces[::2]:
        arena.free(piece)
    arena.trim()
    arena.trim()
    assert arena.bytes_held == 3 * PAGE
    assert all(arena.memory.at(piece) == b"\5" * PAGE for piece in pieces[1::2])


def test_a_full_arena_says_so() -> None:
    arena = Arena(4 * PAGE)
    arena.allocate(3 * PAGE)
    with pytest.raises(MemoryLimitError, match=r"8,192 bytes do not fit.* 12,288 of 16,384"):
        arena.allocate(2 * PAGE)
    arena.allocate(PAGE)
    with pytest.raises(MemoryLimitError):
        arena.allocate(1)


def test_a_closed_arena_gives_back_each_range_as_it_dies() -> None:
    arena = Arena(1 << 26)
    pieces = [arena.allocate(PAGE) for _ in range(3)]
    for piece in pieces:
        fill(arena, piece, 9)
    first, second = arena.lend(pieces[0]), arena.lend(pieces[1])
    arena.free(pieces[2])
    arena.close()
    arena.close()
    assert arena.bytes_held == 2 * PAGE
    with pytest.raises(LoaderError, match="closed"):
        arena.allocate(1)
    assert first[0] == second[0] == 9
    del first
    assert arena.bytes_held == PAGE
    del second
    assert (arena.bytes_held, arena.fd) == (0, -1)


def test_a_finalizer_that_interrupts_the_holder_of_the_lock_does_not_wait_for_it(arena: Arena) -> None:
    loan = arena.lend(arena.allocate(PAGE))
    with arena._locked():  # as if garbage were collected in the middle of an allocation
        del loan
        gc.collect()
        assert arena._in_use == PAGE
    assert arena.in_use == 0


def test_many_threads_take_and_free(arena: Arena) -> None:
    barrier, wrong = threading.Barrier(8), list[str]()

    def work(mark: int) -> None:
        barrier.wait()
        for turn in range(200):
            piece = arena.allocate((mark * 7 + turn) % 5 * PAGE + 1)
            fill(arena, piece, mark)
            if arena.memory.at(piece) != bytes([mark]) * piece.size:
                wrong.append(f"{mark} in turn {turn}")
            if turn % 3:
                arena.free(piece)
            else:
                arena.lend(piece)
            if turn % 50 == 0:
                arena.trim()

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert arena.in_use == 0


def test_memory_file_by_way_of_libc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    arena = Arena(1 << 20)
    assert "memfd:intune" in os.readlink(f"/proc/self/fd/{arena.fd}")
    assert not os.get_inheritable(arena.fd)
    fill(arena, arena.allocate(PAGE))
    arena.close()


def test_a_forked_child_takes_nothing_from_its_parent() -> None:
    script = """
        import os
        from intune.pipeline.arena import Arena
        arena = Arena(1 << 20)
        loan = arena.lend(arena.allocate(4096))
        loan[:5] = b"hello"
        arena.close()  # from now on what dies is emptied
        child = os.fork()
        if not child:
            del loan
            os._exit(0)
        os.waitpid(child, 0)
        print(bytes(loan[:5]).decode())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "hello\n"


def test_address_space_follows_its_limit() -> None:
    script = """
        import resource
        from intune.pipeline.arena import Arena
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        arena = Arena()
        print(arena.capacity)
        arena.close()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 1 << 30
