"""The local record of every run, and its optional mirrors (CSV, TensorBoard, Weights & Biases)."""

from andrea_ablate.tracking import wandb  # noqa: F401 (importing it registers the logger)
from andrea_ablate.tracking.mirrors import LOGGERS, Mirror, MirrorInfo, Mirrors, check_logger, open_mirrors
from andrea_ablate.tracking.plans import Plan
from andrea_ablate.tracking.store import (
    FINAL,
    STATUSES,
    RunBusy,
    RunWriter,
    Store,
    StoreError,
    config_payload,
    write_atomic,
)

__all__ = [
    "FINAL",
    "LOGGERS",
    "STATUSES",
    "Mirror",
    "MirrorInfo",
    "Mirrors",
    "Plan",
    "RunBusy",
    "RunWriter",
    "Store",
    "StoreError",
    "check_logger",
    "config_payload",
    "open_mirrors",
    "write_atomic",
]
