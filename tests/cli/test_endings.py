"""Errors of the library as the command says them."""

import pytest

pytest.importorskip("typer")

import typer

from intune.cli.endings import as_options, clean_endings

OPTIONS = {"format": "--format", "held_out": "--held-out", "shuffle_rows": "--rows-shuffle", "memory": "--memory"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("say format='tsv' or format='parquet'", "say --format tsv or --format parquet"),
        ("memory=0.5 is much", "--memory 0.5 is much"),
        ("pass memory= or less", "pass --memory or less"),
        ("what may change: format=, memory=", "what may change: --format, --memory"),
        ("with shuffle_rows='7', held_out='0.1' and", "with --rows-shuffle 7, --held-out 0.1 and"),
        ("shuffle_rows must be at least 0, got -1", "--rows-shuffle must be at least 0, got -1"),
        ("raise held_out", "raise --held-out"),
        ("memory: '1x' is no size", "--memory: '1x' is no size"),
        ("cannot tell the format of x", "cannot tell the format of x"),
        ("no file 'held_out' or \"held_out\"", "no file 'held_out' or \"held_out\""),
        ("/data/format=tsv/held_out/a", "/data/format=tsv/held_out/a"),
        ("held_out_rows and my_held_out stay", "held_out_rows and my_held_out stay"),
    ],
)
def test_arguments_become_options(text: str, said: str) -> None:
    assert as_options(text, OPTIONS) == said
    assert as_options(text, {}) == text


def test_ctrl_c_is_one_line_with_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    for notes, said in (
        ((), "interrupted"),
        (("after 5 rows", "to go on: x"), "interrupted after 5 rows; to go on: x"),
    ):
        stop = KeyboardInterrupt()
        for note in notes:
            stop.add_note(note)
        with pytest.raises(typer.Exit) as ended, clean_endings():
            raise stop
        assert ended.value.exit_code == 130
        assert capsys.readouterr() == ("", f"{said}\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError(30, "Read-only file system", "/a/b"), "/a/b: Read-only file system"),
        (FileNotFoundError("no such thing"), "no such thing"),
    ],
)
def test_what_the_system_refuses_is_one_line(error: OSError, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, clean_endings():
        raise error
    assert ended.value.exit_code == 2
    assert capsys.readouterr() == ("", f"error: {said}\n")


def test_the_end_of_a_pipe_is_left_to_who_called() -> None:
    with pytest.raises(BrokenPipeError), clean_endings():
        raise BrokenPipeError(32, "Broken pipe")
