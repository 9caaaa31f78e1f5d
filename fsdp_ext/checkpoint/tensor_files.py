"""Files of named tensors, in the format of safetensors, with checksums.

A file has a length of 8 bytes, a header in JSON, and data. Any reader of safetensors can open it.
A file of a checkpoint has more in the header's metadata: where each tensor lies in the whole one,
and a checksum of every block of its data. So a part of a tensor can be read and checked without the
rest.

The header is written last, so readers refuse a file whose writer was interrupted.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import os
import stat
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp_ext._util.files import naming
from fsdp_ext.checkpoint import disk

# The name in the file of each dtype, as safetensors has it.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_UNSUPPORTED = ("F4", "F6_E2M3", "F6_E3M2")  # the format has these, too
QUANTIZED = "Quantized weights have to be loaded by the library that wrote them."

BLOCK = 1 << 20  # bytes under one checksum
_WRITE = 8 << 20  # bytes written at once
_BUFFERS = 512  # pieces of memory written at once; the system allows 1,024
_PAGE = 4096  # the data begins at a multiple of it
_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER = 512 << 20
_CHECKSUM = 16  # hexadecimal digits
_OURS = "fsdp_ext"  # the key of our metadata
_COMPACT = (",", ":")

Bytes = memoryview


# What code raises that reads JSON of another form than it expects.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class DamagedFileError(ValueError):
    """A file is not what its writer wrote, or not of this format."""


@dataclass(frozen=True)
class Part:
    """A tensor in a file: the whole one, or a box of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    whole: tuple[int, ...]  # the shape of the whole tensor
    offset: tuple[int, ...]  # where the part begins in the whole tensor, in each dimension
    begin: int = 0  # where its bytes begin, from the beginning of the file
    # Of each block of the part; None if the file has none.
    checksums: str | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def whole_of(cls, dtype: torch.dtype, shape: tuple[int, ...]) -> Part:
        """Return the part that a whole tensor is."""
        return cls(dtype, shape, shape, (0,) * len(shape))


# - Memory


def memory_of(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a contiguous tensor on the host. They keep its memory alive."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    block: Any = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    block.tensor = tensor
    return memoryview(block).cast("B")


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor whose bytes are its values.

    ``conj()`` of a tensor has the same bytes and a bit that says how to read them, as has a view of
    its imaginary part.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def checksum(data: Bytes | bytes) -> str:
    """Return the checksum of some bytes."""
    import xxhash  # only here, so that a machine without it can do all but checkpoints

    return xxhash.xxh3_64_hexdigest(data)


def digest(content: Any) -> str:
    """Return the checksum of a value of JSON."""
    return checksum(json.dumps(content).encode())


def _blocks(nbytes: int) -> Iterator[slice]:
    for begin in range(0, nbytes, BLOCK):
        yield slice(begin, min(begin + BLOCK, nbytes))


# - Writing


class Writer:
    """Writes a new file of a checkpoint.

    Args:
        path: the file, which must not exist.
        parts: the tensors, by name, in their order in the file.
        tree: more for the metadata, as JSON.

    Raises:
        OSError: the system's error, with the path, from any of the methods.
        TypeError: if the format has no name for a dtype.
    """

    def __init__(self, path: Path, parts: Mapping[str, Part], tree: Any = None) -> None:
        self._path = path
        self._parts = parts
        self._tree = tree
        self._checksums = {name: "0" * _digits(part.nbytes) for name, part in parts.items()}
        self._position = len(self._header())
        # What is about to be written: pieces of memory, and the tensors that own it.
        self._pending: list[Bytes] = []
        self._nbytes = 0
        self._owners: list[torch.Tensor] = []
        with naming(path):
            self._file = disk.create(path)

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, int, str]:
        """Write the tensors and the header. Tensors must not change until the file is finished.

        Tensors side by side in memory should be neighbours in the file.

        Args:
            tensors: all of them, in the order of ``parts``.

        Returns:
            the file's name and size, and the checksum of its header.
        """
        for name, tensor in tensors:
            self._checksums[name] = self._add(tensor, self._parts[name].dtype)
            del tensor  # before the next one needs memory
        self._write_pending()
        header = self._header()
        with naming(self._path):
            disk.write(self._file, [memoryview(header)], 0)
        return self._path.name, self._position, checksum(header)

    def flush(self) -> None:
        """Wait until the disk has the finished file."""
        with naming(self._path):
            disk.flush(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _add(self, tensor: torch.Tensor, dtype: torch.dtype) -> str:
        """Write a tensor, now or later, and return its checksums. A large one is not kept."""
        checksums = []
        for host in on_host(tensor, dtype):
            memory = memory_of(host)
            self._owners.append(host)
            for block in _blocks(len(memory)):
                checksums.append(checksum(memory[block]))
                self._put(memory[block])
        if tensor.nbytes >= _WRITE:
            self._write_pending()
            self._owners.clear()
        return "".join(checksums)

    def _put(self, memory: Bytes) -> None:
        self._pending.append(memory)
        self._nbytes += len(memory)
        if self._nbytes >= _WRITE or len(self._pending) >= _BUFFERS:
            self._write_pending()

    def _write_pending(self) -> None:
        if self._pending:
            with naming(self._path):
                disk.write(self._file, self._pending, self._position)
        self._position += self._nbytes
        self._pending, self._nbytes = [], 0
        del self._owners[:-1]  # the last one may have more to write

    def _header(self) -> bytes:
        ours = {
            name: [part.whole, part.offset, self._checksums[name]]
            for name, part in self._parts.items()
        }
        metadata = json.dumps({"parts": ours, "tree": self._tree}, separators=_COMPACT)
        return header_of(self._parts, {_OURS: metadata})


def header_of(parts: Mapping[str, Part], metadata: Mapping[str, str]) -> bytes:
    """Return what a file has before its data: a length, and a header that ends with a page."""
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for name, part in parts.items():
        if part.dtype not in NAMES:
            raise TypeError(
                f"'{name}' has dtype {part.dtype}, which safetensors cannot store. Use "
                "torch.distributed.checkpoint for this model."
            )
        header[name] = {
            "dtype": NAMES[part.dtype],
            "shape": part.shape,
            "data_offsets": [position, position + part.nbytes],
        }
        position += part.nbytes
    text = json.dumps(header, separators=_COMPACT).encode()
    length = round_up(_LENGTH.size + len(text), _PAGE) - _LENGTH.size
    return _LENGTH.pack(length) + text.ljust(length)


def on_host(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Return the elements of a tensor in order, as contiguous pieces of a dtype on the host."""
    flat = resolved(tensor).view(-1)
    step = _WRITE // flat.itemsize
    for first in range(0, flat.numel(), step):
        yield flat[first : first + step].to(dtype).cpu()


def _digits(nbytes: int) -> int:
    """Return the number of hexadecimal digits in the checksums of a part."""
    return _CHECKSUM * -(-nbytes // BLOCK)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# - Reading


class TensorFile:
    """A file of safetensors. Its data can be read inside ``with file:``, by several threads.

    Args:
        size: its expected size in bytes; None if unknown.
        header_checksum: the expected checksum of its header; None if unknown.

    Attributes:
        parts: its tensors, by name.
        tree: what else its writer put into the metadata.

    Raises:
        DamagedFileError: if the file is not what was written. Nothing outside of the file is read,
            and no memory is allocated for more bytes than the file has.
        OSError: the system's own error.
    """

    def __init__(
        self, path: Path, size: int | None = None, header_checksum: str | None = None
    ) -> None:
        self.path = path
        self._users = 0  # blocks that have the file open
        self._lock = threading.Lock()
        with self:
            found = os.fstat(self._file)
            if not stat.S_ISREG(found.st_mode):
                self._fail("is not a file")
            self._size = found.st_size
            if size is not None and self._size != size:
                self._fail(f"has {self._size} bytes, and {size} were written")
            self.parts, self.tree = self._read_header(header_checksum)

    def __enter__(self) -> TensorFile:
        with self._lock:
            if self._users == 0:
                self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                os.close(self._file)

    def read(self, name: str, begin: int, into: Bytes) -> None:
        """Read bytes of a tensor from its byte ``begin``, and check the blocks they lie in."""
        part = self.parts[name]
        end = begin + len(into)
        if part.checksums is None:
            self._read_at(part.begin + begin, into)
            return
        edge: Bytes | None = None
        for number in range(begin // BLOCK, -(-end // BLOCK)):
            first, last = number * BLOCK, min((number + 1) * BLOCK, part.nbytes)
            is_whole = begin <= first and last <= end
            if is_whole:
                block = into[first - begin : last - begin]
            else:
                edge = edge or memoryview(bytearray(BLOCK))
                block = edge[: last - first]
            self._read_at(part.begin + first, block)
            expected = part.checksums[number * _CHECKSUM : (number + 1) * _CHECKSUM]
            if checksum(block) != expected:
                self._fail(f"has damaged data in tensor '{name}': its checksum differs")
            if not is_whole:
                low, high = max(begin, first), min(end, last)
                into[low - begin : high - begin] = block[low - first : high - first]

    def _read_at(self, position: int, into: Bytes) -> None:
        while len(into):
            count = os.preadv(self._file, [into], position)
            if count == 0:
                self._fail("became shorter while it was read")
            position += count
            into = into[count:]

    def _read_header(self, header_checksum: str | None) -> tuple[dict[str, Part], Any]:
        if self._size < _LENGTH.size:
            self._fail(f"has {self._size} bytes, which is too short for a header")
        length_bytes = bytearray(_LENGTH.size)
        self._read_at(0, memoryview(length_bytes))
        (length,) = _LENGTH.unpack(length_bytes)
        start = _LENGTH.size + length
        if length == 0:
            self._fail("has no header, since its writer was interrupted")
        if start > self._size or length > _LONGEST_HEADER:
            self._fail(f"has {self._size} bytes, and its header says that it has {length} itself")
        header = bytearray(length)
        self._read_at(_LENGTH.size, memoryview(header))
        if header_checksum not in (None, checksum(bytes(length_bytes + header))):
            self._fail("has a damaged header: its checksum differs")
        try:
            entries = json.loads(header.decode())
            ours = json.loads(entries.pop("__metadata__", {}).get(_OURS, "{}"))
            unsupported = [n for n, entry in entries.items() if entry["dtype"] in _UNSUPPORTED]
            parts = {
                name: _part(start, entry, ours.get("parts", {}).get(name))
                for name, entry in entries.items()
                if not unsupported
            }
        except MALFORMED as error:
            self._fail(f"has a header that cannot be understood ({error})", error)
        if unsupported:
            name = unsupported[0]
            raise ValueError(
                f"{self.path} has '{name}' as {entries[name]['dtype']}, which fsdp_ext cannot "
                f"read. {QUANTIZED}"
            )
        self._check_places(parts, start)
        return parts, ours.get("tree")

    def _check_places(self, parts: dict[str, Part], start: int) -> None:
        """Check that the tensors fill the file, and that no two of them overlap."""
        position = start
        for name, part in sorted(parts.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
            if part.begin != position:
                self._fail(f"has tensor '{name}' at byte {part.begin} instead of {position}")
            position += part.nbytes
        if position != self._size:
            self._fail(f"has {self._size} bytes, and its tensors end at byte {position}")

    def _fail(self, what: str, cause: BaseException | None = None) -> Any:
        raise DamagedFileError(f"{self.path} {what}.") from cause


def _part(start: int, entry: Any, ours: Any) -> Part:
    """Return the part that an entry of a header describes.

    Raises:
        ValueError: if the entry contradicts itself.
        KeyError, TypeError: if it is no such entry.
    """
    shape = _sizes(entry["shape"])
    dtype = DTYPES[entry["dtype"]]
    begin, end = _sizes(entry["data_offsets"])
    whole, offset, checksums = ours or (shape, (0,) * len(shape), None)
    part = Part(dtype, shape, _sizes(whole), _sizes(offset), start + begin, checksums)
    if end - begin != part.nbytes:
        raise ValueError(f"{end - begin} bytes for shape {shape}")
    boxes = itertools.zip_longest(part.whole, part.offset, shape)
    if any(None in box or box[1] + box[2] > box[0] for box in boxes):
        raise ValueError(f"a part {shape} at {part.offset} of a tensor {part.whole}")
    if checksums is not None and len(checksums) != _digits(part.nbytes):
        raise ValueError(f"{len(checksums)} digits of checksums for {part.nbytes} bytes")
    return part


def _sizes(values: Sequence[Any] | Iterable[Any]) -> tuple[int, ...]:
    sizes = tuple(values)
    if any(type(size) is not int or not 0 <= size < 2**63 for size in sizes):
        raise ValueError(f"sizes {sizes}")
    return sizes
