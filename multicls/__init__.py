"""Multi-CLS BERT (arXiv:2210.05043): the model, and the code that the three stages share.

`import multicls` registers the model type "multicls-bert" with the auto classes of transformers. torch and transformers
are imported only when they are needed: the light modules (settings, corpus) load at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from multicls.configuration_multicls import MultiClsBertConfig
    from multicls.modeling_multicls import (
        MultiClsBertForMaskedLM,
        MultiClsBertForPreTraining,
        MultiClsBertForSequenceClassification,
        MultiClsBertModel,
    )

__version__ = "0.2.0"
__all__ = [
    "MultiClsBertConfig",
    "MultiClsBertForMaskedLM",
    "MultiClsBertForPreTraining",
    "MultiClsBertForSequenceClassification",
    "MultiClsBertModel",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'multicls' has no attribute '{name}'")
    module = "configuration_multicls" if name == "MultiClsBertConfig" else "modeling_multicls"
    return getattr(importlib.import_module(f"multicls.{module}"), name)


# A chain of three hooks registers the model, whichever module is imported first. A hook runs when the import of its
# module has finished, so no module is used half imported.


@wrapt.when_imported("transformers")
def _load_configuration(_transformers: Any) -> None:
    """Runs when transformers is imported, before or after `import multicls`."""
    importlib.import_module("multicls.configuration_multicls")


@wrapt.when_imported("multicls.configuration_multicls")
def _load_models(_configuration: Any) -> None:
    importlib.import_module("multicls.modeling_multicls")


@wrapt.when_imported("multicls.modeling_multicls")
def _register(modeling: Any) -> None:
    """Registers the classes of `AUTO_MAP` with the auto classes, and their code to be saved with each model."""
    import transformers

    from multicls.configuration_multicls import AUTO_MAP

    config = modeling.MultiClsBertConfig
    for name, reference in AUTO_MAP.items():
        auto_class, ours = getattr(transformers, name), getattr(modeling, reference.split(".")[1])
        auto_class.register(config.model_type if ours is config else config, ours)
        ours.register_for_auto_class(name)
