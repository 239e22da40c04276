"""Embeddings by part: as sentence-transformers computes them, topics of whole texts, and the cache."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from multicls.embeddings import Embedder, cached_embeddings, embed, model_sha256, topics_of
from multicls.errors import UserError
from multicls.modeling_multicls import TopicTable
from multicls.topics import fit_topics_of_texts

TEXTS = ["len bal los nar", "the del", "len " * 30 + "fil"]


def declare(source: Path, folder: Path, length: int = 12) -> Path:
    """Returns a copy that is declared as BGE and others are: [CLS] pooling, Normalize, a default prompt."""
    shutil.copytree(source, folder)
    kind = "sentence_transformers.models."
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    files = {
        "modules.json": [
            {"idx": n, "name": str(n), "path": path, "type": kind + name}
            for n, (path, name) in enumerate(modules)
        ],
        "sentence_bert_config.json": {"max_seq_length": length},
        "config_sentence_transformers.json": {
            "prompts": {"query": "the gol "},
            "default_prompt_name": "query",
        },
    }
    size = json.loads((folder / "config.json").read_text())["hidden_size"]
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    pooling = {"word_embedding_dimension": size, "pooling_mode_cls_token": True}
    files["1_Pooling/config.json"] = pooling | {"pooling_mode_mean_tokens": False}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def test_a_sentence_transformer_keeps_its_pooling_prompt_and_length(
    tiny_bert: Path, tmp_path: Path
) -> None:
    model = Embedder(declare(tiny_bert, tmp_path / "bge"))
    assert model.parts == ("sentence",) and model.max_length == 12
    found = model.embed(TEXTS)["sentence"]
    encoder, tokenizer = (
        AutoModel.from_pretrained(tiny_bert).eval(),
        AutoTokenizer.from_pretrained(tiny_bert),
    )
    for text, vector in zip(TEXTS, found, strict=True):
        inputs = tokenizer(f"the gol {text}", truncation=True, max_length=12, return_tensors="pt")
        with torch.no_grad():
            cls = encoder(**inputs).last_hidden_state[0, 0].numpy()
        np.testing.assert_allclose(vector, cls / np.linalg.norm(cls), atol=1e-5)
    assert Embedder(model.folder, 4).max_length == 4


def test_parts_of_a_plain_encoder(tiny_bert: Path) -> None:
    model = Embedder(tiny_bert, 16)
    found = model.embed(TEXTS)
    assert model.parts == tuple(found) == ("mean", "cls")
    inputs = model.tokenizer([TEXTS[0]], return_tensors="pt")
    with torch.no_grad():
        hidden = model.model(**inputs).last_hidden_state[0]
    np.testing.assert_allclose(found["mean"][0], hidden.mean(0), atol=1e-5)
    np.testing.assert_allclose(found["cls"][0], hidden[0], atol=1e-5)
    with pytest.raises(UserError, match="holds no config.json"):
        Embedder(tiny_bert.parent)


def test_a_word_that_a_user_made_special_is_one_token(tiny_bert: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    tokenizer.add_special_tokens({"extra_special_tokens": ["[DRUG]"]})
    model = AutoModel.from_pretrained(tiny_bert)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    found = Embedder(tmp_path).tokenizer("len [DRUG] [SEP]", add_special_tokens=False)
    assert found.tokens()[:3] == ["len", "[DRUG]", "["], "other special tokens are text"
    AutoModel.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="its tokenizer has .* entries, its vocabulary"):
        Embedder(tmp_path)


def test_topics_read_the_whole_text_and_need_no_pretraining(tiny_bert: Path) -> None:
    model = Embedder(tiny_bert, 4)
    texts = [f"len {'bal ' * 9}{word}" for word in ("nar fil", "ros gol") * 10]
    ids = model.tokenizer(texts, add_special_tokens=False)["input_ids"]
    table = TopicTable.of(fit_topics_of_texts(ids, 4, vocabulary=len(model.tokenizer)))
    topics = embed(model.model, model.tokenizer, texts, max_length=4, topics=table)["topics"]
    np.testing.assert_array_equal(topics, topics_of(table, model.tokenizer, texts))
    assert abs(float(topics[0] @ topics[1])) < 0.01 < 0.99 < float(topics[0] @ topics[2])


def test_the_cache_computes_new_texts_alone(tmp_path: Path) -> None:
    asked = list[list[str]]()

    def lengths(texts: Sequence[str]) -> dict[str, np.ndarray]:
        asked.append(list(texts))
        return {"mean": np.array([[len(text)] for text in texts])}

    first = cached_embeddings(tmp_path, "key", ["a", "bb", "a"], lengths)["mean"]
    second = cached_embeddings(tmp_path, "key", ["ccc", "a"], lengths)["mean"]
    assert first.ravel().tolist() == [1, 2, 1] and second.ravel().tolist() == [3, 1]
    assert asked == [["a", "bb"], ["ccc"]]


def test_a_model_is_known_by_its_files(tiny_bert: Path, tmp_path: Path) -> None:
    copy = declare(tiny_bert, tmp_path / "copy")
    other = model_sha256(copy)
    assert other != model_sha256(tiny_bert) and other == model_sha256(copy)
    pooling = copy / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text().replace("false", "true"))
    assert model_sha256(copy) != other
