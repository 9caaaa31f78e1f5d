"""Calls that raise or warn, and their messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest

# The class of the error or warning, a pattern of its message, and the call.
Row = tuple[type[Exception], str, Callable[[], object]]


def check_message(kind: type[Exception], pattern: str, call: Callable[[], object]) -> Exception:
    """Check that a call raises an error, or gives a warning, whose message matches.

    Args:
        kind: the class of the error or warning.
        pattern: a regular expression that is searched for in the message.
        call: the call.

    Returns:
        The error or warning.
    """
    if issubclass(kind, Warning):
        with pytest.warns(kind) as warned:
            call()
        found = [warning.message for warning in warned]
    else:
        with pytest.raises(kind) as caught:
            call()
        found = [caught.value]
    matching = [each for each in found if re.search(pattern, str(each))]
    assert matching, (pattern, [str(each) for each in found])
    error = matching[0]
    assert isinstance(error, Exception)
    return error


def check_messages(rows: Iterable[Row]) -> None:
    """Check the call of each row, one after the other, by `check_message`."""
    for row in rows:
        check_message(*row)
