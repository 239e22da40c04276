"""Exports: ONNX gives the model's outputs, and what does not is not kept."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

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
    words = [model, "--rows", write_rows(tmp_path / "new.csv", rows)]
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


def test_what_cannot_be_exported_is_refused(tiny_bert: Path, glue: Path, tmp_path: Path) -> None:
    model = saved(tiny_bert, glue, tmp_path / "r", "cls")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="thesis: holds something else"):
        main([model, "--output", str(tmp_path / "thesis")])
    assert (tmp_path / "thesis" / "thesis.txt").exists()
    with (
        mock.patch("torch.onnx.export", side_effect=TypeError("no such operator")),
        pytest.raises(UserError, match="head cls cannot be exported: no such operator"),
    ):
        main([model, "--output", str(tmp_path / "onnx")])
