"""Multi-CLS models (arXiv:2210.05043), and the code that the three stages share.

`import multicls.modeling_multicls` registers the model type "multicls" with transformers' auto classes. torch and
transformers are imported only when they are needed, so that settings and corpus load fast.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.3.0"
__all__ = [
    "MultiClsConfig",
    "MultiClsForMaskedLM",
    "MultiClsForPreTraining",
    "MultiClsForSequenceClassification",
    "MultiClsModel",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'multicls' has no attribute '{name}'")
    return getattr(importlib.import_module("multicls.modeling_multicls"), name)
