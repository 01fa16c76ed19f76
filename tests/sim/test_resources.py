"""What tasks that share resources get: known answers, and nothing is made or lost."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intune.sim.resources import PARTS, Part, Resources, Task
from intune.sim.scenario import SimMachine, SimStage

STAGE = SimStage("work")


def task(*parts: tuple[Part, float], stage: SimStage = STAGE, process: bool = False, threads: int = 1) -> Task:
    return Task(stage, process, list(parts), 0.0, threads=threads)


def finish(resources: Resources, *tasks: Task) -> list[tuple[float, Task]]:
    """All of them begun now and carried to their ends: (seconds, task)."""
    for each in tasks:
        resources.begin(each)
    ends: list[tuple[float, Task]] = []
    while (end := resources.next_end()) is not None:
        ends += [(end, done) for done in resources.advance(end)]
    assert len(ends) == len(tasks)
    return ends


def seconds(machine: SimMachine, *tasks: Task) -> list[float]:
    """When each of them ends, in the order in which they were given."""
    ended = {id(done): at for at, done in finish(Resources(machine), *tasks)}
    return [ended[id(each)] for each in tasks]


class TestCpus:
    def test_work_that_fits_takes_its_own_time(self) -> None:
        assert seconds(SimMachine(cpus=4), *[task(("cpu", 2.0)) for _ in range(4)]) == pytest.approx([2] * 4)

    def test_what_is_more_than_the_cpus_shares_them(self) -> None:
        tasks = [task(("cpu", 1.0)) for _ in range(6)]
        assert seconds(SimMachine(cpus=4), *tasks) == pytest.approx([1.5] * 6)
        assert [each.cpu_seconds for each in tasks] == pytest.approx([1.0] * 6)
        assert [each.queue_seconds for each in tasks] == pytest.approx([0.5] * 6)

    def test_the_shorter_ends_first_and_leaves_the_longer_more(self) -> None:
        assert seconds(SimMachine(cpus=1), task(("cpu", 1.0)), task(("cpu", 3.0))) == pytest.approx([2, 4])

    def test_neighbours_and_threads_take_their_share(self) -> None:
        resources = Resources(SimMachine(cpus=4))
        resources.neighbours = 2.0
        (ended,) = finish(resources, task(("cpu", 1.0), threads=6))
        assert ended[0] == pytest.approx(2.0)  # 8 want 4
        assert resources.cpu_used == pytest.approx(6.0)
        assert resources.cpu_others == pytest.approx(2.0)

    def test_a_quota_that_is_cut_slows_down_from_then_on(self) -> None:
        resources = Resources(SimMachine(cpus=2))
        works = [task(("cpu", 2.0)), task(("cpu", 2.0))]
        for each in works:
            resources.begin(each)
        assert resources.advance(1.0) == []
        resources.cpus = 1.0
        resources.changed()
        assert resources.next_end() == pytest.approx(3.0)


class TestLocks:
    def test_threads_of_one_process_compute_one_after_another(self) -> None:
        tasks = [task(("lock", 1.0)) for _ in range(4)]
        assert seconds(SimMachine(cpus=8), *tasks) == pytest.approx([4.0] * 4)
        assert [each.cpu_seconds for each in tasks] == pytest.approx([1.0] * 4)
        assert [each.queue_seconds for each in tasks] == pytest.approx([0.0] * 4)  # a lock is no run queue

    def test_stages_share_the_lock(self) -> None:
        other = SimStage("other")
        ends = seconds(SimMachine(cpus=8), task(("lock", 1.0)), task(("lock", 1.0), stage=other))
        assert ends == pytest.approx([2.0, 2.0])

    def test_each_process_has_its_own(self) -> None:
        tasks = [task(("lock", 1.0), process=True) for _ in range(4)]
        assert seconds(SimMachine(cpus=8), *tasks) == pytest.approx([1.0] * 4)
        assert seconds(SimMachine(cpus=2), *[task(("lock", 1.0), process=True) for _ in range(4)]) == pytest.approx(
            [2.0] * 4
        )

    def test_who_waits_for_the_lock_is_counted(self) -> None:
        resources = Resources(SimMachine(cpus=8))
        finish(resources, *[task(("lock", 1.0)) for _ in range(3)])
        assert resources.lock_waits == pytest.approx(3 * 3.0)

    def test_a_serial_section_is_one_of_each_stage(self) -> None:
        other = SimStage("other")
        tasks = [task(("serial", 1.0)), task(("serial", 1.0)), task(("serial", 1.0), stage=other)]
        assert seconds(SimMachine(cpus=8), *tasks) == pytest.approx([2, 2, 1])

    def test_parts_come_one_after_another(self) -> None:
        """Two items: 1 s in the section one after the other, then 2 s beside each other."""
        both = [task(("serial", 0.5), ("cpu", 2.0)), task(("serial", 0.5), ("cpu", 2.0))]
        assert seconds(SimMachine(cpus=8), *both) == pytest.approx([3.0, 3.0])
        assert [each.cpu_seconds for each in both] == pytest.approx([2.5] * 2)


class TestStreams:
    @pytest.mark.parametrize("what", ["disk", "network"])
    def test_a_stream_has_a_limit_and_all_together_have_one(self, what: Part) -> None:
        machine = SimMachine(**{f"{what}_bytes_per_second": 300.0, f"{what}_stream_bytes_per_second": 100.0})  # type: ignore[arg-type]
        for streams, each in ((1, 2.0), (3, 2.0), (6, 4.0)):
            ends = seconds(machine, *[task((what, 200.0)) for _ in range(streams)])
            assert ends == pytest.approx([each] * streams)

    def test_what_is_read_is_counted_and_takes_no_cpu(self) -> None:
        resources = Resources(SimMachine(cpus=1))
        work = [task(("disk", 5e8)) for _ in range(3)]
        finish(resources, *work)
        assert resources.read_bytes == pytest.approx(15e8)
        assert resources.cpu_used == 0.0

    def test_waiting_disturbs_nobody(self) -> None:
        ends = seconds(SimMachine(cpus=1), *[task(("wait", 1.0)) for _ in range(9)], task(("cpu", 1.0)))
        assert ends == pytest.approx([1.0] * 10)


class TestSlowingDown:
    def test_memory_bandwidth_slows_down_those_that_move_bytes(self) -> None:
        machine = SimMachine(cpus=8, memory_bytes_per_second=100.0)
        mover = replace(STAGE, cpu_seconds=1.0, moved_bytes=50.0)
        other = SimStage("other", cpu_seconds=1.0)
        for movers, each in ((1, 1.0), (2, 1.0), (4, 2.0)):
            tasks = [task(("cpu", 1.0), stage=mover) for _ in range(movers)]
            ends = seconds(machine, *tasks, task(("cpu", 1.0), stage=other))
            assert ends == pytest.approx([each] * movers + [1.0])
            assert tasks[0].cpu_seconds == pytest.approx(each)  # stalled on memory is on the CPU

    @pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
    def test_the_universal_scalability_law(self, n: int) -> None:
        bending = replace(STAGE, contention=0.1, coherency=0.02)
        ends = seconds(SimMachine(cpus=8), *[task(("cpu", 1.0), stage=bending) for _ in range(n)])
        assert ends == pytest.approx([1 + 0.1 * (n - 1) + 0.02 * n * (n - 1)] * n)


MACHINE = SimMachine(
    cpus=3,
    disk_bytes_per_second=3.0,
    disk_stream_bytes_per_second=2.0,
    network_bytes_per_second=4.0,
    network_stream_bytes_per_second=1.0,
)
parts = st.lists(st.tuples(st.sampled_from(PARTS), st.floats(0.01, 3.0)), min_size=1, max_size=4)
tasks = st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), parts), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(tasks, st.lists(st.floats(0.05, 2.0), max_size=12))
def test_nothing_is_made_or_lost(drawn: list[tuple[str, bool, list[tuple[Part, float]]]], gaps: list[float]) -> None:
    """Each task gets the CPU seconds and the machine gives the bytes that its parts say, whenever it begins."""
    resources = Resources(MACHINE)
    works = [Task(SimStage(name), process, list(each), 0.0) for name, process, each in drawn]
    wanted = [
        [sum(a for p, a in each if p in kinds) for kinds in (("cpu", "lock", "serial"), ("disk",))]
        for *_, each in drawn
    ]
    ended: dict[int, float] = {}
    starts = dict(zip(range(len(works)), [*gaps, *[0.0] * len(works)], strict=False))
    for number, work in enumerate(works):
        until = resources.now + starts[number]
        while (end := resources.next_end()) is not None and end <= until:
            ended.update({id(done): end for done in resources.advance(end)})
        resources.advance(until)
        resources.begin(work)
    while (end := resources.next_end()) is not None:
        ended.update({id(done): end for done in resources.advance(end)})
    assert len(ended) == len(works)
    for work, (cpu, _) in zip(works, wanted, strict=True):
        assert work.cpu_seconds == pytest.approx(cpu, rel=1e-6, abs=1e-6)
        assert ended[id(work)] - work.began >= work.cpu_seconds + work.queue_seconds - 1e-6
    assert resources.cpu_used == pytest.approx(sum(cpu for cpu, _ in wanted), rel=1e-6, abs=1e-6)
    assert resources.read_bytes == pytest.approx(sum(read for _, read in wanted), rel=1e-6, abs=1e-6)
    assert resources.cpu_used <= MACHINE.cpus * resources.now + 1e-6
    assert not any(resources.running.values())
    assert not math.isinf(resources.now)
