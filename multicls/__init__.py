"""Multi-CLS BERT (arXiv:2210.05043): the model, and what the three stages share.

`import multicls` makes `AutoConfig`, `AutoModel`, `AutoModelForPreTraining` and
`AutoModelForSequenceClassification` know the model type "multicls-bert". Neither torch nor transformers is imported
before it is needed, so that the light parts (settings, shards) answer at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from multicls.configuration_multicls import MultiClsBertConfig
    from multicls.modeling_multicls import (
        MultiClsBertForPreTraining,
        MultiClsBertForSequenceClassification,
        MultiClsBertModel,
    )

__version__ = "0.1.0"
__all__ = [
    "MultiClsBertConfig",
    "MultiClsBertForPreTraining",
    "MultiClsBertForSequenceClassification",
    "MultiClsBertModel",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'multicls' has no attribute '{name}'")
    module = "configuration_multicls" if name == "MultiClsBertConfig" else "modeling_multicls"
    return getattr(importlib.import_module(f"multicls.{module}"), name)


@wrapt.when_imported("transformers")
def _register(_transformers: Any) -> None:
    """Runs as soon as transformers is imported, which may be before or after `import multicls`."""
    importlib.import_module("multicls.registration")
