"""What is the peak memory of a rank with each system, and does it grow over the steps?

The transformer of examples/gpt_model.py trains ten steps. Each system runs in processes of its own,
so that peaks do not mix. A row shows the rank that needs the most memory.

On the CPU (two ranks, or --ranks N) the figures are the resident set (/proc/self/status). "peak" is
VmHWM since the model was built and sharded; the others are VmRSS after a step. The process's
initial memory is subtracted: by then it had trained a tiny model without any system, so that
torch's code was loaded. A page of shared memory counts in each process that has touched it.

On a GPU (as many ranks as GPUs) the figures are the memory in use by the driver's count, less what
was in use before. That count includes NCCL's buffers, and those of fsdp_ext that do not come from
torch's allocator, but also other processes on the GPU. "peak" is the most after a step, because
torch and fsdp_ext give no memory back within a step unless an allocation fails. "reserved" and
"allocated" (peaks), "split" (inactive parts of blocks in use), retries, and cudaMallocs after the
third step come from torch.cuda.memory_stats.

"growth" is from the third step to the last. All allocations have happened once by the third step,
so growth means fragmentation or a leak. "in theory" is the least that a rank needs: its shard of
parameters, gradients and AdamW's two moments (16 bytes a parameter / ranks), plus the unsharded
root unit, one block, and the block that is being gathered. Activations are not included. "books"
are fsdp_ext's own figures for the same rank.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.harness import ranks
from bench.harness.options import positive
from bench.harness.output import picture, print_table
from bench.harness.runner import Keep
from bench.models.training import LARGE, MEDIUM, SMALL, SYSTEMS, GPTConfig, Training

STEPS = 10
SETTLED = 3  # after so many steps, every allocation has happened once
MB = 10**6
TRAINED = {name: SYSTEMS[name] for name in ("ours", "FSDP2", "FSDP2, defaults", "FSDP1")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --ranks."""
    text = "default: 2 on the host, one for each GPU"
    parser.add_argument("--ranks", type=positive, metavar="N", help=text)


# - One rank of one system


def forget_peak(device: torch.device) -> bool:
    """Reset the peak; return whether that is possible here."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return True
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM = VmRSS, proc(5)
        return True
    return False


class Gauge:
    """Measures the memory that this process has gained since the gauge was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        self.before = self.in_use()
        self.after_steps: list[int] = []
        self.cuda_mallocs: list[int] = []

    def in_use(self) -> int:
        """Return the bytes in use on the host by this process, or on the GPU by all processes."""
        if self.device.type != "cuda":
            return ranks.memory("VmRSS")
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def read(self) -> None:
        """Record the memory after a step."""
        self.after_steps.append(self.in_use() - self.before)
        if self.device.type == "cuda":
            self.cuda_mallocs.append(torch.cuda.memory_stats().get("num_device_alloc", 0))

    def summary(self) -> dict[str, Any]:
        """Return the figures of all steps."""
        settled = self.after_steps[SETTLED - 1]
        found: dict[str, Any] = {
            "before_bytes": self.before,
            "after_steps_bytes": self.after_steps,
            "settled_bytes": settled,
            "last_bytes": self.after_steps[-1],
            "growth_bytes": self.after_steps[-1] - settled,
        }
        if self.device.type != "cuda":
            peak, shared = ranks.memory("VmHWM"), ranks.memory("RssShmem")
            return found | {"peak_bytes": peak - self.before, "shared_bytes": shared}
        stats = torch.cuda.memory_stats()
        mallocs = self.cuda_mallocs
        return found | {
            "peak_bytes": max(self.after_steps),
            "reserved_peak_bytes": stats["reserved_bytes.all.peak"],
            "allocated_peak_bytes": stats["allocated_bytes.all.peak"],
            "inactive_split_peak_bytes": stats["inactive_split_bytes.all.peak"],
            "alloc_retries": stats["num_alloc_retries"],
            "cuda_mallocs": [b - a for a, b in zip([0, *mallocs], mallocs, strict=False)],
        }


def books_of(training: Training) -> dict[str, int]:
    """Return fsdp_ext's own figures, in bytes."""
    from fsdp_ext import _C

    model: Any = training.model
    books: dict[str, int] = model._fsdp_ext_unit.root.impl.memory()
    return {
        **{name: value for name, value in books.items() if name.endswith("bytes")},
        "shard_bytes": sum(unit.flat_shard.nbytes for unit in model._fsdp_ext_unit.root.units),
        "shared_memory_bytes": _C.shared_memory_bytes(),
    }


def in_theory(training: Training) -> dict[str, int]:
    """Return the least bytes that a rank needs, by their purpose."""
    numel = training.parameters
    block = sum(p.numel() for p in Training.unsharded_block(training.config))
    root = numel - training.config.layers * block
    size = training.dtype.itemsize
    state = 16 * numel // dist.get_world_size()
    return {"state": state, "unsharded": size * (root + 2 * block)}


def load_code(device: torch.device) -> None:
    """Train a tiny model once, so that torch's lazy imports and threads count for no system."""
    tiny = GPTConfig(vocabulary=8, context=8, dim=8, layers=1, heads=1)
    Training(SYSTEMS["unsharded"], tiny, 1, device).step()


def train(name: str, config: GPTConfig, batch: int, device: torch.device) -> dict[str, Any]:
    """Train with one system; return the memory of this rank."""
    load_code(device)
    gauge = Gauge(device)
    training = Training(TRAINED[name], config, batch, device)
    gc.collect()
    since_built = forget_peak(device)
    for _ in range(STEPS):
        training.step()
        gauge.read()
    return {
        **gauge.summary(),
        "peak_since_built": since_built,
        "settings": training.sharded.settings,
        "parameters": training.parameters,
        "theory": in_theory(training),
        "books": books_of(training) if name == "ours" else None,
    }


def run_rank(arguments: Sequence[str]) -> None:
    """Train with one system on this rank; rank 0 writes the figures of the largest rank."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory")
    parser.add_argument("system", choices=TRAINED)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args(arguments)
    ranks.register(lambda: ranks.leave(ranks.INTERRUPTED))
    torch.set_num_threads(1)
    device = ranks.join(args.device)
    large = LARGE if device.type == "cuda" else MEDIUM
    config, batch = (SMALL, 4) if args.quick else (large, 4)
    try:
        mine = train(args.system, config, batch, device)
    except Exception as error:  # other ranks may wait for this one, so they have to end, too
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        args.out.write_text(json.dumps({"error": text}), encoding="utf-8")
        ranks.leave(1, failed=True)
    found: list[Any] = [mine] * dist.get_world_size()
    if dist.get_world_size() > 1:
        dist.all_gather_object(found, mine)
    if ranks.rank() == 0:
        most = max(found, key=lambda one: one["peak_bytes"])
        args.out.write_text(json.dumps(most), encoding="utf-8")
    dist.barrier()
    ranks.leave(0)


# - All systems


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Run each system in processes of its own."""
    on_gpu = args.device == "cuda"
    count = args.ranks or (torch.cuda.device_count() if on_gpu else 2)
    rows: list[dict[str, Any]] = []
    for name in TRAINED:
        with tempfile.TemporaryDirectory(prefix="bench-memory-") as directory:
            out = Path(directory) / "row.json"
            options = ["--device", args.device, *(["--quick"] if args.quick else [])]
            code = ranks.start_ranks("bench.memory", [name, str(out), *options], count)
            found = {"error": f"exit code {code}; see the messages above"}
            if out.exists():
                found = json.loads(out.read_text(encoding="utf-8"))
        rows.append({"system": name, "ranks": count, "device": args.device, "steps": STEPS} | found)
        add_ratios(rows)
        keep.replace(rows)


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add the ratio of each peak to the smallest peak of the peers, and to the theory."""
    ran = [row for row in rows if "error" not in row]
    peers = [row["peak_bytes"] for row in ran if row["system"] != "ours"]
    for row in ran:
        row["of_best_peer"] = row["peak_bytes"] / min(peers) if peers and min(peers) > 0 else None
        row["of_theory"] = row["peak_bytes"] / sum(row["theory"].values())


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table, and the books of ours."""
    ran = [row for row in rows if "error" not in row]
    on_gpu = rows[0]["device"] == "cuda"
    if ran:
        count = f"{ran[0]['ranks']} rank{'s' if ran[0]['ranks'] > 1 else ''}"
        count += f", {ran[0]['parameters'] / 1e6:,.1f} M parameters"
        where = "in use on the GPU" if on_gpu else "resident"
        print(f"MB of a rank, {where}, less what there was before; {count}")
        if not all(row["peak_since_built"] for row in ran):
            print("/proc/self/clear_refs is not writable, so peaks include building the model")
    header = ["system", "peak", f"after step {SETTLED}", f"step {STEPS}", "growth"]
    more = ["reserved", "allocated", "split", "retries", "cudaMallocs"] if on_gpu else ["shared"]
    header += [*more, "in theory", "of theory", "of best peer", "settings, or error"]
    table = []
    for row in rows:
        if "error" in row:
            table.append([row["system"], *[""] * (len(header) - 2), row["error"][:100]])
            continue
        figures = [row[f"{name}_bytes"] for name in ("peak", "settled", "last", "growth")]
        cells = [f"{value / MB:,.1f}" for value in figures]
        if on_gpu:
            names = ("reserved_peak", "allocated_peak", "inactive_split_peak")
            cells += [f"{row[f'{name}_bytes'] / MB:,.1f}" for name in names]
            cells += [str(row["alloc_retries"]), str(sum(row["cuda_mallocs"][SETTLED:]))]
        else:
            cells += [f"{row['shared_bytes'] / MB:,.1f}"]
        best = row["of_best_peer"]
        cells += [f"{sum(row['theory'].values()) / MB:,.1f}", f"{row['of_theory']:.2f}"]
        cells += ["" if best is None else f"{best:.2f}", row["settings"]]
        table.append([row["system"], *cells])
    print_table(header, table, words_last=True)
    for row in ran:
        if row["books"]:
            books = [f"{name[:-6]} {value / MB:,.1f}" for name, value in row["books"].items()]
            print(f"{row['system']}' books, MB: {', '.join(books)}")


def fault(rows: list[dict[str, Any]]) -> str | None:
    """Return why the run failed: ours could not run."""
    failed = [row["error"] for row in rows if row["system"] == "ours" and "error" in row]
    return f"ours failed: {failed[0]}" if failed else None


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw the memory of a rank after each step."""
    ran = [row for row in rows if "error" not in row]
    with picture(path, f"memory of a rank, {ran[0]['ranks']} ranks, {ran[0]['device']}") as axes:
        for i, row in enumerate(ran):
            after = [value / MB for value in row["after_steps_bytes"]]
            axes.plot(range(1, len(after) + 1), after, f"C{i}o-", label=row["system"])
            axes.axhline(row["peak_bytes"] / MB, color=f"C{i}", linestyle=":")
        theory = sum(ran[0]["theory"].values()) / MB
        axes.axhline(theory, color="grey", linestyle="--", label="in theory")
        axes.set(xlabel="step", ylabel="MB (dotted: peak)")
        axes.set_ylim(bottom=0)
        axes.legend()


if __name__ == "__main__":
    run_rank(sys.argv[1:])
