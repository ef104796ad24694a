"""Where Hydra looks for plug-ins; it takes only classes defined here."""

from hydra.core.config_store import ConfigStore

from andrea_ablate import sweep


class AblateSweeper(sweep.AblateSweeper):
    """``hydra/sweeper: ablate``."""


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="ablate",
    node={"_target_": f"{__name__}.AblateSweeper", "params": None},
    provider="andrea_ablate",
)
