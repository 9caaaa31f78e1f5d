"""``python -m fsdp_ext plan``: the memory of each rank and the time of a step, as a command.

    python -m fsdp_ext plan my_model:make --world-size 64 --units Block --batch 8x2048:int64 \\
        --flops-per-second 400e12 --link h100_cluster --memory-limit 80GB
"""

from __future__ import annotations

import argparse
import functools
import importlib
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_ext._util.numbers import bytes_in
from fsdp_ext._util.tables import size
from fsdp_ext.comm.link import PRESETS, Link
from fsdp_ext.comm.transports import OF_GPUS, OF_THE_HOST
from fsdp_ext.planner.api import plan

# It runs as it is. The model is in planner/example.py.
EXAMPLE = """python -m fsdp_ext plan fsdp_ext.planner.example:make --world-size 64 \\
      --units TransformerEncoderLayer --param-dtype bfloat16 \\
      --batch 2x4096x4096 --flops-per-second 400e12"""


def run(arguments: Sequence[str]) -> int:
    """Print the plan; return 0, or 1 if it exceeds the memory limit, or 2 for other errors."""
    parser = _parser()
    if not arguments:
        print(
            f"{parser.prog} needs a model and --world-size, such as\n  {EXAMPLE}\n"
            "--help explains all options.",
            file=sys.stderr,
        )
        return 2
    args = vars(parser.parse_args(arguments))  # what is not taken out is an argument of plan()
    factory, path, limit = map(args.pop, ("model", "json", "memory_limit"))
    dtypes = {name: args.pop(name) for name in ("param_dtype", "reduce_dtype")}
    # None if nothing was asked for: a sharded model has its own policy.
    policy = MixedPrecisionPolicy(**dtypes) if any(dtypes.values()) else None
    try:
        model = _model(factory)
        args["units"] = _classes(model, args["units"]) or None
        args["batch"] = tuple(args["batch"]) if args["batch"] else None
        args["link"] = _link("--link", args["link"])
        args["replica_link"] = _link("--replica-link", args["replica_link"])
        result = plan(model, mp_policy=policy, **args)
        print(result)
        if path is not None:
            result.to_json(path)
    except (OSError, TypeError, ValueError, NotImplementedError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except Exception:
        traceback.print_exc()  # without it, Python would exit with 1
        return 2
    peak = result.memory.peak
    if limit is not None and peak > limit:
        print(
            f"{parser.prog}: each rank needs {size(peak)} without activations, but --memory-limit "
            f"is {size(limit)}. Use more ranks, smaller units or smaller dtypes.",
            file=sys.stderr,
        )
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_ext plan",
        description="Show how much memory each rank of a training needs and how long a step takes."
        "\nThis needs no process group, no GPU and no memory. Times are simulated.",
        epilog=f"""example: a transformer of 3.2 B parameters on 64 ranks
  {EXAMPLE}

example: a model that make() of my_model.py returns, on 64 ranks with 80 GB each
  python -m fsdp_ext plan my_model:make --world-size 64 --units Block \\
      --batch 8x2048:int64 --flops-per-second 400e12 --link h100_cluster --memory-limit 80GB

exit code: 0, or 1 if the plan exceeds --memory-limit, or 2 for other errors""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(parser.add_argument)
    return parser


def _add_options(add: Callable[..., object]) -> None:
    dtype, nbytes = {"type": _dtype, "metavar": "DTYPE"}, {"type": _bytes, "metavar": "SIZE"}
    number, link = {"type": int, "metavar": "N"}, {"metavar": "PRESET|FILE"}
    add("model", metavar="MODULE:FACTORY", help="function without arguments that makes the model")
    of_units = {"default": "", "metavar": "CLASS[,CLASS]"}
    add("--units", **of_units, help="classes of the modules that become units")
    add("--param-dtype", **dtype, help="dtype of compute, such as bfloat16")
    add("--reduce-dtype", **dtype, help="dtype of gradient reductions")
    unsharded = {"action": "store_const", "const": False, "dest": "reshard_after_forward"}
    add("--no-reshard-after-forward", **unsharded, help="keep units unsharded for backward")
    add("--bucket-bytes", **nbytes, help="size up to which units share a bucket")
    add("--max-message-bytes", **nbytes, help="size of the largest message; by default any")
    add("--prefetch", **number, help="how many buckets to gather ahead")
    kept = "whether cast shards are kept for the gather in backward; by default on the CPU only"
    add("--keep-gather-inputs", action=argparse.BooleanOptionalAction, help=kept)
    offload = {"action": "store_const", "const": CPUOffloadPolicy(), "dest": "offload_policy"}
    add("--offload", **offload, help="shards and gradients are in the host's memory")
    states = "tensors that the optimizer keeps per parameter, by default 2"
    add("--optimizer-states", **number, default=2, help=states)
    attached = "the optimizer steps units in backward; see optimizer.attach(model)"
    add("--optimizer-attached", action="store_const", const=True, help=attached)
    add("--optimizer-fused", action="store_true", help="the optimizer's step is fused")
    add("--world-size", **number, required=True, help="number of all ranks")
    replicas = "how many ranks have the same shard, for hybrid sharding; by default 1"
    add("--replicas", **number, help=replicas)
    kinds = "devices of the ranks: cuda for GPUs, the default, or cpu"
    add("--device-type", choices=["cuda", "cpu"], default="cuda", help=kinds)
    transports = [*OF_GPUS, *OF_THE_HOST]
    add("--transport", choices=transports, help="by default the one that the run would choose")
    within = f"link to simulate: {', '.join(PRESETS)}, or a file that measure-link wrote; "
    add("--link", **link, help=f"{within}by default a typical link of the transport")
    between = "link between replicas; by default the one that --link has across nodes"
    add("--replica-link", **link, help=between)
    add(
        "--batch",
        type=_tensor,
        nargs="+",
        metavar="SHAPE[:DTYPE]",
        help="what one rank calls the model with, such as 8x2048:int64; it is used to count flops",
    )
    rate = {"type": float, "metavar": "X"}
    add("--flops-per-second", **rate, help="how fast a rank computes; with --batch")
    share = "seconds of compute that are lost per second of communication beside it"
    add("--contention", type=float, default=0.0, metavar="C", help=share)
    add("--memory-limit", **nbytes, help="memory of each rank, such as 80GB")
    add("--json", type=Path, metavar="FILE", help="write the plan to this file, too")


# - The values of arguments


def _bytes(text: str) -> int:
    nbytes = bytes_in(text)
    if nbytes is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 80GB or 40MiB")
    return nbytes


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype such as bfloat16")
    return dtype


def _tensor(text: str) -> Tensor:
    shape, _, dtype = text.partition(":")
    if re.fullmatch(r"\d+(x\d+)*", shape) is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape and a dtype such as 8x2048:int64"
        )
    sizes = [int(part) for part in shape.split("x")]
    return torch.empty(sizes, dtype=_dtype(dtype) if dtype else torch.float32, device="meta")


def _model(text: str) -> nn.Module:
    name, _, attribute = text.partition(":")
    if not (name and attribute):
        raise ValueError(
            f"{text!r} is not of the form MODULE:FACTORY, such as my_model:make. FACTORY is a "
            "function without arguments that returns the model."
        )
    try:
        module: object = importlib.import_module(name)
        factory = functools.reduce(getattr, attribute.split("."), module)
    except Exception as error:
        raise ValueError(
            f"cannot import {text}: {type(error).__name__} ({error}). Name a module as in an "
            "import and a function in it, such as my_model:make. Run the command in its folder, "
            "or add that folder to PYTHONPATH."
        ) from error
    if not callable(factory):
        raise ValueError(f"{text} is not a function. Name the one that makes the model.")
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing is trained here
            model = factory()
    except Exception as error:
        raise ValueError(
            f"{text} raised {type(error).__name__} ({error}) when it was called without arguments "
            "on the meta device. Name a function that makes the model so."
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{text} returned a {type(model).__name__}. Let it return a module.")
    return model


def _classes(model: nn.Module, text: str) -> list[type[nn.Module]]:
    asked = [name for name in text.split(",") if name]
    known = {type(module): type(module).__name__ for module in model.modules()}
    for name in asked:
        if name not in known.values():
            raise ValueError(
                f"--units names {name!r}, but the classes of the model's modules are "
                f"{', '.join(sorted(set(known.values())))}."
            )
    return [cls for cls, name in known.items() if name in asked]


def _link(option: str, text: str | None) -> Link | str | None:
    if text is None or text in PRESETS:
        return text
    if not Path(text).is_file():
        raise ValueError(f"{option} {text!r} is neither a file nor one of {', '.join(PRESETS)}.")
    return Link.load(text)
