"""``python -m fsdp_ext plan``: what each rank of a training would hold, and how long a step takes.

    python -m fsdp_ext plan my_model:make --world-size 64 --units Block --batch 8x2048:int64 \\
        --flops-per-second 400e12 --link h100_cluster --memory-limit 80GB
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_ext._util.tables import size
from fsdp_ext.comm.link import PRESETS, Link
from fsdp_ext.comm.transports import OF_GPUS, OF_THE_HOST
from fsdp_ext.planner.api import plan

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{prefix}i": 2 ** (10 * i) for i, prefix in enumerate("KMGT", start=1)}


def run(arguments: Sequence[str]) -> int:
    """Print the plan; return 0, 1 if it does not fit the memory limit, 2 for other errors."""
    parser = _parser()
    args = parser.parse_args(arguments)
    try:
        model = _model(args.model)
        result = plan(
            model,
            args.world_size,
            units=_classes(model, args.units) or None,
            mp_policy=_policy(args.param_dtype, args.reduce_dtype),
            bucket_bytes=args.bucket_bytes,
            max_message_bytes=args.max_message_bytes,
            prefetch=args.prefetch,
            reshard_after_forward=False if args.no_reshard_after_forward else None,
            transport=args.transport,
            link=_link(args.link),
            device_type=args.device_type,
            optimizer_states=args.optimizer_states,
            batch=tuple(args.batch) if args.batch else None,
            flops_per_second=args.flops_per_second,
            contention=args.contention,
        )
        print(result)
        if args.json is not None:
            result.to_json(args.json)
    except (OSError, TypeError, ValueError, NotImplementedError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    peak = result.memory.peak
    if args.memory_limit is not None and peak > args.memory_limit:
        print(
            f"{parser.prog}: expects at most {size(args.memory_limit)} on each rank but it takes "
            f"{size(peak)} without activations; use more ranks, smaller units or other dtypes",
            file=sys.stderr,
        )
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_ext plan",
        description="Show what each rank of a training would hold and how long a step would take, "
        "before it starts: no process group, no GPU, no memory. Times are simulated.",
        epilog="Exit code: 0; 1 if it does not fit --memory-limit; 2 for errors.",
    )
    add = parser.add_argument
    add("model", metavar="MODULE:FACTORY", help="callable without arguments that returns the model")
    add("--world-size", type=int, required=True, metavar="N", help="ranks")
    add("--units", default="", metavar="CLASS[,CLASS]", help="modules that become units")
    add("--param-dtype", type=_dtype, metavar="DTYPE", help="of computation, such as bfloat16")
    add("--reduce-dtype", type=_dtype, metavar="DTYPE", help="of the reduction of gradients")
    add("--no-reshard-after-forward", action="store_true", help="keep units gathered for backward")
    add("--bucket-bytes", type=_bytes, metavar="SIZE", help="of units that travel together")
    add("--max-message-bytes", type=_bytes, metavar="SIZE", help="of a message, by default any")
    add("--prefetch", type=int, metavar="N", help="buckets gathered ahead")
    add("--optimizer-states", type=int, default=2, metavar="N", help="tensors of each parameter")
    add("--device-type", choices=["cuda", "cpu"], default="cuda")
    add("--transport", choices=[*OF_GPUS, *OF_THE_HOST], help="by default as usual")
    add(
        "--link",
        metavar="PRESET|FILE",
        help=f"that times are of: {', '.join(PRESETS)}, or a file that measure-link has written; "
        "by default what is typical of the transport",
    )
    add(
        "--batch",
        type=_tensor,
        nargs="+",
        metavar="SHAPE[:DTYPE]",
        help="what one rank calls the model with, such as 8x2048:int64, to count flops",
    )
    add("--flops-per-second", type=float, metavar="X", help="that a rank computes at, for times")
    add("--contention", type=float, default=0.0, metavar="C", help="what compute loses, 0 to 1")
    add("--memory-limit", type=_bytes, metavar="SIZE", help="of each rank, such as 80GB")
    add("--json", type=Path, metavar="FILE", help="write the plan there")
    return parser


# - What arguments stand for


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"expects a size such as 80GB or 40MiB but got {text!r}")
    unit = match[2] or ""
    return int(float(match[1]) * _UNITS[unit[:1].upper() + unit[1:].lower()])


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"expects a dtype such as bfloat16 but got {text!r}")
    return dtype


def _tensor(text: str) -> Tensor:
    shape, _, dtype = text.partition(":")
    if re.fullmatch(r"\d+(x\d+)*", shape) is None:
        raise argparse.ArgumentTypeError(
            f"expects a shape and a dtype such as 8x2048:int64 but got {text!r}"
        )
    sizes = [int(part) for part in shape.split("x")]
    return torch.empty(sizes, dtype=_dtype(dtype) if dtype else torch.float32, device="meta")


def _model(text: str) -> nn.Module:
    name, _, attribute = text.partition(":")
    if not name or not attribute:
        raise ValueError(
            f"expects MODULE:FACTORY, such as my_model:make, but got {text!r}; FACTORY is called "
            "without arguments and returns the model"
        )
    try:
        factory: Any = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"cannot import {name} ({error}); run where it is, or put that into PYTHONPATH"
        ) from error
    for part in attribute.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        raise ValueError(f"expects a callable '{attribute}' in {name} but it has none; correct it")
    model = _call(factory, text)
    if not isinstance(model, nn.Module):
        raise ValueError(f"expects {text} to return a module but got {type(model).__name__}")
    return model


def _call(factory: Callable[[], Any], text: str) -> Any:
    try:
        with torch.device("meta"):
            return factory()
    except Exception as error:
        raise ValueError(
            f"expects {text} to make a model on the meta device without arguments but it raised "
            f"{type(error).__name__} ({error}); wrap it in a function that does"
        ) from error


def _policy(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> MixedPrecisionPolicy | None:
    """Return None where nothing is asked for: a sharded model has its own."""
    if param_dtype is None and reduce_dtype is None:
        return None
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)


def _classes(model: nn.Module, text: str) -> list[type[nn.Module]]:
    asked = [name for name in text.split(",") if name]
    known = {type(module).__name__: type(module) for module in model.modules()}
    for name in asked:
        if name not in known:
            raise ValueError(
                f"--units expects classes of the model's modules, {', '.join(sorted(known))}, but "
                f"got {name!r}; correct it"
            )
    return [known[name] for name in asked]


def _link(text: str | None) -> Link | None:
    if text is None:
        return None
    if text in PRESETS:
        return PRESETS[text]
    if not Path(text).is_file():
        raise ValueError(
            f"--link expects one of {', '.join(PRESETS)}, or a file, but got {text!r}; correct it"
        )
    return Link.load(text)
