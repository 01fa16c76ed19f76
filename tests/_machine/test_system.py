"""Figures in the small text files of the system."""

import pytest

from intune._machine.system import numbers, picked

STATUS = "Name:\tRssAnon: 5 kB\nRssAnon:\t  120 kB\nRssShmem:\t7 kB\nRssAnonymous: 9 kB\nVmSize: unlimited\nanon 11\n"


@pytest.mark.parametrize("names", [("RssAnon",), ("RssShmem", "RssAnon"), ("anon", "VmSize"), ("nothing",), ()])
def test_picked_lines_are_those_of_all(names: tuple[str, ...]) -> None:
    every = numbers(STATUS)
    assert picked(STATUS, *names) == {name: every[name] for name in names if name in every}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a 1\n", {"a": 1}),
        ("a: 12 kB", {"a": 12}),
        ("a 12x\n", {}),
        ("a -1\n", {}),
        ("a\n12\n", {}),
        (" a 1\n", {}),
        ("ba 1\na.c 2\n", {}),
        ("", {}),
        (None, {}),
    ],
)
def test_only_whole_lines_with_a_number_count(text: str | None, found: dict[str, int]) -> None:
    assert picked(text, "a") == found


def test_names_are_taken_as_they_stand() -> None:
    assert picked("a.c 1\nabc 2\n", "a.c") == {"a.c": 1}
