"""Benchmarks: one file for one question, all on one harness. `python -m bench` lists them.

A benchmark is a module of this package with

    measure(args, keep)     measures, and calls keep(row) as soon as a row (a dict) is known
    show(rows)              prints the tables; rows may be the first few alone

and, where there is something to say,

    add_arguments(parser)   options of its own
    plot(rows, path)        draws a picture (`bench.harness.output.picture`)
    fault(rows)             a sentence that says why the run has failed, or None
    RANKS                   how many ranks it runs on by default; --ranks asks for others
    RANKS_OF_ALL            on how many ranks `all` runs it, one after another
    DEVICES                 what --device may be, by default ("cpu", "cuda")
    TITLE                   what its JSON is called, by default the module's name

Its docstring's first line is the question; the rest is the method and what the columns mean.
Everything else is shared: `harness` (options, what is kept, how a run ends), `ranks` (starting and
ending them), `timing` (turns, warm-up, caches, spread), `output` (tables, JSON, pictures).
"""

import sys
from pathlib import Path

# `python -m` puts the checkout first, whose fsdp_ext may be unbuilt, or built for another torch.
# It goes behind what is installed, as it is for scripts in other directories.
if sys.path[0] in ("", str(Path(__file__).resolve().parents[1])):
    sys.path.append(sys.path.pop(0))
