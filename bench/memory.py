"""What is the peak memory of a rank with each system, and how does it grow over steps?

The transformer of examples/gpt_model.py trains ten steps. Each system has processes of its own, so
that no peak is another's, and what a row says is of the rank that has most.

On the host (two ranks, or --ranks N) it is the resident set, /proc/self/status: "peak" is VmHWM
since the model was built and sharded, others are VmRSS after a step, all less what the process had
before, when it had trained a tiny model without any system, so that torch's own code was loaded.
Pages of shared memory count in each process that has touched them. On a GPU (as many ranks as GPUs)
it is what torch's allocator has reserved; "allocated", "split" (inactive parts of blocks in use),
retries and cudaMallocs after the third step are those of torch.cuda.memory_stats, and "device" is
what the driver says has gone, which NCCL's own buffers are in. Growth is from the third step to the
last: by then each allocation was made before, so it is fragmentation, or a leak.

"in theory" is what a rank cannot do without: its part of parameters, gradients and AdamW's two
moments (16 bytes a parameter / ranks), and unsharded the root unit, a block, and the block that is
gathered meanwhile. Activations are not in it. "books" are ours' own, of the same rank.
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
SETTLED = 3  # steps after which every allocation was made before
MB = 10**6
TRAINED = {name: SYSTEMS[name] for name in ("ours", "FSDP2", "FSDP2, defaults", "FSDP1")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how many ranks there are, each system's in turn."""
    text = "default: 2 on the host, one for each GPU"
    parser.add_argument("--ranks", type=positive, metavar="N", help=text)


# - One rank of one system


def on_host(field: str) -> int:
    """Return a figure of /proc/self/status, such as VmRSS, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024  # "kB", which is KiB there (proc(5))
    return 0


def forget_peak(device: torch.device) -> bool:
    """Begin a new peak; return whether that is possible here."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return True
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM to VmRSS: proc(5)
        return True
    return False


class Gauge:
    """What this process has, beyond what it had when this was made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        self.before = 0 if device.type == "cuda" else on_host("VmRSS")
        self.device_before = self.gone_from_device()
        self.after_steps: list[int] = []
        self.cuda_mallocs: list[int] = []

    def gone_from_device(self) -> int:
        """Return what the driver says is in use, of all processes."""
        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def read(self) -> None:
        """Note what there is after a step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            self.after_steps.append(torch.cuda.memory_reserved())
            self.cuda_mallocs.append(torch.cuda.memory_stats().get("num_device_alloc", 0))
        else:
            self.after_steps.append(on_host("VmRSS") - self.before)

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
            shared = on_host("RssShmem")
            return found | {"peak_bytes": on_host("VmHWM") - self.before, "shared_bytes": shared}
        stats = torch.cuda.memory_stats()
        mallocs = self.cuda_mallocs
        return found | {
            "peak_bytes": stats["reserved_bytes.all.peak"],
            "allocated_peak_bytes": stats["allocated_bytes.all.peak"],
            "inactive_split_peak_bytes": stats["inactive_split_bytes.all.peak"],
            "alloc_retries": stats["num_alloc_retries"],
            "cuda_mallocs": [b - a for a, b in zip([0, *mallocs], mallocs, strict=False)],
            "device_bytes": self.gone_from_device() - self.device_before,
        }


def books_of(training: Training) -> dict[str, int]:
    """Return what fsdp_ext itself says that it has, in bytes."""
    from fsdp_ext import _C

    model: Any = training.model
    books: dict[str, int] = model._unit.root.core.memory()
    locals_ = [parameter.to_local() for parameter in model.parameters()]
    return {
        **{name: value for name, value in books.items() if name.endswith("bytes")},
        "shard_bytes": sum(local.untyped_storage().nbytes() for local in _one_a_storage(locals_)),
        "shared_memory_bytes": _C.shared_memory_bytes(),
    }


def _one_a_storage(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Parameters of a unit are views of one flat shard.
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}.values())


def in_theory(training: Training) -> dict[str, int]:
    """Return the bytes that a rank cannot do without, by what they are for."""
    numel = training.parameters
    block = sum(p.numel() for p in Training.unsharded_block(training.config))
    root = numel - training.config.layers * block
    size = training.dtype.itemsize
    state = 16 * numel // dist.get_world_size()
    return {"state": state, "unsharded": size * (root + 2 * block)}


def load_code(device: torch.device) -> None:
    """Train a tiny model once: what torch imports and starts on first use is no system's."""
    tiny = GPTConfig(vocabulary=8, context=8, dim=8, layers=1, heads=1)
    Training(SYSTEMS["unsharded"], tiny, 1, device).step()


def train(name: str, config: GPTConfig, batch: int, device: torch.device) -> dict[str, Any]:
    """Return what a system's training takes on this rank."""
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
    """Train one system on this rank of several; the first writes what the largest one took."""
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
    except Exception as error:  # other ranks may wait for this one, so it ends them
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
            found = {"error": f"exit code {code}, with what is said above"}
            if out.exists():
                found = json.loads(out.read_text(encoding="utf-8"))
        rows.append({"system": name, "ranks": count, "device": args.device, "steps": STEPS} | found)
        add_ratios(rows)
        keep.replace(rows)


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Put each peak's ratio to the smallest of the peers into the rows."""
    ran = [row for row in rows if "error" not in row]
    peers = [row["peak_bytes"] for row in ran if row["system"] != "ours"]
    for row in ran:
        row["of_best_peer"] = row["peak_bytes"] / min(peers) if peers and min(peers) > 0 else None
        row["of_theory"] = row["peak_bytes"] / sum(row["theory"].values())


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table, and ours' books."""
    ran = [row for row in rows if "error" not in row]
    on_gpu = rows[0]["device"] == "cuda"
    if ran:
        count = f"{ran[0]['ranks']} rank{'s' if ran[0]['ranks'] > 1 else ''}"
        where = "reserved on the GPU" if on_gpu else "resident, beyond what there was before"
        print(f"MB of a rank, {where}; {count}, {ran[0]['parameters'] / 1e6:,.1f} M parameters")
        if not all(row["peak_since_built"] for row in ran):
            print("/proc/self/clear_refs cannot be written: peaks include building the model")
    header = ["system", "peak", f"after step {SETTLED}", f"step {STEPS}", "growth"]
    more = ["allocated", "split", "retries", "cudaMallocs", "device"] if on_gpu else ["shared"]
    header += [*more, "in theory", "of theory", "of best peer", "settings, or error"]
    table = []
    for row in rows:
        if "error" in row:
            table.append([row["system"], *[""] * (len(header) - 2), row["error"][:100]])
            continue
        figures = [row[f"{name}_bytes"] for name in ("peak", "settled", "last", "growth")]
        cells = [f"{value / MB:,.1f}" for value in figures]
        if on_gpu:
            names = ("allocated_peak_bytes", "inactive_split_peak_bytes")
            cells += [f"{row[name] / MB:,.1f}" for name in names]
            cells += [str(row["alloc_retries"]), str(sum(row["cuda_mallocs"][SETTLED:]))]
            cells += [f"{row['device_bytes'] / MB:,.1f}"]
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
    """Return what is said if ours could not run."""
    failed = [row["error"] for row in rows if row["system"] == "ours" and "error" in row]
    return f"ours failed: {failed[0]}" if failed else None


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """Draw what a rank has after each step."""
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
