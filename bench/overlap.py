"""How much communication is hidden behind compute, over a simulated link or between two hosts?

**On two hosts** (--hosts 2, --rate 4gbit): namespaces of this machine, which a virtual cable of
that rate connects. It needs root. A transformer trains on one rank of each host, each bound to a
core, with real messages. The batch is chosen so that the unsharded step computes `ratio` times as
long as the wire takes. A step is forward and backward. Systems take turns, and the slowest rank of
each step counts:

  wire      = the bytes that a rank has to send in a step / the rate (if it is unlimited: / the rate
              of plain messages, which is measured first)
  exposed   = the step - the unsharded step of the same turn; in brackets, by fsdp_ext.profile
  hidden    = 1 - exposed / wire (median, and quartiles)
  at most   = min(compute / wire, 1 - the processor time of plain messages of as many bytes / wire),
              since a core that handles messages does not compute
  CPU ms    = CPU time of all threads - that of the unsharded step. The kernel's work for messages
              counts only as far as it runs in a thread of the rank.
  sent MB   = what the interface has counted; of least = divided by the bytes that a rank has to
              send. It counts the headers of TCP, too.
  because   = the largest causes of the exposed time, by the ledger of rank 0

**Over a simulated link**, in one process, a stack of linear layers, each a unit, trains steps
(forward and backward) of real matrix products. "compute" is the step over a link that takes no
time. "wire" is the time that all collectives of a step take by the link's figures. The simulated
step runs over a link whose bandwidth makes our compute `ratio` times as long as the wire. All
systems and settings of one ratio have the same link. Steps with and without the wire take turns,
and each step with the wire is compared with the two steps around it:

  exposed   = the difference; hidden = 1 - exposed / wire (median, and quartiles)
  by ledger = the same by fsdp_ext.profile of the same steps, which counts waits as exposed. It
              includes wake-ups of threads, which a step without a wire has, too.
  at most   = the most that the schedule could hide (planner.schedule.predict) if only the wire
              took time; the first gather and the last reduction are exposed. In the sweep "ahead",
              steps end with a gap, as of a loader, and prefetch_next_forward() may hide the gather
  on one link at most = min(1, compute / wire), if all collectives shared one link
  of ideal  = hidden / at most
  slowdown  = compute beside the wire / compute without it, both without waits
  because   = the largest causes of the exposed time, by the ledger

"wires" counts the links of a system, each of the full bandwidth. Ours has two, for gathers and for
reductions, as fsdp_ext's Simulated has. Both are busy at the same time in backward, so ours can
hide more than min(1, ratio). This is not possible if both go through the same NIC, as `python -m
bench scaling` assumes. FSDP2 and FSDP1 have one link by default, and FSDP2 has two with a separate
group for reductions.

FSDP2's best settings are that group, explicit prefetch with asynchronous unshards, and two
reductions in flight, as far as this torch has them. A CPU has no streams. So FSDP1, and FSDP2 with
its defaults, wait on the host for each collective and hide almost nothing, and FSDP2 with its best
settings still waits for each reduction. "modelled waits" replaces those waits by a model of streams
(bench/models/simulated_group.py). PyTorch's steps compute longer, so their compute / wire is larger
over the same link. A ratio is "not possible here" if latencies alone take longer than the wire
should.

Compute is real, and all times with a wire in them are simulated. On a machine with other load,
threads wake up late. The ledger calls this "issued late" or "a rank came late", and a star marks
rows whose collectives took longer than the link says.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.harness import ranks
from bench.harness.options import UsageError, positive, positive_number
from bench.harness.output import picture, print_table
from bench.harness.runner import Keep, Row
from bench.models import overlap_hosts
from bench.models.overlap_rows import link_for, row_of, settings_of
from bench.models.overlap_systems import (
    FSDP1,
    FSDP2,
    FSDP2_PREFETCH,
    NO_BUCKETS,
    OURS,
    PEERS,
    Case,
    Shape,
)
from fsdp_ext import Link

TITLE = "overlap (simulated)"
HOSTS = 2
SWEEPS = ("ratio", "system", "prefetch", "ahead", "bucket", "world_size")
RATIOS = [4.0, 2.0, 1.0, 0.5, 0.25]
RATIOS_OF_SYSTEMS = [2.0, 1.0, 0.5]
RATIOS_OF_WORLD_SIZES = [2.0, 1.0]
WORLD_SIZES = [8, 64, 512, 1024]
DEPTHS = [0, 1, 2, 3]
QUICK_RATIO = 2.0
GAP = 5e-3  # seconds between steps, several messages long
# A wire is marked as disturbed if it takes longer than the link says by more than a part of its
# time, plus microseconds for each collective, which a thread needs on a quiet machine, too.
LATE, WAKE_UP = 0.05, 10.0
UNITS_OF_BUCKETS = [0.5, 2, 4, 16]  # sizes of buckets in units, besides the default and 0

HIDDEN = "simulated wire hidden"
RATIO = "compute_over_simulated_wire"
ONE_LINK = "simulated_hidden_at_most_on_one_link"
LINKS = f"{OURS} has a link for gathers and one for reductions, each of the full bandwidth"
# A CPU has no streams, so these systems wait on the host and cannot hide what they wait for.
WAITS = {
    FSDP2: "waits on the host",
    FSDP2_PREFETCH: "waits on the host for reductions",
    FSDP1: "waits on the host",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the simulation."""
    parser.add_argument(
        "--ratio",
        type=positive_number,
        metavar="X",
        help="compute time / wire time; default: a sweep, and 1 for buckets",
    )
    parser.add_argument(
        "--world-size", type=positive, metavar="N", help="simulated ranks; default: 64, and a sweep"
    )
    parser.add_argument(
        "--sweep", choices=SWEEPS, action="append", help="run only this sweep; may be repeated"
    )


def shapes(on_gpu: bool) -> tuple[Shape, Shape]:
    """Return the shape of the model, and a shape whose small units are better sent in buckets."""
    if on_gpu:
        return Shape(32, 8192, 4096), Shape(128, 1024, 4096)
    return Shape(32, 1024, 64), Shape(128, 128, 64)


def sweeps(args: argparse.Namespace) -> dict[str, list[Case]]:
    """Return the cases of each sweep to run; cases with the same link follow each other."""
    large, small = shapes(args.device == "cuda")
    unit = small.dim**2 * (2 if args.device == "cuda" else 4)
    start = Case(OURS, large, args.world_size or 64, args.ratio or 1.0)
    buckets = [NO_BUCKETS, *(round(units * unit) for units in UNITS_OF_BUCKETS), None]

    def ratios(default: list[float]) -> list[float]:
        return [args.ratio] if args.ratio else [QUICK_RATIO] if args.quick else default

    peers = (FSDP2,) if args.quick else PEERS
    sizes = [args.world_size] if args.world_size else WORLD_SIZES
    every = {
        "ratio": [replace(start, ratio=ratio) for ratio in ratios(RATIOS)],
        "system": [
            replace(start, ratio=ratio, system=system)
            for ratio in ratios(RATIOS_OF_SYSTEMS)
            for system in (OURS, *peers)
        ],
        "prefetch": [replace(start, prefetch=depth) for depth in DEPTHS],
        "ahead": [
            replace(start, ratio=args.ratio or QUICK_RATIO, gap=GAP, ahead=ahead)
            for ahead in (False, True)
        ],
        "bucket": [
            replace(start, shape=small, ratio=1.0, bucket_bytes=nbytes) for nbytes in buckets
        ],
        "world_size": [
            replace(start, ratio=ratio, world_size=size)
            for ratio in ratios(RATIOS_OF_WORLD_SIZES)
            for size in sizes
        ],
    }
    asked = args.sweep or (["system"] if args.quick else SWEEPS)
    return {name: every[name] for name in SWEEPS if name in asked}


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Measure each case of each sweep, or the systems on two hosts."""
    if args.hosts > 1:
        if args.sweep or args.world_size:
            raise UsageError("--sweep and --world-size are for simulated links; leave them out")
        ranks.join(args.device)
        overlap_hosts.measure(args, keep)
        return
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    warnings.filterwarnings("ignore", message="fsdp_ext: .*simulated")  # the tables say it
    for name, cases in sweeps(args).items():
        repeats = 6 if args.quick else 16
        repeats *= 4 if name == "bucket" else 1  # its steps are short
        links: dict[tuple[Shape, int, float], Link] = {}
        for case in cases:
            key = (case.shape, case.world_size, case.ratio)
            try:
                if key not in links:
                    links[key] = link_for(case, repeats, device)
            except UsageError as error:  # no link has this ratio; others may still be possible
                text = f"not possible here: {error}"
                keep({"sweep": name, **settings_of(case), "error": text})
                continue
            keep({"sweep": name, **row_of(case, links[key], repeats, device)})


# - What was measured


def show(rows: list[Row]) -> None:
    """Print a table a sweep, or a table a rate."""
    if "rate" in rows[0]:
        overlap_hosts.show(rows)
        return
    for name in SWEEPS:
        of_sweep = [row for row in rows if row["sweep"] == name]
        if of_sweep:
            show_sweep(name, of_sweep)
            print()
    print("the compute is real; all times with a wire in them are simulated")
    if any(disturbed(row) for row in rows):
        print(
            f"*  collectives took over {LATE:.0%} and {WAKE_UP:.0f} us longer than the simulated "
            "link says: threads woke up late, probably because of other load on the machine"
        )


def show_sweep(name: str, rows: list[Row]) -> None:
    """Print one table."""
    first = rows[0]
    sizes = sorted({row["simulated_ranks"] for row in rows})
    ranks = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    print(f"{name}: {first['layers']} layers of {first['dim']}, {ranks} simulated ranks; {LINKS}")
    header = [name, "wires", "compute / simulated wire", "compute ms", "simulated wire ms"]
    header += ["simulated step ms", "simulated exposed ms (by ledger)", "simulated hidden"]
    header += ["quartiles (by ledger)", "at most", "on one link at most", "of ideal"]
    header += ["simulated slowdown", "because, or error"]
    print_table(header, [cells(name, row) for row in rows], words_last=True)


def disturbed(row: Row) -> bool:
    """Return whether the lanes' threads were so late that the figures say little of the wire."""
    if "ledger_simulated_wire_us" not in row:
        return False
    wire: float = row["simulated_wire_us"]
    late: float = row["ledger_simulated_wire_us"] - wire
    return late > LATE * wire + WAKE_UP * row["collectives"]


def label(name: str, row: Row) -> str:
    """Return the label of a row within its sweep."""
    if name == "bucket" and "error" in row:
        return "any bucket"
    if name == "bucket":
        return f"{name_of(row)}: {row['buckets']} buckets"
    if name == "prefetch":
        return str(row["prefetch"])
    if name == "ahead":
        return "gathered ahead" if row["ahead"] else "gathered in forward"
    ratio = f"ratio {row['ratio']:g}"
    return {
        "ratio": ratio,
        "system": f"{ratio}, {row['system']}",
        "world_size": f"{ratio}, {row['simulated_ranks']} ranks",
    }[name]


def cells(name: str, row: Row) -> list[str]:
    """Return the cells of a row."""
    if "error" in row:
        return [label(name, row), *[""] * 12, row["error"][:120]]
    ledger = "ledger_simulated_hidden" in row
    exposed = milliseconds(row["simulated_exposed_us"]["median"])
    quartiles = f"{row['simulated_hidden_low']:.1%} to {row['simulated_hidden_high']:.1%}"
    if ledger:
        exposed += f" ({milliseconds(row['ledger_simulated_exposed_us'])})"
        quartiles += f" ({row['ledger_simulated_hidden']:.1%})"
    of_ideal = row["simulated_of_ideal"]
    return [
        f"{label(name, row)}{' *' if disturbed(row) else ''}",
        str(row["wires"]),
        f"{row['compute_over_simulated_wire']:.2f}",
        milliseconds(row["compute_us"]["median"]),
        milliseconds(row["simulated_wire_us"]),
        milliseconds(row["simulated_step_us"]["median"]),
        exposed,
        f"{row['simulated_hidden']:.1%}",
        quartiles,
        f"{row['simulated_hidden_at_most']:.1%}",
        f"{row['simulated_hidden_at_most_on_one_link']:.1%}",
        "" if of_ideal is None else f"{of_ideal:.1%}",
        f"{row['ledger_simulated_slowdown']:.2f}" if ledger else "",
        because(row["ledger_simulated_causes_us"]) if ledger else "",
    ]


def because(causes: dict[str, float]) -> str:
    """Return the largest causes of exposed time, with their milliseconds."""
    largest = sorted(causes.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {milliseconds(value)}" for name, value in largest)


def milliseconds(microseconds: float) -> str:
    """Return microseconds as milliseconds for the tables."""
    return f"{microseconds / 1e3:.1f}"


# - The picture


def plot(rows: list[Row], path: str) -> None:
    """Draw three panels: over the ratio, over the number of ranks, over prefetch and buckets.

    For two hosts, draw a panel for each rate.

    Raises:
        OSError: if the file cannot be written.
    """
    if "rate" in rows[0]:
        overlap_hosts.plot(rows, path)
        return
    ran = [row for row in rows if "error" not in row]
    title = f"How much of a simulated wire is hidden; {LINKS}"
    with picture(path, title, columns=3, height=7.2) as panels:
        ratio, ranks, settings = panels
        draw_ratios(ratio, [row for row in ran if row["sweep"] in ("ratio", "system")])
        draw_ranks(ranks, of_sweep(ran, "world_size"))
        draw_settings(settings, ran)
        for axes in panels:
            axes.set_ylabel(HIDDEN)
            axes.set_ylim(top=max([1.05, *(row["simulated_hidden"] + 0.02 for row in ran)]))
            if axes is settings and axes.has_data():
                axes.legend(fontsize="small", loc="lower right")
            elif axes.has_data():  # below the panel, since lines fill it
                axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.13))
            else:
                axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)


def draw_line(
    axes: Any, rows: Sequence[Row], x: Callable[[Row], float], label: str, **style: Any
) -> None:
    """Draw the hidden part with its quartiles."""
    ordered = sorted(rows, key=x)
    hidden = [row["simulated_hidden"] for row in ordered]
    # Rounding may put the median outside the quartiles by the last digit.
    below = [max(0.0, row["simulated_hidden"] - row["simulated_hidden_low"]) for row in ordered]
    above = [max(0.0, row["simulated_hidden_high"] - row["simulated_hidden"]) for row in ordered]
    places = [x(row) for row in ordered]
    axes.errorbar(places, hidden, [below, above], capsize=3, label=label, **style)


def draw_ideal(
    axes: Any, rows: Sequence[Row], x: Callable[[Row], float], label: str, **style: Any
) -> None:
    """Draw the most that could be hidden."""
    ordered = sorted(rows, key=x)
    most = [row["simulated_hidden_at_most"] for row in ordered]
    axes.plot([x(row) for row in ordered], most, linestyle="--", label=label, **style)


def draw_one_link(
    axes: Any, rows: Sequence[Row], x: Callable[[Row], float], label: str, **style: Any
) -> None:
    """Draw the most that a link shared by gathers and reductions could hide."""
    ordered = sorted(rows, key=x)
    most = [row[ONE_LINK] for row in ordered]
    axes.plot([x(row) for row in ordered], most, linestyle=":", label=label, **style)


def draw_ratios(axes: Any, rows: Sequence[Row]) -> None:
    """Draw each system over compute / wire, with the most that two wires and one could hide."""
    axes.set(title="systems", xlabel="compute / simulated wire")
    axes.set_xscale("log", base=2)
    if not rows:
        return

    def ratio(row: Row) -> float:
        return float(row[RATIO])

    for wires, color in ((2, "black"), (1, "grey")):
        of_wires = [row for row in rows if row["wires"] == wires]
        if of_wires:
            text = f"schedule at most, {wires} link{'s' if wires > 1 else ''}"
            draw_ideal(axes, of_wires, ratio, text, color=color)
    draw_one_link(axes, rows, ratio, "one shared link at most: min(1, ratio)", color="red")
    systems = dict.fromkeys(row["system"] for row in rows)
    for number, system in enumerate(systems):
        swept = {"system": system, "sweep": "ratio"}
        of_ratios = [row for row in rows if swept.items() <= row.items()]
        of_system = of_ratios or [row for row in rows if row["system"] == system]
        label = legend_of(system, of_system[0]["wires"])
        draw_line(axes, of_system, ratio, label, marker="o", color=f"C{number}")


def legend_of(system: str, wires: int) -> str:
    """Return a system's entry in the legend: its links, and whether it waits on the host."""
    said = [f"{wires} link{'s' if wires > 1 else ''}", WAITS.get(system, "")]
    return f"{system}: {', '.join(filter(None, said))}"


def draw_ranks(axes: Any, rows: Sequence[Row]) -> None:
    """Draw ours over the number of ranks, with a line for each ratio."""
    axes.set(title=f"{OURS}: simulated ranks", xlabel="simulated ranks")
    axes.set_xscale("log", base=2)

    def ranks(row: Row) -> float:
        return float(row["simulated_ranks"])

    for number, ratio in enumerate(sorted({row["ratio"] for row in rows})):
        of_ratio = [row for row in rows if row["ratio"] == ratio]
        color = f"C{number}"
        draw_line(axes, of_ratio, ranks, f"ratio {ratio:g}", marker="o", color=color)
        draw_ideal(axes, of_ratio, ranks, f"at most, ratio {ratio:g}", color=color)
        text = f"one shared link at most, ratio {ratio:g}"
        draw_one_link(axes, of_ratio, ranks, text, color=color)


def draw_settings(axes: Any, rows: Sequence[Row]) -> None:
    """Draw ours for each prefetch depth and each bucket size, as bars."""
    axes.set_title(f"{OURS}: prefetch, and bytes of buckets")
    of_sweeps = [
        ("prefetch", [(f"prefetch {row['prefetch']}", row) for row in of_sweep(rows, "prefetch")]),
        ("buckets", [(name_of(row), row) for row in sizes(rows)]),
    ]
    place = 0
    labels = []
    for number, (name, bars) in enumerate(of_sweeps):
        if not bars:
            continue
        places = range(place, place + len(bars))
        hidden = [row["simulated_hidden"] for _, row in bars]
        axes.bar(places, hidden, color=f"C{number}", label=name)
        most = [row["simulated_hidden_at_most"] for _, row in bars]
        text = None if labels else "at most"
        axes.scatter(places, most, marker="_", s=400, color="black", label=text)
        labels += [label for label, _ in bars]
        place += len(bars)
    if labels:
        axes.set_xticks(range(place), labels, rotation=45, ha="right")


def name_of(row: Row) -> str:
    """Return the name of a bucket size."""
    name = f"{row['bucket_bytes'] / 1e6:.2f} MB" if row["bucket_bytes"] else "each unit alone"
    return f"{name} (default)" if row["default_buckets"] else name


def of_sweep(rows: Sequence[Row], name: str) -> list[Row]:
    """Return the rows of one sweep."""
    return [row for row in rows if row["sweep"] == name]


def sizes(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the buckets, the smallest first."""
    return sorted(of_sweep(rows, "bucket"), key=lambda row: int(row["bucket_bytes"]))
