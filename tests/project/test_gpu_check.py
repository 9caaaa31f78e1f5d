"""`make gpu-check` keeps its results even if a step fails or is late."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.tools import TOOLS, load_tool


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_tool(TOOLS / "gpu_check.py")
    machine = {"device": "Some GPU 1", "capability": "9.0", "torch": "", "nccl": "", "date": "d"}
    monkeypatch.setattr(module, "describe_machine", lambda: machine)
    return module


def _check(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, steps: list[Any], *options: str
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(tool, "steps", lambda capability, part: steps)
    monkeypatch.setattr(
        sys, "argv", ["gpu_check.py", "--part", "tests", "--out", str(out), *options]
    )
    monkeypatch.setenv("OUT", "")  # main() sets it
    earlier = set(out.glob("*.json"))
    code: int = tool.main()
    (path,) = set(out.glob("*.json")) - earlier
    return code, json.loads(path.read_text())["steps"]


@pytest.mark.exhaustive
def test_a_step_that_fails_or_hangs_does_not_stop_the_others(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def step(name: str, code: str, limit: int = 60) -> Any:
        return gpu_check.Step(name, [sys.executable, "-c", code], limit, {})

    code, results = _check(
        gpu_check,
        monkeypatch,
        tmp_path,
        [
            step("fine", "print('3 passed in 1 s')"),
            step("fails", "import sys; print('why'); sys.exit(3)"),
            step("hangs", "import time; print('begun', flush=True); time.sleep(600)", limit=2),
            gpu_check.Step("missing", ["/nowhere/tool"], 60, {}),
            step("last", "print('done')"),
        ],
    )
    assert code == 1
    assert results["fine"]["outcome"] == "ok"
    assert results["fine"]["summary"] == "3 passed in 1 s"
    assert results["fails"]["outcome"] == "failed with exit code 3"
    assert results["fails"]["output"] == "why\n"
    assert results["hangs"]["outcome"] == "did not end within 2 s"
    assert "begun" in results["hangs"]["output"]
    assert results["missing"]["outcome"].startswith("could not start")
    assert results["last"]["outcome"] == "ok"
    log = (tmp_path / "some-gpu-1-tests-d.log").read_text()
    assert "=== fails: failed with exit code 3\nwhy" in log


def test_rows_of_benchmarks_are_kept(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [{"system": "ours", "us": 1}, {"system": "FSDP2", "error": "none"}]
    program = f"import json, sys; json.dump({{'rows': {rows}}}, open(sys.argv[2], 'w'))"
    bench = gpu_check.Step("bench", [sys.executable, "-c", program], 60, {}, json=True)
    code, results = _check(gpu_check, monkeypatch, tmp_path, [bench])
    assert code == 0
    assert results["bench"]["rows"] == rows
    assert results["bench"]["summary"] == "2 rows, errors in FSDP2"


def test_nothing_begins_that_cannot_end_in_time(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    step = gpu_check.Step("late", [sys.executable, "-c", "raise SystemExit(1)"], 60, {})
    code, results = _check(gpu_check, monkeypatch, tmp_path, [step], "--minutes", "0.1")
    assert code == gpu_check.EXIT_OF_REST
    assert results["late"]["outcome"] == "not run: no time was left"


def test_a_second_call_runs_what_has_not_begun(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    def step(name: str, code: str = "print('1 passed')") -> Any:
        return gpu_check.Step(name, [sys.executable, "-c", code], 60, {})

    trial = gpu_check.Step("trial", ["true"], 60, {}, of_machine=True)
    long = gpu_check.Step("long", ["true"], 600, {}, needs="trial")
    steps = [step("build"), trial, step("fails", "raise SystemExit(1)"), long]
    _, results = _check(gpu_check, monkeypatch, tmp_path, steps, "--minutes", "2")
    assert [result["outcome"] for result in results.values()] == [
        "ok",
        "ok",
        "failed with exit code 1",
        "not run: no time was left",
    ]
    assert "for another call, with --after these results: long" in capsys.readouterr().out
    (tmp_path / "some-gpu-1-tests-d-2.log").write_text("of a call that ended in its first step")
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    earlier = ["--after", str(tmp_path / "some-gpu-1-tests-d.json"), "--minutes", "11"]
    code, results = _check(gpu_check, monkeypatch, tmp_path, steps, *earlier)
    assert code == 0
    assert list(results) == ["build", "trial", "long"]  # the machine may be another one
    assert {path: path.read_bytes() for path in kept} == kept
    assert (tmp_path / "some-gpu-1-tests-d-3.json").exists()


def test_a_later_call_tries_again_what_its_steps_need(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def step(name: str, code: str = "raise SystemExit(1)", **options: Any) -> Any:
        return gpu_check.Step(name, [sys.executable, "-c", code], 60, {}, **options)

    trial = step(gpu_check.TRIAL, of_machine=True)
    steps = [step("build", "pass"), trial, step("tests", needs=trial.name), step("last", "pass")]
    first = tmp_path / "first"
    _check(gpu_check, monkeypatch, first, steps)
    earlier = ["--after", str(first / "some-gpu-1-tests-d.json")]
    for options in (earlier, ["--only", "build", "tests"]):
        code, results = _check(gpu_check, monkeypatch, tmp_path / "second", steps, *options)
        assert code == gpu_check.EXIT_OF_MACHINE
        assert list(results) == ["build", gpu_check.TRIAL, "tests"]


def test_one_call_after_another_runs_every_step_by_what_it_says(gpu_check: ModuleType) -> None:
    steps = gpu_check.steps("9.0", gpu_check.ALL)
    names = [step.name for step in steps]
    assert names[:4] == ["build", "environment", gpu_check.TRIAL, "describe"]
    assert len(set(names)) == len(names)
    assert set(names) == {s.name for part in NAMES for s in gpu_check.steps("9.0", part)}


NAMES = ("tests", "bench", "more")
PARTS = pytest.mark.parametrize("part", NAMES)


@PARTS
def test_the_limits_of_a_part_add_up_to_less_than_nine_minutes(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(gpu_check, "find_wheel", lambda: Path("some.whl"))
    steps = gpu_check.steps("9.0", part)
    assert steps[0].name == "build"
    assert sum(step.limit for step in steps) + gpu_check.GRACE_S <= 9 * 60


@PARTS
def test_steps_have_names_of_their_own_and_need_only_earlier_ones(
    gpu_check: ModuleType, part: str
) -> None:
    steps = gpu_check.steps("9.0", part)
    assert len({step.name for step in steps}) == len(steps)
    for number, step in enumerate(steps):
        assert step.needs in {"", *(before.name for before in steps[:number] if before.of_machine)}


@PARTS
def test_steps_of_several_ranks_need_the_trial_of_two(gpu_check: ModuleType, part: str) -> None:
    ours = [step for step in gpu_check.steps("9.0", part) if not step.of_machine]
    several = [step for step in ours if step.shares or {*gpu_check.ENDING} & {*step.command}]
    assert all(step.needs == gpu_check.TRIAL for step in several), several


def test_collectives_have_a_rank_on_each_of_several_devices(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for devices, ranks, needs in ((1, "2", gpu_check.TRIAL), (8, "8", "")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda it=devices: it)
        collectives = gpu_check.steps("9.0", "more")[-1]
        assert collectives.command[-2:] == ["--ranks", ranks]
        assert collectives.needs == needs
        assert collectives.shares == (needs != "")


def test_no_step_of_ours_is_in_two_parts(gpu_check: ModuleType) -> None:
    assert gpu_check.PARTS == NAMES
    commands = [
        (*step.command, *step.environment.items())
        for part in NAMES
        for step in gpu_check.steps("9.0", part)
        if step.name != "build" and not step.of_machine
    ]
    assert len(set(commands)) == len(commands)


def test_every_file_of_gpu_tests_is_in_one_step(gpu_check: ModuleType) -> None:
    steps = {step.name: step.command for step in gpu_check.steps("9.0", "tests")}
    files = {
        name: [w for w in command if w.startswith("tests/gpu/")] for name, command in steps.items()
    }
    assert "tests/gpu" in steps["tests"]
    left_out = [
        steps["tests"][at + 1] for at, word in enumerate(steps["tests"]) if word == "--ignore"
    ]
    assert files["tests"] == left_out
    assert sorted(left_out) == sorted(files["timed tests"] + files["tests that end processes"])


def test_results_of_the_emulated_gpu_are_kept_from_those_of_devices(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUT", raising=False)
    folders = [gpu_check.default_folder(name) for name in ("Emulated GPU", "NVIDIA H100")]
    assert [folder.parts[-2:] for folder in folders] == [
        ("build", "emulated_gpu_check"),
        ("bench", "results"),
    ]


def test_a_slow_machine_may_have_other_limits_and_measure_little(gpu_check: ModuleType) -> None:
    step = gpu_check.bench("pack", 50)
    slow = gpu_check.changed(step, 3, quick=True)
    assert slow.limit == 150
    assert slow.command == [*step.command, "--quick"]
    assert gpu_check.changed(slow, 1, quick=True).command == slow.command


def test_timed_tests_run_alone_on_the_gpu(gpu_check: ModuleType) -> None:
    steps = {step.name: step.command for step in gpu_check.steps("9.0", "tests")}
    assert "-n" not in steps["timed tests"]
    assert set(gpu_check.TIMED) <= set(steps["timed tests"])


def test_the_table_notes_that_tests_run_one_at_a_time(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for found, noted in ((object(), False), (None, True)):
        monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name, it=found: it)
        (tests,) = (step for step in gpu_check.steps("9.0", "tests") if step.name == "tests")
        assert ("pytest-xdist is missing" in tests.note) == noted
        assert ("-n" in tests.command) != noted


def test_spare_time_goes_to_the_steps_that_may_take_it(gpu_check: ModuleType) -> None:
    def step(limit: int, takes_spare: bool) -> Any:
        return gpu_check.Step("some", [], limit, {}, takes_spare=takes_spare)

    later = [step(100, True), step(50, False)]
    assert gpu_check.limit_of(step(60, False), later, 400.0) == 60
    assert gpu_check.limit_of(step(60, True), later, 400.0) == 250 - gpu_check.GRACE_S
    assert gpu_check.limit_of(step(60, True), later, 200.0) == 60
    assert gpu_check.limit_of(step(60, True), later, 30.0) == 30


def test_failures_of_the_machine_are_told_from_those_of_fsdp_ext(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    def step(name: str, code: str, **options: Any) -> Any:
        return gpu_check.Step(name, [sys.executable, "-c", code], 60, {}, **options)

    unsupported = "print('========= COMPUTE-SANITIZER\\n========= Error: Device not supported')"
    trial = step("sanitizer", f"{unsupported}; raise SystemExit(9)", of_machine=True)
    needy = step("memcheck", "raise SystemExit(5)", needs="sanitizer")
    fine = step("fine", "print('3 passed')", note="one at a time")
    code, results = _check(gpu_check, monkeypatch, tmp_path, [trial, needy, fine])
    assert code == gpu_check.EXIT_OF_MACHINE
    assert results["sanitizer"]["summary"] == "Error: Device not supported"
    says = "not run: sanitizer does not work on this machine: Error: Device not supported"
    assert results["memcheck"]["outcome"] == says
    table = capsys.readouterr().out
    assert "3 passed (one at a time)" in table
    assert "failures of this machine, not of fsdp_ext: sanitizer, memcheck" in table

    ignored = step("memcheck", unsupported)
    code, results = _check(gpu_check, monkeypatch, tmp_path, [trial, ignored])
    assert code == 1
    assert results["memcheck"]["outcome"] == "failed, with exit code 0"

    missing = gpu_check.Step("sanitizer", ["/nowhere/tool"], 60, {}, of_machine=True)
    code, results = _check(gpu_check, monkeypatch, tmp_path, [missing, needy])
    assert code == gpu_check.EXIT_OF_MACHINE
    assert "could not start: " in results["memcheck"]["outcome"]


def test_the_emulated_gpu_does_not_measure_sizes_of_a_gpu(gpu_check: ModuleType) -> None:
    left_out = {
        step.name
        for part in gpu_check.PARTS
        for step in gpu_check.steps("9.0", part)
        if gpu_check.why_not(step, 500.0, {}, "Emulated GPU") is not None
    }
    assert left_out == {"host_overhead", "optimizer", "overlap", "checkpoint"}
    [overlap] = [step for step in gpu_check.steps("9.0", "more") if step.name == "overlap"]
    result = gpu_check.why_not(overlap, 500.0, {}, "Emulated GPU")
    assert "not run on the emulated GPU" in result["outcome"]
    assert gpu_check.why_not(overlap, 500.0, {}, "NVIDIA H100") is None
    assert gpu_check.show({"overlap": result}) == 0


def test_tools_of_cuda_are_found_outside_of_the_path(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho found 1 passed\n")
    tool.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    commands = {step.name: step.command for step in gpu_check.steps("9.0", "tests")}
    assert Path(commands["memcheck"][0]).name == "compute-sanitizer"
    by_name = gpu_check.Step("by name", ["compute-sanitizer"], 60, {})
    code, results = _check(gpu_check, monkeypatch, tmp_path, [by_name])
    assert code == 0
    assert "1 passed" in results["by name"]["summary"]


def test_processes_that_share_the_card_use_a_service_that_ends_with_them(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = tmp_path / "said"
    service = tmp_path / "bin" / "nvidia-cuda-mps-control"
    service.parent.mkdir()
    service.write_text(f'#!/bin/sh\necho "$1" "$CUDA_MPS_PIPE_DIRECTORY" >> {said}\n')
    with service.open("a") as file:
        file.write(f'[ "$1" = -d ] || cat >> {said}\n')
    service.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    command = ["/bin/sh", "-c", f'echo "${{CUDA_MPS_PIPE_DIRECTORY:-alone}}" >> {said}']
    steps = [gpu_check.Step("alone", command, 60, {})]
    steps += [gpu_check.Step("shares", command, 60, {}, shares=True)]
    assert _check(gpu_check, monkeypatch, tmp_path / "out", steps)[0] == 0
    alone, start, used, stop, quit_ = said.read_text().splitlines()
    assert alone == "alone"
    assert start == f"-d {used}"
    assert stop.strip() == used
    assert quit_.startswith("quit")


@pytest.mark.exhaustive
def test_the_trial_of_two_ranks_works_on_the_host(
    gpu_check: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = load_tool(TOOLS / "gpu_environment.py")
    assert environment.try_ranks(2, "cpu")
    said = capfd.readouterr().out
    assert "2 ranks can share this GPU" in said
    times = gpu_check.MEASURED.findall(said)
    assert len(times) == 3  # of each rank, and then the longest
    assert float(times[-1]) == max(map(float, times)) > 0
    assert not environment.try_ranks(2, "cpu", limit_s=0.0)
    said = capfd.readouterr().out
    assert "rank 0 had not ended after 0 s" in said
    assert said.splitlines()[-1].startswith("2 ranks cannot share this GPU")


def test_a_wheel_replaces_the_build(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel = tmp_path / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("fsdp_ext/_C.cpython-312-x86_64-linux-gnu.so", "compiled")
        archive.writestr("fsdp_ext/_build_info.py", "BUILD_KIND = 'CUDA'")
        archive.writestr("fsdp_ext/__init__.py", "not taken")
    monkeypatch.setenv("FSDP_WHEEL", str(wheel))
    (build, *_) = gpu_check.steps("9.0", "bench")
    assert build.command[2:] == ["--unpack", str(wheel)]
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    gpu_check.unpack(wheel)
    written = {path.name for path in (tmp_path / "fsdp_ext").iterdir()}
    assert written == {"_C.cpython-312-x86_64-linux-gnu.so", "_build_info.py"}


@PARTS
def test_every_step_is_of_something_that_is_there(gpu_check: ModuleType, part: str) -> None:
    for step in gpu_check.steps("9.0", part):
        for word in step.command:
            if word.endswith(".py"):
                assert (TOOLS.parent / word).exists(), word
        if step.command[1:3] == ["-m", "bench"]:
            assert (TOOLS.parent / "bench" / f"{step.command[3]}.py").exists(), step.name
            assert step.json


@pytest.mark.exhaustive
def test_a_benchmark_that_is_late_keeps_its_rows(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = """
import pathlib, sys, time, types
from bench.harness import runner
endless = types.ModuleType("endless", "Never ends.")
def measure(args, keep):
    keep({"known": 1})
    pathlib.Path("KEPT").touch()
    time.sleep(600)
endless.measure, endless.show = measure, print
sys.exit(runner.run("endless", endless, sys.argv[1:]))
"""
    kept = tmp_path / "kept"

    class Late(subprocess.Popen[bytes]):
        """A process that has reached its limit as soon as it has kept a row."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout != late.limit:
                return super().wait(timeout)
            while self.poll() is None and not kept.exists():
                time.sleep(0.05)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(gpu_check.subprocess, "Popen", Late)
    command = [sys.executable, "-c", program.replace("KEPT", str(kept))]
    late = gpu_check.Step("late", command, 12, {}, json=True)
    _, results = _check(gpu_check, monkeypatch, tmp_path, [late])
    assert results["late"]["outcome"] == "did not end within 12 s"
    assert "interrupted; kept 1 row" in results["late"]["output"]
    assert results["late"]["rows"] == [{"known": 1}]


def test_the_wheel_is_of_the_installed_torch(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    minor = "".join(torch.__version__.split(".")[:2])
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    (tmp_path / "dist").mkdir()
    names = [
        f"fsdp_ext-0.1.0-{build}-{python}-{python}-manylinux_2_34_x86_64.whl"
        for build in (f"{minor}cpu", f"{minor}cu130", "999cu130")
    ]
    for name in (names[0], names[2]):
        (tmp_path / "dist" / name).touch()
    assert gpu_check.find_wheel() is None
    (tmp_path / "dist" / names[1]).touch()
    assert gpu_check.find_wheel() == tmp_path / "dist" / names[1]
