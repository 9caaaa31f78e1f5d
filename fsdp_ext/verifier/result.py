"""What ``verify`` returns."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_ext._util.tables import columns


@dataclass(frozen=True)
class Check:
    """One check that was tried.

    Args:
        name: the name of the check.
        ok: whether it went well; None if it was not tried.
        detail: the difference, or the reason for no check; empty if everything agreed.
        parameter: the first parameter, buffer or other tensor that differs; None if none does.
        values: how many elements the first rank compared.
        is_exact: whether they were compared bit for bit.
        transport: the transport of the collectives; empty if there were none.
        untried: why gradients were left out; empty if they were compared.
    """

    name: str
    ok: bool | None
    detail: str = ""
    parameter: str | None = None
    values: int = 0
    is_exact: bool = True
    transport: str = ""
    untried: str = ""


@dataclass(frozen=True)
class Verification:
    """What :func:`fsdp_ext.verify` has found. Printing it shows a table.

    Args:
        model: the name of the model's class.
        ranks: how many ranks there were.
        units: how many units the model had.
        checks: the checks, in order.
    """

    model: str
    ranks: int
    units: int
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check found a difference."""
        return all(check.ok is not False for check in self.checks)

    @property
    def first_difference(self) -> Check | None:
        """The first check that failed; None if none did."""
        return next((check for check in self.checks if check.ok is False), None)

    def __str__(self) -> str:
        """Return the table."""
        rows = [(check.name, f"{check.values:,}", _result(check)) for check in self.checks]
        table = columns(("tried", "values compared", "result"), rows, left=(0, 2))
        notes = []
        if not all(check.is_exact for check in self.checks):
            notes.append(
                "Gradients were compared within the rounding of a sum over ranks, whose order the "
                "transport does not fix, and everything else bit for bit."
            )
        if self.ranks == 1:
            notes.append(
                "One rank has nothing to shard or to sum. Start the script with torchrun to check "
                "that over several ranks."
            )
        notes += [f"Gradients were not tried: {reason}" for reason in self._untried]
        return "\n".join([self._head(), *table, *notes])

    @property
    def _untried(self) -> list[str]:
        return list(dict.fromkeys(check.untried for check in self.checks if check.untried))

    def _head(self) -> str:
        units = f"{self.units} unit{'' if self.units == 1 else 's'}"
        ranks = f"{self.ranks} rank{'' if self.ranks == 1 else 's'}"
        transports = [check.transport for check in self.checks if check.transport] or ["none"]
        same = "trains as it does unsharded"
        if self._untried:
            same += ", except gradients, which were not tried"
        verdict = same if self.ok else "DIFFERS from the unsharded model"
        return (
            f"verify: {self.model} {verdict} ({units}, {ranks} over "
            f"{' and '.join(dict.fromkeys(transports))})"
        )


def _result(check: Check) -> str:
    if check.ok is None:
        return f"not tried: {check.detail}"
    if check.ok:
        equal = "equal" if check.is_exact else "equal up to rounding"
        return f"{equal}; gradients not tried" if check.untried else equal
    return f"FAILED: {check.detail.splitlines()[0]}"  # errors may list earlier output
