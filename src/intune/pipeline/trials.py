"""What is decided once, by measurement: whether a stage waits; whether its function runs in threads or processes."""

import threading
from dataclasses import replace
from typing import Protocol

from intune._errors import IntuneError
from intune._values import Event
from intune.pipeline.context import Context
from intune.pipeline.executors import Verdict
from intune.pipeline.stage import LiveStage, Pool, Trial


class Owner(Protocol):
    """Whose stages they are; everything but `resize_pools` is used with the scheduler's lock held."""

    live: list[LiveStage]

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        ...

    def make_pool(self, stage: LiveStage) -> Pool:
        """Processes for a stage.

        Raises:
            IntuneError: If its function cannot be sent to one.
        """
        ...

    def decided(self, event: Event | None) -> None:
        """Something was decided: limits are to be computed anew; and what a person may want to know of it."""
        ...

    def resize_pools(self) -> None:
        """Ask for the processes that are wanted; called without the lock."""
        ...


class Trials:
    """Books what trials found. With the scheduler's lock held, but for `join`."""

    def __init__(self, context: Context, owner: Owner) -> None:
        self._context, self._owner = context, owner
        self._starters: list[threading.Thread] = []
        context.on_executor_trial = self._measured

    def waits(self, stage: LiveStage, waits: bool) -> None:
        """It is now known whether a stage waits."""
        stage.decide(waits)
        told = Event("waits", stage.info.name, "its items wait instead of computing: it holds no slot")
        self._owner.decided(told if waits else None)
        if waits and stage.executor_trial is not None:
            self._choose(stage, Verdict("thread", "its items wait"))

    def end_long(self, now: float) -> bool:
        """A trial is to cost little: where one item takes long the others go on, and one more joins the first.

        Returns:
            Whether more may begin now.
        """
        joined = False
        for stage in self._owner.live:
            if stage.most_unproven is not None and stage.running >= stage.most_unproven:
                stage.most_unproven += 1
                joined = True
        found = self._context.on_trial or self._context.held_back
        if found is None:
            return joined
        stage, since = found
        if stage.executor_trial is not None and now - since > Trial.PATIENCE_SECONDS:
            stage.executor_trial.disturbed = True
        if not stage.wants_alone or now - since <= Trial.PATIENCE_SECONDS:
            return joined
        for other in self._owner.live:
            if other.trial is not None:
                other.trial.lifted = True
        self._context.on_trial = self._context.held_back = None
        return True

    def join(self) -> None:
        """Wait for processes that are being asked for; without the lock."""
        for starter in self._starters:
            starter.join()

    def _measured(self, stage: LiveStage, wall: float, cpu: float, size: int) -> None:
        assert stage.executor_trial is not None
        verdict = stage.executor_trial.add(wall, cpu, size)
        if verdict is not None:
            self._choose(stage, verdict)

    def _choose(self, stage: LiveStage, verdict: Verdict) -> None:
        """It is now known where a stage's function is to run; it stays there."""
        stage.executor_trial = None
        if verdict.executor == "process" and not self._owner.closed:
            try:
                stage.pool = self._owner.make_pool(stage)
            except IntuneError as error:
                verdict = Verdict("thread", f"{verdict.reason}, but it cannot be sent to a process ({error})")
            else:
                stage.info = replace(stage.info, executor="process", waits=False)
                stage.trial = None
        self._owner.decided(Event("executor", stage.info.name, f"{verdict.executor}: {verdict.reason}"))
        if stage.pool is not None:
            # Not here: the lock is held, and a pool tells of its changes at once.
            self._starters.append(threading.Thread(target=self._start_pool, args=(stage,), name="intune-start"))
            self._starters[-1].start()

    def _start_pool(self, stage: LiveStage) -> None:
        self._owner.resize_pools()
        if stage.instances is not None:
            stage.instances.trim(0)
