"""What happens when something goes wrong, after how long, and what does the message say?

Each fault is provoked on two ranks of this host, in new processes, with fsdp_ext ("ours") and with
FSDP2 over gloo. "what" is the worst outcome of a rank:

  right          the parameters are those of an unsharded model that trained on all ranks' batches
  raises         an exception, whose first line is the message
  crashes        the process was ended by a signal
  hangs          the process did not end by itself, and was ended after 20 s
  wrong numbers  nothing was said, and the parameters differ from those of the unsharded model

"s" is the time from the fault until the last rank stopped; it is left out where everything is
right. The process group has a timeout of 5 s, instead of 30 minutes, to make the run short. A rank
that is killed on purpose does not count. The run fails if "ours" has wrong numbers, hangs or
crashes, except for faults that are known to be open, which are listed below the tables.

The faults are functions in bench/fault_cases/. FSDP_BENCH_SHOW=1 shows what their ranks print.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.fault_cases import breaks, peers, wrong_numbers
from bench.fault_cases.case import FSDP2, OURS, Fault
from bench.fault_cases.launch import BAD, Launcher
from bench.harness.options import UsageError
from bench.harness.output import print_table
from bench.harness.runner import Keep

DEVICES = ("cpu",)
FAULTS: list[Fault] = [*wrong_numbers.FAULTS, *breaks.FAULTS, *peers.FAULTS]
PRINTED = 110  # characters of a message in the table; the JSON has all of them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --only."""
    parser.add_argument("--only", metavar="TEXT", help="only faults whose names contain this text")


def chosen(args: argparse.Namespace) -> list[Fault]:
    """Return the faults that the options ask for.

    Raises:
        UsageError: if there is none.
    """
    found = [
        fault
        for fault in FAULTS
        if (fault.quick or not args.quick) and (args.only or "") in fault.name
    ]
    if not found:
        names = "; ".join(fault.name for fault in FAULTS)
        raise UsageError(f"--only {args.only!r} is in no fault's name; there are: {names}")
    return found


def measure(args: argparse.Namespace, keep: Keep) -> None:
    """Provoke each fault with each system."""
    faults = chosen(args)
    launcher = Launcher()
    for fault in faults:
        for transport in fault.transports:
            keep(launcher.run(fault, OURS, transport))
        if not fault.not_fsdp2:
            keep(launcher.run(fault, FSDP2, "gloo"))


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table for each kind of fault."""
    header = ["fault", "system", "transport", "what", "s", "message"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        table = []
        before = ""
        for row in (row for row in rows if row["kind"] == kind):
            name, before = ("" if row["fault"] == before else row["fault"]), row["fault"]
            seconds = "" if row["what"] == "right" else f"{row['seconds']:.1f}"
            message = row["message"]
            message = message if len(message) <= PRINTED else message[: PRINTED - 3] + "..."
            table.append([name, row["system"], row["transport"], row["what"], seconds, message])
        print(f"{kind}:")
        print_table(header, table, words_last=True)
        print()
    for name, why in {row["fault"]: row["open"] for row in rows if row["open"]}.items():
        print(f"open: {name}: {why}")
    for system in (OURS, FSDP2):
        found = [row["what"] for row in rows if row["system"] == system]
        counts = ", ".join(f"{found.count(what)} {what}" for what in dict.fromkeys(found))
        print(f"{system}: {counts}")


def fault(rows: list[dict[str, Any]]) -> str | None:
    """Return why the run failed: ours had wrong numbers, hung or crashed."""
    bad = [row for row in rows if row["system"] == OURS and row["what"] in BAD and not row["open"]]
    if not bad:
        return None
    first = bad[0]
    return f"ours: {first['fault']} ({first['transport']}): {first['what']}: {first['message']}"
