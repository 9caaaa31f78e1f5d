"""Benchmarks, one file for each question. `python -m bench` lists them.

A benchmark is a module directly in this package. It has

    measure(args, keep)     measures, and calls keep(row) as soon as a row (a dict) is known
    show(rows)              prints the tables; an interrupted run has only the first rows

and it may have

    add_arguments(parser)   options of its own
    plot(rows, path)        draws a picture (`bench.harness.output.picture`)
    fault(rows)             returns a sentence that says why the run has failed, or None
    RANKS                   the default number of ranks; --ranks asks for another one
    RANKS_OF_ALL            the numbers of ranks on which `all` runs it, one after another
    HOSTS                   that its ranks may be on two hosts: --hosts 2 and --rate
    DEVICES                 the choices of --device, by default ("cpu", "cuda")
    TITLE                   the benchmark's name in its JSON, by default the module's name

The first line of its docstring is the question. The rest explains the method and the columns.
`bench.harness` has the parts that all benchmarks share, `bench.models` the models and systems that
they measure. A benchmark may import both, and fsdp_ext, but no other benchmark. Start with `pack`.
"""

import sys
from pathlib import Path

# `python -m` puts the checkout first on the path, and its fsdp_ext may be unbuilt, or built for
# another torch. So the checkout goes to the end, behind the installed packages.
if sys.path[0] in ("", str(Path(__file__).resolve().parents[1])):
    sys.path.append(sys.path.pop(0))
