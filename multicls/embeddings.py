"""Makes a saved Multi-CLS model loadable by sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from multicls.files import write_json

# The model pools itself (`MultiClsModel.embed_sentences`), so the folder needs no pooling module.
FILES: dict[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ],
    "sentence_bert_config.json": {
        "modality_config": {"text": {"method": "embed_sentences", "method_output_name": None}},
        "module_output_name": "sentence_embedding",
        "processor_kwargs": {"split_special_tokens": True},  # a literal "[SEP]" in a text is text
    },
}


def write_sentence_transformer(folder: Path) -> None:
    """Writes the files with which `SentenceTransformer(folder, trust_remote_code=True)` loads a model folder."""
    for name, content in FILES.items():
        write_json(folder / name, content)
