"""The picture of `python -m bench overlap`: what is hidden, beside the most that could be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.harness import Row
from bench.output import picture
from bench.overlap_systems import FSDP1, FSDP2, FSDP2_PREFETCH, OURS

HIDDEN = "simulated wire hidden"
RATIO = "compute_over_simulated_wire"
ONE_LINK = "simulated_hidden_at_most_on_one_link"
LINKS = f"{OURS} has a link for gathers and one for reductions, each of the full bandwidth"
# A CPU has no streams, so what these wait for they cannot hide, whatever the link.
WAITS = {
    FSDP2: "waits on the host",
    FSDP2_PREFETCH: "waits on the host for reductions",
    FSDP1: "waits on the host",
}


def draw(rows: Sequence[Row], path: str) -> None:
    """Draw three panels: over the ratio, over the number of ranks, over prefetch and buckets.

    Raises:
        OSError: as `fsdp_ext.files.write_whole`.
    """
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
            elif axes.has_data():  # below, since lines are everywhere in the panel
                axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.13))
            else:
                axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)


def draw_line(
    axes: Any, rows: Sequence[Row], x: Callable[[Row], float], label: str, **style: Any
) -> None:
    """Draw what is hidden with its quartiles."""
    ordered = sorted(rows, key=x)
    hidden = [row["simulated_hidden"] for row in ordered]
    # The median is within the quartiles, but for the last digit.
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
    """Draw what a link that gathers and reductions share could hide."""
    ordered = sorted(rows, key=x)
    most = [row[ONE_LINK] for row in ordered]
    axes.plot([x(row) for row in ordered], most, linestyle=":", label=label, **style)


def draw_ratios(axes: Any, rows: Sequence[Row]) -> None:
    """Draw each system over compute / wire, beside the ideals of two wires and of one."""
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
    """Return what the legend says of a system: its links, and whether a CPU keeps it waiting."""
    said = [f"{wires} link{'s' if wires > 1 else ''}", WAITS.get(system, "")]
    return f"{system}: {', '.join(filter(None, said))}"


def draw_ranks(axes: Any, rows: Sequence[Row]) -> None:
    """Draw ours over the number of ranks, a line a ratio."""
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
    """Draw ours for each depth of the prefetch and each size of the buckets, as bars."""
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
    """Return how a size of buckets is called."""
    name = f"{row['bucket_bytes'] / 1e6:.2f} MB" if row["bucket_bytes"] else "each unit alone"
    return f"{name} (default)" if row["default_buckets"] else name


def of_sweep(rows: Sequence[Row], name: str) -> list[Row]:
    """Return the rows of one sweep."""
    return [row for row in rows if row["sweep"] == name]


def sizes(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the buckets, the smallest first."""
    return sorted(of_sweep(rows, "bucket"), key=lambda row: int(row["bucket_bytes"]))
