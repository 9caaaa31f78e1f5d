"""What a run leaves: tables, JSON with what the figures depend on, and pictures.

A file is written whole or not at all, and whether it can be is asked before anything is measured.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp_ext._util.files import write_whole
from fsdp_ext._util.tables import columns

ROOT = Path(__file__).resolve().parents[2]
PICTURES = (".png", ".pdf", ".svg")


def environment(device: str) -> dict[str, str]:
    """Return what a figure depends on besides the code.

    Args:
        device: "cpu" or "cuda": where the run computes.
    """
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "commit": commit(),
    }


def describe(device: str) -> str:
    """Return the environment as the line that comes before the tables."""
    known = environment(device)
    threads = "1 thread" if known["threads"] == "1" else f"{known['threads']} threads"
    return (
        f"torch {known['torch']}, Python {known['python']}, device {known['device']}, "
        f"{known['cpu']} ({known['machine']}), {known['cores']} cores, {threads}, "
        f"commit {known['commit']}"
    )


def cpu_model() -> str:
    """Return what the CPU calls itself."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"


def commit() -> str:
    """Return the commit, marked if files differ from it; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
        )
        return found.stdout.strip()
    return os.environ.get("COMMIT", "unknown")


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], words_last: bool = False
) -> None:
    """Print rows under a header, columns aligned: to the right but for the first.

    Args:
        header: the columns' names.
        rows: as many cells each.
        words_last: the last column is words and not figures, and aligned to the left, too.
    """
    left = (0, len(header) - 1) if words_last else (0,)
    print(*columns(header, rows, left), sep="\n")


def drop_stdout() -> None:
    """Let what could not be printed go: Python would try again at its end, and say so."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def fault_of_target(path: str) -> str | None:
    """Return why `path` cannot be written, or None if it looks as if it could."""
    target = Path(path)
    if target.is_dir():
        return f"expects a file but {path} is a directory; name a file in it"
    directory = target.absolute().parent
    if not directory.is_dir():
        return f"expects a directory that exists but there is no {directory}; make it first"
    # A file is replaced, which is a matter of its directory; a device or a pipe is written to.
    needed = target if _is_special(target) else directory
    if not os.access(needed, os.W_OK):
        return f"expects to write to {needed} but may not; name another place"
    return None


def fault_of_picture(path: str) -> str | None:
    """Return why no picture can be drawn into `path`, or None; matplotlib is asked for."""
    if Path(path).suffix not in PICTURES:
        return f"expects a name that ends in one of {', '.join(PICTURES)} but got {path!r}"
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"expects matplotlib but it cannot be imported ({error}); pip install matplotlib"
    return fault_of_target(path)


def _is_special(target: Path) -> bool:
    return target.exists() and not target.is_file()


def write_json(
    path: str, name: str, rows: Sequence[Mapping[str, Any]], device: str, **more: object
) -> None:
    """Write a benchmark's rows with its environment, whole or not at all.

    Args:
        path: where to.
        name: what the benchmark is called there.
        rows: dicts that JSON can express.
        device: "cpu" or "cuda": where it computed.
        more: further fields of the document.

    Raises:
        OSError: as `fsdp_ext.files.write_whole`.
    """
    document = {"benchmark": name, "environment": environment(device), **more, "rows": list(rows)}
    write_whole(path, (json.dumps(document, indent=2) + "\n").encode())


@contextlib.contextmanager
def picture(path: str, title: str, columns: int = 1, height: float = 4.8) -> Iterator[Any]:
    """Draw into `path`: yields matplotlib's axes, an array of them if there are several.

    Args:
        path: its suffix says the format, one of `PICTURES`.
        title: of the whole.
        columns: how many axes stand side by side.
        height: of the picture, in inches; a column is 6.4 wide.

    Raises:
        OSError: as `fsdp_ext.files.write_whole`.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    from matplotlib import pyplot

    size = (6.4 * columns, height)
    figure, axes = pyplot.subplots(1, columns, figsize=size, layout="constrained")
    try:
        figure.suptitle(title)
        yield axes
        content = io.BytesIO()
        kind = Path(path).suffix[1:]
        # Words of an SVG stay words, and the same rows the same file.
        metadata = {"Date": None} if kind == "svg" else None
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fsdp_ext"}):
            figure.savefig(content, format=kind, dpi=150, metadata=metadata)
    finally:
        pyplot.close(figure)
    write_whole(path, content.getvalue())


def bars(
    axes: Any,
    labels: Sequence[str],
    values: Sequence[float],
    unit: str,
    groups: Sequence[str] | None = None,
) -> None:
    """Draw horizontal bars, the first on top, with their values.

    Args:
        axes: matplotlib's.
        labels: one a bar.
        values: as many, in `unit`.
        unit: what the axis is called, too.
        groups: one a bar; those of a group have one colour. By default each has its own.
    """
    order = list(dict.fromkeys(labels if groups is None else groups))
    colours = [f"C{order.index(group)}" for group in (labels if groups is None else groups)]
    drawn = axes.barh(labels, values, color=colours)
    axes.bar_label(drawn, fmt="%.3g", padding=3)
    axes.set_xlabel(unit)
    axes.set_xlim(right=max(values) * 1.15)
    axes.invert_yaxis()
