"""The model: facets, parameter counts, baselines as settings. Objectives: test_objectives.py."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from finetune.heads import modeling_heads
from multicls import (
    MultiClsBertConfig,
    MultiClsBertForMaskedLM,
    MultiClsBertForPreTraining,
    MultiClsBertForSequenceClassification,
    MultiClsBertModel,
    configuration_multicls,
)
from multicls.modeling_multicls import VARLEN

TINY = {
    "vocab_size": 97,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}


def tiny(**changes: object) -> MultiClsBertConfig:
    return MultiClsBertConfig(**(TINY | {"num_facets": 3} | changes))  # type: ignore[arg-type]


def batch(config: MultiClsBertConfig, examples: int = 4, length: int = 20) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = config.num_parts * examples
    ids = torch.randint(10, 97, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - 5 :] = 0
    labels = torch.full_like(ids, -100)
    labels[:, 7:9] = ids[:, 7:9]
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "token_type_ids": torch.zeros_like(ids),
        "labels": labels,
        "tfidf_labels": torch.rand(rows, length - config.num_facets, generator=generator) * 10,
        "so_labels": torch.arange(rows) % 2,
    }


def test_a_batch_that_is_not_part_major_has_the_other_objectives() -> None:
    model = MultiClsBertForPreTraining(tiny()).eval()
    ids = torch.randint(10, 97, (4, 20))
    out = model(ids, output_hidden_states=True, output_attentions=True)
    assert out.loss is None and out.losses == {} and out.mcqt_scores is None
    assert out.mlm_logits.shape == (4, 20, 97) and len(out.hidden_states) == 4
    labels = torch.full_like(ids, -100)
    labels[1, 7] = labels[3, 5] = 11
    labelled = model(ids, labels=labels)
    assert set(labelled.losses) == {"mlm"} and labelled.loss == labelled.losses["mlm"]
    torch.testing.assert_close(labelled.mlm_logits, out.mlm_logits[[1, 3], [7, 5]])
    assert set(model(ids[:3], labels=labels[:3]).losses) == {"mcqt", "mlm"}
    with pytest.raises(ValueError, match="3 parts"):  # MCQT is asked for
        model(ids, group_size=2)


def test_masked_lm_shares_the_pretraining_weights(tmp_path: Path) -> None:
    pretraining = MultiClsBertForPreTraining(tiny()).eval()
    pretraining.save_pretrained(tmp_path)
    loaded: Any = MultiClsBertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    masked, report = loaded
    assert not any(report.values())
    assert masked.cls.predictions.decoder.weight is masked.bert.embeddings.word_embeddings.weight
    ids = torch.randint(10, 97, (2, 20))
    torch.testing.assert_close(masked.eval()(ids).logits, pretraining(ids).mlm_logits)


@pytest.mark.parametrize(
    ("labels", "given", "found"),
    [
        (torch.tensor([0.5, 2.0]), None, "regression"),
        (torch.tensor([[0.5, 2.0, 1.0], [1.0, 0.0, 3.0]]), "regression", "regression"),
        (torch.tensor([0, 2]), None, "single_label_classification"),
        (torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]), None, "multi_label_classification"),
    ],
)
def test_problem_type_is_that_of_bert(labels: Tensor, given: str | None, found: str) -> None:
    config = tiny(num_labels=1 if labels.is_floating_point() and labels.ndim == 1 else 3, problem_type=given)
    model = MultiClsBertForSequenceClassification(config).eval()
    out = model(torch.randint(10, 97, (2, 12)), labels=labels)
    losses = {
        "regression": lambda: (out.logits.squeeze(-1) - labels).square().mean(),
        "single_label_classification": lambda: -out.logits.log_softmax(-1)[[0, 1], labels].mean(),
        "multi_label_classification": lambda: torch.nn.functional.binary_cross_entropy(out.logits.sigmoid(), labels),
    }
    torch.testing.assert_close(out.loss, losses[found]())
    assert model.config.problem_type == found


@pytest.mark.parametrize("module", [configuration_multicls, modeling_heads])
def test_an_older_transformers_is_refused_in_a_line(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    with pytest.raises(ImportError, match=r"needs transformers 5, this is transformers 4.57.6: pip install [^\n]*$"):
        runpy.run_path(module.__file__)


def test_short_input_and_wrong_tokens_are_told() -> None:
    model = MultiClsBertModel(tiny(facet_ids=[1, 2, 3], num_hidden_layers=1, facet_layers=[])).eval()
    with pytest.raises(ValueError, match="3 tokens has no room for .* 3 facets"):
        model(torch.tensor([[5, 1, 2]]))
    ids = torch.tensor([[5, 1, 2, 3, 9, 9], [5, 1, 2, 3, 9, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids)
        model(inputs_embeds=torch.zeros(1, 6, 16))
    with pytest.warns(UserWarning, match="padded on the left"):
        model(ids.roll(1, dims=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids.flip(1))  # it has warned
    with pytest.warns(UserWarning, match=r"ids \[1, 2, 3\]"):
        MultiClsBertModel(model.config)(torch.tensor([[5, 1, 2, 4, 9, 9]]))


@pytest.mark.parametrize("facets", [0, 3])
def test_sentence_embeddings(facets: int) -> None:
    """The mean leaves the facets out; without facets it is the usual mean."""
    model = MultiClsBertModel(tiny(num_facets=facets)).eval()
    ids = torch.randint(10, 97, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    out = model(ids, attention_mask=mask)
    kept = [0, *range(1 + facets, 12)]
    expected = torch.stack([out.last_hidden_state[0, kept].mean(0), out.last_hidden_state[1, kept[:-3]].mean(0)])
    model.config.return_dict = False  # as somebody's config.json may say
    torch.testing.assert_close(model.embed_sentences(ids, mask), expected)
    model.config.sentence_embedding = "facets"
    torch.testing.assert_close(model.embed_sentences(ids, mask), out.facet_embeddings.sum(1))
    model.config.mcqt_lambda = 0.0
    sums = torch.nn.functional.normalize(out.facet_embeddings.sum(1), dim=-1)
    torch.testing.assert_close(model.similarity(out.facet_embeddings, out.facet_embeddings), sums @ sums.T)


def test_normalizers_replace_the_counts() -> None:
    config = tiny()
    model = MultiClsBertForPreTraining(config).eval()
    inputs = batch(config)
    own, shared = model(**inputs).losses, model(**inputs, normalizers={"mlm": 48.0, "so": 6.0}).losses
    torch.testing.assert_close(shared["mlm"], own["mlm"] * 24 / 48)
    torch.testing.assert_close(shared["so"], own["so"] * 12 / 6)
    torch.testing.assert_close(shared["tfidf"], own["tfidf"])


def test_inserted_layers_touch_the_facets_only() -> None:
    config = tiny(facet_layers=[3])
    model = MultiClsBertModel(config).eval()
    plain = MultiClsBertModel(tiny(facet_layers=[])).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    ids = torch.randint(10, 97, (2, 12))
    ours, theirs = model(ids).last_hidden_state, plain(ids).last_hidden_state
    torch.testing.assert_close(ours[:, [0, *range(4, 12)]], theirs[:, [0, *range(4, 12)]])
    for k in range(3):
        weight = model.encoder.layer[2].facets.weight[k]
        torch.testing.assert_close(ours[:, 1 + k], theirs[:, 1 + k] @ weight.T, rtol=1e-4, atol=1e-6)


def test_every_weight_learns() -> None:
    """Inserted layers and the order transform too, which the authors' optimizer left out."""
    config = tiny()
    model = MultiClsBertForPreTraining(config)
    model(**batch(config)).loss.backward()
    without = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()}
    assert {name for name in without if "pooler" not in name and "key.bias" not in name} == set()


@pytest.mark.parametrize(
    "changes", [{"num_facets": 0, "hard_negatives": False}, {"num_facets": 1}, {"facet_layers": []}]
)
def test_baselines_are_the_same_code_with_other_settings(changes: dict[str, object]) -> None:
    config = tiny(**changes)
    out = MultiClsBertForPreTraining(config)(**batch(config))
    assert set(out.losses) == {"mlm", "tfidf", "so", "mcqt"}
    assert out.facet_embeddings.shape == (config.num_parts * 4, config.num_embeddings_per_sequence, 16)
    candidates = 8 if config.hard_negatives else 4
    assert [None if s is None else tuple(s.shape) for s in out.mcqt_scores] == [
        (4, candidates),
        (4, candidates) if config.hard_negatives else None,
    ]


def test_reparameterised_pooling() -> None:
    model = MultiClsBertForSequenceClassification(tiny()).eval()
    ids = torch.randint(10, 97, (2, 12))
    out = model(ids)
    hidden, weight = model.bert(ids).last_hidden_state, model.bert.facet_head.dense.weight
    centred = weight - weight.mean(0)
    expected = sum(hidden[:, 1 + k] @ centred[k].T for k in range(3))
    torch.testing.assert_close(out.pooled, expected, rtol=1e-4, atol=1e-5)
    assert not model.facet_bias.any()
    # facets with one and the same weight would be cancelled, not merged: the gradient keeps them apart
    model.bert.facet_head.dense.weight.data[:] = weight[0].clone()
    assert model(ids).pooled.abs().max() < 1e-5


@pytest.mark.parametrize(("facets", "pooling"), [(1, "multicls"), (0, "cls"), (3, "sum")])
def test_other_poolings(facets: int, pooling: str) -> None:
    model = MultiClsBertForSequenceClassification(tiny(num_facets=facets, classifier_pooling=pooling)).eval()
    ids = torch.randint(10, 97, (2, 12))
    encoded = model.bert(ids)
    if pooling == "cls":
        expected = encoded.pooler_output
    else:
        weight = model.bert.facet_head.dense.weight
        expected = sum(encoded.last_hidden_state[:, 1 + k] @ weight[k].T for k in range(facets))
    torch.testing.assert_close(model(ids).pooled, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "millions"),
    [
        ({}, 118.4),
        ({"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}, 350.9),
    ],
)
def test_parameter_counts_of_the_paper(shape: dict[str, int], millions: float) -> None:
    """The published counts include the authors' task-type table (17 x D), which is folded into the token types here."""
    config = MultiClsBertConfig(**shape)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = MultiClsBertForSequenceClassification(config)
    assert config.facet_layers == ([4, 8] if config.num_hidden_layers == 12 else [8, 16])
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.06)
    assert round((count + 17 * config.hidden_size) / 1e6, 1) == millions


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"facet_layers": [4]}, r"1\.\.3"),
        ({"facet_layers": [2, 1]}, "ascending"),
        ({"num_facets": 0, "facet_layers": [1]}, "no facets"),
        ({"num_facets": 39}, "num_facets"),
        ({"mcqt_lambda": 1.5}, "mcqt_lambda"),
        ({"classifier_pooling": "mean"}, "classifier_pooling"),
        ({"sentence_embedding": "max"}, "sentence_embedding"),
        ({"facet_ids": [1, 2]}, "facet_ids"),
    ],
)
def test_settings_out_of_range(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_leaving_out_the_padding_changes_nothing() -> None:
    """Losses and gradients of the packed tokens are those of the padded batch; with wrong bounds they are not."""
    config = tiny()
    inputs = batch(config)
    lengths = torch.tensor([20, 13, 16, 20, 12, 14, 18, 11, 20, 19, 12, 17])
    mask = inputs["attention_mask"] = (torch.arange(20) < lengths[:, None]).long()
    inputs["labels"] = inputs["labels"].where(mask.bool(), -100)
    bounds = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    padded, packed = (MultiClsBertForPreTraining(config).eval() for _ in range(2))
    packed.load_state_dict(padded.state_dict())
    packed.set_attn_implementation(VARLEN)
    packed_inputs = inputs | {"cu_seqlens": bounds, "token_positions": mask.flatten().nonzero().squeeze(1)}
    expected, found = padded(**inputs).losses, packed(**packed_inputs).losses
    for model, losses in ((padded, expected), (packed, found)):
        torch.stack(list(losses.values())).sum().backward()
        assert (
            losses.keys() == {"mlm", "tfidf", "so", "mcqt"} and model.bert.embeddings.word_embeddings.weight.grad.any()
        )
    for name, loss in expected.items():
        torch.testing.assert_close(found[name], loss, rtol=1e-4, atol=0)
    gradients = {name: p.grad for name, p in packed.named_parameters()}
    for name, parameter in padded.named_parameters():
        if parameter.grad is not None and not name.endswith("key.bias"):  # whose true gradient is 0
            assert (gradients[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name
    with torch.no_grad():
        torch.testing.assert_close(packed(**inputs).losses["mlm"], expected["mlm"])  # finds the bounds itself
        wrong = bounds.clone()
        wrong[1] -= 1  # control: the last token of the first sequence is attended by the second one
        difference = packed(**packed_inputs | {"cu_seqlens": wrong}).losses["mcqt"] - expected["mcqt"]
        assert abs(difference / expected["mcqt"]) > 1e-4
