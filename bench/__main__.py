"""`python -m bench NAME [options]` runs a benchmark, `all` all of them; without a name: a list."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent
WHAT_ONE_HAS = {"measure", "show"}


def benchmarks() -> dict[str, str]:
    """Return the first line of each benchmark's docstring by name.

    Nothing is imported for it, so that a list takes no time.
    """
    found = {}
    for file in sorted(PACKAGE.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if functions >= WHAT_ONE_HAS:
            found[file.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def show_list(found: dict[str, str]) -> None:
    """Print what there is to run."""
    width = max(len(name) for name in found)
    print("python -m bench NAME [--quick] [--json FILE] [--plot FILE] [--device cpu]\n")
    for name, line in found.items():
        print(f"{name:<{width}}  {line}")
    print(f"{'all':<{width}}  One after another; --json and --plot name directories.")
    print("\npython -m bench NAME --help says how it measures, and what its columns mean.")


def load(name: str) -> ModuleType:
    """Return a benchmark's module."""
    return importlib.import_module(f"bench.{name}")


def run_all(found: dict[str, str], arguments: Sequence[str]) -> int:
    """Run each in a process of its own, whatever becomes of the others; return the worst code."""
    from bench.harness import options, output, ranks

    parser = options.Parser(prog="python -m bench all", description="Run all benchmarks.")
    options.add_common_arguments(parser, "DIR")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="only those that can run there")
    args = parser.parse_args(arguments)
    for option in ("json", "plot"):
        directory = getattr(args, option)
        if directory and not Path(directory).is_dir():
            parser.error(f"--{option} expects a directory but {directory} is none; make it first")
    if args.plot and (fault := output.fault_of_picture(os.path.join(args.plot, "all.png"))):
        parser.error(f"--plot {fault}")
    ranks.register(ranks.stop_children)
    worst = 0
    for name in found:
        module = load(name)
        if args.device and args.device not in getattr(module, "DEVICES", ("cpu", "cuda")):
            print(f"{name}: not run: not a benchmark of {args.device}\n", flush=True)
            continue
        for count in getattr(module, "RANKS_OF_ALL", (None,)):
            code = ranks.Child(command_of(name, module, args, count)).wait()
            if ranks.stopping():
                return ranks.INTERRUPTED
            worst = max(worst, abs(code))
            print(flush=True)
    return worst


def command_of(
    name: str, module: ModuleType, args: argparse.Namespace, count: int | None
) -> list[str]:
    """Return how `all` runs a benchmark, on `count` ranks if that is said."""
    command = [sys.executable, "-m", "bench", name]
    stem = name
    if count is not None:
        command += ["--ranks", str(count)]
        stem += f"-{count}ranks" if count > 1 else ""
    if args.quick:
        command.append("--quick")
    if args.device:
        command += ["--device", args.device]
    if args.json:
        command += ["--json", str(Path(args.json) / f"{stem}.json")]
    if args.plot and hasattr(module, "plot"):
        command += ["--plot", str(Path(args.plot) / f"{stem}.png")]
    return command


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for; return the exit code."""
    found = benchmarks()
    if not arguments or arguments[0] in ("-h", "--help"):
        show_list(found)
        return 0
    name = arguments[0]
    # While torch is imported; from then on `ranks.register` has it. An exception may be swallowed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(130))
    if name == "all":
        return run_all(found, arguments[1:])
    if name not in found:
        names = ", ".join(found)
        print(f"python -m bench: there is no benchmark {name!r}, only {names}", file=sys.stderr)
        return 2
    from bench.harness import runner

    return runner.run(name, load(name), arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
