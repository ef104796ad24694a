"""Hugging Face weights in and out: ``config.json`` and safetensors, never a pickle."""

from andrea_ablate.convert.families import FAMILIES
from andrea_ablate.convert.maps import config_from_hf, config_to_hf, weights_from_hf, weights_to_hf

__all__ = ["FAMILIES", "config_from_hf", "config_to_hf", "weights_from_hf", "weights_to_hf"]
