"""The loader: what a training loop iterates."""

import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Protocol

from intune._errors import LoaderError
from intune._values import Snapshot
from intune._words import count
from intune.pipeline.engine import Engine, totals
from intune.pipeline.item import Item
from intune.pipeline.mixing import describe_mixing
from intune.pipeline.oversize import describe_oversize
from intune.pipeline.run import EpochRun, Position, count_rows
from intune.pipeline.source import BlockSource, IndexedSource, SequentialSource
from intune.pipeline.state import identity, make_state, read_state
from intune.pipeline.stats import StageTotals, Stats


class Control(Protocol):
    """What tunes a loader while it runs."""

    def start(self) -> None:
        """Begin to tune; calling it again does nothing."""
        ...

    def stop(self) -> None:
        """End; calling it again does nothing."""
        ...

    def last(self) -> Snapshot | None:
        """The last window."""
        ...

    def lines(self) -> list[dict[str, Any]]:
        """The last lines of the journal."""
        ...

    def explain(self, ended: str | None = None) -> str:
        """What limits the run, for a person; what limited it, where nothing goes on and `ended` says why."""
        ...

    def owns(self, thread: threading.Thread) -> bool:
        """Whether a thread is its own."""
        ...


class Loader:
    """Runs a pipeline: `for batch in loader`, once an epoch.

    The k-th iteration begun is epoch k, also when the one before was left early. One iterator lives at a
    time: from its first `next` until it ends or is dropped. Threads and processes stay warm between epochs
    and end with `close`, with the `with` block, when the loader is dropped, or when the interpreter ends.

    Made by `Pipeline.loader`.
    """

    def __init__(self, engine: Engine, control: Control) -> None:
        self._engine, self._control = engine, control
        self._next_epoch = 0
        self._start: Position | None = None
        self._begun: _Begun | None = None
        self._newest: weakref.ref[LoaderIterator] | None = None
        self._pid = os.getpid()
        self._first_asked: float | None = None
        self._identity: dict[str, Any] | None = None
        self._finalizer = weakref.finalize(self, _finish, engine, control, self._pid)
        self._oversize = describe_oversize(engine.pipeline, engine.allocation.in_flight_bytes)
        if self._oversize:
            logging.getLogger("intune").warning("%s", self._oversize)

    def __iter__(self) -> "LoaderIterator":
        """A new iterator; its epoch is fixed by its first `next`."""
        iterator = LoaderIterator(self)
        self._newest = weakref.ref(iterator)
        return iterator

    def __len__(self) -> int:
        """Number of items of an epoch, exactly.

        Raises:
            TypeError: If it cannot be known without running the functions.
        """
        rows = self._rows()
        if rows is not None:
            items, known = count_rows(self._engine.pipeline, self._engine.options.share, rows)
            if known:
                newest = self._newest() if self._newest is not None else None
                # `list(loader)` asks too, between `iter` and the first `next`, for a hint that it does not rely on.
                if newest is None or newest.begun:
                    self._engine.context.exact_rows = True
                return items
        raise TypeError(f"the length of {self._engine.pipeline!r} cannot be known without running it")

    def set_epoch(self, epoch: int) -> None:
        """The next iteration begun is this epoch.

        Raises:
            ValueError: If epoch is negative.
        """
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise ValueError(f"an epoch is an int >= 0, got {epoch!r}")
        self._next_epoch, self._start = epoch, None
        self._forget_left()

    def state_dict(self) -> dict[str, Any]:
        """Where the training loop stands, as small JSON: what follows is what it has not been given yet.

        An iteration that was left before its end, by `break`, an interrupt or an error, stands behind the last batch
        that it gave, until the next one begins or `set_epoch` or `load_state_dict` says otherwise.

        Raises:
            LoaderError: If ordered=False was chosen.
        """
        self._check_alive()
        self._engine.check_not_within()
        if not self._engine.options.ordered:
            raise LoaderError(
                "ordered=False gives items as they come, so there is no position to save: use ordered=True"
            )
        epoch, position = self._left() or (self._next_epoch, self._start or Position())
        return make_state(self._known(), epoch, position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken: the next iteration begun is the rest of its epoch.

        Raises:
            StateError: If the state does not fit; the message names the difference.
            LoaderError: If an iterator is live.
        """
        self._check_alive()
        self._check_no_other(None)
        levels = sum(stage.kind in ("shuffle", "batch") for stage in self._engine.pipeline.stages)
        epoch, position = read_state(state, self._known(), levels)
        self._next_epoch, self._start = epoch, position
        self._forget_left()

    def stats(self) -> Stats:
        """Lifetime figures, and the last window."""
        engine = self._engine
        consumer = engine.consumer.copy()
        stages = {
            name: StageTotals(each.items_out, each.rows_out, each.wall_seconds, each.cpu_seconds, each.skipped)
            for name, each in totals(engine).items()
        }
        since = engine.context.clock.wall() - self._first_asked if self._first_asked is not None else 0.0
        return Stats(
            since,
            consumer.items,
            consumer.rows,
            consumer.wait_seconds,
            stages,
            tuple(engine.skips),
            self._control.last(),
        )

    def __repr__(self) -> str:
        """The chain, and how far it came, in one line; takes no lock."""
        consumer, engine = self._engine.consumer, self._engine
        at = "closed" if engine.closed else f"next epoch {self._next_epoch}"
        given = f"{count(consumer.items, 'batch', 'batches')}, {count(consumer.rows, 'row')}"
        return f"<Loader of {engine.pipeline!r}: {given}, {at}>"

    def explain(self) -> str:
        """What limits the run now, and what would help; how well a shuffle mixes the files; what is too large.

        Where no iterator is live, or the loader is closed: what limited it for most of the time.
        """
        others = describe_mixing(self._engine.pipeline), self._oversize
        return "\n".join([self._control.explain(self._rests()), *(each for each in others if each)])

    @property
    def journal(self) -> list[dict[str, Any]]:
        """The last 1,000 lines of the journal: what was seen, decided and why."""
        return self._control.lines()

    def close(self) -> None:
        """End threads, processes and the live iterator; calling it again does nothing."""
        if os.getpid() == self._pid:
            self._finalizer()

    def __enter__(self) -> "Loader":
        """The loader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    # --- for the iterator

    def _begin(self, iterator: "LoaderIterator") -> None:
        self._check_alive()
        self._check_no_other(iterator)
        epoch, start = self._next_epoch, self._start or Position()
        if self._first_asked is None:
            self._first_asked = self._engine.context.clock.wall()
        self._control.start()
        run = self._engine.begin(epoch, start)
        # No call from here on: an interrupt, which comes with one, finds all of this done or nothing.
        iterator.run, iterator.epoch, self._begun = run, epoch, iterator.begun_as
        self._next_epoch, self._start = epoch + 1, None

    def _left(self) -> tuple[int, Position] | None:
        """Epoch and position of the iteration begun last, if it is live or was left before its end."""
        begun = self._begun
        if begun is None:
            return None
        iterator = begun.iterator()
        if iterator is None:
            return begun.left
        with self._engine.scheduler.lock:
            return iterator.place()

    def _rests(self) -> str | None:
        """Why nothing goes on, for a person; None where something does, or nothing was begun."""
        if self._engine.closed:
            return "The run has ended: the loader is closed"
        iterator = self._begun.iterator() if self._begun is not None else None
        if self._first_asked is None or (iterator is not None and iterator.alive):
            return None
        return "The run has ended or rests: no iterator is live"

    def _forget_left(self) -> None:
        """Where the last iteration was left does not count any more, unless it is live."""
        iterator = self._begun.iterator() if self._begun is not None else None
        if iterator is None or not iterator.alive:
            self._begun = None

    def _check_alive(self) -> None:
        if os.getpid() != self._pid:
            raise LoaderError(
                f"this loader belongs to process {self._pid}; in a forked child ({os.getpid()}) its copy is dead: "
                "make the loader after the fork"
            )
        if self._engine.closed:
            raise LoaderError("the loader is closed: make a new one with Pipeline.loader()")

    def _check_no_other(self, iterator: "LoaderIterator | None") -> None:
        other = self._begun.iterator() if self._begun is not None else None
        if other is not None and other is not iterator and other.alive:
            raise LoaderError("another iterator of this loader is live: end or drop it first, or make a second loader")

    def _rows(self) -> int | None:
        """Source rows of this rank in an epoch, where they can be had without reading data."""
        source, share = self._engine.pipeline.source, self._engine.options.share
        total: int | None
        if isinstance(source, BlockSource):
            known = source.unit_rows() if share.world_size == 1 else source.count_unit_rows()
            total = sum(known) if known is not None else None
        elif isinstance(source, IndexedSource):
            order = source.order(self._next_epoch)
            if order is not None:
                return len(order)
            total = len(source)
        else:
            total = source.length()
        if total is None or share.world_size == 1:
            return total
        if share.on_uneven == "drop":
            return total // share.world_size
        if share.on_uneven == "pad":
            return -(-total // share.world_size)
        if isinstance(source, SequentialSource):
            return (total - share.rank + share.world_size - 1) // share.world_size
        return (share.rank + 1) * total // share.world_size - share.rank * total // share.world_size

    def _known(self) -> dict[str, Any]:
        if self._identity is None:
            self._identity = identity(self._engine.pipeline, self._engine.options.share)
        return self._identity


class _Begun:
    """An iterator that was begun, and what is to be known of it once it has been dropped."""

    def __init__(self, iterator: "LoaderIterator") -> None:
        self.iterator = weakref.ref(iterator)
        self.left: tuple[int, Position] | None = None


class LoaderIterator(Iterator[Any]):
    """One epoch, or the rest of one; made by `iter(loader)`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._engine = loader._engine
        self._samples: list[Any] | None = None
        self._taken = 0
        self._item: Item | None = None
        self._ended = self._complete = False
        self._in_use = threading.Lock()
        self.run: EpochRun | None = None
        self.epoch: int | None = None
        self.begun_as = _Begun(self)

    @property
    def begun(self) -> bool:
        """Whether its first item was asked for."""
        return self.run is not None or self._ended

    @property
    def alive(self) -> bool:
        """Whether its first item was asked for and it has not ended."""
        return self.run is not None and not self._ended

    def __next__(self) -> Any:
        """The next batch; an iterator is for one thread at a time.

        Raises:
            StopIteration: At the end of the epoch.
            LoaderError: If another thread is inside `next` of this iterator.
            BaseException: What a function raised, with notes that say where.
        """
        if self._ended:
            raise StopIteration
        in_use = False
        try:
            in_use = not self._in_use.acquire(blocking=False)
            if in_use:
                raise LoaderError(
                    "another thread is inside next() of this iterator: take batches in one thread and hand them on, "
                    "or give each thread a loader of its own"
                )
            samples = self._samples
            within = samples is not None and self._taken < len(samples)
            value = samples[self._taken] if samples is not None and within else self._next_item()
            self._in_use.release()
        except BaseException:
            if not in_use:
                self._finish()  # whoever asks again is told of the end; so it does not matter who holds the lock
            raise
        # No call from here on: an interrupt, which comes with one, finds the batch given and counted, or neither.
        self._taken += 1
        return value

    def _next_item(self) -> Any:
        """The next item, or its first sample; not counted as taken yet."""
        self._loader._check_alive()
        if self.run is None:
            self._loader._begin(self)
        assert self.run is not None
        if self._item is not None and self._item.failure is not None:
            self._raise(self._item)
        item = self._engine.next_item(self.run)
        if item is None:
            self._loader._check_alive()
            raise StopIteration
        self._take(item)
        if not item.rows:
            self._raise(item)
        payload, item.payload = item.payload, None
        if item.keys is None:
            return payload
        self._samples = payload
        return payload[0]

    def _take(self, item: Item) -> None:
        self._samples, self._taken = None, 0
        self._item = item

    def place(self) -> tuple[int, Position] | None:
        """Epoch and position behind what was given; None = the epoch has not begun, or all of it was given.

        The lock is held, or nobody else has this iterator.
        """
        run = self.run
        if run is None or (self._complete if self._ended else self._gave_all(run)):
            return None
        assert self.epoch is not None
        return self.epoch, run.position(self._taken if self._has_last(run) else 0)

    def _has_last(self, run: EpochRun) -> bool:
        """Whether the last item taken from the run has arrived here; an interrupt may have lost it on its way."""
        item = self._item
        return run.root == (None if item is None else (item.position, item.before))

    def _gave_all(self, run: EpochRun) -> bool:
        item = self._item
        if not self._has_last(run) or (item is not None and (self._taken < item.count or item.failure is not None)):
            return False  # an item is on its way to here, or is not wholly given
        return run.delivery.ended and not run.delivery.ready

    def _raise(self, item: Item) -> None:
        failure = item.failure
        assert failure is not None
        error = failure.error
        if isinstance(error, StopIteration):  # the loop over us would end as if the epoch had
            error = RuntimeError(f"a function raised {error!r}")
            error.__cause__ = failure.error
        key = failure.key[0] if len(failure.key) == 1 else failure.key
        error.add_note(f"intune: raised in stage {item.failed_stage!r}, at {item.origin()}, item {key}")
        raise error

    def _finish(self) -> None:
        if not self._ended and self.run is not None:
            self._complete = self._gave_all(self.run)
            self._ended = True
            self._engine.end(self.run)
        self._ended = True

    def __del__(self) -> None:
        """A dropped iterator frees what it had begun; where it was left is kept."""
        run = getattr(self, "run", None)
        if run is None:
            return
        try:
            self.begun_as.left = self.place()
        finally:
            if not self._ended:
                self._engine.end(run)


def _finish(engine: Engine, control: Control, pid: int) -> None:
    """End everything of a loader; may be called by the garbage collector in any thread."""
    if os.getpid() != pid:
        return
    current = threading.current_thread()
    if engine.scheduler.owns(current) or control.owns(current):
        # Collected inside one of our own threads, which may hold the lock: another thread has to do it.
        threading.Thread(target=_finish, args=(engine, control, pid), name="intune-close", daemon=True).start()
        return
    try:
        control.stop()
    finally:
        stuck = engine.close()
    if stuck:
        logging.getLogger("intune").warning("left behind, still inside a function that does not return: %s", stuck)
