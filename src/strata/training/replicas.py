"""Copies of one state that must be equal on all ranks: digested, compared, and put right where one differs.

Every so many steps, and before every save, each rank digests its parameters and the state of its optimizers; 16 bytes of each rank
are exchanged, and `strata.core.jobs.replicas` says whose copy is odd. A majority's copy replaces it: training continues at the step
it had reached. So nothing is saved that the ranks did not agree on. Buffers are not compared: running statistics are a rank's own.

A digest on a device is queued behind the step, and what it says is asked for after the next one, unless the state is about to be
saved. It finds every single flipped bit; on the CPU, where the digest is xxh3, any change.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import distributed

from strata.core.jobs.replicas import Agreed, Odd, Undecided, judge
from strata.core.text import counted
from strata.torch_compat.groups import outlive_group
from strata.training.exchange import broadcast_state, gather, rank_and_world
from strata.training.state import TrainingState, unwrap

NAMED = 3
"""So many of the tensors that differ are named."""

_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_cuda: Any = torch.cuda  # Its module is not typed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What was found, and what became of it."""

    step: int
    """Of the state that was compared."""
    verdict: Odd | Undecided
    who: tuple[str, ...]
    """The ranks whose copies are odd, each with its machine and process; all of them where that cannot be told."""
    tensors: tuple[str, ...]
    """Those that differ."""

    def __str__(self) -> str:
        named = ", ".join(f"'{name}'" for name in self.tensors[:NAMED])
        if len(self.tensors) > NAMED:
            named += f" and {counted(len(self.tensors) - NAMED, 'more tensor')}"
        if isinstance(self.verdict, Odd):
            return (
                f"{', '.join(self.who)} differed from the other ranks after step {self.step:,} in {named}, which the "
                f"job's code cannot cause: replaced by the copy of rank {self.verdict.source}"
            )
        return f"The copies of {', '.join(self.who)} differ after step {self.step:,} in {named}, without a majority"


class _Digest:
    """Of every tensor of one copy, as it was when this was made."""

    def __init__(self, step: int, tensors: list[torch.Tensor]) -> None:
        self.step = step
        self._on_cpu = {
            number: _of_bytes(tensor) for number, tensor in enumerate(tensors) if not tensor.is_cuda
        }
        self._sums: list[tuple[list[int], torch.Tensor, Any]] = []
        by_device: dict[torch.device, list[int]] = {}
        for number, tensor in enumerate(tensors):
            if tensor.is_cuda:
                by_device.setdefault(tensor.device, []).append(number)
        for device, numbers in by_device.items():
            sums = torch.stack([_sum_of_bits(tensors[number]) for number in numbers])
            arrived = torch.empty(len(numbers), dtype=torch.int64, pin_memory=True)
            arrived.copy_(sums, non_blocking=True)
            event = _cuda.Event()
            event.record(_cuda.current_stream(device))
            self._sums.append((numbers, arrived, event))

    def of_each(self) -> list[int]:
        found = dict(self._on_cpu)
        for numbers, arrived, event in self._sums:
            event.synchronize()
            found |= zip(numbers, arrived.tolist(), strict=True)
        return [found[number] for number in sorted(found)]


def _of_bytes(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_64_intdigest(flat.numpy().data)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Modulo 2 ** 64, of the elements' bits as whole numbers: one flipped bit changes it."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(_OF_SIZE[min(flat.element_size(), 8)]).sum(dtype=torch.int64)


class Replicas:
    """The copies of one job's state. All ranks call the same methods at the same steps."""

    def __init__(self, state: TrainingState, *, every: int) -> None:
        self._state = state
        self._every = every
        self._pending: _Digest | None = None
        self.repairs: Counter[int] = Counter()
        """How often each rank's copy was replaced."""

    def compare(self, step: int, *, is_saving: bool) -> Difference | None:
        """A step was made. Where a copy is found to be odd, it is right when this returns, on all ranks."""
        found: Difference | None = None
        if self._pending is not None:
            found = self._settle()
        if found is None and (is_saving or step % self._every == 0):
            self._pending = _Digest(step, [tensor for _, tensor in self._tensors()])
            if is_saving:
                found = self._settle()
        return found

    def _settle(self) -> Difference | None:
        """Exchange what was digested."""
        assert self._pending is not None
        digest, self._pending = self._pending, None
        values = digest.of_each()
        verdict = judge(gather(xxhash.xxh3_128_hexdigest(repr(values).encode())))
        if isinstance(verdict, Agreed):
            return None
        me = f"rank {rank_and_world()[0]} (host {socket.gethostname()}, pid {os.getpid()})"
        everyone = gather((me, values))
        names = [name for name, _ in self._tensors()]
        differing = tuple(
            name
            for name, *each in zip(names, *(each for _, each in everyone), strict=True)
            if len(set(each)) > 1
        )
        odd = verdict.ranks if isinstance(verdict, Odd) else range(len(everyone))
        if isinstance(verdict, Odd):
            self._replace(verdict)
        return Difference(
            step=digest.step, verdict=verdict, who=tuple(everyone[rank][0] for rank in odd), tensors=differing
        )

    def _replace(self, odd: Odd) -> None:
        self.repairs.update(odd.ranks)
        rank = rank_and_world()[0]
        members = [odd.source, *odd.ranks]
        group = distributed.new_group(sorted(members))
        if rank in members:
            is_source = rank == odd.source
            state = self._state.capture(step=0, epoch=0, rng_states={}, world_size=0) if is_source else None
            into = None if is_source else self._state.targets()
            received = broadcast_state(state, source=odd.source, into=into, group=group)
            if not is_source:
                self._state.adopt(received, rank=rank)
            outlive_group(group)
        distributed.destroy_process_group(group)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that a step makes alike on all ranks, by name."""
        state, extra = self._state, self._state.extra or {}
        names: dict[int, str] = {}
        for prefix, module in [
            ("", unwrap(state.model)),
            *((f"{name}.", item) for name, item in extra.items()),
        ]:
            if isinstance(module, torch.nn.Module):
                for name, parameter in module.named_parameters():
                    names.setdefault(id(parameter), f"{prefix}{name}")
                    yield f"{prefix}{name}", parameter
        for optimizer in (state.optimizer, *extra.values()):
            if isinstance(optimizer, torch.optim.Optimizer):
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        owner = names.get(id(parameter), "parameter")
                        for key, value in optimizer.state.get(parameter, {}).items():
                            if isinstance(value, torch.Tensor):
                                yield f"{owner}, {key} of the optimizer", value
