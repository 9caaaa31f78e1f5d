"""How fast would Llama train on 8 to 1,024 GPUs, and how well does the model fit published figures?

This benchmark measures nothing: all figures except those marked "published" are simulated. The
compute time of a step is its FLOPs divided by a rate. Its communication time is that of rings over
published networks. planner.schedule computes how both overlap, with one unit a layer. The formulas
are in bench/models/step_model.py, and the sources in bench/models/published.py.

One figure is fitted for each GPU and its software, on one measurement of a single node: the part of
the peak that the GPU reaches while it computes. The second table compares the model with other
measurements. The third table compares the effect of more GPUs, published and simulated. The
assumptions are printed above the tables.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from bench.harness.options import positive
from bench.harness.output import picture, print_table
from bench.harness.runner import Keep
from bench.models.published import (
    FULL,
    H100,
    H100_400G,
    LLAMA3_8B,
    LLAMA3_70B,
    MEASUREMENTS,
    NODE,
    SELECTIVE_OP,
    Measurement,
    Stack,
)
from bench.models.step_model import (
    ASSUMPTIONS,
    Step,
    fitted,
    memory_bytes,
    model_flops,
    replica_link,
    ring,
    step_of,
    step_seconds,
)

TITLE = "scaling (simulated)"
MEMORY_GB = 80  # of an H100


# - Rows


def prediction_row(step: Step, stack: Stack, part: float) -> dict[str, Any]:
    """Return the row of a prediction."""
    seconds, found = step_seconds(step, part * stack.peak)
    tokens = step.tokens / seconds
    between = replica_link(step)
    return {
        "table": "prediction (simulated)",
        "model": step.model.name,
        "gpu": stack.name,
        "strategy": "HSDP" if step.hybrid else "FSDP",
        "link": ring(step.network, step.shards).name,
        "replica_link": between.name if between is not None else None,
        "ranks": step.ranks,
        "batch": step.batch,
        "length": step.length,
        "recompute": step.recompute.name,
        "part_of_peak": part,
        "simulated_step_ms": seconds * 1e3,
        "simulated_exposed_ms": (seconds - found.compute) * 1e3,
        "simulated_tokens": tokens,
        "simulated_mfu": tokens * model_flops(step.model, step.length) / stack.peak,
        "memory_gb": memory_bytes(step) / 1e9,
        "assumptions": list(ASSUMPTIONS),
    }


def check_row(measured: Measurement, part: float) -> dict[str, Any]:
    """Return the row that compares a published measurement with the model."""
    step, stack = step_of(measured), measured.stack
    seconds, found = step_seconds(step, part * stack.peak)
    tokens = step.tokens / seconds
    flops = model_flops(step.model, step.length)
    return {
        "table": "check",
        "model": step.model.name,
        "gpu": stack.name,
        "network": step.network.name,
        "strategy": "HSDP" if step.hybrid else "FSDP",
        "ranks": step.ranks,
        "batch": step.batch,
        "length": step.length,
        "recompute": step.recompute.name,
        "reduce_bytes": step.reduce_bytes,
        "part_of_peak": part,
        "fitted_on_this": measured.fits,
        "published_tokens": measured.tokens,
        "published_mfu": measured.tokens * flops / stack.peak,
        "simulated_tokens": tokens,
        "simulated_exposed_ms": (seconds - found.compute) * 1e3,
        "error": tokens / measured.tokens - 1,
        "source": measured.source,
        "assumptions": list(ASSUMPTIONS),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --batch."""
    parser.add_argument("--batch", type=positive, default=1, help="sequences of a rank; default: 1")


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Predict, then check; --quick predicts for three sizes only."""
    parts = fitted()
    sizes = (8, 64, 1024) if args.quick else (8, 16, 32, 64, 128, 256, 512, 1024)
    for model, recompute in ((LLAMA3_8B, SELECTIVE_OP), (LLAMA3_70B, FULL)):
        for length in (8192, 2048):
            for hybrid in (False, True):
                for ranks in sizes:
                    if hybrid and ranks <= NODE:
                        continue  # the same as FSDP
                    step = Step(
                        model, H100_400G, ranks, args.batch, length, recompute, hybrid=hybrid
                    )
                    keep(prediction_row(step, H100, parts[H100]))
    for measured in MEASUREMENTS:
        keep(check_row(measured, parts[measured.stack]))


def show(rows: list[dict[str, Any]]) -> None:
    """Print the assumptions and the tables."""
    predictions = [row for row in rows if row["table"] != "check"]
    checks = [row for row in rows if row["table"] == "check"]
    for row in rows[:1]:
        print("assumptions:", *row["assumptions"], sep="\n- ")
    if predictions:
        show_predictions(predictions)
    if checks:
        show_checks(checks)


def show_predictions(rows: list[dict[str, Any]]) -> None:
    """Print the first table."""
    first = rows[0]
    print(
        f"\npredictions (simulated): {first['gpu']}, {first['part_of_peak']:.0%} of its peak while "
        f"it computes, {first['batch']} sequence(s) a rank, fp32 reductions"
    )
    header = ["model", "length", "strategy", "ranks", "simulated step ms", "simulated exposed ms"]
    header += ["simulated tokens/s a GPU", "simulated MFU", "GB a rank"]
    print_table(
        header,
        [
            [
                row["model"],
                f"{row['length']:,}",
                row["strategy"],
                f"{row['ranks']:,}",
                f"{row['simulated_step_ms']:,.0f}",
                f"{row['simulated_exposed_ms']:,.0f}",
                f"{row['simulated_tokens']:,.0f}",
                f"{row['simulated_mfu']:.1%}",
                f"{row['memory_gb']:.1f}{'!' if row['memory_gb'] > MEMORY_GB else ' '}",
            ]
            for row in rows
        ],
    )
    if any(row["memory_gb"] > MEMORY_GB for row in rows):
        print(f"!: more than the GPU's {MEMORY_GB} GB; the row is shown for its time only")


def show_checks(rows: list[dict[str, Any]]) -> None:
    """Print the second table, and a summary of the errors."""
    print("\nchecks against published figures; *: the GPU's part of the peak is fitted to this row")
    header = ["model", "GPU", "part of peak", "strategy", "GPUs", "batch x length", "recompute"]
    header += ["published tokens/s a GPU", "simulated", "error", "source"]
    print_table(
        header,
        [
            [
                row["model"],
                row["gpu"],
                f"{row['part_of_peak']:.1%}",
                row["strategy"],
                f"{row['ranks']}",
                f"{row['batch']} x {row['length']:,}",
                row["recompute"],
                f"{row['published_tokens']:,.0f}",
                f"{row['simulated_tokens']:,.0f}",
                "*" if row["fitted_on_this"] else f"{row['error']:+.1%}",
                row["source"],
            ]
            for row in rows
        ],
    )
    fits = {row["gpu"]: row for row in rows if row["fitted_on_this"]}
    checks = [row for row in rows if not row["fitted_on_this"]]
    # A GPU reaches more of its peak with recomputation, and with larger batches.
    for same in (True, False):
        errors = [
            abs(row["error"])
            for row in checks
            if (row["recompute"] == fits[row["gpu"]]["recompute"]) == same
        ]
        if errors:
            print(
                f"{len(errors)} checks that recompute {'as' if same else 'differently from'} the "
                f"fitted run: median error {statistics.median(errors):.1%}, largest error "
                f"{max(errors):.1%}"
            )
    show_changes(rows)


def changes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the change of the tokens of a GPU between runs that differ only in their GPUs.

    The change shows the cost of communication and of all else that grows with the ranks. It hardly
    depends on the fitted part of the peak.
    """
    alike = ("model", "gpu", "network", "strategy", "batch", "length", "recompute", "reduce_bytes")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in alike), []).append(row)
    found = []
    for group in groups.values():
        few, *more = sorted(group, key=lambda row: row["ranks"])
        found += [
            {
                "model": few["model"],
                "gpu": few["gpu"],
                "batch": few["batch"],
                "length": few["length"],
                "from": few["ranks"],
                "to": many["ranks"],
                "published": many["published_tokens"] / few["published_tokens"] - 1,
                "simulated": many["simulated_tokens"] / few["simulated_tokens"] - 1,
                "simulated_exposed_ms": many["simulated_exposed_ms"],
            }
            for many in more
        ]
    return found


def show_changes(rows: list[dict[str, Any]]) -> None:
    """Print the third table."""
    found = changes(rows)
    if not found:
        return
    print("\nchange of tokens/s a GPU with more GPUs, all else being equal")
    header = ["model", "GPU", "batch x length", "GPUs", "published", "simulated"]
    header += ["simulated exposed ms"]
    print_table(
        header,
        [
            [
                row["model"],
                row["gpu"],
                f"{row['batch']} x {row['length']:,}",
                f"{row['from']} to {row['to']}",
                f"{row['published']:+.1%}",
                f"{row['simulated']:+.1%}",
                f"{row['simulated_exposed_ms']:.0f}",
            ]
            for row in found
        ],
    )
    print(
        "communication is almost hidden in all of them, so they say little about predictions of "
        "exposed communication; other losses (stragglers, NCCL's use of the GPU) are not modelled"
    )


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw tokens/s a GPU over the ranks, for FSDP and HSDP; each model has its own axes."""
    predictions = [row for row in rows if row["table"] != "check"]
    models = list(dict.fromkeys(row["model"] for row in predictions))
    with picture(path, f"{H100_400G.name} (simulated)", columns=len(models)) as all_axes:
        for axes, model in zip(all_axes, models, strict=True):
            of_model = [row for row in predictions if row["model"] == model]
            curves = dict.fromkeys((row["length"], row["strategy"]) for row in of_model)
            for length, strategy in curves:
                points = [r for r in of_model if (r["length"], r["strategy"]) == (length, strategy)]
                ranks = [row["ranks"] for row in points]
                tokens = [row["simulated_tokens"] for row in points]
                style = "o-" if strategy == "FSDP" else "s--"
                axes.plot(ranks, tokens, style, label=f"{strategy}, {length:,} tokens")
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set(title=model, xlabel="ranks", ylabel="simulated tokens/s a GPU")
            axes.legend(fontsize="small")
