"""The example learns, resumes on any number of ranks, and explains wrong options."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launcher import run_ranks
from support.matrix import exhaustive
from support.parity import device

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_gpt  # noqa: E402  (its folder is on the path from here on)
from corpus import UsageError, load_corpus  # noqa: E402
from options import parse_arguments  # noqa: E402
from results import chart  # noqa: E402

TINY = ["--dim", "32", "--layers", "2", "--heads", "2", "--context", "16", "--batch", "12"]
STEPS = 6


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


def write_text(path: Path) -> Path:
    """Write a corpus with an order to learn, which byte frequencies alone cannot predict."""
    path.write_text("".join(f"line {i % 10} of some text that repeats\n" for i in range(400)))
    return path


def run_script(arguments: list[str], ranks: int, expect: int = 0) -> str:
    """Run the example as a user does. Return what it printed, errors included."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "train_gpt.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == expect, done.stdout
    return done.stdout


@pytest.mark.exhaustive
def test_it_learns_saves_plots_and_goes_on_with_one_rank_less(text: Path, tmp_path: Path) -> None:
    checkpoint, figures, picture = tmp_path / "run", tmp_path / "out.json", tmp_path / "loss.png"
    shared = [*TINY, "--data", str(text), "--checkpoint", str(checkpoint), "--eval-batches", "2"]
    outputs = [*shared, "--json", str(figures), "--lr", "0.01", "--sample", "8"]
    printed = run_script([*outputs, "--steps", "40", "--plot", str(picture), "--profile"], ranks=2)
    result = json.loads(figures.read_text())

    assert result["world_size"] == 2
    assert result["steps"] == 40
    assert result["validation_loss"] < result["byte_frequency_loss"] - 0.5
    assert math.isfinite(result["tokens_per_second"])
    rank = result["memory_per_rank"][0]
    assert 0 < rank["parameters"] < 4 * result["parameters"] * 0.6  # a half, and padding
    assert rank["gradients"] == rank["parameters"]
    assert rank["optimizer"] > 2 * rank["parameters"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    for part in ("validation loss", "byte frequencies alone", "tokens/s", "--- sample ---"):
        assert part in printed
    assert "8 steps on rank 0 of 2 over shared_memory" in printed  # what --profile prints
    assert "training loss in nats/byte" in printed
    assert printed.index("training loss in nats/byte") < printed.index("What to try next:")
    assert "nan tokens/s" not in printed  # after the first step, whose time does not count

    printed = run_script([*outputs, "--steps", "44", "--resume"], ranks=1)
    resumed = json.loads(figures.read_text())
    assert f"resumed from {checkpoint} at step 40" in printed
    assert resumed["world_size"] == 1
    assert resumed["curve"][:40] == result["curve"]
    assert resumed["curve"][-1][0] == 44
    assert resumed["validation_loss"] < result["validation_loss"] + 0.2


def test_of_a_large_file_only_the_bytes_of_the_corpus_are_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    corpus = load_corpus(tmp_path, context=16, max_bytes=4096)
    assert len(corpus.train) + len(corpus.validation) == 4096


def test_a_loss_curve_has_a_line_for_each_level_and_names_its_ends() -> None:
    curve = [(step, 6.0 - step) for step in range(1, 5)]
    *levels, axis, steps = chart(curve, height=4).splitlines()
    assert levels == [
        *("   5.00 |*", "   4.00 | *", "        |  *", "   2.00 |   *"),
    ]
    assert axis == "        +----"
    assert steps.split() == ["1", "4"]
    assert chart([(7, 2.5)]).splitlines() == ["   2.50 |*", "        +-", "         7"]


def test_a_loss_curve_leaves_out_what_is_not_finite() -> None:
    curve = [(1, 5.0), (2, math.nan), (3, 4.0), (4, math.inf)]
    *levels, _, _ = chart(curve, height=2).splitlines()
    assert levels == ["   5.00 |*", "   4.00 |  *"]
    *levels, _, _ = chart([(1, 5.0), (2, math.nan)]).splitlines()
    assert levels == ["   5.00 |*"]
    assert chart([(1, math.nan)]) == "no loss was a finite number"


@pytest.mark.exhaustive
def test_a_run_that_diverges_reports_and_writes_its_figures(text: Path, tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    outputs = ["--json", str(figures), "--plot", str(tmp_path / "loss.png"), "--sample", "8"]
    printed = run_script(
        [*TINY, "--data", str(text), "--steps", "4", "--lr", "1e30", *outputs], ranks=1
    )
    assert "There is no sample" in printed
    assert "training loss in nats/byte" in printed

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    result = json.loads(figures.read_text(), parse_constant=refuse)
    assert result["validation_loss"] is None
    assert result["curve"][0] == [1, pytest.approx(math.log(256), rel=0.1)]


def steps(arguments: list[str], save_after: int | None) -> list[float]:
    """Return the loss of each step up to the last. Save a checkpoint on the way."""
    options = parse_arguments("", arguments)
    run = train_gpt.prepare(options, device())
    losses = []
    while run.step < options.steps:
        losses.append(train_gpt.mean_over_ranks(train_gpt.train_step(run)))
        if run.step == save_after:
            train_gpt.save(run)
    losses.append(train_gpt.evaluate(run))
    return losses


@pytest.mark.parametrize("ranks", [1, 2, *exhaustive(3)])
def test_a_resumed_run_goes_on_as_the_uninterrupted_one_did(
    ranks: int, text: Path, tmp_path: Path
) -> None:
    arguments = [*TINY, "--data", str(text), "--steps", str(STEPS)]
    arguments += ["--checkpoint", str(tmp_path / "run")]
    whole = run_ranks(steps, 2, arguments, STEPS // 2)[0]
    rest = run_ranks(steps, ranks, [*arguments, "--resume"], None)[0]
    assert len(rest) == STEPS - STEPS // 2 + 1
    if ranks == 2:
        assert rest == whole[STEPS // 2 :]
    # The mean over another number of ranks sums in another order.
    torch.testing.assert_close(
        torch.tensor(rest), torch.tensor(whole[STEPS // 2 :]), rtol=1e-4, atol=1e-5
    )


def test_the_four_systems_train_alike(text: Path) -> None:
    arguments = [*TINY, "--data", str(text), "--steps", "4"]
    losses: dict[str, list[float]] = {
        system: run_ranks(steps, 2, [*arguments, "--system", system], None)[0]
        for system in ("ours", "fsdp2", "fsdp1", "ddp")
    }
    assert losses["ours"] == losses["fsdp2"]
    for system in ("fsdp1", "ddp"):
        torch.testing.assert_close(
            torch.tensor(losses[system]), torch.tensor(losses["ours"]), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], r"--steps is 0; give at least 1"),
        (["--eval-batches", "-1"], r"--eval-batches is -1; give at least 1"),
        (["--threads", "-2"], r"--threads is -2; give at least 0"),
        (["--dim", "10", "--heads", "3"], r"--dim 10 is not a multiple of --heads 3"),
        (["--prompt", ""], r"--prompt is empty"),
        (["--resume"], r"--resume needs --checkpoint DIR"),
        (["--profile", "--system", "ddp"], r"--profile works with --system ours, not ddp"),
        (["--json", "/no/such/directory/x"], r"--json .* in a directory that does not exist"),
        (["--json", "/"], r"--json / is a directory; name a file in it"),
        (["--checkpoint", __file__], r"--checkpoint .* is a file; name a directory"),
        (["--lr", "nan"], r"--lr is nan; give a positive, finite number"),
        (["--lr", "-1"], r"--lr is -1.0; give a positive, finite number"),
        (["--system", "zero"], r"argument --system: invalid choice: 'zero'"),
        (["--steps", "many"], r"argument --steps: invalid int value: 'many'"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parse_arguments("", arguments)
    assert "\n" not in str(error.value)


def _message_of(arguments: list[str]) -> str:
    try:
        train_gpt.prepare(parse_arguments("", arguments), torch.device("cpu"))
    except UsageError as error:
        return str(error)
    return "no error"


def test_options_that_do_not_fit_the_data_or_the_checkpoint_are_one_sentence(
    text: Path, tmp_path: Path
) -> None:
    run = ["--data", str(text), "--checkpoint", str(tmp_path / "run"), "--steps", "2"]

    def message(*arguments: str) -> str:
        messages: list[Any] = run_ranks(_message_of, 1, [*TINY, *arguments])
        return str(messages[0])

    assert "--data /no/such/data does not exist" in message("--data", "/no/such/data")
    assert "--context 16384" in message("--data", str(text), "--context", "16384")
    assert "there is no checkpoint in" in message(*run, "--resume")
    run_ranks(steps, 2, [*TINY, *run], 1)
    assert "already holds a run at step 1" in message(*run)
    assert "began with --layers 2, and --resume got 3" in message(*run, "--resume", "--layers", "3")
    assert "has done 1 steps" in message(*run, "--resume", "--steps", "1")
    other = tmp_path / "other"
    other.write_text(text.read_text() + "more\n" * 100)
    assert "has other contents" in message(*run, "--resume", "--data", str(other))


@pytest.mark.exhaustive
def test_one_rank_of_many_says_what_is_wrong(text: Path) -> None:
    printed = run_script([*TINY, "--data", str(text), "--batch", "5"], ranks=2, expect=1)
    assert printed.count("--batch 5 is not a multiple of the 2 ranks") == 1
