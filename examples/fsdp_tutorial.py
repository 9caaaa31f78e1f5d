"""What most people do first with FSDP1: a convolutional network that classifies small images.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 examples/fsdp_tutorial.py

The program wraps the network with a policy by size, offloads parameters where that is possible,
trains it with Adadelta and StepLR, and evaluates it with sums over all ranks. Rank 0 saves the
whole state dict, and a plain network loads it. DDP trains the same network beside it, so that the
memory of both can be compared. ``--systems`` adds PyTorch's own FSDP1. The images are made up: each
class has a pattern, which is shifted and blurred by noise.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import functools
import gc
import importlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from results import memory_of_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, FullStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adadelta, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 10
SIZE = 28  # pixels in each direction
# Where each system's FullyShardedDataParallel comes from. DDP is a class of its own.
FSDP = {"fsdp_ext": "fsdp_ext", "fsdp1": "torch.distributed.fsdp"}


class Network(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.hidden = nn.Linear(32 * 12 * 12, width)
        self.scores = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logarithms of the classes' probabilities."""
        x = functional.relu(self.conv1(images))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.hidden(x.flatten(1)))
        return functional.log_softmax(self.scores(x), dim=1)


def make_images(count: int, seed: int) -> TensorDataset:
    """Return images with their classes. The classes' patterns are the same for every seed."""
    patterns = torch.randn(CLASSES, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    patterns = functional.interpolate(patterns, (SIZE, SIZE), mode="bilinear")
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    shifts = torch.randint(-3, 4, (count, 2), generator=generator)
    images = [
        patterns[label].roll(tuple(shift), (1, 2))
        for label, shift in zip(labels.tolist(), shifts.tolist(), strict=True)
    ]
    noise = torch.randn(count, 1, SIZE, SIZE, generator=generator)
    return TensorDataset(torch.stack(images) + noise, labels)


@dataclass(frozen=True)
class Result:
    """What one system reached, and the memory that it took."""

    loss: float  # of training, in the last epoch
    test_loss: float
    accuracy: float  # in percent
    held: int  # bytes of parameters, gradients and optimizer state of the fullest rank
    peak: int  # bytes that training added on this rank at its worst moment


def wrap(system: str, model: nn.Module, device: torch.device) -> nn.Module:
    """Return ``model`` wrapped by a system, which is a key of ``FSDP`` or "ddp"."""
    if system == "ddp":
        return DistributedDataParallel(model.to(device))
    fsdp: Any = importlib.import_module(FSDP[system])
    wrapped: nn.Module = fsdp.FullyShardedDataParallel(
        model,
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=20_000),
        # PyTorch's FSDP1 does not offload on CPUs. On GPUs, whole state dicts of offloaded
        # parameters would need a process group for the host as well.
        cpu_offload=CPUOffload(offload_params=system == "fsdp_ext" and device.type == "cpu"),
        device_id=device,
    )
    return wrapped


def train_epoch(
    model: nn.Module, loader: DataLoader[Any], optimizer: Optimizer, device: torch.device
) -> float:
    """Train for an epoch; return the mean loss of all ranks."""
    model.train()
    total = torch.zeros(2, device=device)  # the loss and the images
    for images, labels in loader:
        optimizer.zero_grad()
        loss = functional.nll_loss(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        total += torch.tensor([loss.item() * len(images), len(images)], device=device)
    dist.all_reduce(total)
    return float(total[0] / total[1])


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader[Any], device: torch.device, *, alone: bool = False
) -> tuple[float, float]:
    """Return the mean loss and the accuracy in percent, of all ranks or of this one alone."""
    model.eval()
    total = torch.zeros(3, device=device)  # the loss, the right answers and the images
    for images, labels in loader:
        scores, labels = model(images.to(device)), labels.to(device)
        total[0] += functional.nll_loss(scores, labels, reduction="sum")
        total[1] += (scores.argmax(dim=1) == labels).sum()
        total[2] += len(images)
    if not alone:
        dist.all_reduce(total)
    return float(total[0] / total[2]), float(100 * total[1] / total[2])


def save_whole(system: str, model: nn.Module, path: Path) -> None:
    """Write the parameters of the unwrapped network to a file, on rank 0; on all ranks."""
    if isinstance(model, DistributedDataParallel):
        state = model.module.state_dict()
    else:
        fsdp: Any = importlib.import_module(FSDP[system])
        on_gpu = torch.cuda.is_available()
        whole_on_rank_0 = FullStateDictConfig(offload_to_cpu=on_gpu, rank0_only=True)
        with fsdp.FullyShardedDataParallel.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, whole_on_rank_0
        ):
            state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, path)


def forget_peak() -> None:
    """Begin a new measurement of :func:`peak_bytes`."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:  # on Linux, with its C library
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free goes back to the system
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now


def peak_bytes() -> int:
    """Return the most memory since :func:`forget_peak`, of the GPU or of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def run(
    system: str, options: argparse.Namespace, device: torch.device, *, shows: bool = True
) -> Result:
    """Train and evaluate with one system, save the network and check the file; on all ranks."""
    ranks = dist.get_world_size()
    # A size that the ranks divide. Otherwise, DistributedSampler would repeat test images.
    of_test = max(1, options.images // 4 // ranks) * ranks
    training, test = make_images(options.images, 1), make_images(of_test, 2)
    sampler: DistributedSampler[Any] = DistributedSampler(training, seed=options.seed)
    loader = DataLoader(training, options.batch, sampler=sampler)
    own_part = DistributedSampler(test, shuffle=False)
    test_loader = DataLoader(test, options.batch, sampler=own_part)

    torch.manual_seed(options.seed)  # every rank makes the same parameters
    network = Network(options.width)
    forget_peak()
    before = peak_bytes()
    model = wrap(system, network, device)
    optimizer = Adadelta(model.parameters(), lr=options.lr)  # after wrapping
    schedule = StepLR(optimizer, step_size=1, gamma=options.gamma)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, device)
        test_loss, accuracy = evaluate(model, test_loader, device)
        schedule.step()
        if shows and dist.get_rank() == 0:
            print(f"{system:<8}  epoch {epoch + 1}: loss {loss:.6f}, test loss {test_loss:.6f}")
    peak = peak_bytes() - before
    held = max(m.parameters + m.gradients + m.optimizer for m in memory_of_ranks(optimizer, device))

    path = options.save / f"network-{system}.pt"
    save_whole(system, model, path)
    if dist.get_rank() == 0:
        plain = Network(options.width)
        plain.load_state_dict(torch.load(path))
        loss_of_file, _ = evaluate(plain, DataLoader(test, 256), torch.device("cpu"), alone=True)
        if abs(loss_of_file - test_loss) > 1e-3:
            raise RuntimeError(f"{path} has a test loss of {loss_of_file}, not {test_loss}")
    return Result(loss, test_loss, accuracy, held, peak)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    systems = [*FSDP, "ddp"]
    parser.add_argument("--systems", nargs="+", choices=systems, default=["fsdp_ext", "ddp"])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=2048, help="to train with, on all ranks")
    parser.add_argument("--batch", type=int, default=32, help="images of a step on each rank")
    parser.add_argument("--width", type=int, default=512, help="of the hidden layer")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7, help="factor of lr after each epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="a directory for the networks", default=None)
    return parser.parse_args()


def main() -> None:
    """Train with each system in turn and print a table."""
    options = parse_arguments()
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("start this with torchrun: torchrun --nproc-per-node 2 " + __file__)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    with tempfile.TemporaryDirectory() as temporary:
        options.save = options.save or Path(temporary)
        options.save.mkdir(parents=True, exist_ok=True)
        first_use = copy.copy(options)  # loads code, which would count as the first one's memory
        first_use.epochs, first_use.images = 1, 4 * options.batch * dist.get_world_size()
        for system in options.systems:
            run(system, first_use, device, shows=False)
        results = {system: run(system, options, device) for system in options.systems}
    if dist.get_rank() == 0:
        mb = 1e6
        print(f"\n{'':<8}  {'test loss':>9}  {'accuracy':>8}  {'held':>9}  {'peak':>9}")
        for system, of_it in results.items():
            print(
                f"{system:<8}  {of_it.test_loss:9.6f}  {of_it.accuracy:6.2f} %  "
                f"{of_it.held / mb:6.2f} MB  {of_it.peak / mb:6.2f} MB"
            )
        print(
            "held: parameters, gradients and optimizer state of a rank between steps. peak: what "
            "training added to rank 0's memory at most, images and activations included. On the "
            "CPU it has what the allocator keeps, too, and varies from run to run."
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
