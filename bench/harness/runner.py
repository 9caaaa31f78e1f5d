"""Runs one benchmark: reads its options, keeps its rows, and prints and writes them at the end.

A row is kept as soon as it is known. However the run ends (normally, by Ctrl-C, by an error, with a
full disk), the rows so far are printed and written. Of several ranks only rank 0 prints and writes.
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

from bench.harness import output, ranks
from bench.harness.options import (
    UsageError,
    check_arguments,
    count_of_hosts,
    count_of_ranks,
    parser_of,
)

Row = dict[str, Any]


class Keep(Protocol):
    """Keeps rows of a benchmark."""

    def __call__(self, row: Row) -> None:
        """Keep one more row."""

    def replace(self, rows: Sequence[Row]) -> None:
        """Keep these rows instead of all before, since more repeats have improved them."""


def run(name: str, module: ModuleType, arguments: Sequence[str]) -> int:
    """Run a benchmark, and start ranks for it if it needs several; return the exit code."""
    parser = parser_of(name, module)
    args = parser.parse_args(arguments)
    check_arguments(parser, args, module)
    wanted = count_of_ranks(args, module)
    if wanted > 1 and not ranks.under_torchrun():
        ranks.register(ranks.stop_children)
        several = count_of_hosts(args) > 1
        start = ranks.start_ranks_on_hosts if several else ranks.start_ranks
        code = start("bench", [name, *arguments], wanted)
        return ranks.INTERRUPTED if ranks.stopping() and code else code
    return Run(name, module, args).run()


class Run:
    """One run of a benchmark in this process."""

    def __init__(self, name: str, module: ModuleType, args: argparse.Namespace) -> None:
        self.name = name
        self.module = module
        self.args = args
        self.rows: list[Row] = []
        self.start = time.monotonic()
        # Guards the rows and the exit code: another thread may end the run (Note [interruption]).
        self.lock = threading.Lock()
        self.code: int | None = None

    def __call__(self, row: Row) -> None:
        """Keep one more row."""
        with self.lock:
            self.rows.append(row)
            self.say_progress(row)

    def replace(self, rows: Sequence[Row]) -> None:
        """Keep these rows instead of all earlier ones."""
        with self.lock:
            self.rows[:] = rows
            self.say_progress({})

    def say_progress(self, row: Row) -> None:
        """Print the progress of the run on stderr."""
        if ranks.rank() == 0:
            of_what = ", ".join(str(value) for value in row.values() if isinstance(value, str))
            seconds = time.monotonic() - self.start
            text = f"{self.name}: kept {self.count()}, {seconds:.0f} s"
            text += f": {of_what}" if of_what else ""
            print(text[:100], file=sys.stderr, flush=True)

    def run(self) -> int:
        """Measure and report; return the exit code, or end the process if it is one of several."""
        ranks.register(self.interrupt)
        torch.set_num_threads(1)  # one thread a rank
        if ranks.rank() == 0:
            try:
                print(f"{self.name}: {output.describe(self.args.device)}", flush=True)
            except OSError as error:
                output.drop_stdout()
                print(f"cannot print: {error.strerror}; measured nothing", file=sys.stderr)
                return 1
        failure, code = self.measure()
        with self.lock:
            reported = self.report(failure)
            self.code = code or reported
        if not ranks.under_torchrun():
            if dist.is_initialized():
                dist.destroy_process_group()
            return self.code
        if code == 0:
            dist.barrier()  # no rank leaves while another still needs its connections
            dist.destroy_process_group()
        ranks.leave(self.code, failed=code == 1)

    def measure(self) -> tuple[str | None, int]:
        """Run the benchmark's `measure`; return why it failed, or None, and the exit code."""
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
        """Let the other thread end the process, if the failure is a consequence of a signal."""
        if ranks.under_torchrun():
            time.sleep(0.5)  # another rank may have got the signal first, and failed this one
        self.lock.acquire()  # does not return if the other thread has it
        self.lock.release()

    def interrupt(self) -> NoReturn:
        """Report the rows so far and end the process; runs on the thread of Note [interruption]."""
        ranks.stop_children()
        if ranks.rank() != 0:
            # Rank 0 may be in a collective with this rank. It has to get the signal before the
            # collective fails.
            time.sleep(0.3)
            ranks.leave(ranks.INTERRUPTED)
        self.lock.acquire()  # never released, so that the main thread keeps no more rows
        if self.code is None:
            self.code = self.report("interrupted", interrupted=True)
        ranks.leave(self.code)

    def report(self, failure: str | None, interrupted: bool = False) -> int:
        """Write the files and print the tables, which come last; return 0, 1 or 130."""
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
        except Exception:  # the table of an interrupted run may need rows that are missing
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
        """Return the number of rows, in words."""
        return f"{len(self.rows)} row{'s' if len(self.rows) != 1 else ''}"

    def write(self, interrupted: bool) -> tuple[list[str], list[str]]:
        """Write the files; return sentences on the written files and on the failures."""
        wrote: list[str] = []
        unwritten: list[str] = []
        if self.args.json:
            title = getattr(self.module, "TITLE", self.name)
            if count_of_hosts(self.args) > 1:
                title = f"{self.name} on {self.args.hosts} hosts"
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
