"""Exports: ONNX and transformers' own classes give the model's outputs, and what does not is not kept."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from finetune.export import main
from multicls.errors import UserError
from tests.finetune.runs import finetune, write_rows


def saved(model: Path, glue: Path, folder: Path, head: str, **values: Any) -> str:
    values |= {"train_size": 20, "train__max_steps": 2, "save_model": True}
    return str(Path(finetune(model, glue, folder, head=head, **values)["path"]) / "model")


@pytest.mark.slow
def test_onnx(
    tiny_multicls: Path, glue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(tiny_multicls, glue, tmp_path / "r", "isobn", pooling="multicls")
    rows = [{"body": "len bal los nar " * (n % 5 + 1)} for n in range(9)]
    words = [model, "--onnx", "--rows", write_rows(tmp_path / "new.csv", rows)]
    words += ["--text_column", "body"]
    assert main([*words, "--output", str(tmp_path / "served")]) == 0
    assert "at most, on 9 rows" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "served").iterdir()}
    assert {"model.onnx", "tokenizer.json", "config.json"} <= names
    with (
        mock.patch("finetune.export.write_onnx", return_value=0.17),
        pytest.raises(UserError, match="not kept: its outputs differ by 0.17"),
    ):
        main([*words, "--output", str(tmp_path / "wrong")])
    assert not (tmp_path / "wrong").exists()


def test_stock_classes(tiny_bert: Path, tiny_multicls: Path, glue: Path, tmp_path: Path) -> None:
    model = saved(tiny_bert, glue, tmp_path / "r", "cls")
    assert main([model, "--stock", "--output", str(tmp_path / "stock")]) == 0
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "stock")
    ours = AutoModelForSequenceClassification.from_pretrained(model, trust_remote_code=True)
    batch = AutoTokenizer.from_pretrained(tmp_path / "stock")(["len bal los"], return_tensors="pt")
    with torch.no_grad():
        found, expected = (each.eval()(**batch).logits.numpy() for each in (stock, ours))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert type(stock).__name__ == "BertForSequenceClassification"
    scores = [{"text": f"len bal {n}", "label": n} for n in range(1, 13)]
    own = {"train_file": write_rows(tmp_path / "s.csv", scores), "label_type": "score"}
    model = saved(tiny_bert, glue, tmp_path / "s", "cls", task="", own=own, data_dir="")
    assert main([model, "--stock", "--output", str(tmp_path / "stock")]) == 0, "a model is replaced"
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "stock")
    ours = AutoModelForSequenceClassification.from_pretrained(model, trust_remote_code=True)
    with torch.no_grad():
        found, expected = (each.eval()(**batch).logits.numpy() for each in (stock, ours))
    np.testing.assert_allclose(found, 12 * expected, atol=1e-4)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="thesis: holds something else"):
        main([model, "--stock", "--output", str(tmp_path / "thesis")])
    assert (tmp_path / "thesis" / "thesis.txt").exists()
    with (
        mock.patch("torch.onnx.export", side_effect=TypeError("no such operator")),
        pytest.raises(UserError, match="head cls cannot be exported: no such operator"),
    ):
        main([model, "--onnx", "--output", str(tmp_path / "onnx")])
    mistakes = {
        (model,): "set either --onnx or --stock",
        (saved(tiny_bert, glue, tmp_path / "m", "mean"), "--stock"): "head mean on bert",
    }
    for words, message in mistakes.items():
        with pytest.raises(UserError, match=message):
            main([*words])
