"""The settings that ``tune`` may choose from, and how a root switches between them."""

from __future__ import annotations

from collections.abc import Iterator

from fsdp_ext.comm.costs import default_bucket_bytes
from fsdp_ext.sharding.root import Root
from fsdp_ext.sharding.settings import AUTO, Choice, Scope

_DEPTHS = (0, 1, 2, 3, 4)
# Bucket sizes are halved until there are more sizes than this.
_MOST_SIZES = 16
# Numbers of units that stay unsharded are tried one by one up to this, then in larger steps.
_FINE_STEPS = 8


class TunableSettings:
    """The settings of a root that the user has left open.

    Args:
        root: the root, whose settings :meth:`apply` and :meth:`probe` change.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._was = root.decision
        asked = root.units[0].settings
        self._has_fixed_bucket = asked.bucket_bytes not in (None, AUTO)
        self._has_fixed_prefetch = asked.prefetch not in (None, AUTO)
        now = root.settings
        self.before = Choice(now.bucket_bytes[0], now.prefetch, now.stays_unsharded)
        # The units below the root whose reshard_after_forward the user has not set.
        self._free = [
            number
            for number, unit in enumerate(root.units)
            if number > 0 and unit.settings.reshard_after_forward is None
        ]

    def apply(self, choice: Choice) -> None:
        """Run with ``choice`` from the next step on."""
        self._root.decide(choice, Scope.OPEN)

    def probe(self, bucket_bytes: int, prefetch: int) -> None:
        """Run with these settings, whatever the user has set."""
        self._root.decide(Choice(bucket_bytes, prefetch, self.before.stays_unsharded), Scope.ALL)

    def restore(self) -> None:
        """Run as before."""
        self._root.restore_decision(self._was)

    def candidates(self, total: int, keeps_more: bool) -> Iterator[Choice]:
        """Yield all settings that may be chosen.

        Args:
            total: bytes of all units' gathers.
            keeps_more: whether more units may stay unsharded than before.
        """
        before = self.before.stays_unsharded
        unsharded = self._unsharded() if keeps_more else [before]
        sizes = {self.before.bucket_bytes} if self._has_fixed_bucket else self._sizes(total)
        depths = {self.before.prefetch}
        if not self._has_fixed_prefetch:
            depths |= set(_DEPTHS)
        for nbytes in sorted(sizes):
            for depth in sorted(depths):
                for units in unsharded:
                    yield Choice(nbytes, depth, units)

    def _sizes(self, total: int) -> set[int]:
        """Return 0, the default, the size before, and halves of the whole."""
        sizes = {0, default_bucket_bytes(self._root.link), self.before.bucket_bytes}
        largest = max(total, 1)
        while largest > 1 and len(sizes) <= _MOST_SIZES:
            sizes.add(largest)
            largest //= 2
        return sizes

    def _unsharded(self) -> list[tuple[int, ...]]:
        """Return sets of units that may stay unsharded: the last ones of forward come first."""
        before = self.before.stays_unsharded
        others = [number for number in self._free if number not in before]
        found: dict[tuple[int, ...], None] = {before: None}
        count = 1
        while count <= len(others):
            found[tuple(sorted({*before, *others[-count:]}))] = None
            count += 1 if count < _FINE_STEPS else max(1, len(others) // _FINE_STEPS)
        found[tuple(sorted({*before, *others}))] = None
        return list(found)
