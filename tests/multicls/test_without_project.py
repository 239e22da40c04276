"""An exported folder in the tools of Hugging Face, without this project: the checks of `without_project.py`."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from multicls.build import build
from multicls.cards import write_sentence_transformer
from tests.encoders import FAMILIES, save_encoder
from tests.multicls import without_project
from tests.processes import completed

pytestmark = pytest.mark.slow
CHECKS = [name for name in vars(without_project) if name.startswith("check_")]
KINDS = list(FAMILIES) if os.environ.get("MULTICLS_ENCODERS") == "all" else ["bert", "modernbert"]
# Padding changes what ConvBERT computes; the tiny vocabulary of DeBERTa holds [MASK] as a word of its own.
SKIPPED = [("convbert", "check_trainer"), ("deberta-v2", "check_sentence_transformers")]
SKIPPED += [("bert", "check_onnx")]  # slow; another encoder is exported
CASES = [(kind, check) for kind in KINDS for check in CHECKS if (kind, check) not in SKIPPED]
Results = dict[tuple[str, str], str | None]


def export(kind: str, folder: Path) -> None:
    """Writes an exported model, the tokenizer of its encoder, and what the model computes."""
    start = save_encoder(kind, folder.with_name(f"{kind}_start"))
    model, tokenizer = build(str(start), num_facets=3, report=lambda _: None)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_sentence_transformer(folder)
    inputs = tokenizer(without_project.TEXTS, padding=True, return_tensors="pt")
    real = inputs["attention_mask"].clone()
    real[:, 1:4] = 0
    with torch.no_grad():
        outputs = model.eval()(**inputs)
    pairs = zip(outputs.last_hidden_state, real.bool(), strict=True)
    expected = {"mean": torch.stack([rows[kept].mean(dim=0) for rows, kept in pairs])}
    expected |= {"facets": outputs.facet_embeddings, "logits": outputs.logits}
    save_file(expected, folder / "expected.safetensors")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The traceback of each check on each folder, or None; all run in one process, with -I, in another folder."""
    parent = tmp_path_factory.mktemp("elsewhere")
    for kind in KINDS:
        export(kind, parent / kind)
    environment = os.environ | {"HF_MODULES_CACHE": str(parent / "modules")}
    environment["SKIPPED"] = " ".join(f"{kind}/{check}" for kind, check in SKIPPED)
    words = ["-I", without_project.__file__, *(parent / kind for kind in KINDS)]
    ran = completed([sys.executable, *words], cwd=parent, env=environment)
    assert ran.returncode == 0, ran.stderr
    lines = [line.removeprefix("RESULT ") for line in ran.stdout.splitlines() if "RESULT" in line]
    return {(kind, check): problem for kind, check, problem in map(json.loads, lines)}


@pytest.mark.parametrize(("kind", "check"), CASES)
def test_tools_of_hugging_face(results: Results, kind: str, check: str) -> None:
    assert results[kind, check] is None, results[kind, check]
