"""The example gives an engine in another process the weights that the trainer has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.examples import EXAMPLES, run_example

ROUND = re.compile(r"^round \d: the engine loaded 10 weights, loss ([\d.]+), .* is ([\d.]+)$", re.M)


@pytest.mark.exhaustive
def test_the_engine_has_the_trainers_weights_in_each_round() -> None:
    printed = run_example("stream_weights.py")
    losses = ROUND.findall(printed)
    assert len(losses) == 3, printed
    assert all(engine == trainer for engine, trainer in losses)
    assert len({engine for engine, _ in losses}) == 3  # the weights changed


@pytest.mark.exhaustive
def test_an_engine_that_fails_ends_the_trainer(tmp_path: Path) -> None:
    text = (EXAMPLES / "stream_weights.py").read_text()
    failing = tmp_path / "stream_weights.py"
    failing.write_text(text.replace("loaded.add(name)", 'raise MemoryError("planted")'))
    with pytest.raises(AssertionError, match="planted"):
        run_example(str(failing))
