"""Where memory alone keeps a loader from going on, and nothing of its own is left that could give bytes back."""

from intune._errors import MemoryLimitError
from intune._words import count, size
from intune.pipeline.engine import Engine
from intune.pipeline.run import EpochRun
from intune.pipeline.sequence import ShuffleSequencer


class Impasse:
    """Tells whether an engine can go on with what is to spare, and ends its epoch where somebody decides that it can't.

    Args:
        engine: What runs.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._context = engine, engine.context

    def keep_to(self, spare_bytes: int | None) -> None:
        """From now on what order waits for may take no more than this until it is told again; None = what it takes.

        Where a number is given, no epoch is begun ahead.
        """
        with self._engine.scheduler.lock:
            self._context.ledger.keep_to(spare_bytes)
            self._engine.scheduler.dispatch()

    def lacks(self) -> int | None:
        """Bytes that would have to be to spare for anything to go on; None = it goes on, or lacks something else.

        Not None only while the consumer waits, has had all that is ready, nothing is being worked on, and what order
        waits for is kept back by want of bytes to spare alone. An epoch that was begun ahead is given up first.
        """
        with self._engine.scheduler.lock:
            run = self._waited_for()
            if run is None or self._kept_back(run) is None:
                return None
            ahead = [other for other in self._engine.runs if other is not run and not other.cancelled]
            for other in ahead:
                other.cancel()
            return None if ahead else self._context.lacking

    def give_up(self, why: str) -> None:
        """End the epoch with an error that says why, if it is still as `lacks` said."""
        with self._engine.scheduler.lock:
            run = self._waited_for()
            stage = self._kept_back(run) if run is not None else None
            if run is not None and stage is not None:
                run.crash(MemoryLimitError(f"{why}. {self._held(run, stage)}"))

    def _waited_for(self) -> EpochRun | None:
        """The run that the consumer waits for, where it has had all that is there and nothing is in hand."""
        engine = self._engine
        if not engine.runs or self._context.busy or not engine.consumer.inside:
            return None
        run = engine.runs[0]
        return None if run.cancelled or not engine.nothing_for(run) else run

    def _kept_back(self, run: EpochRun) -> str | None:
        """The stage that is kept back by want of bytes to spare, where nothing else can begin."""
        self._context.lacking, found = None, None
        for node in run.nodes:
            if node.stage.running < node.stage.cap and all(node.gates()):
                return None
            if found is None and self._context.lacking is not None:
                found = node.stage.info.name
        return found

    def _held(self, run: EpochRun, stage: str) -> str:
        """What holds the bytes, and what to do about it."""
        held, lacking = self._context.ledger.held, self._context.lacking
        said = [f"Items in flight hold {size(held)}, and the next one of {stage!r} takes about {size(lacking)} more"]
        for sequence in run.sequences:
            pieces, wanted = sequence.sequencer.filling
            rows = sum(piece.stop - piece.start for piece in pieces)
            if rows:
                tokens = {id(piece.token): piece.token for piece in pieces}
                per_row = sum(token.charge.actual for token in tokens.values()) / sum(t.rows for t in tokens.values())
                whole = f"of the {count(wanted, 'row')} that {sequence.stage!r} puts together {rows:,} have come"
                said.append(f"{whole}, and all of them take about {size(int(wanted * per_row))}")
        advice = "raise the limit and go on from the loader's state_dict()"
        if any(isinstance(sequence.sequencer, ShuffleSequencer) for sequence in run.sequences):
            advice += ", or begin the epoch again with fewer rows in shuffle (no state of this loader fits those)"
        return f"{'; '.join(said)}. Nothing is left in flight that could give memory back: {advice}"
