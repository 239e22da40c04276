"""An exported folder in the tools of Hugging Face, without this project: the checks of `without_project.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from multicls.build import build
from multicls.embeddings import write_sentence_transformer
from multicls.files import atomic_folder
from tests.encoders import save_encoder
from tests.multicls import without_project

pytestmark = pytest.mark.slow
CHECKS = [
    name.removeprefix("check_") for name in vars(without_project) if name.startswith("check_")
]


@pytest.fixture(scope="module", params=["bert", "modernbert"])
def results(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The traceback of each check, or None; all run in one process, with -I, in another folder."""
    parent = tmp_path_factory.mktemp("elsewhere")
    folder, start = parent / "hf", save_encoder(request.param, parent / "start")
    model, tokenizer = build(str(start), num_facets=3, report=lambda _: None)
    with atomic_folder(folder) as fresh:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        write_sentence_transformer(fresh)
    AutoTokenizer.from_pretrained(start).save_pretrained(folder / "base")
    inputs = tokenizer(without_project.TEXTS, padding=True, return_tensors="pt")
    real = inputs["attention_mask"].clone()
    real[:, 1:4] = 0
    with torch.no_grad():
        outputs = model.eval()(**inputs)
    means = [
        rows[kept.bool()].mean(dim=0)
        for rows, kept in zip(outputs.last_hidden_state, real, strict=True)
    ]
    expected = {"facets": outputs.facet_embeddings, "mean": torch.stack(means)}
    save_file(expected | {"mlm_logits": outputs.mlm_logits}, folder / "expected.safetensors")
    (folder / "expected.safetensors").chmod(0o644)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(parent / "modules")}
    command = [sys.executable, "-I", without_project.__file__, str(folder)]
    ran = subprocess.run(
        command,
        cwd=parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    lines = [
        json.loads(line.removeprefix("RESULT "))
        for line in ran.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    return {line["check"]: line["problem"] for line in lines}


@pytest.mark.parametrize("check", CHECKS)
def test_tools_of_hugging_face(results: dict[str, str | None], check: str) -> None:
    assert results[check] is None, results[check]
