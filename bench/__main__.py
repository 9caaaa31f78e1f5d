"""`python -m bench NAME` runs a benchmark, `all` runs all of them, and no name lists them."""

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
REQUIRED = {"measure", "show"}  # functions of a benchmark


def benchmarks() -> dict[str, str]:
    """Return the first line of each benchmark's docstring, by name.

    It reads the files and imports nothing, so that the list appears at once.
    """
    found = {}
    for file in sorted(PACKAGE.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if functions >= REQUIRED:
            found[file.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def show_list(found: dict[str, str]) -> None:
    """Print the list of benchmarks."""
    width = max(len(name) for name in found)
    print("python -m bench NAME [--quick] [--json FILE] [--plot FILE] [--device cpu]\n")
    for name, line in found.items():
        print(f"{name:<{width}}  {line}")
    print(f"{'all':<{width}}  Run all, one after another; --json and --plot name directories.")
    print("\npython -m bench NAME --help explains the method and the columns.")


def load(name: str) -> ModuleType:
    """Return a benchmark's module."""
    return importlib.import_module(f"bench.{name}")


def run_all(found: dict[str, str], arguments: Sequence[str]) -> int:
    """Run each benchmark in its own process, even after failures; return the worst exit code.

    A benchmark that lacks a package fails, too.
    """
    from bench.harness import options, output, ranks

    parser = options.Parser(prog="python -m bench all", description="Run all benchmarks.")
    options.add_common_arguments(parser, "DIR")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="run only benchmarks of this device"
    )
    args = parser.parse_args(arguments)
    for option in ("json", "plot"):
        directory = getattr(args, option)
        if directory and not Path(directory).is_dir():
            parser.error(f"--{option} needs a directory and got {directory}; make it first")
    if args.plot and (fault := output.fault_of_picture(os.path.join(args.plot, "all.png"))):
        parser.error(f"--plot {fault}")
    ranks.register(ranks.stop_children)
    worst = 0
    for name in found:
        try:
            module = load(name)
        except ImportError as error:
            print(f"{name}: not run: {error}\n", file=sys.stderr, flush=True)
            worst = max(worst, 1)
            continue
        if args.device and args.device not in getattr(module, "DEVICES", ("cpu", "cuda")):
            print(f"{name}: not run, since it cannot use {args.device}\n", flush=True)
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
    """Return the command by which `all` runs a benchmark, on `count` ranks if given."""
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
    """Run one benchmark, or all; return the exit code."""
    found = benchmarks()
    if not arguments or arguments[0] in ("-h", "--help"):
        show_list(found)
        return 0
    name = arguments[0]
    # These handlers are for the import of torch; `ranks.register` replaces them later. They end the
    # process themselves, since the import might swallow an exception.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(130))
    if name == "all":
        return run_all(found, arguments[1:])
    if name not in found:
        names = ", ".join(found)
        print(
            f"python -m bench: there is no benchmark {name!r}; choose one of {names}",
            file=sys.stderr,
        )
        return 2
    from bench.harness import runner

    return runner.run(name, load(name), arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
