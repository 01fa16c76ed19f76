"""The learned agent: what it is made of, where it may be loaded from, and who decides when it is unsure."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intune._errors import PipelineError
from intune._values import Allocation, Budget
from intune.testing import check_tuner
from intune.tuners import Model
from intune.tuners._senses import ACTIONS, BEGINNING, GLOBAL_FEATURES, STAGE_FEATURES, Seen, Senses
from intune.tuners._trust import GOOD_WINDOWS, Detector
from intune.tuners.agent import LEAST_GAIN, Agent, gains, load_weights, save_weights

from .plant import Plant, PlantStage, run

WIDTH, NETWORKS = 6, 3
HALF = ACTIONS.index("half")


def weights(seed: int = 0, *, gain: Mapping[str, Sequence[float]] | None = None) -> dict[str, np.ndarray]:
    """Random networks; or ones that always say that an action gains so much, network by network."""
    random = np.random.default_rng(seed)
    shapes = {"in": (STAGE_FEATURES + GLOBAL_FEATURES, WIDTH), "mid": (WIDTH, WIDTH), "out": (3 * WIDTH, WIDTH)}
    shapes["gain"] = (WIDTH, len(ACTIONS))
    found = {}
    for name, shape in shapes.items():
        scale = 0.0 if name == "gain" and gain is not None else 0.3
        found[f"{name}.w"] = (scale * random.standard_normal((NETWORKS, *shape))).astype(np.float32)
        found[f"{name}.b"] = np.zeros((NETWORKS, 1, shape[1]), np.float32)
    for action, values in (gain or {}).items():
        found["gain.b"][:, 0, ACTIONS.index(action)] = values
    return found


def stages(count: int = 3) -> list[PlantStage]:
    return [PlantStage("source", 0.001), *(PlantStage(f"map{n}", 0.01 * (n + 1)) for n in range(count - 1))]


def followed(tuner: Agent, decisions: int = 20) -> bool:
    """Whether it does what the model alone does."""
    alone, other = (run(each, Plant(stages()), decisions)[0] for each in (Model(), tuner))
    return [each.concurrency for each in alone] == [each.concurrency for each in other]


@pytest.mark.parametrize("seed", [0, 1])
def test_it_keeps_the_contract_of_tuners(seed: int) -> None:
    check_tuner(Agent(weights(seed)))


def test_it_does_what_the_model_does_where_nothing_gains_enough() -> None:
    assert followed(Agent(weights(gain={"half": [LEAST_GAIN * 0.9] * NETWORKS})))
    assert not followed(Agent(weights(gain={"half": [LEAST_GAIN * 1.1] * NETWORKS})))


def test_networks_that_disagree_change_nothing() -> None:
    assert followed(Agent(weights(gain={"half": [1.0, -0.6, -0.1]})))
    assert not followed(Agent(weights(gain={"half": [1.0, 0.9, 1.1]})))


def test_it_says_what_it_does_instead_of_the_model() -> None:
    applied, _ = run(Agent(weights(gain={"half": [1.0] * NETWORKS})), Plant(stages()), 1)
    assert applied[0].concurrency["map0"] == 4
    assert applied[0].reasons["map0"] == "half, by what was learnt; the model would say 1"


def test_after_the_beginning_the_model_decides_alone() -> None:
    alone, _ = run(Model(), Plant(stages()), BEGINNING + 8)
    agent, _ = run(Agent(weights(gain={"half": [1.0] * NETWORKS})), Plant(stages()), BEGINNING + 8)
    learned = ["by what was learnt" in "".join(each.reasons.values()) for each in agent]
    assert learned == [True] * BEGINNING + [False] * 8
    assert agent[-1].concurrency == alone[-1].concurrency


@pytest.mark.parametrize(
    ("action", "level"), [("half", 4), ("twice the model's", 2), ("four times the model's", 4), ("open", None)]
)
def test_what_each_action_gives_where_all_is_open_and_the_model_would_begin_with_one(
    action: str, level: int | None
) -> None:
    applied, _ = run(Agent(weights(gain={action: [1.0] * NETWORKS})), Plant(stages()), 1)
    assert applied[0].concurrency["map0"] == level


def test_what_it_looks_at_has_no_scale() -> None:
    """The same pipeline, ten times as slow with ten times as long windows, looks the same."""

    def look(factor: float) -> Seen:
        plant = Plant([PlantStage("source", 0.01 * factor), PlantStage("map", 0.05 * factor, bend=0.02)])
        snapshot = plant(Allocation({"source": None, "map": 3}, 8))
        model = Model()
        proposal = model.propose(snapshot, Budget(8))
        return Senses().look(snapshot, Budget(8), proposal, model)

    one, other = look(1.0), look(1.0)
    assert np.array_equal(one.stages, other.stages)
    assert one.stages.shape == (2, STAGE_FEATURES)
    assert one.whole.shape == (GLOBAL_FEATURES,)
    # Items a window differ, and with them how sure the model is; shares and ratios do not.
    slow = look(4.0)
    assert np.abs(one.stages[:, :6] - slow.stages[:, :6])[:, :4].max() < 0.2


@given(st.integers(1, 12), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_the_order_of_stages_does_not_matter_to_the_networks(count: int, random: object) -> None:
    draw = np.random.default_rng(count)
    options: list[list[int | None]] = [[None] * len(ACTIONS)] * count
    allowed = np.ones((count, len(ACTIONS)), np.bool_)
    numbers = draw.standard_normal((count, STAGE_FEATURES)).astype(np.float32)
    whole = draw.standard_normal(GLOBAL_FEATURES).astype(np.float32)
    order = draw.permutation(count)
    found = gains(weights(1), Seen(numbers, whole, options, allowed))
    again = gains(weights(1), Seen(numbers[order], whole, options, allowed))
    assert found.shape == (NETWORKS, count, len(ACTIONS))
    assert np.allclose(found[:, order], again, atol=1e-4)
    assert (found[..., 0] == 0).all()


def test_actions_that_change_nothing_are_not_taken() -> None:
    """A stage that may only work on one item at once has no choice."""
    single = [PlantStage("source", 0.001, max_concurrency=1), PlantStage("map", 0.01)]
    applied, _ = run(Agent(weights(gain={"twice the model's": [1.0] * NETWORKS, "open": [2.0] * NETWORKS})), Plant(single), 5)
    assert all(each.concurrency["source"] in (None, 1) for each in applied)
    assert all("by what was learnt" not in each.reasons["source"] for each in applied)


class TestFiles:
    def test_weights_come_back(self, tmp_path: Path) -> None:
        made = weights(3)
        save_weights(tmp_path / "a.npz", made, "{}")
        found = load_weights(tmp_path / "a.npz")
        assert found.keys() == made.keys()
        assert all(np.array_equal(found[name], made[name]) for name in made)

    def test_those_of_the_package_are_there(self) -> None:
        assert load_weights()["gain.w"].shape[-1] == len(ACTIONS)

    @pytest.mark.parametrize(
        "spoil", ["missing", "empty", "torn", "text", "version", "layer", "shape", "nan", "pickle"]
    )
    def test_what_cannot_be_used_is_said_and_training_goes_on(self, tmp_path: Path, spoil: str) -> None:
        path = tmp_path / "a.npz"
        made = weights()
        if spoil == "layer":
            del made["mid.w"]
        elif spoil == "shape":
            made["in.w"] = made["in.w"][:, :-1]
        elif spoil == "nan":
            made["gain.b"][0, 0, 0] = np.nan
        save_weights(path, made, "{}")
        if spoil == "missing":
            path.unlink()
        elif spoil == "empty":
            path.write_bytes(b"")
        elif spoil == "torn":
            path.write_bytes(path.read_bytes()[:300])
        elif spoil == "text":
            path.write_text("weights")
        elif spoil == "version":
            np.savez(path, format=np.array("intune agent 0"), **made)
        elif spoil == "pickle":
            np.savez(path, format=np.array("x", dtype=object), **made)
        with pytest.raises(PipelineError, match="npz"):
            load_weights(path)
        with pytest.warns(UserWarning, match="the fitted model decides alone"):
            tuner = Agent(path)
        assert followed(tuner)


class TestState:
    """What was found on one pipeline is for the next run of the same one."""

    names = ("source", "map0", "map1")

    def kept(self, factors: Mapping[str, float], names: Sequence[str] = names) -> Agent:
        tuner = Agent(weights(gain={}))
        tuner.load_state_dict(json.loads(json.dumps({"stages": list(names), "factors": factors})))
        return tuner

    def test_it_comes_back_and_multiplies_what_is_proposed(self) -> None:
        tuner = self.kept({"map1": 2.0})
        applied, _ = run(tuner, Plant(stages()), 1)
        assert applied[0].concurrency == {"source": 1, "map0": 1, "map1": 2}
        assert "2 times as many" in applied[0].reasons["map1"]
        assert tuner.state_dict() == {"stages": list(self.names), "factors": {"map1": 2.0}}

    @pytest.mark.parametrize("names", [("source", "map0"), ("source", "map1", "map0"), (*names, "map2"), ()])
    def test_of_other_stages_or_another_order_it_is_left_out(self, names: tuple[str, ...]) -> None:
        tuner = self.kept({"map1": 2.0}, names)
        with pytest.warns(UserWarning, match="left out"):
            applied, _ = run(tuner, Plant(stages()), 1)
        assert applied[0].concurrency["map1"] == 1
        assert tuner.state_dict() == {"stages": list(self.names), "factors": {}}

    @pytest.mark.parametrize("cpus", [1, 3, 16])
    def test_with_other_cpus_all_that_it_proposes_is_legal(self, cpus: int) -> None:
        applied, _ = run(self.kept({"map0": 8.0, "map1": 0.125}), Plant(stages(), cpus=cpus), 12)
        levels = [each.concurrency[name] for each in applied for name in self.names]
        assert all(level is None or 1 <= level <= cpus for level in levels)

    @pytest.mark.parametrize(
        "state",
        [
            {},
            {"stages": "source", "factors": {}},
            {"stages": [], "factors": []},
            {"stages": ["a"], "factors": {"a": 9.0}},
            {"stages": ["a"], "factors": {"a": math.nan}},
            {"stages": ["a"], "factors": {"a": "2"}},
        ],
    )
    def test_what_no_agent_gave_is_refused(self, state: Mapping[str, object]) -> None:
        with pytest.raises(PipelineError, match=r"state_dict|factors"):
            Agent(weights(gain={})).load_state_dict(state)


class TestTrust:
    def fits(self, detector: Detector, expected: float | None, got: float, windows: int, starved: bool = True) -> bool:
        for _ in range(windows):
            detector.observe(expected, got, starved)
        return detector.fits

    def test_it_stays_where_predictions_are_good(self) -> None:
        assert self.fits(Detector(), 100, 90, 1000)

    def test_it_goes_where_they_are_not_and_comes_back(self) -> None:
        detector = Detector()
        assert self.fits(detector, 100, 20, 5)
        assert not self.fits(detector, 100, 20, 1)
        assert not self.fits(detector, 100, 20, 50)
        assert not self.fits(detector, 100, 100, GOOD_WINDOWS - 1)
        assert self.fits(detector, 100, 100, 1)

    @pytest.mark.parametrize(("expected", "got", "starved"), [(None, 5.0, True), (100.0, 5.0, False), (0.0, 1.0, True)])
    def test_some_windows_say_nothing(self, expected: float | None, got: float, starved: bool) -> None:
        assert self.fits(Detector(), expected, got, 100, starved)

    def test_a_single_window_without_a_batch_costs_no_trust(self) -> None:
        detector = Detector()
        for _ in range(30):
            detector.observe(100, 0.0, True)
            for _ in range(4):
                detector.observe(100, 100, True)
        assert detector.fits

    @pytest.mark.parametrize("fits", [True, False])
    def test_without_trust_the_model_decides_alone_and_it_says_why(self, fits: bool) -> None:
        tuner = Agent(weights(gain={"half": [1.0] * NETWORKS}))
        tuner._detector.fits = fits
        assert followed(tuner, 5) is not fits
        tuner._detector.fits = fits
        applied, _ = run(tuner, Plant(stages()), 1)
        assert ("unlike those" in applied[0].reasons["map0"]) is not fits

    def test_a_pipeline_that_nobody_foresees_loses_it_and_is_experimented_on(self) -> None:
        """Half of what is finished never reaches the training loop, by no fault of any stage."""

        class Losing(Plant):
            def __call__(self, allocation: Allocation):  # type: ignore[no-untyped-def]
                found = super().__call__(allocation)
                lost = replace(found.consumer, rows=found.consumer.rows // 3, wait_share=0.9)
                seen = tuple(replace(stage, rows_out=stage.items_out) for stage in found.stages)
                return replace(found, stages=seen, consumer=lost)

        tuner = Agent(weights(gain={"half": [0.0] * NETWORKS}))
        applied, _ = run(tuner, Losing(stages()), 60)
        assert not tuner._detector.fits
        assert any("what is tried here" in reason for each in applied for reason in each.reasons.values())
