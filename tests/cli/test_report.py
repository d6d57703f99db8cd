"""Tables as wide as the window."""

import pytest
from rich.cells import cell_len

from vbcaps.cli.report import Table, table


def example() -> Table:
    made = table("name", "what it is about", numbers=("size", "error"))
    made.add_row("smallnorb", "stereo pairs of fifty toys, in colours that nobody has seen", "48", "1.6 ± 0.06")
    made.add_row("日本語の名前", "", "1,024", "12.00")
    return made


@pytest.mark.parametrize("width", [120, 80, 60, 50, 40, 30])
def test_every_word_is_whole_and_in_the_window(width):
    made = example()
    lines = made.lines(width)
    assert max(map(cell_len, lines)) <= width
    shown = " ".join(lines).split()
    for row in made.rows:
        for word in " ".join(row).split():
            assert word in shown


def test_numbers_stand_flush_right_below_their_heading():
    heading, first, *rest = example().lines(120)
    end = cell_len(heading)
    assert heading.endswith("error")
    assert [cell_len(first), cell_len(rest[-1])] == [end, end]


def test_texts_are_wrapped_before_rows_become_blocks():
    lines = example().lines(60)
    assert lines[0].split() == ["name", "what", "it", "is", "about", "size", "error"]
    assert len(lines) == 5  # the long text takes three
    assert example().lines(40) == [
        "smallnorb",
        "  what it is about stereo pairs of fifty",
        "  toys, in colours that nobody has seen",
        "  size 48  error 1.6 ± 0.06",
        "日本語の名前",
        "  size 1,024  error 12.00",
    ]


def test_a_column_that_can_be_spared_goes_first():
    made = table("recipe", "routing", numbers=("parameters", "paper"), spare=["parameters"])
    made.add_row("smallnorb", "dynamic", "169,802", "1.6")
    assert made.lines(None)[0].split() == ["recipe", "routing", "parameters", "paper"]
    assert made.lines(37) == made.lines(None)
    assert made.lines(30) == ["recipe     routing  paper", "smallnorb  dynamic    1.6"]
    assert made.lines(20) == ["smallnorb", "  routing dynamic", "  parameters 169,802", "  paper 1.6"]


def test_a_word_longer_than_the_window_stays_whole():
    made = table("image", "class")
    made.add_row("photos/of/somebody/else/1.png", "Staffordshire-bull-terrier and more")
    assert made.lines(20) == ["photos/of/somebody/else/1.png", "  class", "  Staffordshire-bull-terrier", "  and more"]
