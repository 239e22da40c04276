"""The file formats that are read: a module a family. A module registers its formats when it is imported."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module

from data_prep.formats.base import FORMATS, Record, SourceFile, read_records
from data_prep.formats.text import join_rows
from data_prep.settings import BuildOptions

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["FORMATS", "read_documents"]


def read_documents(file: SourceFile, settings: BuildOptions) -> Iterator[Record]:
    """Returns the documents and bad records of a file, one at a time; UserError if it is out of reach."""
    records = read_records(file, settings)
    return join_rows(records) if file.layout == "sentences" else records
