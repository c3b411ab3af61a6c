"""The state of a job whose model is spread over the ranks: what this rank holds of it, named like the plain model's.

`capture` gives the nested state with the distributed tensors themselves, under the names that
`torch.distributed.checkpoint.state_dict` gives: those of the module without any wrapper, and for the optimizer's state those of
its parameters. `targets` are the live tensors that a saved one is read into, with the optimizer's made where they do not exist
yet; `adopt` does the rest. Nothing here talks to storage or to other ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from strata.checkpoint.catalog.naming import MODEL, OPTIMIZER, SCHEDULER
from strata.checkpoint.errors import StateMismatch
from strata.checkpoint.image.nested import PLAIN, leaves
from strata.checkpoint.sharded.plan import Path
from strata.torch_compat.dtensors import is_distributed_tensor, local_of
from strata.torch_compat.modules import OwnedTensor, plain_tensors, state_tensors
from strata.torch_compat.wrappers import is_extra_state, plain_name
from strata.training import rng
from strata.training.state import EXTRA, TrainingState, unwrap

RNG = "rng_states"


def is_sharded(state: TrainingState) -> bool:
    """Whether any tensor of the model or of what is saved with it is one rank's part of a larger one."""
    modules = [state.model, *_of_kind(state, torch.nn.Module)]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return any(map(is_distributed_tensor, tensors))


def is_generator_of(ranks: Collection[int], path: Path) -> bool:
    """Whether something that was saved is of the random number generators that one of these ranks continues with: its own, or where
    there was no such rank, the first one's."""
    return path[0] == RNG and path[1] in {"0", *map(str, ranks)}


class Same(dict[str, Any]):
    """Part of a captured state that holds tensors alone, and the same ones as long as it is the same object."""


class Locals:
    """Captured states, with what this rank holds in the place of each distributed tensor, in rows."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Same, dict[str, Any], frozenset[int]]] = {}

    def of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What is in several places is there several times: each has a name, and a part of its own."""
        taken: set[int] = set()

        def held(tensor: torch.Tensor) -> torch.Tensor:
            local = local_of(tensor)
            if not local.is_contiguous():
                return local.detach().contiguous()
            if id(local) in taken:
                return local.detach()
            taken.add(id(local))
            return local

        def visit(node: Any) -> Any:
            if isinstance(node, torch.Tensor):
                return held(node)
            if type(node) in PLAIN:
                return node
            if type(node) is Same:
                return same(node)
            if isinstance(node, Mapping):
                return {key: visit(value) for key, value in node.items()}
            if isinstance(node, list):
                return list(map(visit, node))
            if isinstance(node, tuple):
                row = map(visit, node)
                return type(node)(*row) if hasattr(node, "_fields") else tuple(row)
            return node

        def same(node: Same) -> dict[str, Any]:
            nonlocal taken
            known = self._known.get(id(node))
            if known is not None and known[0] is node and not known[2] & taken:
                taken |= known[2]
                return known[1]
            before, taken = taken, set()
            found = {key: visit(value) for key, value in node.items()}
            kept = all(local_of(tensor).is_contiguous() for _, tensor in leaves(node, leaf=torch.Tensor))
            if kept and not before & taken:  # What had to be copied is copied each time.
                self._known[id(node)] = node, found, frozenset(taken)
            taken |= before
            return found

        # The rest has none, and a generator of random numbers hundreds of numbers.
        return {
            name: visit(part) if name in (MODEL, OPTIMIZER, EXTRA) else part for name, part in state.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The state of a module or an optimizer, and the tensors that it is made of."""

    state: Same
    tensors: list[OwnedTensor]

    def is_current(self) -> bool:
        return all(each.is_current() for each in self.tensors)


class ShardedState:
    """A `TrainingState`, by the names of the plain model."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._known: dict[int, _Known] = {}
        self._names = {
            id(parameter): name
            for prefix, module in self._modules()
            for name, parameter in _named_parameters(module, prefix)
        }

    def capture(self, *, step: int, epoch: int, rank: int, world_size: int) -> dict[str, Any]:
        state = self._state
        return {
            "step": step,
            "epoch": epoch,
            "world_size": world_size,
            MODEL: self._read(unwrap(state.model)),
            OPTIMIZER: self._saved(state.optimizer),
            SCHEDULER: state.scheduler.state_dict() if state.scheduler is not None else None,
            # Each rank has its own; a tuple is one object, whatever is in it.
            RNG: {str(rank): (rng.capture(),)},
            EXTRA: {name: self._saved(item) for name, item in (state.extra or {}).items()},
        }

    def targets(
        self, tensors: Mapping[Path, tuple[torch.dtype, torch.Size]], *, ranks: Collection[int]
    ) -> dict[Path, torch.Tensor]:
        """For each tensor that was saved, by its path, what it is read into. Raises `StateMismatch`, with nothing changed."""
        state = self._state
        found = _targets_of_module(unwrap(state.model), tensors, (MODEL,))
        for base, item in [
            ((OPTIMIZER,), state.optimizer),
            *(((EXTRA, name), item) for name, item in (state.extra or {}).items()),
        ]:
            if isinstance(item, torch.nn.Module):
                if any(path[: len(base)] == base for path in tensors):
                    found |= _targets_of_module(item, tensors, base)
            elif isinstance(item, torch.optim.Optimizer):
                found |= self._targets_of_optimizer(item, tensors, base)
            else:
                found |= _targets_of_other(item, tensors, base)
        for path, (dtype, size) in tensors.items():
            if path not in found and (path[0] != RNG or is_generator_of(ranks, path)):
                found[path] = torch.empty(size, dtype=dtype)
        return found

    def adopt(self, state: Mapping[str, Any], *, rank: int) -> None:
        """Continue from a state whose tensors are those of `targets`."""
        mine = self._state
        _adopt_module(unwrap(mine.model), state.get(MODEL, {}))
        if OPTIMIZER in state:
            self._adopt(mine.optimizer, state[OPTIMIZER])
        if mine.scheduler is not None and state.get(SCHEDULER) is not None:
            mine.scheduler.load_state_dict(state[SCHEDULER])
        for name, item in (mine.extra or {}).items():
            saved = (state.get(EXTRA) or {}).get(name)
            if saved is not None:
                self._adopt(item, saved)
        # One that was imported is a mapping itself, or in a list.
        generators = {
            name: row if isinstance(row, Mapping) else row[0] for name, row in (state.get(RNG) or {}).items()
        }
        rng.restore(generators, rank)

    # --- what is saved ----------------------------------------------------------------------------------------

    def _modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        yield "", unwrap(self._state.model)
        for name, item in (self._state.extra or {}).items():
            if isinstance(item, torch.nn.Module):
                yield f"{name}.", item

    def _read(self, module: torch.nn.Module) -> dict[str, Any]:
        """Its state. Asking a module takes longer than all else that a save does on the training thread, so it is asked once, as
        long as it has the same tensors."""
        if (known := self._known.get(id(module))) is not None and known.is_current():
            return known.state
        state = Same(_module_state(module))
        self._known.pop(id(module), None)
        tensors = plain_tensors(module)
        if not tensors or {plain_name(each.name) for each in tensors} != state.keys():
            return dict(state)
        self._known[id(module)] = _Known(state=state, tensors=tensors)
        return state

    def _saved(self, item: Any) -> dict[str, Any]:
        if isinstance(item, torch.nn.Module):
            return self._read(item)
        if isinstance(item, torch.optim.Optimizer):
            return self._optimizer_state(item)
        found: dict[str, Any] = item.state_dict()
        return found

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        saved = optimizer.state_dict()
        names = self._numbered(optimizer, saved["param_groups"])
        known = self._known.get(id(optimizer))
        state: dict[str, Any]
        if known is not None and len(known.state) == len(saved["state"]) and known.is_current():
            state = known.state
        else:
            self._known.pop(id(optimizer), None)
            state = {names.get(number, str(number)): entry for number, entry in saved["state"].items()}
            tensors = state_tensors(optimizer)
            if tensors:
                state = Same({name: dict(entry) for name, entry in state.items()})
                self._known[id(optimizer)] = _Known(state=state, tensors=tensors)
        return {
            **saved,
            "state": state,
            "param_groups": [
                {**group, "params": [names[number] for number in group["params"]]}
                for group in saved["param_groups"]
            ],
        }

    def _numbered(self, optimizer: torch.optim.Optimizer, groups: list[Any]) -> dict[int, str]:
        """The names of an optimizer's parameters, by torch's numbers for them."""
        return {
            number: self._names.get(id(parameter), f"parameter-{number}")
            for group, live in zip(groups, optimizer.param_groups, strict=True)
            for number, parameter in zip(group["params"], live["params"], strict=True)
        }

    def _parameters(self, optimizer: torch.optim.Optimizer) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
        """An optimizer's parameters by name, each with its group."""
        parameters = [(p, group) for group in optimizer.param_groups for p in group["params"]]
        return {
            self._names.get(id(parameter), f"parameter-{number}"): (parameter, group)
            for number, (parameter, group) in enumerate(parameters)
        }

    # --- what comes back --------------------------------------------------------------------------------------

    def _targets_of_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        tensors: Mapping[Path, tuple[torch.dtype, torch.Size]],
        base: Path,
    ) -> dict[Path, torch.Tensor]:
        base = (*base, "state")
        parameters = self._parameters(optimizer)
        found: dict[Path, torch.Tensor] = {}
        for path, (dtype, size) in tensors.items():
            if path[: len(base)] != base:
                continue
            name, keys = str(path[len(base)]), path[len(base) + 1 :]
            if name not in parameters:
                raise StateMismatch(f"'{'.'.join(map(str, path))}' belongs to no parameter of the optimizer.")
            parameter, group = parameters[name]
            found[path] = _target_of_state(
                optimizer.state.get(parameter), parameter, group, keys, dtype, size
            )
        return found

    def _adopt(self, item: Any, saved: Any) -> None:
        if isinstance(item, torch.nn.Module):
            _adopt_module(item, saved)
        elif isinstance(item, torch.optim.Optimizer):
            self._adopt_optimizer(item, saved)
        else:
            item.load_state_dict(saved)

    def _adopt_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        groups = deepcopy(saved.get("param_groups", []))
        wanted = [[self._names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        there = [group.get("params", []) for group in groups]
        if [len(names) for names in there] != [len(names) for names in wanted] or any(
            name and name != other
            for names, others in zip(wanted, there, strict=True)
            for name, other in zip(names, others, strict=True)
        ):
            raise StateMismatch("The optimizer's groups hold other parameters than when it was saved.")
        parameters = self._parameters(optimizer)
        state: defaultdict[Any, Any] = defaultdict(dict)
        for name, entry in saved.get("state", {}).items():
            if name in parameters:
                state[parameters[name][0]] = entry
        for group, live in zip(groups, optimizer.param_groups, strict=True):
            group["params"] = live["params"]
        optimizer.__setstate__({"state": state, "param_groups": groups})


def _of_kind(state: TrainingState, kind: type[Any]) -> list[Any]:
    return [item for item in (state.extra or {}).values() if isinstance(item, kind)]


def _named_parameters(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters():
        yield prefix + plain_name(name), parameter


def _module_state(module: torch.nn.Module) -> dict[str, Any]:
    return {plain_name(name): value for name, value in module.state_dict().items()}


def _targets_of_module(
    module: torch.nn.Module, tensors: Mapping[Path, tuple[torch.dtype, torch.Size]], base: Path
) -> dict[Path, torch.Tensor]:
    live = {
        name: value
        for name, value in _module_state(module).items()
        if isinstance(value, torch.Tensor) and not is_extra_state(name)
    }
    saved = {
        str(path[len(base)]): size
        for path, (_, size) in tensors.items()
        if path[: len(base)] == base and not is_extra_state(str(path[len(base)]))
    }
    dotted = ".".join(map(str, base))
    for name, tensor in live.items():
        if name not in saved:
            raise StateMismatch(f"'{dotted}.{name}' is not in the checkpoint.")
        if saved[name] != tensor.size():
            raise StateMismatch(
                f"'{dotted}.{name}' is {tuple(saved[name])} in the checkpoint, but {tuple(tensor.size())} in the model."
            )
    for name in saved:
        if name not in live:
            raise StateMismatch(f"'{dotted}.{name}' is in the checkpoint, but not in the model.")
    return {(*base, name): tensor for name, tensor in live.items()}


def _adopt_module(module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """Its tensors are in place; where its state is not just its tensors, it is given the rest."""
    live = {local_of(tensor).data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    if any(
        not isinstance(value, torch.Tensor) or (value.numel() and local_of(value).data_ptr() not in live)
        for value in saved.values()
    ):
        raw = {plain_name(name): name for name in module.state_dict()}
        module.load_state_dict({raw[name]: value for name, value in saved.items() if name in raw})


def _target_of_state(
    entry: Any,
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    keys: Path,
    dtype: torch.dtype,
    size: torch.Size,
) -> torch.Tensor:
    """The live tensor of an optimizer's state, or one of the kind that torch would make of what was saved."""
    live = entry
    for key in keys:
        live = live.get(key) if isinstance(live, Mapping) else None
    if isinstance(live, torch.Tensor) and live.size() == size and live.dtype is dtype:
        return live
    if keys[-1:] == ("step",):
        on_device = bool(group.get("fused") or group.get("capturable"))
        return torch.empty(size, dtype=dtype, device=parameter.device if on_device else "cpu")
    if size == parameter.size():
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if size and is_distributed_tensor(parameter):
        # As `new_zeros` makes a tensor of another size: on every rank, and of the kind that can be computed with.
        return parameter.detach().new_empty(size, dtype=dtype)
    return torch.empty(size, dtype=dtype, device=parameter.device)


def _targets_of_other(
    item: Any, tensors: Mapping[Path, tuple[torch.dtype, torch.Size]], base: Path
) -> dict[Path, torch.Tensor]:
    """The distributed tensors of something with a state of its own: they must be there, and like those that were saved."""
    from strata.checkpoint.sharded.plan import flattened

    found: dict[Path, torch.Tensor] = {}
    if not any(path[: len(base)] == base for path in tensors):
        return found
    for path, value in flattened(item.state_dict()):
        at = (*base, *path)
        if is_distributed_tensor(value) and at in tensors:
            if tensors[at][1] != value.size():
                raise StateMismatch(
                    f"'{'.'.join(map(str, at))}' is {tuple(tensors[at][1])} in the checkpoint, but "
                    f"{tuple(value.size())} here."
                )
            found[at] = value
    return found
