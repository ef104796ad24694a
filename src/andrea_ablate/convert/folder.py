"""Folders on disk: a Hugging Face model (``config.json``, safetensors), and one of ours (``config.yaml``, the same)."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from andrea_ablate.config import ModelConfig, from_mapping, run_config
from andrea_ablate.convert.maps import config_from_hf, config_to_hf, weights_from_hf, weights_to_hf
from andrea_ablate.data import TOKENIZERS, tokenizer_of
from andrea_ablate.data.tokenizers import Tokenizer
from andrea_ablate.registry import ConfigError
from andrea_ablate.yamltext import load_yaml

log = logging.getLogger("andrea_ablate")


def read_hf(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and fp32 tensors of ours from a Hugging Face folder. Raises ConfigError for what has no choice."""
    hf = _json(folder / "config.json")
    config, unread = config_from_hf(hf)
    if unread:
        log.warning("%s: not read: %s", folder / "config.json", ", ".join(sorted(unread)))
    return config, weights_from_hf(config, hf["model_type"], _tensors(folder))


def write_hf(
    folder: Path, config: ModelConfig, weights: dict[str, Tensor], model_type: str, end: int | None = None
) -> None:
    """A Hugging Face folder of the family. end: id of the token that ends a document.

    Raises: ConfigError naming the choices that the family cannot express.
    """
    hf = {**config_to_hf(config, model_type), "bos_token_id": end, "eos_token_id": end}
    tensors = weights_to_hf(config, model_type, weights)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read_ours(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and tensors of a folder that `write_ours`, or a finished run, has left."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} has no config.yaml; give a run's folder or one that convert has written")
    return from_mapping(ModelConfig, load_yaml(path.read_text(encoding="utf-8"))["model"]), _tensors(folder)


def write_ours(folder: Path, config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """``config.yaml`` with the section ``model``, and ``model.safetensors`` under our names."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump({"model": asdict(config)}, sort_keys=False)
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    save_file(weights, folder / "model.safetensors")


def tokenizer_from(folder: Path) -> Tokenizer | None:
    """The tokenizer of a run, from its configuration; of another folder, its tokenizer.json; None without either."""
    path = folder / "config.yaml"
    plain = load_yaml(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if "data" in plain:
        cfg = run_config(plain)
        return tokenizer_of(cfg.data, Path(cfg.paths.cache))
    own = folder / "tokenizer.json"
    return TOKENIZERS.build({"type": "file", "path": str(own)}) if own.is_file() else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}; give a folder as `save_pretrained` writes it")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files, however many."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    if not found:
        other = next(iter([*folder.glob("*.bin"), *folder.glob("*.pt")]), None)
        why = f"{other.name} may run code when it is read; save it again as safetensors" if other else "none is there"
        raise ConfigError(f"{folder}: weights are read from *.safetensors alone: {why}")
    return found
