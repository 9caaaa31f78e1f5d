"""Real text as bytes: the Python standard library's own sources, or any file or directory."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

VOCABULARY = 256
"""Every byte is a token, so no tokenizer and no vocabulary file are needed."""

_SKIPPED_DIRECTORIES = {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "site-packages",
    "test",
    "tests",
}


class UsageError(Exception):
    """The user asked for something impossible. The message is one sentence that says what to do."""


@dataclass(frozen=True)
class Corpus:
    """Bytes split into a training part and a held-out part.

    Attributes:
        name: where the bytes came from, for printing.
        files: number of files read.
        digest: hexadecimal SHA-256 of all bytes, in the order in which they are used.
        train: uint8 tensor of shape (training bytes,).
        validation: uint8 tensor of shape (validation bytes,), the last part of the corpus.
    """

    name: str
    files: int
    digest: str
    train: torch.Tensor
    validation: torch.Tensor


def load_corpus(
    data: Path | None, context: int, validation_fraction: float = 0.08, max_bytes: int = 32 << 20
) -> Corpus:
    """Read the corpus; the same files always give the same bytes in the same order.

    Args:
        data: a file, a directory (every file in it), or None for the standard library's sources.
        context: bytes that the model sees at once; each part needs more bytes than that.
        validation_fraction: the fraction of the bytes, at the end, that is held out.
        max_bytes: the corpus is cut off after this many bytes.

    Raises:
        UsageError: if there is nothing to read, or too little for one training window.
    """
    if data is None:
        root = Path(sysconfig.get_path("stdlib"))
        name, paths = f"Python standard library ({root})", _files(root, ".py")
    elif data.is_dir():
        name, paths = str(data), _files(data, "")
    elif data.is_file():
        name, paths = str(data), iter([data])
    else:
        raise UsageError(
            f"--data {data} does not exist; "
            "give another path, or leave --data out to use the Python standard library's sources"
        )
    raw, files = _read(paths, max_bytes)
    held_out = int(len(raw) * validation_fraction)
    if held_out <= context:
        raise UsageError(
            f"the corpus {name} has {len(raw)} bytes, but --context {context} needs more than "
            f"{int(context / validation_fraction)}; give more data or a smaller --context"
        )
    tokens = torch.frombuffer(raw, dtype=torch.uint8)
    return Corpus(
        name=name,
        files=files,
        digest=hashlib.sha256(raw).hexdigest(),
        train=tokens[:-held_out],
        validation=tokens[-held_out:],
    )


def _files(root: Path, suffix: str) -> Iterator[Path]:
    """Files below `root`, in an order that depends on their names alone."""

    def wanted(path: Path) -> bool:
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts)
        skipped = bool(suffix) and any(part in _SKIPPED_DIRECTORIES for part in parts[:-1])
        return path.name.endswith(suffix) and not hidden and not skipped and path.is_file()

    candidates = [path for path in root.rglob("*") if wanted(path)]
    yield from sorted(candidates, key=lambda path: path.relative_to(root).as_posix())


def _read(paths: Iterator[Path], max_bytes: int) -> tuple[bytearray, int]:
    raw, files = bytearray(), 0
    for path in paths:
        if len(raw) >= max_bytes:
            break
        with path.open("rb") as file:
            raw += file.read(max_bytes - len(raw))
        files += 1
    return raw, files


def byte_frequency_loss(corpus: Corpus) -> float:
    """Cross entropy, in nats a byte, of the validation part under the training part's frequencies.

    It is the loss of a model that knows how often each byte occurs, and nothing of their order.
    One is added to each count (Laplace), so that a byte that is not in the training part has a
    finite loss.
    """
    counts = torch.bincount(corpus.train, minlength=VOCABULARY).double() + 1.0
    log_frequency = (counts / counts.sum()).log()
    occurrences = torch.bincount(corpus.validation, minlength=VOCABULARY).double()
    return float(-(occurrences * log_frequency).sum() / occurrences.sum())


def training_batch(corpus: Corpus, seed: int, step: int, batch: int, context: int) -> torch.Tensor:
    """The global batch of one step. It depends on `seed` and `step` alone.

    Each rank takes its own rows of it. So every system and every number of ranks trains on the
    same bytes in the same order, and a resumed run continues with the batch that comes next.

    Returns:
        int64 tensor of shape (batch, context + 1): inputs and, shifted by one, targets.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(corpus.train) - context, (batch,), generator=generator)
    return _windows(corpus.train, starts, context)


def validation_batches(
    corpus: Corpus, batches: int, batch: int, context: int
) -> Iterator[torch.Tensor]:
    """Global batches of windows that are spread evenly over the validation part, always the same.

    Yields:
        int64 tensors of shape (batch, context + 1).
    """
    last = len(corpus.validation) - context - 1
    starts = torch.linspace(0, last, batches * batch, dtype=torch.float64).long()
    for chunk in starts.split(batch):
        yield _windows(corpus.validation, chunk, context)


def _windows(tokens: torch.Tensor, starts: torch.Tensor, context: int) -> torch.Tensor:
    return tokens[starts[:, None] + torch.arange(context + 1)].long()
