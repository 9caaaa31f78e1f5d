"""Text tables, and sizes and names in them."""

from __future__ import annotations

from collections.abc import Sequence


def columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> list[str]:
    """Return the lines of a table. Columns ``left`` are left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, *rows]
    ]


def size(nbytes: int) -> str:
    """Return a number of bytes with three or four digits and a unit."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def row_of_names(first: str, last: str, count: int) -> str:
    """Return how units that lie behind each other are called."""
    return first if count == 1 else f"{first} to {last} ({count})"
