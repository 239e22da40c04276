"""The converter and the model against numbers computed by the authors' public code (tests/fixtures/parity_a)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from multicls import MultiClsBertForPreTraining, MultiClsBertForSequenceClassification
from multicls.convert import main
from multicls.errors import UserError

FIXTURE = Path(__file__).parents[1] / "fixtures" / "parity_a.safetensors"
Fixture = tuple[dict[str, Tensor], dict[str, str]]


@pytest.fixture(scope="module")
def fixture() -> Fixture:
    with safe_open(FIXTURE, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.fixture(scope="module")
def converted(fixture: Fixture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors, _ = fixture
    folder = tmp_path_factory.mktemp("parity")
    save_authors_checkpoint(tensors, folder / "model.pt")
    flags = "--num-facets 3 --facet-layers 1,3 --num-attention-heads 4 --mcqt-lambda 0.1 --output"
    main([str(folder / "model.pt"), *flags.split(), str(folder / "hf")])
    return folder / "hf"


def save_authors_checkpoint(tensors: dict[str, Tensor], path: Path) -> None:
    state = {key.removeprefix("peer."): tensor for key, tensor in tensors.items() if key.startswith("peer.")}
    torch.save({"sd": state, "epoch": 0}, path)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def test_outputs_and_losses(fixture: Fixture, converted: Path) -> None:
    tensors, _ = fixture
    loaded: Any = MultiClsBertForPreTraining.from_pretrained(converted, output_loading_info=True)
    model, found = loaded
    assert not any(found.values()) and model.config.facet_ids is None  # there is no tokenizer
    assert (converted / "modules.json").exists() and (converted / "model.safetensors").stat().st_mode & 0o777 == 0o644
    labels = tensors["mlm_labels"].where(tensors["mlm_labels"] != -1, -100)
    with torch.no_grad():
        out = model.eval()(
            tensors["input_ids"],
            attention_mask=tensors["attention_mask"],
            token_type_ids=tensors["token_type_ids"],
            labels=labels,
            tfidf_labels=tensors["tfidf_labels"],
            so_labels=tensors["so_labels"],
        )
    close(out.last_hidden_state, tensors["out.sequence"])
    close(out.facet_embeddings, tensors["out.facets"])
    close(out.mcqt_scores[0], tensors["out.mcqt_scores_forward"])
    close(out.mcqt_scores.backward, tensors["out.mcqt_scores_backward"])
    close(out.so_logits, tensors["out.so_logits"])
    close(out.tfidf, tensors["out.tfidf"])
    for name in ("mlm", "so", "mcqt"):
        close(out.losses[name], tensors[f"out.loss_{name}"])
    # Their TF-IDF loss counts padding too; ours is the mean over real tokens.
    close(F.mse_loss(out.tfidf, tensors["tfidf_labels"]), tensors["out.loss_tfidf"])
    real = tensors["attention_mask"][:, [0, *range(4, 24)]].bool()
    squared = (tensors["out.tfidf"] - tensors["tfidf_labels"])[real].square()
    close(out.losses["tfidf"], squared.mean())
    close(out.loss, sum(out.losses.values()))


def test_pooled_embedding(fixture: Fixture, converted: Path) -> None:
    tensors, _ = fixture
    model = MultiClsBertForSequenceClassification.from_pretrained(converted).eval()
    inputs = {key: tensors[key] for key in ("input_ids", "attention_mask", "token_type_ids")}
    with torch.no_grad():
        close(model(**inputs).pooled, tensors["out.pooled"])
    model.config.classifier_pooling = "sum"
    with torch.no_grad():
        assert not torch.allclose(model(**inputs).pooled, tensors["out.pooled"], rtol=1e-2)


def test_inserted_layers_matter(fixture: Fixture, converted: Path) -> None:
    """A control: one level off, and the hidden states differ."""
    tensors, _ = fixture
    model = MultiClsBertForPreTraining.from_pretrained(converted).eval()
    layers = model.bert.encoder.layer
    layers[0].facets, layers[2].facets = layers[2].facets, layers[0].facets
    with torch.no_grad():
        out = model.bert(tensors["input_ids"], attention_mask=tensors["attention_mask"])
    assert (out.last_hidden_state - tensors["out.sequence"]).abs().max() > 1e-2


def test_facets_and_levels_from_training_conf(fixture: Fixture, tmp_path: Path) -> None:
    save_authors_checkpoint(fixture[0], tmp_path / "model.pt")
    (tmp_path / "training.conf").write_text('num_facet = 3\ndiversify_hidden_layer = "1,3"\n')
    main([str(tmp_path / "model.pt"), "--num-attention-heads", "4", "--output", str(tmp_path / "hf")])
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["num_facets"], config["facet_layers"]) == (3, [1, 3])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--num_facets"),
        ("--num-facets 3 --facet-layers 1,3", "--num_attention_heads"),
        ("--num-facets 2 --facet-layers 1,3 --num-attention-heads 4", "facet_lin_emb.0.2.weight"),
        ("--num-facets 3 --facet-layers 1 --num-attention-heads 4", "facet_lin_emb.1.0.weight"),
        ("--num-facets 4 --facet-layers 1,3 --num-attention-heads 4", "facet_lin_emb.0.3.weight"),
        ("--num-facets 3 --facet-layers 1,9 --num-attention-heads 4", "1..4"),
        ("--num-facets 3 --facet-layers 1,x --num-attention-heads 4", "whole numbers"),
    ],
)
def test_wrong_shape_is_refused_before_writing(fixture: Fixture, tmp_path: Path, flags: str, message: str) -> None:
    save_authors_checkpoint(fixture[0], tmp_path / "model.pt")
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        main([str(tmp_path / "model.pt"), *flags.split(), "--output", str(tmp_path / "hf")])
    assert not (tmp_path / "hf").exists()


def test_a_folder_with_other_files_is_left_alone(fixture: Fixture, tmp_path: Path) -> None:
    save_authors_checkpoint(fixture[0], tmp_path / "model.pt")
    flags = "--num-facets 3 --facet-layers 1,3 --num-attention-heads 4 --output"
    with pytest.raises(UserError, match="exists already"):
        main([str(tmp_path / "model.pt"), *flags.split(), str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_checkpoint_with_code_in_it_is_refused(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "executed",)  # type: ignore[return-value]

    torch.save({"sd": Payload()}, tmp_path / "model.pt")
    with pytest.raises(UserError, match="safely"):
        main([str(tmp_path / "model.pt"), "--num-facets", "1", "--facet-layers", "", "--output", str(tmp_path / "hf")])
    assert not (tmp_path / "executed").exists()
