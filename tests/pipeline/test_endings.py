"""However a run ends, everything of ours ends with it, and nothing is said that need not be."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

import intune
from intune import Loader, LoaderError
from intune.testing import assert_exactly_once

pytestmark = pytest.mark.timeout(180)
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file, wherever it lies

EXECUTORS = ["thread", "process"]


def wait_for(what: Callable[[], bool]) -> None:
    """Ask again and again; a test that waits for ever is ended by its time-out."""
    while not what():
        time.sleep(0.001)


def make(executor: Any = "thread", rows: int = 1000, work: Callable[[int], Any] = lambda i: i) -> Loader:
    return intune.from_iterable(range(rows)).map(work, executor=executor, max_concurrency=2).batch(10).loader(cpus=2)


def rows(batches: Any) -> list[int]:
    return [i for batch in batches for i in batch.tolist()]


def held() -> tuple[set[int | None], set[int]]:
    """Threads and processes that live."""
    return {thread.ident for thread in threading.enumerate()}, {child.pid for child in psutil.Process().children()}


class TestClose:
    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_twice_and_before_anything_ran(self, executor: Any) -> None:
        before = held()
        loader = make(executor)
        loader.close()
        loader.close()
        wait_for(lambda: held() == before)

    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_in_the_middle(self, executor: Any) -> None:
        before = held()
        loader = make(executor)
        running = iter(loader)
        next(running)
        loader.close()
        wait_for(lambda: held() == before)
        for _ in range(2):
            with pytest.raises((LoaderError, StopIteration)):
                next(running)

    def test_what_is_asked_of_a_closed_one(self) -> None:
        with make() as loader:
            whole = rows(loader)
            state = loader.state_dict()
        assert whole == list(range(1000))
        for ask in (lambda: list(loader), loader.state_dict, lambda: loader.load_state_dict(state)):
            with pytest.raises(LoaderError, match="closed"):
                ask()
        assert loader.stats().rows == 1000
        assert loader.journal
        assert loader.explain()
        assert len(loader) == 100

    def test_a_closed_one_says_so_in_the_middle(self) -> None:
        loader = make()
        running = iter(loader)
        next(running)
        loader.close()
        with pytest.raises(LoaderError, match="closed"):
            next(running)

    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_while_another_thread_waits_in_next(self, executor: Any, tmp_path: Path) -> None:
        gate = tmp_path / "gate"

        def stuck(i: int) -> int:
            while not gate.exists():
                time.sleep(0.001)
            return i

        loader = make(executor, work=stuck)
        found: list[BaseException] = []

        def consume() -> None:
            try:
                next(iter(loader))
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=consume)
        thread.start()
        wait_for(lambda: loader._engine.consumer._inside_since is not None)
        closing = threading.Thread(target=loader.close)
        closing.start()
        thread.join()
        assert isinstance(found[0], LoaderError)
        gate.touch()
        closing.join()

    def test_from_many_threads_at_once(self) -> None:
        loader = make("process")
        next(iter(loader))
        threads = [threading.Thread(target=loader.close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert loader._engine.closed

    def test_from_inside_a_function(self) -> None:
        """A stage's function that closes its own loader does not wait for itself."""
        made: list[Loader] = []

        def work(i: int) -> int:
            if i == 50:
                made[0].close()
            return i

        made.append(make(work=work))
        with pytest.raises(LoaderError, match="closed"):
            list(made[0])
        made[0].close()

    def test_a_thread_that_does_not_return_is_named(self, caplog: pytest.LogCaptureFixture) -> None:
        go = threading.Event()
        inside = threading.Event()

        def stuck(i: int) -> int:
            inside.set()
            go.wait(50)
            return i

        loader = intune.from_iterable(range(5)).map(stuck, name="stuck").loader(cpus=1)

        def consume() -> None:
            with pytest.raises(LoaderError, match="closed"):
                list(loader)

        consumer = threading.Thread(target=consume)
        consumer.start()
        inside.wait(30)
        loader.close()
        consumer.join()
        assert "does not return" in caplog.text
        go.set()
        wait_for(lambda: not any(thread.name.startswith("intune-from") for thread in threading.enumerate()))


class TestDropped:
    @pytest.mark.parametrize("executor", EXECUTORS)
    @pytest.mark.parametrize("when", ["never asked", "in the middle", "after an epoch", "after an error"])
    def test_without_close(self, executor: Any, when: str) -> None:
        def work(i: int) -> int:
            if when == "after an error" and i == 500:
                raise ValueError(i)
            return i

        before = held()
        loader = make(executor, work=work)
        if when == "in the middle":
            running = iter(loader)
            next(running)
            del running
        elif when == "after an epoch":
            list(loader)
        elif when == "after an error":
            with pytest.raises(ValueError, match="500"):
                list(loader)
        del loader
        gc.collect()
        wait_for(lambda: held() == before)

    def test_an_iterator_keeps_its_loader(self) -> None:
        running = iter(intune.from_iterable(range(100)).batch(3).loader())
        gc.collect()
        assert rows(running) == list(range(100))

    def test_in_a_reference_cycle(self) -> None:
        class Trainer:
            def __init__(self) -> None:
                self.loader = make()
                self.running = iter(self.loader)
                self.me = self

        before = held()
        trainer = Trainer()
        next(trainer.running)
        seen = weakref.ref(trainer)
        del trainer
        gc.collect()
        assert seen() is None
        wait_for(lambda: held() == before)

    def test_an_abandoned_iterator_frees_what_it_had_begun(self) -> None:
        made = closed = 0

        def spread(i: int) -> Iterator[int]:
            nonlocal made, closed
            made += 1
            try:
                yield from range(1000)
            finally:
                closed += 1

        with intune.from_iterable(range(50)).flat_map(spread).batch(10).loader(cpus=2) as loader:
            for _ in range(5):
                for _batch in loader:
                    break
            wait_for(lambda: loader._engine.context.busy == 0)
            loader._engine.snapshot()
            assert loader._engine.context.ledger.charged == 0
            wait_for(lambda: made == closed)

    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_five_early_exits_then_a_full_pass(self, executor: Any) -> None:
        before = held()
        with make(executor) as loader:
            for _ in range(5):
                for number, _batch in enumerate(loader):
                    if number == 2:
                        break
            assert_exactly_once(rows(loader), 1000)
        wait_for(lambda: held() == before)


class TestInterrupt:
    """KeyboardInterrupt comes out of `next` as it is and leaves the loader usable."""

    def interrupt(self, when: Callable[[], bool]) -> threading.Thread:
        main = threading.get_ident()

        def send() -> None:
            wait_for(when)
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=send)
        thread.start()
        return thread

    def test_while_next_waits(self) -> None:
        go, reached = threading.Event(), threading.Event()

        def stuck(i: int) -> int:
            if i == 500:
                reached.set()
                go.wait(50)
            return i

        with make(work=stuck) as loader:
            stuck_at_last = lambda: reached.is_set() and loader._engine.consumer._inside_since is not None  # noqa: E731
            sender = self.interrupt(lambda: stuck_at_last() and not loader._engine.runs[0].delivery.ready)
            got: list[int] = []
            running = map(lambda batch: got.extend(batch.tolist()), loader)
            with pytest.raises(KeyboardInterrupt):
                list(running)
            sender.join()
            assert got == list(range(len(got)))
            go.set()
            assert rows(loader) == list(range(1000))

    def test_in_the_loop(self) -> None:
        with make() as loader:
            running = (signal.raise_signal(signal.SIGINT) for batch in loader if batch[0] == 200)
            with pytest.raises(KeyboardInterrupt):
                list(running)
            del running
            assert rows(loader) == list(range(1000))

    @pytest.mark.slow
    def test_at_any_moment(self) -> None:
        """Interrupts as fast as they can be sent, wherever the consumer stands."""
        armed = False

        def handler(number: int, frame: Any) -> None:
            if armed:
                raise KeyboardInterrupt

        stop = threading.Event()
        main = threading.get_ident()

        def send() -> None:
            while not stop.wait(0.0007):
                signal.pthread_kill(main, signal.SIGINT)

        before = signal.signal(signal.SIGINT, handler)
        sender = threading.Thread(target=send)
        caught = 0
        try:
            with intune.from_iterable(range(3000)).map(lambda i: i).batch(2).loader(cpus=2) as loader:
                list(loader)  # the first measurements of the machine are taken, files opened for them included
                sender.start()
                while caught < 300:
                    try:
                        armed = True
                        for _ in loader:
                            pass
                        armed = False
                    except KeyboardInterrupt:
                        armed = False
                        caught += 1
                stop.set()
                sender.join()
                assert rows(loader) == list(range(3000))
                assert loader._engine.scheduler.used == 0
        finally:
            armed = False
            stop.set()
            signal.signal(signal.SIGINT, before)


def script(text: str, tmp_path: Path) -> subprocess.Popen[str]:
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(text))
    return subprocess.Popen(
        [sys.executable, str(file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and what was written."""
    out, err = process.communicate(timeout=50)
    return process.returncode, out, err


def members(session: int) -> list[int]:
    """Processes that belong to a session still."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except (ProcessLookupError, psutil.Error):
            continue
    return found


class TestScripts:
    LOOP = """
        import sys, time, os, signal
        import intune

        def work(i):
            {work}
            return i

        loader = intune.from_iterable(range(100_000)).map(work, {options}).batch(2).loader(cpus=2)
        for number, batch in enumerate(loader):
            if number == 20:
                {then}
    """

    @pytest.mark.parametrize("options", ["", "executor='process', max_concurrency=2"])
    @pytest.mark.parametrize("sleeps", [False, True])
    def test_interrupted(self, tmp_path: Path, options: str, sleeps: bool) -> None:
        """The terminal sends SIGINT to the whole group: the workers hear it too."""
        if sleeps:
            work, then = "i >= 5000 and (print('here', flush=True), time.sleep(60))", "continue"
        else:
            work, then = "pass", "print('here', flush=True)"
        process = script(self.LOOP.format(work=work, options=options, then=then), tmp_path)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        os.killpg(process.pid, signal.SIGINT)
        code, _, err = ended(process)
        assert code == -signal.SIGINT
        assert err.count("Traceback (most recent call last)") == 1
        lines = [line for line in err.splitlines() if "left behind" not in line]
        assert lines[-1] == "KeyboardInterrupt"
        assert (len(lines) < len(err.splitlines())) == (sleeps and not options), "a thread that is stuck is named"
        wait_for(lambda: not members(process.pid))

    @pytest.mark.parametrize("options", ["", "executor='process', max_concurrency=2"])
    def test_interrupt_handled(self, tmp_path: Path, options: str) -> None:
        text = self.LOOP.format(work="pass", options=options, then="signal.raise_signal(signal.SIGINT)")
        lines = textwrap.dedent(text).splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("for "))
        guarded = ["try:", *("    " + line for line in lines[at:]), "except KeyboardInterrupt:", "    sys.exit(130)"]
        assert ended(script("\n".join(lines[:at] + guarded), tmp_path)) == (130, "", "")

    @pytest.mark.parametrize("options", ["", "executor='process', max_concurrency=2"])
    @pytest.mark.parametrize("then", ["break", "sys.exit(0)"])
    def test_left_early(self, tmp_path: Path, options: str, then: str) -> None:
        process = script(self.LOOP.format(work="pass", options=options, then=then), tmp_path)
        assert ended(process) == (0, "", "")
        assert not members(process.pid)

    @pytest.mark.parametrize("options", ["", "executor='process', max_concurrency=2"])
    def test_an_unfinished_iterator_in_a_global(self, tmp_path: Path, options: str) -> None:
        process = script(
            f"""
            import intune
            loader = intune.from_iterable(range(100_000)).map(lambda i: i, {options}).batch(2).loader(cpus=2)
            running = iter(loader)
            next(running)
            """,
            tmp_path,
        )
        assert ended(process) == (0, "", "")
        assert not members(process.pid)

    @pytest.mark.parametrize("options", ["", "executor='process', max_concurrency=2"])
    def test_an_error_of_the_script_is_the_only_one(self, tmp_path: Path, options: str) -> None:
        process = script(self.LOOP.format(work="pass", options=options, then="raise ValueError('mine')"), tmp_path)
        code, _, err = ended(process)
        assert code == 1
        assert err.count("Traceback") == 1
        assert err.splitlines()[-1] == "ValueError: mine"
        assert not members(process.pid)

    def test_killed(self, tmp_path: Path) -> None:
        """Nothing can be done any more by the parent, so its workers see it and end."""
        text = self.LOOP.format(
            work="pass", options="executor='process', max_concurrency=2", then="os.kill(os.getpid(), 9)"
        )
        process = script(text, tmp_path)
        assert ended(process)[0] == -signal.SIGKILL
        wait_for(lambda: not members(process.pid))

    def test_forked_child(self, tmp_path: Path) -> None:
        """A copy in a forked child is dead and says so; the parent goes on."""
        process = script(
            """
            import os, sys
            import intune

            pipe = intune.from_iterable(range(1000)).map(lambda i: i, executor="process", max_concurrency=1)
            loader = pipe.batch(5).loader(cpus=2)
            idle = intune.from_iterable(range(10)).loader()
            running = iter(loader)
            got = next(running).tolist()

            def refused(ask):
                try:
                    ask()
                except intune.LoaderError as error:
                    assert "forked child" in str(error), error
                else:
                    raise AssertionError("not refused")

            for leave in (os._exit, sys.exit):
                child = os.fork()
                if child == 0:
                    refused(lambda: next(running))
                    refused(lambda: list(loader))
                    refused(lambda: list(idle))
                    refused(loader.state_dict)
                    refused(lambda: loader.load_state_dict({}))
                    loader.close()
                    with intune.from_iterable(range(7)).batch(2).loader() as own:
                        assert [b.tolist() for b in own] == [[0, 1], [2, 3], [4, 5], [6]]
                    leave(0)
                assert os.waitpid(child, 0)[1] == 0
            for batch in running:
                got += batch.tolist()
            assert got == list(range(1000))
            assert list(idle) == list(range(10))
            print("fine")
            """,
            tmp_path,
        )
        assert ended(process) == (0, "fine\n", "")

    def test_fork_with_an_iterator_that_is_dropped_in_the_child(self, tmp_path: Path) -> None:
        process = script(
            """
            import gc, os
            import intune

            loader = intune.from_iterable(range(1000)).map(lambda i: i).batch(5).loader(cpus=2)
            running = iter(loader)
            got = next(running).tolist()
            child = os.fork()
            if child == 0:
                del running, loader
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            for batch in running:
                got += batch.tolist()
            assert got == list(range(1000))
            print("fine")
            """,
            tmp_path,
        )
        assert ended(process) == (0, "fine\n", "")
