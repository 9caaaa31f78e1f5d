"""One run of one benchmark: its options, the rows it keeps, and how it ends, in time or before.

Rows are kept as soon as they are known, and whatever ends the run (its end, Ctrl-C, an error, a
full disk) they are printed and written. Of several ranks the first alone prints and writes.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from bench import output, ranks

Row = dict[str, Any]


class UsageError(Exception):
    """What was asked for cannot be measured; the message is one sentence."""


class Keep(Protocol):
    """Takes a row as soon as it is known."""

    def __call__(self, row: Row) -> None:
        """Keep one more row."""

    def replace(self, rows: Sequence[Row]) -> None:
        """Keep these rows instead of all before, as more repeats make them better."""


class Parser(argparse.ArgumentParser):
    """As argparse's, but what is wrong is one sentence."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and exit with 2."""
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def positive(text: str) -> int:
    """Return an option's value that has to be an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expects at least 1 but got {value}")
    return value


positive.__name__ = "integer"  # as argparse calls it where it is none


def parser_of(name: str, module: ModuleType) -> Parser:
    """Return the parser of a benchmark's options: the common ones and its own."""
    text = (module.__doc__ or "").replace("%", "%%")
    parser = Parser(
        prog=f"python -m bench {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common_arguments(parser, "FILE")
    devices = getattr(module, "DEVICES", ("cpu", "cuda"))
    default = "cuda" if "cuda" in devices and torch.cuda.is_available() else devices[0]
    parser.add_argument("--device", choices=devices, default=default, help="a GPU if there is one")
    if hasattr(module, "RANKS"):
        parser.add_argument("--ranks", type=positive, metavar="N", help=f"default: {module.RANKS}")
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    return parser


def add_common_arguments(parser: argparse.ArgumentParser, target: str) -> None:
    """Add the options that are the same for all; `target` is what --json and --plot name."""
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases, in seconds")
    parser.add_argument("--json", metavar=target, help="write the rows there, too")
    parser.add_argument("--plot", metavar=target, help="draw a picture there, too")


def check_arguments(parser: Parser, args: argparse.Namespace, module: ModuleType) -> None:
    """Exit with 2 and a sentence if the run could not end well, before it begins."""
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device cuda expects a GPU but torch finds none; nvidia-smi shows whether there is "
            "a driver, torch.version.cuda whether this torch is built for one"
        )
    if args.json and (fault := output.fault_of_target(args.json)):
        parser.error(f"--json {fault}")
    if args.plot and not hasattr(module, "plot"):
        parser.error("--plot expects a benchmark that has a picture, and this one has none")
    if args.plot and (fault := output.fault_of_picture(args.plot)):
        parser.error(f"--plot {fault}")
    if not ranks.under_torchrun():
        return
    there = ranks.world_size()
    if not hasattr(module, "RANKS") and there > 1:
        parser.error(f"expects one rank but got torchrun's {there}; start it without torchrun")
    if getattr(args, "ranks", None) not in (None, there):
        parser.error(f"--ranks expects torchrun's {there} but got {args.ranks}; leave it out")


def run(name: str, module: ModuleType, arguments: Sequence[str]) -> int:
    """Run a benchmark, on ranks of its own if it needs some; return the exit code."""
    parser = parser_of(name, module)
    args = parser.parse_args(arguments)
    check_arguments(parser, args, module)
    wanted = (args.ranks or module.RANKS) if hasattr(module, "RANKS") else 1
    if wanted > 1 and not ranks.under_torchrun():
        ranks.register(ranks.stop_children)
        code = ranks.start_ranks("bench", [name, *arguments], wanted)
        return ranks.INTERRUPTED if ranks.stopping() and code else code
    return Run(name, module, args).run()


class Run:
    """The run in this process."""

    def __init__(self, name: str, module: ModuleType, args: argparse.Namespace) -> None:
        self.name = name
        self.module = module
        self.args = args
        self.rows: list[Row] = []
        self.start = time.monotonic()
        # Of the rows and of how the run ends, which another thread decides (Note [interruption]).
        self.lock = threading.Lock()
        self.code: int | None = None

    def __call__(self, row: Row) -> None:
        """Keep one more row."""
        with self.lock:
            self.rows.append(row)
            self.say_progress(row)

    def replace(self, rows: Sequence[Row]) -> None:
        """Keep these rows instead of all before."""
        with self.lock:
            self.rows[:] = rows
            self.say_progress({})

    def say_progress(self, row: Row) -> None:
        """Say on stderr how far the run has come."""
        if ranks.rank() == 0:
            of_what = ", ".join(str(value) for value in row.values() if isinstance(value, str))
            seconds = time.monotonic() - self.start
            text = f"{self.name}: kept {self.count()}, {seconds:.0f} s"
            text += f": {of_what}" if of_what else ""
            print(text[:100], file=sys.stderr, flush=True)

    def run(self) -> int:
        """Measure, and report; return the exit code if this process is alone, else leave."""
        ranks.register(self.interrupt)
        torch.set_num_threads(1)  # one thread a rank
        if ranks.rank() == 0:
            try:
                print(f"{self.name}: {output.describe(self.args.device)}", flush=True)
            except OSError as error:
                output.drop_stdout()
                print(f"cannot print: {error.strerror}; nothing was measured", file=sys.stderr)
                return 1
        failure, code = self.measure()
        with self.lock:
            self.code = self.report(failure) or code
        if not ranks.under_torchrun():
            if dist.is_initialized():
                dist.destroy_process_group()
            return self.code
        if code == 0:
            dist.barrier()  # none takes away what another still needs
            dist.destroy_process_group()
        ranks.leave(self.code, failed=code == 1)

    def measure(self) -> tuple[str | None, int]:
        """Run the benchmark's own part; return why it failed, or None, and the exit code."""
        try:
            self.module.measure(self.args, self)
            return None, 0
        except UsageError as error:
            self.wait_if_interrupted()
            return f"python -m bench {self.name}: {error}", 2
        except Exception as error:
            self.wait_if_interrupted()
            traceback.print_exc()
            return f"{self.name} failed: {type(error).__name__}: {error}".splitlines()[0], 1

    def wait_if_interrupted(self) -> None:
        """Let the other thread end the process, if what failed did so because ranks end."""
        if ranks.under_torchrun():
            time.sleep(0.5)  # the signal may come after what it has done to another rank
        self.lock.acquire()  # for good, if the other thread has it
        self.lock.release()

    def interrupt(self) -> NoReturn:
        """End the process with what is known; by the thread of Note [interruption]."""
        ranks.stop_children()
        if ranks.rank() != 0:
            # The first may be in a collective with this one, and is to hear of the signal first.
            time.sleep(0.3)
            ranks.leave(ranks.INTERRUPTED)
        self.lock.acquire()  # for good: the main thread is to keep nothing more
        if self.code is None:
            self.code = self.report("interrupted", interrupted=True)
        ranks.leave(self.code)

    def report(self, failure: str | None, interrupted: bool = False) -> int:
        """Write and print what is known, the table last; return 0, 1 or 130."""
        if ranks.rank() != 0:
            return 0
        wrote, unwritten = self.write(interrupted)
        lost = bool(unwritten) and bool(self.args.json)
        try:
            if self.rows:
                print(*wrote, "", sep="\n")
                self.module.show(self.rows)
            sys.stdout.flush()
        except OSError as error:
            output.drop_stdout()
            unwritten.append(f"cannot print the table: {error.strerror}")
            lost = True
        except Exception:  # a table of the first few rows may need what comes later
            if failure is None:
                raise
            traceback.print_exc()
            lost = True
        if failure is None and self.rows and hasattr(self.module, "fault"):
            failure = self.module.fault(self.rows)
        if failure is not None:
            print("; ".join([failure, f"kept {self.count()}", *wrote]), file=sys.stderr)
        for sentence in unwritten:
            print(sentence, file=sys.stderr)
        if lost:
            print(json.dumps(self.rows), file=sys.stderr)
        if interrupted:
            return ranks.INTERRUPTED
        return 1 if failure is not None or unwritten else 0

    def count(self) -> str:
        """Return how many rows there are, in words."""
        return f"{len(self.rows)} row{'s' if len(self.rows) != 1 else ''}"

    def write(self, interrupted: bool) -> tuple[list[str], list[str]]:
        """Write what is asked for; return what was written and why other things were not."""
        wrote: list[str] = []
        unwritten: list[str] = []
        if self.args.json:
            title = getattr(self.module, "TITLE", self.name)
            device = self.args.device
            try:
                output.write_json(self.args.json, title, self.rows, device, interrupted=interrupted)
                wrote.append(f"wrote {self.args.json}")
            except OSError as error:
                unwritten.append(f"cannot write {self.args.json}: {error.strerror or error}")
        if self.args.plot and self.rows and not interrupted:
            try:
                self.module.plot(self.rows, self.args.plot)
                wrote.append(f"wrote {self.args.plot}")
            except OSError as error:
                unwritten.append(f"cannot write {self.args.plot}: {error.strerror or error}")
        return wrote, unwritten
