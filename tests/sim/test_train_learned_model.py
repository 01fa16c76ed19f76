from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from intune._errors import PipelineError  # noqa: E402
from intune._values import CROWDS, Budget  # noqa: E402
from intune.sim import HELD_OUT, TRAINED, play, train_learned_model  # noqa: E402
from intune.sim.families import scenario  # noqa: E402
from intune.sim.train_learned_model import Options, Wanderer, main, samples, train  # noqa: E402
from intune.testing import check_tuner  # noqa: E402
from intune.tuners import LearnedModel  # noqa: E402
from intune.tuners.learned_model import SIZES, curves  # noqa: E402

TINY = Options(decisions=8, rounds=3)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """More of them only get into each other's way in networks so small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_what_wanders_keeps_the_contract_of_tuners() -> None:
    check_tuner(Wanderer(3))


@pytest.mark.slow
def test_it_wanders_and_keeps_what_it_saw() -> None:
    drawn, wanderer = scenario("bending", 8), Wanderer(0)
    trace = play(drawn, wanderer, 20)
    assert len(wanderer.seen) == 21
    assert len({tuple(each.concurrency.values()) for each in trace.intervals}) > 4
    assert None not in trace.intervals[0].concurrency.values()  # few at once to begin with
    assert {budget for _, budget in wanderer.seen} == {Budget(drawn.machine.cpus)}


@pytest.mark.slow
def test_samples_are_of_what_comes_later_in_proportion_to_what_was() -> None:
    found = samples(scenario("clean", 3), TINY)
    count = len(found.answer)
    assert found.told.shape == (count, SIZES[0])
    assert set(found.at_once.tolist()) <= set(map(float, CROWDS))
    assert len(set(found.at_once.tolist())) > 1
    assert ((found.weight > 0) & (found.weight <= 1)).all()
    # Stages of this family scale perfectly: items take what they took before, whatever is at work.
    assert np.average(found.answer, weights=found.weight) == pytest.approx(0, abs=0.1)
    again = samples(scenario("clean", 3), TINY)
    assert all((a == b).all() for a, b in zip(found, again, strict=True))


@pytest.mark.slow
def test_the_seed_decides_and_it_learns_from_trained_families_only(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, told = set(), []

    def noted(family: str, seed: int) -> object:
        drawn.add(family)
        return scenario(family, seed)

    monkeypatch.setattr(train_learned_model, "scenario", noted)
    monkeypatch.setattr(train_learned_model, "TRAINED", ("bending", "serial", "clean"))
    tiny = replace(TINY, scenarios=2)
    first, second, other = train(tiny, told.append), train(tiny), train(replace(tiny, seed=1))
    flat = [[array.tolist() for layer in each for array in layer] for each in (first, second, other)]
    assert flat[0] == flat[1]
    assert flat[0] != flat[2]
    assert [matrix.shape for matrix, _ in first] == list(pairwise(SIZES))
    assert len(told) == 2 + tiny.rounds
    assert drawn == {"bending", "serial", "clean"} <= set(TRAINED)
    assert not set(train_learned_model.TRAINED) & set(HELD_OUT)


@pytest.mark.slow
def test_the_command_writes_a_file_that_the_tuner_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_learned_model, "TRAINED", ("clean", "bending"))
    monkeypatch.setattr(
        train_learned_model, "Options", lambda *given, **named: replace(TINY, scenarios=named.get("scenarios", 2))
    )
    main(["--out", str(tmp_path / "learned.npz"), "--seed", "2", "--scenarios", "2"])
    LearnedModel(tmp_path / "learned.npz")
    with pytest.raises(SystemExit):
        main(["--seed", "2"])
    with pytest.raises(PipelineError, match="scenarios is 1, must be at least 2"):
        main(["--out", str(tmp_path / "none.npz"), "--scenarios", "1"])


def test_it_learns_with_the_curve_that_the_tuner_decides_by() -> None:
    outputs = np.random.default_rng(0).normal(0, 4, (20, 3)).astype(np.float32)
    at_once = np.repeat(np.float32([1, 2, 8, 64]), 5)
    given = train_learned_model._predicted(lambda told: told, (torch.from_numpy(outputs), torch.from_numpy(at_once)))
    base, slope, bend = curves(outputs.astype(float), np.full(20, 0.3)).T
    seconds = base + slope * (at_once - 1) + bend * at_once * (at_once - 1)
    assert given.numpy() == pytest.approx(np.log(seconds / 0.3), abs=1e-4)
