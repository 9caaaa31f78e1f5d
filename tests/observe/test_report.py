"""A profile prints, writes and draws what it has recorded."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch.distributed as dist
from support.launcher import run_ranks
from support.profiling import LAYERS, UNIT, check_sums, make, profiled

from fsdp_ext import Link, Simulated
from fsdp_ext.profiler.recording import Iteration


def _rows_of_units() -> None:
    warnings.simplefilter("ignore")
    prof = profiled(make(compute=0.0, bucket_bytes=3 * UNIT))
    check_sums(prof)
    buckets, units = prof.rows(), prof.rows(by="unit")
    assert [row.units for row in buckets if row.operation == "reduce"] == ["0 to 2", "3 to 5"]
    reduced = [row for row in units if row.operation == "reduce"]
    assert [row.units for row in reduced] == [str(number) for number in range(LAYERS)]
    # Each of three equal units has a third of their collective.
    assert all(row.nbytes == pytest.approx(UNIT) for row in reduced)
    of_first = [row.wire for row in reduced[:3]]
    assert of_first == pytest.approx([of_first[0]] * 3)
    with pytest.raises(ValueError, match="got rows by 'layer'"):
        prof.report(by="layer")
    prof.report(by="unit")
    document = json.loads(prof.to_json())
    assert len(document["rows"]) == len(buckets)
    assert len(document["rows_by_unit"]) == len(units)


def test_a_buckets_figures_are_shared_out_among_its_units() -> None:
    run_ranks(_rows_of_units, 2)


def _printed() -> tuple[str, str, str]:
    warnings.simplefilter("ignore")
    prof = profiled(make(compute=0.0))
    printed, chosen = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        text = prof.report()
    assert prof.report(chosen, by="unit") == chosen.getvalue().removesuffix("\n")
    return text, printed.getvalue(), chosen.getvalue()


def test_rank_0_prints_the_report_and_every_rank_returns_its_own() -> None:
    (text, printed, _), (other, nothing, chosen) = run_ranks(_printed, 2)
    assert printed == text + "\n"
    assert nothing == ""
    assert "rank 1" in other
    assert "rank 1" in chosen


def _check_picture(svg: str, step: Iteration) -> None:
    """Check that a step's picture shows all of it, and that its bars have names."""
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", svg)
    assert "other" in texts or step.other < step.step / 10  # a short bar has no room for its name
    assert {str(number) for number in range(LAYERS)} <= set(texts)
    axis = svg.partition('id="matplotlib.axis_1"')[2].partition('id="matplotlib.axis_2"')[0]
    ticks = [
        (float(x), float(text))
        for x, text in re.findall(
            r'<use [^>]*x="([\d.]+)".*?<text [^>]*>([\d.]+)</text>', axis, re.S
        )
    ]
    (first, zero), (last, end) = ticks[0], ticks[-1]
    right = max(
        float(x) for x in re.findall(r"[ML] ([\d.]+) [\d.]+", svg.partition('id="axes_1"')[2])
    )
    shown = zero + (end - zero) * (right - first) / (last - first)
    assert shown == pytest.approx(step.step * 1e3, rel=0.02)


def _outputs(directory: Path) -> None:
    dist.destroy_process_group()
    warnings.simplefilter("ignore")
    prof = profiled(make(Simulated(8, Link("fast", 1e-3, 1e12)), compute=0.001))
    prof.save_trace(directory / "step.json")
    prof.plot(directory / "step.png")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # texts stay texts
        prof.plot(directory / "step.svg", iteration=0)
    _check_picture((directory / "step.svg").read_text(), prof.iterations[0])
    prof.to_json(directory / "prof.json")
    with pytest.raises(ValueError, match="got iteration=9, but 4 steps were"):
        prof.plot(directory / "step.png", iteration=9)
    with pytest.MonkeyPatch.context() as context:
        context.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"plot needs matplotlib, .*pip install matplotlib"):
            prof.plot(directory / "step.png")
    with pytest.raises(OSError, match=r"nowhere/a.json cannot be written"):
        prof.save_trace(directory / "nowhere" / "a.json")
    with pytest.raises(OSError, match="No space left"):
        prof.to_json("/dev/full")
    with pytest.raises(RuntimeError, match="merge needs the other ranks"):
        prof.merge()
    document = json.loads((directory / "prof.json").read_text())
    assert document == json.loads(prof.to_json())
    assert document["summary"]["iterations"] == 4
    assert "over a simulated link" in str(prof)


def rows_of(trace: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for row in {event["tid"] for event in events}:
        yield sorted(
            (event for event in events if event["tid"] == row), key=lambda e: (e["ts"], -e["dur"])
        )


def test_a_trace_and_pictures_are_written(tmp_path: Path) -> None:
    run_ranks(_outputs, 1, tmp_path)
    trace = json.loads((tmp_path / "step.json").read_text())
    named = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"compute", "gather", "reduce"} <= named
    assert {"forward 3", "backward 3", "gather 3", "reduce 3"} <= {
        event["name"] for event in trace["traceEvents"]
    }
    for row in rows_of(trace):  # viewers expect spans of a row to follow, or enclose, each other
        open_until: list[float] = []
        for event in row:
            while open_until and open_until[-1] <= event["ts"] + 0.002:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1] + 0.002, event
            open_until.append(event["ts"] + event["dur"])
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "step.svg").read_bytes()
    assert not list(tmp_path.glob("*.partial"))
