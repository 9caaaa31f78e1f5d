"""A trace that torch.profiler has written, beside which a profile's trace is shown."""

# Note [one time axis]
# The ledger's times are those of time.monotonic(). PyTorch writes times of the wall clock, as
# microseconds since "baseTimeNanoseconds". The two clocks are compared when the profile ends.

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from fsdp_ext.profiler.result import Recording


def read_torch_trace(path: Path, recording: Recording) -> dict[str, Any]:
    """Read a trace of torch.profiler that was recorded while ``recording`` was.

    Returns:
        The trace, in Chrome's trace event format.

    Raises:
        OSError: if ``path`` cannot be read.
        ValueError: if it is no such trace, or was recorded at another time.
    """
    document = _read(path)
    start = start_of(document, recording)
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    begin, end = recording.iterations[0].begin, recording.iterations[-1].end
    if not any(begin < start + event["ts"] / 1e6 < end for event in events):
        raise ValueError(
            f"{path} has no event of the steps that this profile recorded. Let torch.profiler and "
            "fsdp_ext.profile record the same steps, in one process."
        )
    return document


def start_of(document: dict[str, Any], recording: Recording) -> float:
    """Return the time of 0 microseconds of its events, in seconds of ``time.monotonic()``."""
    seconds: float = (document["baseTimeNanoseconds"] - recording.wall_clock) / 1e9
    return seconds


def _read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    try:
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        document: Any = json.loads(data)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(_refusal(path, f"it is no JSON ({error})")) from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ValueError(_refusal(path, "it has no traceEvents"))
    if not isinstance(document.get("baseTimeNanoseconds"), int):
        raise ValueError(_refusal(path, "it has no baseTimeNanoseconds"))
    return document


def _refusal(path: Path, why: str) -> str:
    return (
        f"{path} is not a trace of torch.profiler: {why}. Pass a file that export_chrome_trace of "
        "the torch.profiler.profile has written."
    )
