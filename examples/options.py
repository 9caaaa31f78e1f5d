"""The command line of train_gpt.py. A mistake in it is reported in one sentence."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import systems
import torch
from corpus import UsageError
from gpt_model import DEFAULT

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of printing, so that only one of many ranks prints the mistake."""
        raise UsageError(message)


def parse_arguments(description: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        UsageError: if an option is wrong, or two of them contradict each other.
    """
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(name: str, default: Any, meaning: str, **more: Any) -> None:
        kind = {} if isinstance(default, bool) or "type" in more else {"type": type(default)}
        shown = "" if default is None or default is False else f" (default: {default})"
        parser.add_argument(name, default=default, help=meaning + shown, **kind, **more)

    add("--system", "ours", "the system that shards the model", choices=systems.SYSTEMS)
    add("--device", "auto", "device of the computation", choices=("auto", "cpu", "cuda"))
    add("--data", None, "file or directory (default: the standard library's sources)", type=Path)
    add("--steps", 800, "optimizer steps in all, those before --resume included")
    add("--batch", 16, "sequences in a step, over all ranks together")
    add("--context", DEFAULT.context, "bytes that the model sees at once")
    add("--dim", DEFAULT.dim, "width of the model")
    add("--layers", DEFAULT.layers, "transformer blocks")
    add("--heads", DEFAULT.heads, "attention heads in each block")
    add("--lr", 4e-3, "highest learning rate")
    add("--seed", 0, "seed of the initial parameters, the order of the data and the sample")
    add("--dtype", "fp32", "dtype of the computation", choices=tuple(DTYPES))
    add("--eval-every", 200, "steps between validations; 0 validates at the end only")
    add("--eval-batches", 8, "batches in one validation")
    add("--sample", 200, "bytes of text to sample at the end")
    add("--prompt", "def __init__(self, ", "text that the sample continues")
    add("--threads", 0, "threads of a rank; 0 divides the cores of the host among its ranks")
    add("--checkpoint", None, "directory to save checkpoints in", type=Path)
    add("--checkpoint-every", 0, "steps between checkpoints; 0 saves at the end only")
    add("--resume", False, "continue from the latest checkpoint", action="store_true")
    add(
        "--profile",
        False,
        "print where the time of a step goes (--system ours)",
        action="store_true",
    )
    add("--plot", None, "write the loss curve to this PNG file", type=Path)
    add("--json", None, "write the final figures to this file", type=Path)
    options = parser.parse_args(arguments)
    _check_arguments(options)
    return options


def _check_arguments(options: argparse.Namespace) -> None:
    for name in ("steps", "batch", "context", "dim", "layers", "heads", "eval_batches"):
        value = getattr(options, name)
        if value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; give at least 1")
    for name in ("eval_every", "checkpoint_every", "sample", "threads", "seed"):
        value = getattr(options, name)
        if value < 0:
            raise UsageError(f"--{name.replace('_', '-')} is {value}; give at least 0")
    if not 0 < options.lr < math.inf:
        raise UsageError(f"--lr is {options.lr}; give a positive, finite number")
    if options.dim % options.heads:
        raise UsageError(
            f"--dim {options.dim} is not a multiple of --heads {options.heads}; change one of them"
        )
    if options.sample and not options.prompt:
        raise UsageError("--prompt is empty; give at least one character")
    if options.resume and options.checkpoint is None:
        raise UsageError("--resume needs --checkpoint DIR, the place to resume from; give both")
    if options.profile and options.system != "ours":
        raise UsageError(
            f"--profile works with --system ours, not {options.system}; leave one of the two out"
        )
    # These mistakes are reported now, and not after a minute of training.
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed; "
            "install it with `pip install matplotlib`, or leave --plot out"
        )
    for name in ("plot", "json"):
        path = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(
                f"--{name} {path} is in a directory that does not exist; create it first"
            )
        if path is not None and path.is_dir():
            raise UsageError(f"--{name} {path} is a directory; name a file in it")
    if options.checkpoint is not None and options.checkpoint.is_file():
        raise UsageError(f"--checkpoint {options.checkpoint} is a file; name a directory")
