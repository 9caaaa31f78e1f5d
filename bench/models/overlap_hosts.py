"""The measurement of `python -m bench overlap --hosts 2`: real steps over a slow cable.

A transformer trains on ranks of two hosts (bench/harness/hosts.py). Its batch is chosen so that the
unsharded step computes for `ratio` times as long as a sharded step's bytes take at the cable's
rate. All systems are built at once and take turns, and the slowest rank of each step counts.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_ext
from bench.harness import hosts, ranks
from bench.harness.output import picture, print_table
from bench.harness.runner import Keep, Row
from bench.harness.timing import INDISTINCT, Timing, as_microseconds, includes_zero
from bench.models.training import (
    GPT,
    Build,
    GPTConfig,
    Sharded,
    leave_unsharded,
    replicate_ddp,
    shard_fsdp1,
    shard_fsdp2,
    shard_ours,
)

RATIOS = [4.0, 2.0, 1.0, 0.5]
QUICK_RATIOS = [2.0]
CONTEXT = 32  # tokens of a sequence; the batch has as many sequences as the ratio needs
MODEL = GPTConfig(vocabulary=1024, context=CONTEXT, dim=384, layers=12, heads=6)
# For links on which MODEL's bytes would take a second or more.
SLOW_MODEL = GPTConfig(vocabulary=1024, context=CONTEXT, dim=256, layers=12, heads=4)
QUICK_MODEL = GPTConfig(vocabulary=256, context=CONTEXT, dim=128, layers=4, heads=4)
SLOW = 250e6  # bytes a second
BATCHES_TO_FIT = (2, 8)
REPEATS, QUICK_REPEATS = 10, 4
WARMUP = 2

UNSHARDED, OURS = "unsharded", "ours"
SYSTEMS: dict[str, Build] = {
    UNSHARDED: leave_unsharded,
    "DDP": replicate_ddp,
    "FSDP1": shard_fsdp1,
    "FSDP2": shard_fsdp2,
    OURS: shard_ours,
}
PEERS = ("DDP", "FSDP1", "FSDP2")
# The bytes by which the cable's own rate is measured, and in how many messages each way.
PROBE_BYTES, PROBE_MESSAGES, PROBES = 1 << 24, 8, 5


@dataclass(frozen=True)
class Taken:
    """The cost of one step on one rank."""

    seconds: float
    cpu_seconds: float  # of all threads of the process
    sent: float  # bytes that the host has sent


class System:
    """A model as one system trains it."""

    def __init__(self, name: str, config: GPTConfig) -> None:
        self.name = name
        self.config = config
        torch.manual_seed(0)
        model = GPT(config)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.sharded: Sharded = SYSTEMS[name](model, torch.float32, torch.device("cpu"))
        self.model: nn.Module = self.sharded.model

    def step(self, tokens: Tensor) -> None:
        """Run forward and backward."""
        logits = self.model(tokens)
        loss = nn.functional.cross_entropy(
            logits.view(-1, self.config.vocabulary), tokens.reshape(-1)
        )
        loss.backward()

    def timed_step(self, tokens: Tensor) -> Taken:
        """Run one step on all ranks at once, without gradients of the previous step."""
        for parameter in self.model.parameters():
            parameter.grad = None
        dist.barrier()
        sent, cpu, start = hosts.sent_bytes(), time.process_time(), time.perf_counter()
        self.step(tokens)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        dist.barrier()  # its messages queue behind those of the step, which may still wait
        return Taken(seconds, cpu_seconds, hosts.sent_bytes() - sent)

    @property
    def is_ours(self) -> bool:
        """Return whether fsdp_ext shards the model."""
        return isinstance(self.model, fsdp_ext.FSDPModule)

    def least_bytes(self, tokens: Tensor) -> float:
        """Return the bytes that each rank has to send in a step.

        For ours they follow its schedule, which does not gather again parameters that it still has.
        The others gather each block twice, and the root, which is kept after forward, once.
        """
        whole = 4 * self.parameters
        if self.name == UNSHARDED:
            return 0.0
        if self.is_ours:
            return sum(nbytes for _, nbytes in self._collectives(tokens)) * others()
        if self.name == "DDP":
            return 2 * whole * others()
        return (2 * whole + bytes_of_blocks(self.config)) * others()

    def _collectives(self, tokens: Tensor) -> list[tuple[str, int]]:
        impl: Any = self.model._fsdp_ext_unit.root.impl  # type: ignore[union-attr]
        impl.enable_log(True)
        self.step(tokens)
        log = impl.take_log()
        impl.enable_log(False)
        return [(operation, nbytes) for operation, _, _, nbytes in log]


def bytes_of_blocks(config: GPTConfig) -> int:
    """Return the bytes of the parameters of all blocks."""
    with torch.device("meta"):
        blocks = GPT(config).blocks
    return 4 * sum(parameter.numel() for parameter in blocks.parameters())


def others() -> float:
    """Return the part of a collective's bytes that belongs to other ranks."""
    return 1 - 1 / dist.get_world_size()


def measure(args: Any, keep: Keep) -> None:
    """Measure all systems at each rate and ratio."""
    for rate in args.rate:
        ranks.set_rate(rate)
        cable = measure_cable()
        limit = hosts.bytes_per_second(rate) or cable.rate
        config = SLOW_MODEL if limit < SLOW else MODEL
        ratios = [args.ratio] if args.ratio else RATIOS
        if args.quick:
            config = QUICK_MODEL
            ratios = ratios if args.ratio else QUICK_RATIOS
        common = {
            "rate": rate,
            "limit_mb_s": limit / 1e6,
            "carried_mb_s": cable.rate / 1e6,
            "message_cpu_us_a_mb": cable.cpu_seconds_a_byte * 1e12,
        }
        measure_rate(Case(config, limit, cable, args.quick), ratios, common, keep)


@dataclass(frozen=True)
class Cable:
    """The rate and CPU time of plain messages on a cable, without a model."""

    rate: float  # bytes a second in each direction at once
    cpu_seconds_a_byte: float  # of those that a rank sends while it receives as many


@dataclass(frozen=True)
class Case:
    """A model on a cable."""

    config: GPTConfig
    limit: float  # bytes a second in each direction
    cable: Cable
    quick: bool


def measure_rate(case: Case, ratios: Sequence[float], common: Row, keep: Keep) -> None:
    """Measure all systems over one cable."""
    systems, errors = start_all(case.config)
    for name, error in errors.items():
        keep({"system": name, "error": error, **common})
    unsharded = systems[0]
    sharded_bytes = (2 * 4 * unsharded.parameters + bytes_of_blocks(case.config)) * others()
    wire = sharded_bytes / case.limit
    alone, for_each = fit_compute(unsharded)
    batches = batches_for([(ratio * wire - alone) / for_each for ratio in ratios])
    for asked, batch in zip(ratios, batches, strict=True):
        if batch is None:
            continue
        torch.manual_seed(dist.get_rank())
        tokens = torch.randint(case.config.vocabulary, (batch, CONTEXT))
        repeats = QUICK_REPEATS if case.quick else REPEATS
        others_busy = OtherPrograms()
        taken, ledgers = run_in_turns(systems, tokens, repeats)
        settings = {"asked_ratio": asked, "batch": batch, "context": CONTEXT}
        settings["measured_ratio"] = median_seconds(taken[UNSHARDED]) / wire
        settings["other_programs_cores"] = others_busy.cores()
        for system in systems:
            row = row_of(system, taken, case, system.least_bytes(tokens))
            keep(common | settings | row | ledgers.get(system.name, {}))


def batches_for(sequences: Sequence[float]) -> list[int | None]:
    """Return the batch nearest to each number of sequences; None for a batch that comes again."""
    batches = [max(1, round(number)) for number in sequences]
    return [batch if batch not in batches[:i] else None for i, batch in enumerate(batches)]


def median_seconds(taken: Sequence[Taken]) -> float:
    """Return the median time of steps."""
    return statistics.median(step.seconds for step in taken)


def start_all(config: GPTConfig) -> tuple[list[System], dict[str, str]]:
    """Build all systems; return those that could be built, and the errors of the others."""
    systems, errors = [], {}
    tokens = torch.zeros(1, CONTEXT, dtype=torch.long)
    for name in SYSTEMS:
        system, error = None, ""
        try:
            system = System(name, config)
            for _ in range(WARMUP):
                system.step(tokens)
        except Exception as raised:  # a peer that cannot run here is listed with its own error
            if name not in PEERS:
                raise
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, error)
        first = next(filter(None, of_ranks), None)
        if first is None and system is not None:
            systems.append(system)
        else:
            errors[name] = str(first)
    return systems, errors


def fit_compute(unsharded: System) -> tuple[float, float]:
    """Return the seconds of a step without sequences, and those that each sequence adds."""
    medians = []
    for batch in BATCHES_TO_FIT:
        tokens = torch.randint(unsharded.config.vocabulary, (batch, CONTEXT))
        taken = [unsharded.timed_step(tokens).seconds for _ in range(2 * WARMUP + 1)]
        # The first quartile: other load on the machine makes steps longer, never shorter.
        medians.append(statistics.quantiles(taken, n=4)[0])
    both = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)  # so that all ranks choose the same batch
    few, many = both.tolist()
    sequences = BATCHES_TO_FIT[1] - BATCHES_TO_FIT[0]
    slope = max((many - few) / sequences, few / BATCHES_TO_FIT[1])
    return few - slope * BATCHES_TO_FIT[0], slope


class OtherPrograms:
    """How busy programs other than the ranks keep this machine, from now on.

    It counts the time of programs alone, not the kernel's, which also works for the ranks.
    """

    def __init__(self) -> None:
        self._start = self._now()

    def _now(self) -> tuple[float, float, float]:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice = (int(field) for field in file.readline().split()[1:3])
        return time.monotonic(), (user + nice) / os.sysconf("SC_CLK_TCK"), os.times().user

    def cores(self) -> float:
        """Return how many cores they kept busy on average. All ranks call this."""
        seconds, all_programs, mine = (
            after - before for after, before in zip(self._now(), self._start, strict=True)
        )
        ranks = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(ranks)
        return max(0.0, (all_programs - ranks.item()) / seconds)


def measure_cable() -> Cable:
    """Return the rate of plain messages, and their CPU time.

    Rank r and its partner on the other host, half of the ranks further on, exchange messages.
    """
    size = dist.get_world_size()
    partner = (dist.get_rank() + size // 2) % size
    sent = torch.zeros(PROBE_BYTES // PROBE_MESSAGES // 4)
    received = [torch.empty_like(sent) for _ in range(PROBE_MESSAGES)]
    seconds, cpu_seconds = [], []
    for _ in range(PROBES + 1):
        dist.barrier()
        cpu, start = time.process_time(), time.perf_counter()
        works = [dist.irecv(part, partner) for part in received]
        works += [dist.isend(sent, partner) for _ in received]
        for work in works:
            assert work is not None
            work.wait()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - cpu)
    slowest = torch.tensor(seconds[1:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    mean = torch.tensor(cpu_seconds[1:], dtype=torch.float64)
    dist.all_reduce(mean)
    return Cable(
        rate=PROBE_BYTES * (size // 2) / statistics.median(slowest.tolist()),
        cpu_seconds_a_byte=statistics.median(mean.tolist()) / size / PROBE_BYTES,
    )


def run_in_turns(
    systems: Sequence[System], tokens: Tensor, repeats: int
) -> tuple[dict[str, list[Taken]], dict[str, Row]]:
    """Return the costs of each system's steps, and the ledgers' figures for ours."""
    for system in systems:
        for _ in range(WARMUP):
            system.timed_step(tokens)
    taken: dict[str, list[Taken]] = {system.name: [] for system in systems}
    order = random.Random(0)  # the same on all ranks, because a step is a collective
    with contextlib.ExitStack() as stack:
        ledgers = {
            system.name: stack.enter_context(fsdp_ext.profile(system.model, repeats))
            for system in systems
            if system.is_ours
        }
        for _ in range(repeats):
            for system in order.sample(list(systems), len(systems)):
                taken[system.name].append(system.timed_step(tokens))
    return (
        {name: agreed(steps) for name, steps in taken.items()},
        {name: by_ledger(ledger) for name, ledger in ledgers.items()},
    )


def agreed(taken: Sequence[Taken]) -> list[Taken]:
    """Return the slowest rank's time of each step, and the other figures as means of the ranks."""
    seconds = torch.tensor([step.seconds for step in taken], dtype=torch.float64)
    cpu = torch.tensor([step.cpu_seconds for step in taken], dtype=torch.float64)
    sent = torch.tensor([step.sent for step in taken], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    for figure in (cpu, sent):
        dist.all_reduce(figure)
        figure /= dist.get_world_size()
    sent /= dist.get_world_size() // hosts.COUNT  # a host's counter has the bytes of all its ranks
    figures = zip(seconds.tolist(), cpu.tolist(), sent.tolist(), strict=True)
    return [Taken(*of_step) for of_step in figures]


def by_ledger(ledger: fsdp_ext.profile) -> Row:
    """Return the figures of rank 0's ledger."""

    def median(figure: Callable[[Any], float]) -> float:
        return statistics.median(figure(iteration) for iteration in ledger.iterations)

    causes = ledger.summary().causes
    return {
        "transport": ledger.transport,
        "ledger_exposed_us": median(lambda iteration: iteration.exposed) * 1e6,
        "ledger_wire_us": median(lambda iteration: iteration.wire) * 1e6,
        "ledger_compute_us": median(lambda iteration: iteration.compute) * 1e6,
        "ledger_causes_us": {name: value * 1e6 for name, value in causes.items()},
    }


def row_of(system: System, taken: dict[str, list[Taken]], case: Case, least: float) -> Row:
    """Return a row's figures for one system's steps, beside the unsharded model's."""
    mine, unsharded = taken[system.name], taken[UNSHARDED]
    compute = median_seconds(unsharded)
    row: Row = {
        "system": system.name,
        "settings": system.sharded.settings,
        "ranks": dist.get_world_size(),
        "parameters": system.parameters,
        "layers": system.config.layers,
        "dim": system.config.dim,
        "step_us": as_microseconds(Timing.of([step.seconds for step in mine])),
        "of_unsharded": median_seconds(mine) / compute,
        "sent_bytes": statistics.median(step.sent for step in mine),
        "least_bytes": least,
    }
    if system.name == UNSHARDED:
        return row
    pairs = list(zip(mine, unsharded, strict=True))  # of one turn
    exposed = [step.seconds - alone.seconds for step, alone in pairs]
    wire = least / case.limit
    # A core that handles messages does not compute.
    messages = least * case.cable.cpu_seconds_a_byte
    hidden = Timing.of([1 - seconds / wire for seconds in exposed])
    return row | {
        "wire_us": wire * 1e6,
        "compute_over_wire": compute / wire,
        "exposed_us": as_microseconds(Timing.of(exposed)),
        "hidden": hidden.median,
        "hidden_low": hidden.low,
        "hidden_high": hidden.high,
        "hidden_at_most": min(max(0.0, 1 - messages / wire), compute / wire),
        "communication_cpu_us": as_microseconds(
            Timing.of([step.cpu_seconds - alone.cpu_seconds for step, alone in pairs])
        ),
    }


# - What was measured


def show(rows: list[Row]) -> None:
    """Print a table for each rate."""
    for rate in dict.fromkeys(row["rate"] for row in rows):
        of_rate = [row for row in rows if row["rate"] == rate]
        first = next((row for row in of_rate if "error" not in row), None)
        if first is None:
            print(*(f"{row['system']}: {row['error']}" for row in of_rate), sep="\n")
            continue
        busy = max(row.get("other_programs_cores", 0.0) for row in of_rate)
        size = f"{first['parameters'] / 1e6:.1f} M parameters in {first['layers'] + 1} units"
        print(
            f"{rate}: {first['ranks']} ranks on two hosts, {size}; plain messages carry "
            f"{first['carried_mb_s']:.0f} MB/s each way, and take "
            f"{first['message_cpu_us_a_mb'] / 1e3:.2f} ms of a core for each MB; other programs "
            f"kept up to {busy:.2f} cores busy"
        )
        header = ["compute / wire (asked), system", "transport", "wire ms", "step ms", "quartiles"]
        header += ["of unsharded", "exposed ms (by ledger)", "hidden", "quartiles", "at most"]
        header += ["CPU ms", "sent MB", "of least", "because, or error"]
        print_table(header, [cells(row) for row in of_rate], words_last=True)
        print()
    print(
        "compute / wire: of the unsharded step and FSDP2's bytes, as measured and as asked for; "
        "hidden = 1 - exposed / wire, of the system's own bytes; the ledger is that of rank 0"
    )


def cells(row: Row) -> list[str]:
    """Return the cells of a row."""
    if "error" in row:
        return [row["system"], *[""] * 12, row["error"][:100]]
    label = f"{row['measured_ratio']:.2f} ({row['asked_ratio']:g}), {row['system']}"
    step = row["step_us"]
    timing = [f"{step['median'] / 1e3:.1f}", f"{step['low'] / 1e3:.1f} to {step['high'] / 1e3:.1f}"]
    timing += [f"{row['of_unsharded']:.2f}"]
    if row["system"] == UNSHARDED:
        return [label, "none", "", *timing, *[""] * 8]
    exposed = f"{row['exposed_us']['median'] / 1e3:.1f}"
    hidden = [f"{row['hidden']:.0%}", f"{row['hidden_low']:.0%} to {row['hidden_high']:.0%}"]
    if includes_zero(row["exposed_us"]):
        exposed, hidden = INDISTINCT, ["", ""]
    if "ledger_exposed_us" in row:
        exposed += f" ({row['ledger_exposed_us'] / 1e3:.1f})"
    return [
        label,
        row.get("transport", "gloo"),
        f"{row['wire_us'] / 1e3:.1f}",
        *timing,
        exposed,
        *hidden,
        f"{row['hidden_at_most']:.0%}",
        f"{row['communication_cpu_us']['median'] / 1e3:.1f}",
        f"{row['sent_bytes'] / 1e6:.1f}",
        f"{row['sent_bytes'] / row['least_bytes']:.2f}",
        because(row),
    ]


def because(row: Row) -> str:
    """Return the largest causes of exposed time by the ledger, with their milliseconds."""
    largest = sorted(row.get("ledger_causes_us", {}).items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {value / 1e3:.1f}" for name, value in largest)


def plot(rows: list[Row], path: str) -> None:
    """Draw each system's step, relative to the unsharded one, over compute / wire.

    Raises:
        OSError: if the file cannot be written.
    """
    ran = [row for row in rows if "error" not in row]
    rates = list(dict.fromkeys(row["rate"] for row in ran))
    title = "A step on two hosts, relative to one without communication"
    with picture(path, title, columns=len(rates)) as axes:
        for rate, panel in zip(rates, axes if len(rates) > 1 else [axes], strict=True):
            panel.set(title=rate, xlabel="compute / wire", ylabel="step / unsharded step")
            panel.set_xscale("log", base=2)
            of_rate = [row for row in ran if row["rate"] == rate]
            for system in dict.fromkeys(row["system"] for row in of_rate):
                mine = sorted(
                    (row["measured_ratio"], row["of_unsharded"])
                    for row in of_rate
                    if row["system"] == system
                )
                panel.plot(*zip(*mine, strict=True), marker="o", label=system)
            panel.legend(fontsize="small")
