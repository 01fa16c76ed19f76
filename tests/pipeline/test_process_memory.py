"""What the processes of a stage hold and will hold, and that none is started while memory runs out."""

import time

import intune
from intune._values import StageInfo
from intune.pipeline.stage import LiveStage, ProcessSizes


class Counted:
    """A pool of so many processes, with sizes that a test sets."""

    failed, starting, leaving = False, 0, 0

    def __init__(self, live: int, sizes: ProcessSizes) -> None:
        self.live, self.found = live, sizes
        self.closed = False

    def sizes(self) -> ProcessSizes:
        return self.found

    def resize(self, n: int) -> None:
        raise AssertionError

    def call(self, *args: object) -> object:
        raise AssertionError

    def close(self) -> None:
        self.closed = True


def stage(pool: Counted, concurrency: int | None = None) -> LiveStage:
    made = LiveStage(StageInfo("work", "map", "process", waits=False), None, 1, concurrency=concurrency, pool=pool)
    made.measure_processes()
    return made


def test_those_without_an_item_yet_will_hold_as_much_as_the_others() -> None:
    work = stage(Counted(4, ProcessSizes((100, 140), (30, 130))))
    assert (work.resident, work.process_bytes, work.process_growth) == (120, 400, 90)


def test_while_none_has_done_an_item_it_is_not_known_what_one_holds() -> None:
    pool = Counted(2, ProcessSizes((), (30, 40)))
    work = stage(pool)
    assert (work.resident, work.process_bytes, work.process_growth) == (None, 70, 0)
    pool.found = ProcessSizes((100,), (40,))
    work.measure_processes()
    pool.found, pool.live = ProcessSizes((), (40,)), 1
    work.measure_processes()
    assert (work.resident, work.process_bytes, work.process_growth) == (100, 40, 60)  # the other one is gone


def test_those_that_leave_hold_what_one_does() -> None:
    pool = Counted(1, ProcessSizes((100,), ()))
    pool.leaving = 2
    assert stage(pool).process_bytes == 300


def test_without_room_a_stage_wants_no_more_processes_than_it_has_but_one() -> None:
    pool = Counted(3, ProcessSizes())
    work = stage(pool, 8)
    wanted = []
    for room, live in ((None, 3), (0, 3), (0, 2), (0, 0), (None, 0)):
        work.room, pool.live = room, live
        work.refresh(8, 1)
        wanted.append(work.processes)
    assert wanted == [8, 3, 2, 1, 8]


def test_the_brake_lets_no_process_be_started_while_it_holds() -> None:
    pipe = intune.from_iterable(range(10**6)).map(abs, name="work", executor="process", max_concurrency=3)
    with pipe.loader(cpus=3, tuner="shared") as loader:
        engine = loader._engine
        (pool,) = (each.pool for each in engine.live if each.pool is not None)
        deadline = time.monotonic() + 60

        def until(live: int) -> None:
            while (pool.live, pool.starting, pool.leaving) != (live, 0, 0):
                assert time.monotonic() < deadline
                time.sleep(0.01)

        engine.hold_back(0, 0)
        engine.resize_pools()
        until(1)
        assert engine.live[1].processes == 1
        engine.hold_back(None, None)
        until(3)
        engine.hold_back(0, 0)
        assert engine.live[1].processes == 3  # those that are there stay
