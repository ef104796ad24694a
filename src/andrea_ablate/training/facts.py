"""What a configuration comes to: sizes, steps, initial scale and decay of each parameter, without training it."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from typing import Any

import torch

from andrea_ablate import machine, ops
from andrea_ablate.config import ModelConfig, RunConfig
from andrea_ablate.model import TransformerLM
from andrea_ablate.parameters import named_params
from andrea_ablate.training.optim import param_groups


def facts(cfg: RunConfig) -> dict[str, Any]:
    """Dotted facts for `confounds.differences`; parameters by name and shape, of the blocks the first one's.

    Raises: ConfigError for a model that cannot be built.
    """
    found = {"total_steps": cfg.total_steps, "warmup_steps": cfg.warmup_steps}
    ops_path = ops.path(cfg.ops, machine.device_type(cfg.trainer.accelerator))
    design = json.dumps([asdict(cfg.model), cfg.optim["decay_embeddings"]])
    return {**_of_design(design), **found, "ops_path": ops_path}


@cache
def _of_design(design: str) -> dict[str, Any]:
    """What the model alone comes to: arms that differ in how they are trained share it. design: JSON, to be a key."""
    config, decay_embeddings = json.loads(design)
    with torch.device("meta"):
        model = TransformerLM(ModelConfig(**config))
    sizes = ("d_ff", "d_head", "n_kv_heads", "padded_vocab")
    found: dict[str, Any] = {size: getattr(model.dims, size) for size in sizes}
    groups = param_groups(model, 1.0, decay_embeddings)
    decayed = {id(parameter): group["weight_decay"] > 0 for group in groups for parameter in group["params"]}
    for name, parameter, param in named_params(model):
        if name.startswith("blocks.") and not name.startswith("blocks.0."):
            continue
        start = {"gain": param.start, "bias": 0.0}.get(param.role)
        shape = "x".join(map(str, param.shape))
        found[f"initial_scale.{name} {shape}"] = model.scheme.std(param) if start is None else start
        found[f"decay.{name} {shape}"] = decayed[id(parameter)]
    return found
