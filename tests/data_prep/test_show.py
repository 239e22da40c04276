"""A document and its example in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from data_prep.examples import ExampleStream, SpecialIds
from data_prep.show import show
from multicls.corpus import Corpus, write_manifest
from multicls.errors import UserError


def test_every_window_is_shown_as_training_sees_it(sample_corpus: Corpus, sample_ids: SpecialIds) -> None:
    stream = ExampleStream(sample_corpus, sample_ids, seq_length=128, seed=3, validation_fraction=0.0)
    epoch = stream.examples(1, range(stream.examples_per_epoch))
    seen = {example.parts: example.input_ids for example in epoch if example.row == 5}
    for window in range(3):
        example = stream.examples_of_row(5, 1, [window])[0]
        text = show(str(sample_corpus.path), 5, 128, 5, seed=3, epoch=1, window=window)
        assert (seen[example.parts] == example.input_ids).all()
        assert f"window {window} of {stream.num_windows(5)}" in text
        assert text.count("[MASK]") == (example.input_ids == sample_ids.mask).sum()
        assert text.count("swapped (label 1)") == (example.so_labels == 1).sum()
        for p, part in enumerate(example.parts):
            assert f"part {'ABC'[p]}: sentence{'s' if part.cut < part.end else ''} {part.first}" in text
            assert f"  + {128 - int(example.attention_mask[p].sum())} [PAD]" in text
    with pytest.raises(UserError, match="no window 10000"):
        show(str(sample_corpus.path), 5, 128, 5, seed=3, epoch=1, window=10_000)


def test_special_tokens_have_the_names_of_the_tokenizer(sample_corpus: Corpus, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    shutil.copytree(sample_corpus.path, folder)
    config = {"cls_token": "[unused97]", "sep_token": {"content": "[unused98]"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"].pop("tokenizer_config.json", None)
    write_manifest(folder, manifest)
    text = show(str(folder), 5, 128, 5, seed=3, epoch=0)
    assert text.count("[unused97]") == 3 and "[unused98]" in text and "[SEP]" not in text
    (folder / "tokenizer_config.json").write_text(json.dumps({"mask_token": "<mask>"}))
    with pytest.raises(UserError, match="has no <mask>"):
        show(str(folder), 5, 128, 5, seed=3, epoch=0)
