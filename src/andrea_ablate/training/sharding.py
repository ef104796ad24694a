"""A run whose ranks each hold a part of the weights and of the optimizer's state: ``trainer.strategy=fsdp``.

torch's own ``fully_shard`` (FSDP2), one group per block and one for the rest, under Lightning's strategy for it.
Outside the steps a state is whole: checkpoints and ``model.safetensors`` are those of any other run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher, _WorkerOutput
from torch import Tensor, nn

from andrea_ablate.model import TransformerLM

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardedSpawn(ModelParallelStrategy):
    """Lightning's strategy for FSDP2, with ranks that are started as processes of this one, as for DDP."""

    def __init__(self, ranks: int) -> None:
        super().__init__(data_parallel_size=ranks, tensor_parallel_size=1)

    def _configure_launcher(self) -> None:
        self._launcher = _Launcher(self, start_method="spawn")


class _Launcher(_MultiProcessingLauncher):
    """Rank 0 has written the weights; none travel back, least of all in parts."""

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> _WorkerOutput | None:
        if self._strategy.local_rank != 0:
            return None
        return _WorkerOutput(None, None, trainer.state, results, self.get_extra_results(trainer))


def shard(model: TransformerLM, mesh: DeviceMesh) -> None:
    """Leave this rank its part of every parameter, in place."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for method in ("hidden", "loss"):  # validation at other lengths calls them by themselves
        register_fsdp_forward_method(model, method)


def whole(state: Any) -> Any:
    """A state dict without sharded tensors; every rank must ask, since each has a part of the answer."""
    if hasattr(state, "full_tensor"):  # a sharded one; its module takes long to import
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return [whole(value) for value in state] if isinstance(state, list) else state


def _part_of(value: Any, like: Tensor) -> Any:
    if not hasattr(like, "full_tensor") or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def load_model(model: nn.Module, state: dict[str, Tensor]) -> None:
    """``load_state_dict`` with the whole state, whether the model is sharded or not."""
    own = model.state_dict()
    model.load_state_dict({key: _part_of(value, own[key]) if key in own else value for key, value in state.items()})


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Likewise for an optimizer: what has a parameter's shape is sharded as that is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(hasattr(parameter, "full_tensor") for parameter in parameters):
        moments = {
            index: {key: _part_of(value, parameters[index]) for key, value in of_one.items()}
            for index, of_one in state["state"].items()
        }
        state = {**state, "state": moments}
    optimizer.load_state_dict(state)
