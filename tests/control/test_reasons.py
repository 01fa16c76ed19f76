"""explain() says why a stage has the limit that it has."""

import intune


def test_a_loader_says_why_a_stage_has_a_limit() -> None:
    pipe = intune.from_iterable(range(400)).map(lambda value: value + 1, name="work")
    with pipe.loader(cpus=4, tuner="even") as loader:
        assert sum(1 for _ in loader) == 400
        assert "Stage work: concurrency 2 (4 CPUs over 2 stages);" in loader.explain()
