"""Tables and sentences fit the width of a terminal."""

from __future__ import annotations

import pytest

from fsdp_ext._util.tables import WIDTH, columns, sentence


@pytest.mark.parametrize("words", [3, 60])
def test_a_tables_words_go_on_in_further_lines(words: int) -> None:
    rows = [("layers.0 to layers.15 (16)", "0.25", " ".join(["late"] * words)), ("b", "1", "")]
    lines = columns(("units", "ms", "because"), rows, left=(0, 2))
    assert all(len(line) <= WIDTH for line in lines)
    assert "\n".join(lines).count("late") == words
    assert lines[0].startswith("units")
    assert lines[-1].split() == ["b", "1"]
    assert len(lines) == (3 if words == 3 else 6)


def test_names_go_on_in_further_lines_if_numbers_leave_no_room() -> None:
    rows = [("a name of words " * 4, *["1,000,000"] * 8)]
    lines = columns(("units", *["bytes"] * 8), rows)
    assert all(len(line) <= WIDTH for line in lines)
    assert len(lines) > 2
    assert "".join(lines).count("1,000,000") == 8


def test_long_headers_of_numbers_are_wrapped() -> None:
    lines = columns(("", *["simulated exposed ms"] * 9), [("one", *["0.25"] * 9)])
    assert all(len(line) <= WIDTH for line in lines)
    *header, row = lines
    assert " ".join(header).split().count("exposed") == 9
    assert row.split() == ["one", *["0.25"] * 9]


def test_a_sentence_is_broken_between_words() -> None:
    text = "measured-link costs " * 20
    lines = sentence(text, indent="    ").splitlines()
    assert len(lines) > 1
    assert all(line.startswith("    ") and len(line) <= WIDTH for line in lines)
    assert " ".join(line.strip() for line in lines) == text.strip()
