"""Facets on many encoders: the encoder stays what it was, facets change what they should, and nothing else."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from multicls.build import build
from multicls.modeling_multicls import MultiClsForPreTraining, MultiClsModel, encoder_layers
from tests.encoders import FAMILIES, TEXTS, save_encoder

KINDS = list(FAMILIES)
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return {kind: save_encoder(kind, tmp_path_factory.mktemp("encoders") / kind) for kind in KINDS}


def built(folder: Path, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, tokenizer = build(str(folder), **({"report": lambda line: None} | settings))
    return model.eval(), tokenizer


def batch(tokenizer: Any, length: int | None = None) -> dict[str, Tensor]:
    options: Any = {"padding": "max_length", "max_length": length} if length else {"padding": True}
    return dict(tokenizer([*TEXTS, *TEXTS], TEXTS * 2, return_tensors="pt", **options))


def inserted(model: Any) -> list[Any]:
    return [m.facets for m in encoder_layers(model.multicls.encoder) if hasattr(m, "facets")]


def set_identity(model: Any) -> None:
    for facets in inserted(model):
        facets.weight.data = torch.eye(model.config.hidden_size).repeat(model.config.num_facets, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_without_facets_it_is_the_encoder(folders: Folders, kind: str) -> None:
    """Hidden states to the bit, and MLM logits at the labelled positions, are those of the encoder's own classes."""
    model, tokenizer = built(folders[kind], num_facets=0)
    theirs = AutoModelForMaskedLM.from_pretrained(folders[kind]).eval()
    inputs = batch(AutoTokenizer.from_pretrained(folders[kind]))
    assert torch.equal(inputs["input_ids"], batch(tokenizer)["input_ids"])
    types = {"token_type_ids": torch.zeros_like(inputs["input_ids"])}  # as a micro-batch has them
    with torch.no_grad():
        expected = theirs(**inputs, output_hidden_states=True)
        out = model(**(types | inputs), output_hidden_states=True)
        labels = torch.full_like(inputs["input_ids"], -100)
        labels[1, 2] = labels[4, 1] = 7
        labelled = model(**(types | inputs), labels=labels, objectives=["mlm"])
    last = AutoModel.from_pretrained(folders[kind]).eval()(**inputs).last_hidden_state
    assert torch.equal(out.last_hidden_state, last)
    size = expected.logits.shape[-1]
    assert model.config.vocab_size % 64 == 0 and model.config.vocab_size >= size
    torch.testing.assert_close(out.logits[..., :size], expected.logits, rtol=1e-4, atol=1e-5)
    picked = expected.logits[[1, 4], [2, 1]]
    torch.testing.assert_close(labelled.logits[:, :size], picked, rtol=1e-4, atol=1e-5)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (kind != "eurobert")
    with torch.no_grad():  # the control
        model.get_output_embeddings().weight += 0.01
        model.get_output_embeddings().weight[:] = model.get_input_embeddings().weight.flip(0)
        assert (model(**inputs).logits[..., :size] - expected.logits).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_inserted_layers_change_the_facets_and_what_reads_them(folders: Folders, kind: str) -> None:
    model, tokenizer = built(folders[kind], num_facets=3, facet_layers=[2])
    inputs = batch(tokenizer)
    real = inputs["attention_mask"].bool()
    types = {} if model.config.has_token_types else {"token_type_ids": None}
    encoder_inputs = {name: value for name, value in inputs.items() if name not in types}
    plain = copy.deepcopy(model.multicls.encoder)
    for layer in encoder_layers(plain):
        layer._forward_hooks.clear()
    with torch.no_grad():
        out = model(**inputs, output_hidden_states=True)
        set_identity(model)
        same = model(**inputs, output_hidden_states=True)
        expected = plain(**encoder_inputs, output_hidden_states=True)
    for ours, theirs in zip(same.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[real], theirs[real], rtol=1e-4, atol=1e-5)
    first, second = out.hidden_states[1], out.hidden_states[2]  # recorded after the hook
    torch.testing.assert_close(first[real], expected.hidden_states[1][real])
    text = [0, *range(4, real.shape[1])]
    torch.testing.assert_close(second[:, text], expected.hidden_states[2][:, text])
    assert (second[:, 1:4] - expected.hidden_states[2][:, 1:4]).abs().amin(dim=(1, 2)).gt(0).all()
    assert (out.last_hidden_state[:, text] - expected.last_hidden_state[:, text]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_facet_and_the_longest_input_fits(folders: Folders, kind: str) -> None:
    notes: list[str] = []
    model, tokenizer = built(folders[kind], num_facets=3, report=notes.append)
    longest = model.config.max_tokens
    reads_padding = kind == "convbert"  # by its convolutions, as in transformers
    assert [f"'{kind}' reads padding" in note for note in notes] == [False, True][
        : 1 + reads_padding
    ]
    with torch.no_grad():
        short = model.multicls(**batch(tokenizer)).facet_embeddings
        padded = model.multicls(**batch(tokenizer, min(longest, 80))).facet_embeddings
        if not reads_padding:
            torch.testing.assert_close(padded, short, rtol=1e-4, atol=1e-5)
        wrong = batch(tokenizer, 40)
        wrong["attention_mask"][:] = 1
        assert (model.multicls(**wrong).facet_embeddings - short).abs().max() > 1e-3
        full = torch.full((1, longest), tokenizer.convert_tokens_to_ids("b"))
        assert model.multicls(full).last_hidden_state.isfinite().all()
        if kind not in ("modernbert", "deberta-v2", "nomic_bert", "eurobert"):  # have no table
            with pytest.raises((IndexError, RuntimeError)):
                model.multicls(torch.full((1, longest + 1), int(full[0, 0])))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_saved_folders_are_the_same(folders: Folders, kind: str, tmp_path: Path) -> None:
    model, tokenizer = built(folders[kind], num_facets=3)
    inputs = batch(tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(**inputs)
        copied = copy.deepcopy(model)
        for facets in inserted(model):
            facets.weight.zero_()  # of the original: the copy has its own
        torch.testing.assert_close(copied(**inputs).facet_embeddings, expected.facet_embeddings)
        loaded: Any = MultiClsForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
        again, report = loaded
        assert not any(report.values()), report
        assert torch.equal(again.eval()(**inputs).logits, expected.logits)
        tied = again.get_output_embeddings().weight is again.get_input_embeddings().weight
        assert tied == (kind != "eurobert")
        masked = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
        assert torch.equal(masked(**inputs).logits, expected.logits)
        half = MultiClsModel.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        similar = torch.nn.functional.cosine_similarity(
            half(**inputs).facet_embeddings.float(), expected.facet_embeddings, dim=-1
        )
    assert similar.min() > 0.98
    continued, same = built(tmp_path, num_facets=3, mcqt_lambda=0.5)
    assert same(TEXTS[0], TEXTS[1]).input_ids == tokenizer(TEXTS[0], TEXTS[1]).input_ids
    assert torch.equal(continued(**inputs).facet_embeddings, expected.facet_embeddings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_and_compiling_change_no_gradient(folders: Folders, kind: str) -> None:
    model, tokenizer = built(folders[kind], num_facets=3)
    inputs = batch(tokenizer)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        outputs = model.train()(**inputs, group_size=2)
        (outputs.loss + outputs.tfidf.sum()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.config.encoder.attention_probs_dropout_prob = 0.0
    for module in model.modules():
        for name in {"p", "drop_prob", "dropout_prob"} & vars(module).keys():
            setattr(module, name, 0.0)
    plain = gradients()
    assert any(name.endswith("facets.weight") for name in plain)
    for layer in encoder_layers(model.multicls.encoder):
        layer.compile(backend="aot_eager", dynamic=False)
    assert_equal_gradients(gradients(), plain)
    for layer in encoder_layers(model.multicls.encoder):
        layer._compiled_call_impl = None
    if model.supports_gradient_checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
            {"use_reentrant": False}
        )
        assert_equal_gradients(gradients(), plain)
    else:
        assert kind == "mpnet"


def assert_equal_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        if not name.endswith(("key.bias", "k.bias", "k_lin.bias")):  # whose true gradient is 0
            torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def test_local_attention_stays_above_its_window(tmp_path: Path) -> None:
    """ModernBERT at 200 tokens, local layers of 16: a mask of four dimensions would attend to all of them."""
    save_encoder("modernbert", tmp_path, num_hidden_layers=4)
    model, _ = built(tmp_path, num_facets=3)
    assert model.config.facet_layers == [3]  # the next one attends globally
    set_identity(model)
    ids = torch.randint(20, 300, (2, 200), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 150:] = 0
    plain = AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        ours = model.multicls(ids, mask).last_hidden_state[mask.bool()]
        expected = plain(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        everywhere = plain(ids, attention_mask=mask[:, None, None].bool()).last_hidden_state
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert (everywhere[mask.bool()] - expected).abs().max() > 1e-2  # the control
