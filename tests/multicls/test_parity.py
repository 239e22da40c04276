"""The converter and the model against numbers computed by the authors' public code (tests/fixtures/parity_a)."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import BertConfig, BertTokenizer

from multicls.convert import main
from multicls.errors import UserError
from multicls.modeling_multicls import MultiClsForPreTraining, MultiClsForSequenceClassification

FIXTURE = Path(__file__).parents[1] / "fixtures" / "parity_a.safetensors"
RIGHT = "--num_facets 3 --facet_layers 1 3"
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "tfidf_labels", "so_labels")


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    with safe_open(FIXTURE, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def authors(tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `model.pt` as the authors' code writes it."""
    path = tmp_path_factory.mktemp("authors") / "model.pt"
    theirs = {key: value for key, value in tensors.items() if key.startswith("peer.")}
    torch.save({"sd": {k.removeprefix("peer."): v for k, v in theirs.items()}, "epoch": 0}, path)
    return path


def base_of(state: dict[str, Tensor], folder: Path) -> str:
    """Saves configuration and tokenizer of the BERT of a state dict, with the facets where the fixture has them."""
    rows, hidden = state["bert.embeddings.word_embeddings.weight"].shape
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"[unused{k}]" for k in range(3))]
    tokens = [*special, *(f"word{n}" for n in range(rows - len(special)))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    sizes: dict[str, Any] = {
        "vocab_size": rows,
        "hidden_size": hidden,
        "num_attention_heads": 4,
        "num_hidden_layers": len([key for key in state if key.endswith("attention.self.key.bias")]),
        "intermediate_size": len(state["bert.encoder.layer.0.intermediate.dense.weight"]),
        "max_position_embeddings": len(state["bert.embeddings.position_embeddings.weight"]),
    }
    BertConfig(**sizes).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def options(authors: Path) -> list[str]:
    state = torch.load(authors, weights_only=True)["sd"]
    return ["--base", base_of(state, authors.parent / "base")]


@pytest.fixture(scope="module")
def converted(authors: Path, options: list[str]) -> Path:
    main([str(authors), *RIGHT.split(), *options, "--output", str(authors.parent / "hf")])
    return authors.parent / "hf"


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def test_outputs_and_losses(tensors: dict[str, Tensor], converted: Path) -> None:
    loaded: Any = MultiClsForPreTraining.from_pretrained(converted, output_loading_info=True)
    model, found = loaded
    assert not any(found.values())
    assert (converted / "modules.json").exists()
    assert (converted / "model.safetensors").stat().st_mode & 0o777 == 0o644
    labels = tensors["mlm_labels"].where(tensors["mlm_labels"] != -1, -100)
    with torch.no_grad():
        out = model.eval()(**{name: tensors[name] for name in INPUTS}, labels=labels)
    close(out.last_hidden_state, tensors["out.sequence"])
    close(out.facet_embeddings, tensors["out.facets"])
    close(out.mcqt_scores[0], tensors["out.mcqt_scores_forward"])
    close(out.mcqt_scores[1], tensors["out.mcqt_scores_backward"])
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


def test_pooled_embedding(tensors: dict[str, Tensor], converted: Path) -> None:
    model = MultiClsForSequenceClassification.from_pretrained(converted).eval()
    inputs = {name: tensors[name] for name in INPUTS[:3]}
    with torch.no_grad():
        model.classifier = torch.nn.Identity()  # what it would classify
        close(model(**inputs).logits, tensors["out.pooled"])
        head = model.multicls.facet_head.dense
        plain = head(model.multicls.facet_states(tensors["out.sequence"])).sum(dim=1)
    assert not torch.allclose(plain, tensors["out.pooled"], rtol=1e-2), "the control"


def test_inserted_layers_matter(tensors: dict[str, Tensor], converted: Path) -> None:
    """The control: with the two levels exchanged the hidden states differ."""
    model = MultiClsForPreTraining.from_pretrained(converted).eval()
    layers: Any = model.multicls.encoder.encoder.layer
    layers[0].facets, layers[2].facets = layers[2].facets, layers[0].facets
    with torch.no_grad():
        out = model.multicls(tensors["input_ids"], attention_mask=tensors["attention_mask"])
    assert (out.last_hidden_state - tensors["out.sequence"]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "num_facets"),
        ("--num_facets 0", "num_facets"),
        (RIGHT.replace("3 --f", "2 --f"), "facet_lin_emb.0.2.weight"),
        (RIGHT.replace("1 3", "1"), "facet_lin_emb.1.0.weight"),
        (RIGHT.replace("3 --f", "4 --f"), "facet_lin_emb.0.3.weight"),
        (RIGHT.replace("1 3", "1 9"), "1..4"),
        (RIGHT.replace("1 3", "1 x"), "facet_layers"),
        (f"{RIGHT} --base TINY", "size mismatch"),
        (f"{RIGHT} --base runs/none", "model runs/none"),
    ],
)
def test_wrong_options_are_refused_before_writing(
    authors: Path, options: list[str], tiny_bert: Path, tmp_path: Path, flags: str, message: str
) -> None:
    words = [*options, *flags.replace("TINY", str(tiny_bert)).split()]
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        main([str(authors), *words, "--output", str(tmp_path / "hf")])
    assert not list(tmp_path.iterdir())


def test_other_files_are_refused(authors: Path, options: list[str], tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "executed",)  # type: ignore[return-value]

    path = tmp_path / "model.pt"
    torch.save({"sd": Payload()}, path)
    with pytest.raises(UserError, match="safely"):
        main([str(path), *RIGHT.split(), *options, "--output", str(tmp_path / "hf")])
    assert not (tmp_path / "executed").exists()
    torch.save([1], path)
    with pytest.raises(UserError, match="'sd'"):
        main([str(path), *RIGHT.split(), *options, "--output", str(tmp_path / "hf")])
    with pytest.raises(UserError, match="exists already"):
        main([str(authors), *RIGHT.split(), *options, "--output", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
