"""Text tables and sentences of at most WIDTH columns, and sizes and names in them."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence

WIDTH = 120
# A column of words is not made narrower than this to fit.
_NARROWEST = 16


def columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> list[str]:
    """Return the lines of a table. Columns ``left`` are left-aligned, the others right-aligned.

    If the table is wider than WIDTH, headers of right-aligned columns are wrapped, and then cells
    of left-aligned ones, those of the last such column first.
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    numbers = [i for i in range(len(header)) if i not in left]
    narrowest = {i: min(widths[i], _NARROWEST) for i in left}
    for i in numbers:
        words = [*header[i].split(), *(row[i] for row in rows)]
        narrowest[i] = max(map(len, words), default=0)
    for i in [*numbers, *sorted(left, reverse=True)]:
        excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        if excess > 0:
            widths[i] = max(narrowest[i], widths[i] - excess)
    lines = []
    for row in [header, *rows]:
        cells = [
            textwrap.wrap(cell, width, break_on_hyphens=False)
            if i in left or row is header
            else [cell]
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            padded = (
                part.ljust(width) if i in left else part.rjust(width)
                for i, (part, width) in enumerate(zip(parts, widths, strict=True))
            )
            lines.append("  ".join(padded).rstrip())
    return lines


def sentence(text: str, indent: str = "") -> str:
    """Return a text as lines of at most WIDTH columns, each behind ``indent``."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def size(nbytes: int) -> str:
    """Return a number of bytes with three or four digits and a unit."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def row_of_names(first: str, last: str, count: int) -> str:
    """Return the name of a row of neighbouring units."""
    return first if count == 1 else f"{first} to {last} ({count})"
