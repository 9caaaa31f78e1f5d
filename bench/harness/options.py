"""The options of a benchmark: the common ones, its own, and the checks before anything runs."""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import NoReturn

import torch

from bench.harness import output, ranks


class UsageError(Exception):
    """The options ask for something that cannot be measured. The message is one sentence."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, with one sentence for each mistake."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake and exit with 2."""
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def positive(text: str) -> int:
    """Return the value of an option that has to be an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"needs at least 1 and got {value}")
    return value


positive.__name__ = "integer"  # argparse names it in "invalid integer value"


def parser_of(name: str, module: ModuleType) -> Parser:
    """Return the parser of a benchmark's options, the common ones and its own."""
    text = (module.__doc__ or "").replace("%", "%%")
    parser = Parser(
        prog=f"python -m bench {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common_arguments(parser, "FILE")
    devices = getattr(module, "DEVICES", ("cpu", "cuda"))
    default = "cuda" if "cuda" in devices and torch.cuda.is_available() else devices[0]
    parser.add_argument(
        "--device", choices=devices, default=default, help="default: a GPU if there is one"
    )
    if hasattr(module, "RANKS"):
        parser.add_argument("--ranks", type=positive, metavar="N", help=f"default: {module.RANKS}")
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    return parser


def add_common_arguments(parser: argparse.ArgumentParser, target: str) -> None:
    """Add the options of all benchmarks; --json and --plot take a `target` (FILE or DIR)."""
    parser.add_argument(
        "--quick", action="store_true", help="run fewer and smaller cases, in seconds"
    )
    parser.add_argument("--json", metavar=target, help="also write the rows as JSON")
    parser.add_argument("--plot", metavar=target, help="also draw a picture")


def check_arguments(parser: Parser, args: argparse.Namespace, module: ModuleType) -> None:
    """Exit with 2 and a sentence if the run could only fail, before it begins."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda needs a GPU and torch finds none; check the driver with nvidia-smi, and "
            "that torch.version.cuda is not None"
        )
    if args.json and (fault := output.fault_of_target(args.json)):
        parser.error(f"--json {fault}")
    if args.plot and not hasattr(module, "plot"):
        parser.error("--plot was given, but this benchmark draws no picture; leave it out")
    if args.plot and (fault := output.fault_of_picture(args.plot)):
        parser.error(f"--plot {fault}")
    if not ranks.under_torchrun():
        return
    there = ranks.world_size()
    if not hasattr(module, "RANKS") and there > 1:
        parser.error(
            f"torchrun started {there} ranks, but this runs on one; start it without torchrun"
        )
    if getattr(args, "ranks", None) not in (None, there):
        parser.error(f"--ranks {args.ranks} contradicts torchrun's {there} ranks; leave it out")
