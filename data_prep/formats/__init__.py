"""The file formats that are read: a module a family. A module registers its formats when it is imported."""

import pkgutil
from importlib import import_module

from data_prep.formats.base import FORMATS

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["FORMATS"]
