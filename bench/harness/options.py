"""The options of a benchmark: the common ones, its own, and the checks before anything runs."""

from __future__ import annotations

import argparse
import math
from types import ModuleType
from typing import NoReturn

import torch

from bench.harness import hosts, output, ranks


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


def positive_number(text: str) -> float:
    """Return the value of an option that has to be a positive, finite number."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"needs a positive, finite number and got {text}")
    return value


positive.__name__ = "integer"  # argparse names it in "invalid integer value"
positive_number.__name__ = "number"


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
    if hasattr(module, "HOSTS"):
        parser.add_argument(
            "--hosts",
            type=positive,
            default=1,
            choices=[1, hosts.COUNT],
            help="2: ranks on two hosts, which are namespaces of this machine; default: 1",
        )
        parser.add_argument(
            "--rate",
            nargs="+",
            help=f"of the cable between two hosts, one or several; default: {hosts.RATES[1]}; such "
            f"as {', '.join(hosts.RATES)}",
        )
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    return parser


def count_of_hosts(args: argparse.Namespace) -> int:
    """Return how many hosts the ranks are on."""
    return getattr(args, "hosts", 1)


def count_of_ranks(args: argparse.Namespace, module: ModuleType) -> int:
    """Return how many ranks a benchmark has. Without RANKS, --ranks is the benchmark's own."""
    default: int = max(getattr(module, "RANKS", 1), count_of_hosts(args))
    return (hasattr(module, "RANKS") and args.ranks) or default


def check_hosts(parser: Parser, args: argparse.Namespace, module: ModuleType) -> None:
    """Exit with 2 and a sentence if the ranks cannot be on the hosts that the options ask for."""
    if count_of_hosts(args) == 1:
        if getattr(args, "rate", None):
            parser.error("--rate is that of the cable between two hosts; add --hosts 2")
        return
    args.rate = args.rate or [hosts.RATES[1]]
    for rate in args.rate:
        try:
            hosts.bytes_per_second(rate)
        except ValueError as error:
            parser.error(f"--rate: {error}")
    if args.device != "cpu":
        parser.error("--hosts 2 measures the CPU's transports; add --device cpu")
    if ranks.under_torchrun():
        return
    if count_of_ranks(args, module) % hosts.COUNT:
        parser.error(f"--hosts 2 needs an even number of --ranks, not {args.ranks}")
    if fault := hosts.why_not():
        parser.error(f"--hosts 2 is not possible here: {fault}")


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
    check_hosts(parser, args, module)
    if not ranks.under_torchrun():
        return
    there = ranks.world_size()
    if not hasattr(module, "RANKS") and there > 1 and count_of_hosts(args) == 1:
        parser.error(
            f"torchrun started {there} ranks, but this runs on one; start it without torchrun"
        )
    if hasattr(module, "RANKS") and args.ranks not in (None, there):
        parser.error(f"--ranks {args.ranks} contradicts torchrun's {there} ranks; leave it out")
