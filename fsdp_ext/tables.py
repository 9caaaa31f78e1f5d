"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with columns aligned: words to the left, numbers to the right."""
    all_rows = [header, *rows]
    widths = [max(len(row[i]) for row in all_rows) for i in range(len(header))]
    is_number = [
        bool(rows) and all(row[i] == "" or row[i][0] in "+-.0123456789" for row in rows)
        for i in range(len(header))
    ]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in all_rows
    ]
