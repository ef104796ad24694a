"""Reading YAML: plain types only, in C where PyYAML was built with it."""

from __future__ import annotations

from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(text: str) -> Any:
    """What a YAML text says. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_LOADER)
