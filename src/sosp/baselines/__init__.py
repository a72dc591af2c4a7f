"""Methods of other papers that train, search or rewrite a network, instead of scoring it as it is."""

from typing import TYPE_CHECKING

from sosp.core.lazy_imports import make_lazy_exports

if TYPE_CHECKING:
    from sosp.baselines.amc_search import amc
    from sosp.baselines.eigendamage import Eigendamaged, rebuild_bottlenecks
    from sosp.baselines.gal_training import gal
    from sosp.baselines.learned_result import Learned
    from sosp.baselines.slimming_training import Slimming
    from sosp.baselines.variational_training import variational
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "sosp.baselines.slimming_training": "Slimming",
            "sosp.baselines.variational_training": "variational",
            "sosp.baselines.gal_training": "gal",
            "sosp.baselines.amc_search": "amc",
            "sosp.baselines.learned_result": "Learned",
            "sosp.baselines.eigendamage": "Eigendamaged rebuild_bottlenecks",
        },
    )

__all__ = ["Slimming", "variational", "gal", "amc", "Learned", "Eigendamaged", "rebuild_bottlenecks"]
