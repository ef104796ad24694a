"""What a configuration comes to: sizes, steps, initial scale and decay of each parameter, without training it."""

from __future__ import annotations

from typing import Any

import torch

from andrea_ablate import machine, ops
from andrea_ablate.config import RunConfig
from andrea_ablate.model import TransformerLM
from andrea_ablate.parameters import named_params
from andrea_ablate.training.optim import param_groups


def facts(cfg: RunConfig) -> dict[str, Any]:
    """Dotted facts for `confounds.differences`; parameters by name and shape, of the blocks the first one's.

    Raises: ConfigError for a model that cannot be built.
    """
    with torch.device("meta"):
        model = TransformerLM(cfg.model)
    sizes = ("d_ff", "d_head", "n_kv_heads", "padded_vocab")
    found: dict[str, Any] = {size: getattr(model.dims, size) for size in sizes}
    found |= {"total_steps": cfg.total_steps, "warmup_steps": cfg.warmup_steps}
    found["ops_path"] = ops.path(cfg.ops, machine.device_type(cfg.trainer.accelerator))
    groups = param_groups(model, 1.0, cfg.optim["decay_embeddings"])
    decayed = {id(parameter): group["weight_decay"] > 0 for group in groups for parameter in group["params"]}
    for name, parameter, param in named_params(model):
        if name.startswith("blocks.") and not name.startswith("blocks.0."):
            continue
        start = {"gain": param.start, "bias": 0.0}.get(param.role)
        shape = "x".join(map(str, param.shape))
        found[f"initial_scale.{name} {shape}"] = model.scheme.std(param) if start is None else start
        found[f"decay.{name} {shape}"] = decayed[id(parameter)]
    return found
