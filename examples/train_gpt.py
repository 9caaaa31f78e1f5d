"""Train a small GPT on real text, sharded over any number of ranks.

    torchrun --nproc-per-node 2 examples/train_gpt.py
    torchrun --nproc-per-node 2 examples/train_gpt.py --system fsdp2     # the same data, FSDP2
    python examples/train_gpt.py --steps 20                              # one rank

The text is the Python standard library's own sources, or --data, read as bytes. The program ends
with sample text, memory, the loss curve, and the validation loss beside the loss of a model that
knows only how often each byte occurs.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import checkpoint
import systems
import torch
import torch.distributed as dist
import torch.nn.functional as F
from corpus import (
    VOCABULARY,
    Corpus,
    UsageError,
    byte_frequency_loss,
    load_corpus,
    training_batch,
    validation_batches,
)
from gpt_model import GPT, GPTConfig
from options import DTYPES, parse_arguments
from results import Memory, as_json, chart, memory_of_ranks, plot
from torch import nn
from torch.optim import AdamW, Optimizer
from tqdm import tqdm

MAX_GRADIENT_NORM = 1.0
WAIT_FOR_RANK_0 = 5.0  # seconds, for its message


def start_ranks(options: argparse.Namespace) -> torch.device:
    """Join the process group that torchrun describes, or one of a single rank, and pick the device.

    Raises:
        UsageError: if the machine or the number of ranks does not fit the options.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if options.batch % world_size:
        raise UsageError(
            f"--batch {options.batch} is not a multiple of the {world_size} ranks; it counts the "
            "sequences of all ranks together, so give a multiple"
        )
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and torch.cuda.device_count() < local_world_size:
        raise UsageError(
            f"--device cuda needs a CUDA device for each of the {local_world_size} ranks on this "
            f"host, but PyTorch sees {torch.cuda.device_count()}; start fewer ranks, or give "
            "--device cpu"
        )
    device = torch.device(kind, local_rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(options.threads or max(1, (cores or 1) // local_world_size))

    # A single rank has no peers, so its store needs no address and no port.
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        device_id=device if kind == "cuda" else None,
        **({} if "RANK" in os.environ else alone),
    )
    return device


def show(text: str) -> None:
    """Print on rank 0, above the progress bar where there is one."""
    if dist.get_rank() == 0:
        tqdm.write(text)
        sys.stdout.flush()


def agree(what: str, value: object) -> None:
    """Raise on every rank if the ranks do not all have the same value."""
    values: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise UsageError(
                f"all ranks expect the same {what} but rank 0 has {values[0]} and rank {rank} has "
                f"{other}; give every host the same files"
            )


@dataclass
class Run:
    """One training run: the options, what they made, and how far it has come.

    Attributes:
        options: the command line.
        device: where this rank computes.
        corpus: training and validation bytes.
        parameters: elements of the whole model.
        model: the sharded model.
        optimizer: over the sharded parameters.
        step: optimizer steps done.
        curve: (steps done, training loss in nats a byte) over all ranks.
        validation: (steps done, validation loss in nats a byte) over all ranks.
        step_seconds: duration of each step, without the first ones and without validation.
    """

    options: argparse.Namespace
    device: torch.device
    corpus: Corpus
    parameters: int
    model: nn.Module
    optimizer: Optimizer
    step: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of this rank's rows of a global batch of windows."""
        rows = windows.chunk(dist.get_world_size())[dist.get_rank()].to(self.device)
        with systems.compute_dtype(self.options.system, DTYPES[self.options.dtype], self.device):
            logits = self.model(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    @property
    def tokens_per_second(self) -> float:
        """Bytes trained on in a second by all ranks together, from the median step."""
        tokens = self.options.batch * self.options.context
        return tokens / statistics.median(self.step_seconds) if self.step_seconds else math.nan


def prepare(options: argparse.Namespace, device: torch.device) -> Run:
    """Read the corpus, build and shard the model, and load the checkpoint to resume."""
    corpus = load_corpus(options.data, options.context)
    agree("corpus", corpus.digest)
    progress = _progress_to_resume(options, corpus)

    # Every rank draws the same initial values, so that no broadcast is needed.
    torch.manual_seed(options.seed)
    model = GPT(
        GPTConfig(VOCABULARY, options.context, options.dim, options.layers, options.heads)
    ).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sharded = systems.shard(options.system, model, DTYPES[options.dtype], device)
    run = Run(options, device, corpus, parameters, sharded, _optimizer(sharded, options))
    if progress is not None:
        checkpoint.load(options.checkpoint, run.model, run.optimizer)
        run.step = progress["step"]
        run.curve = [(step, loss) for step, loss in progress["curve"]]
        run.validation = [(step, loss) for step, loss in progress["validation"]]
    show(
        f"{options.system} on {dist.get_world_size()} {device.type} ranks "
        f"({torch.get_num_threads()} threads each), torch {torch.__version__}, {options.dtype}\n"
        f"model: {parameters:,} parameters, {options.layers} layers of width {options.dim}, "
        f"context {options.context}\n"
        f"corpus: {corpus.name}, {corpus.files:,} files, {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.validation):,} held out"
    )
    if progress is not None:
        show(f"resumed from {options.checkpoint} at step {run.step}")
    return run


# A resumed run has to keep these options, so that it has the same model and the same data.
# The number of ranks, the system, the dtype and the number of steps may change.
_FIXED = ("batch", "context", "dim", "layers", "heads", "seed")


def _progress_to_resume(options: argparse.Namespace, corpus: Corpus) -> dict[str, Any] | None:
    if options.checkpoint is None:
        return None
    progress = checkpoint.read_progress(options.checkpoint)
    agree(f"checkpoint in {options.checkpoint}", progress and progress["step"])
    if not options.resume:
        if progress is not None:
            raise UsageError(
                f"--checkpoint {options.checkpoint} already holds a run at step "
                f"{progress['step']}; give --resume to go on with it, or another directory"
            )
        return None
    if progress is None:
        raise UsageError(
            f"there is no checkpoint in {options.checkpoint}; leave --resume out to begin a run"
        )
    for name in _FIXED:
        was, now = progress["options"][name], getattr(options, name)
        if was != now:
            raise UsageError(
                f"the run in {options.checkpoint} began with --{name} {was}, and --resume got "
                f"{now}; give the same value"
            )
    if progress["corpus"] != corpus.digest:
        raise UsageError(
            f"{corpus.name} has other contents than the corpus with which the run in "
            f"{options.checkpoint} began; give the same --data"
        )
    if progress["step"] >= options.steps:
        raise UsageError(
            f"the run in {options.checkpoint} has done {progress['step']} steps, and --steps is "
            f"{options.steps}; give a larger number"
        )
    return progress


def _optimizer(model: nn.Module, options: argparse.Namespace) -> Optimizer:
    """AdamW with weight decay on the matrices alone.

    A parameter's name says whether it is a matrix. Its number of dimensions does not, because
    some systems shard a matrix into a flat tensor.
    """

    def decays(name: str) -> bool:
        return name.endswith(".weight") and "norm" not in name and "embedding" not in name

    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if decays(name)], "weight_decay": 0.1},
        {"params": [p for name, p in named if not decays(name)], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(options: argparse.Namespace, step: int) -> float:
    """Linear warm-up over a tenth of the run, then half a cosine down to a tenth."""
    warmup = max(1, options.steps // 10)
    if step < warmup:
        return float(options.lr * (step + 1) / warmup)
    done = (step - warmup) / max(1, options.steps - warmup)
    return float(options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done))))


def train(run: Run) -> None:
    """Train to the last step; validate and save checkpoints on the way and at the end."""
    options = run.options
    # Reading the loss makes the CPU wait for the device. A GPU run reads it every tenth step only.
    read_every = 1 if run.device.type == "cpu" else 10
    bar = tqdm(
        initial=run.step,
        total=options.steps,
        unit="step",
        disable=dist.get_rank() != 0,
        mininterval=0.5 if sys.stderr.isatty() else 10.0,
        dynamic_ncols=True,
    )
    first = run.step
    since, losses = run.step, torch.zeros((), device=run.device)
    began = time.perf_counter()
    with bar:
        while run.step < options.steps:
            losses += train_step(run)
            bar.update()
            last = run.step == options.steps
            evaluates = last or bool(options.eval_every and run.step % options.eval_every == 0)
            every = options.checkpoint_every
            saves = options.checkpoint and (last or bool(every and run.step % every == 0))
            if not (evaluates or saves or run.step == first + 1 or run.step % read_every == 0):
                continue
            run.curve.append((run.step, mean_over_ranks(losses / (run.step - since))))
            seconds = (time.perf_counter() - began) / (run.step - since)
            # The first step allocates and warms up, so it says nothing of the others.
            if since > first:
                run.step_seconds += [seconds] * (run.step - since)
            speed = f", {run.tokens_per_second:,.0f} tokens/s" if run.step_seconds else ""
            bar.set_postfix_str(f"loss {run.curve[-1][1]:.3f}{speed}")
            if evaluates:
                run.validation.append((run.step, evaluate(run)))
                step, loss = run.validation[-1]
                show(f"step {step}: validation loss {loss:.3f} nats/byte")
            if saves:
                save(run)
            since, losses = run.step, torch.zeros((), device=run.device)
            began = time.perf_counter()


def train_step(run: Run) -> torch.Tensor:
    """Run one optimizer step; return this rank's loss as a tensor on the device."""
    options = run.options
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(options, run.step)
    windows = training_batch(run.corpus, options.seed, run.step, options.batch, options.context)
    run.optimizer.zero_grad()
    loss = run.loss(windows)
    loss.backward()
    systems.clip_gradients(options.system, run.model, MAX_GRADIENT_NORM)
    run.optimizer.step()
    run.step += 1
    return loss.detach()


@torch.no_grad()
def evaluate(run: Run) -> float:
    """Validation loss in nats a byte, over all ranks."""
    options = run.options
    run.model.eval()
    losses = [
        run.loss(windows)
        for windows in validation_batches(
            run.corpus, options.eval_batches, options.batch, options.context
        )
    ]
    run.model.train()
    return mean_over_ranks(torch.stack(losses).mean())


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def save(run: Run) -> None:
    progress = {
        "step": run.step,
        "options": {name: getattr(run.options, name) for name in _FIXED},
        "corpus": run.corpus.digest,
        "curve": run.curve,
        "validation": run.validation,
    }
    checkpoint.save(run.options.checkpoint, run.model, run.optimizer, progress)


def profile_steps(run: Run, steps: int = 8) -> str:
    """Where the time of forward and backward goes, as `fsdp_ext.profile` reports it.

    Every rank takes part. The parameters do not change.
    """
    import fsdp_ext

    options = run.options
    windows = training_batch(run.corpus, options.seed, run.step, options.batch, options.context)
    with fsdp_ext.profile(run.model) as recorded:
        for _ in range(steps):
            run.optimizer.zero_grad()
            run.loss(windows).backward()
    run.optimizer.zero_grad()
    return str(recorded.merge() if dist.get_world_size() > 1 else recorded)


@torch.no_grad()
def sample(run: Run, temperature: float = 0.8) -> str:
    """The prompt and a continuation, sampled byte by byte; every rank takes part."""
    options = run.options
    run.model.eval()
    systems.keep_unsharded(options.system, run.model)
    generator = torch.Generator().manual_seed(options.seed)
    tokens = torch.tensor([list(options.prompt.encode())], device=run.device)
    for _ in range(options.sample):
        with systems.compute_dtype(options.system, DTYPES[options.dtype], run.device):
            logits = run.model(tokens[:, -options.context :])[0, -1]
        odds = F.softmax(logits.float() / temperature, dim=0).cpu()
        drawn = torch.multinomial(odds, 1, generator=generator).to(run.device)
        # Ranks may round differently, but all have to continue from the same byte.
        dist.broadcast(drawn, src=0)
        tokens = torch.cat([tokens, drawn[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def report(run: Run, memory: list[Memory]) -> dict[str, Any]:
    """Print the final figures and the loss curve; return the figures for --json."""
    options, loss = run.options, run.validation[-1][1]
    baseline = byte_frequency_loss(run.corpus)

    def mib(part: str) -> str:
        return f"{max(getattr(rank, part) for rank in memory) / 2**20:,.1f} MiB"

    peak = "peak allocated" if run.device.type == "cuda" else "peak resident"
    show(
        f"memory of the fullest rank: parameters {mib('parameters')}, gradients "
        f"{mib('gradients')}, optimizer {mib('optimizer')}, {peak} {mib('peak')}\n"
        f"speed: {run.tokens_per_second:,.0f} tokens/s\n"
        f"training loss in nats/byte, by steps:\n{chart(run.curve)}\n"
        f"validation loss: {loss:.3f} nats/byte; byte frequencies alone: {baseline:.3f}"
    )
    return {
        "system": options.system,
        "device": run.device.type,
        "dtype": options.dtype,
        "world_size": dist.get_world_size(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "steps": run.step,
        "parameters": run.parameters,
        "tokens_per_second": run.tokens_per_second,
        "validation_loss": loss,
        "byte_frequency_loss": baseline,
        "memory_per_rank": [asdict(rank) for rank in memory],
        "corpus": {"files": run.corpus.files, "sha256": run.corpus.digest},
        "curve": run.curve,
        "validation": run.validation,
    }


def next_commands(world_size: int) -> str:
    """What to try next, as commands for the interpreter that runs this."""
    python = os.path.relpath(sys.executable)
    python = sys.executable if python.startswith("..") else python
    torchrun = f"{python} -m torch.distributed.run --standalone --nproc-per-node {world_size}"
    train = f"OMP_NUM_THREADS=1 {torchrun} examples/train_gpt.py"
    plan = f"PYTHONPATH=examples {python} -m fsdp_ext plan gpt_model:make --device-type cpu"
    return f"""What to try next:
- see where the time of each step goes:
    {train} --steps 20 --profile
- train the same model with PyTorch's FSDP2:
    {train} --system fsdp2
- compute the memory that each of 8 ranks would need:
    {plan} --units Block --world-size 8
- measure how much communication is hidden behind compute, over a simulated link:
    {python} -m bench overlap --quick
- run the tests:
    make test
examples/options.py lists all options of this program."""


def main() -> int:
    try:
        options = parse_arguments(__doc__, sys.argv[1:])
        device = start_ranks(options)
        run = prepare(options, device)
    except UsageError as error:
        # Every rank finds the same mistake, so only rank 0 prints it.
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{Path(__file__).name}: error: {error}", file=sys.stderr, flush=True)
        else:
            # torchrun ends all ranks as soon as one leaves, so rank 0 is the first to leave.
            time.sleep(WAIT_FOR_RANK_0)
        if dist.is_initialized():
            dist.destroy_process_group()
        return 2
    train(run)
    memory = memory_of_ranks(run.optimizer, run.device)
    if options.profile:
        show(profile_steps(run))
    if options.sample and math.isfinite(run.validation[-1][1]):
        show(f"--- sample ---\n{sample(run)}\n---")
    elif options.sample:
        show("There is no sample, since the validation loss is not a finite number.")
    figures = report(run, memory)
    if dist.get_rank() == 0:
        if options.plot is not None:
            title = f"{options.system}, GPT on bytes"
            plot(options.plot, title, run.curve, run.validation, figures["byte_frequency_loss"])
        if options.json is not None:
            options.json.write_text(as_json(figures) + "\n")
    show(next_commands(dist.get_world_size()))
    # No rank leaves while another still needs its store or its connections.
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
