"""The model on a tiny BERT: facets, parameter counts, baselines as settings, packed sequences."""

import runpy
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor
from transformers import BertConfig

import multicls
from multicls.configuration_multicls import MultiClsConfig
from multicls.modeling_multicls import OBJECTIVES, UNPADDING, MultiClsForPreTraining, MultiClsModel
from pretrain.batches import pack
from tests.encoders import encoder_config
from tests.pretrain.tools import random_inputs, tiny


def batch(config: MultiClsConfig, examples: int = 4, length: int = 20) -> dict[str, Tensor]:
    return random_inputs(0, config.num_parts * examples, config.num_facets, length)


def test_a_batch_that_is_not_part_major_has_the_other_objectives() -> None:
    model = MultiClsForPreTraining(tiny()).eval()
    ids = torch.randint(10, 97, (4, 20))
    out = model(ids, output_hidden_states=True, output_attentions=True)
    assert out.loss is None and out.losses == {} and out.mcqt_scores is None
    assert out.logits.shape == (4, 20, 97) and len(out.hidden_states) == 4
    labels = torch.full_like(ids, -100)
    labels[1, 7] = labels[3, 5] = 11
    labelled, nothing = (model(ids, labels=some) for some in (labels, 0 * ids - 100))
    assert {*labelled.losses} == {"mlm"} and labelled.loss == labelled.losses["mlm"]
    assert nothing.loss == 0, "not 0 / 0"
    torch.testing.assert_close(labelled.logits, out.logits[[1, 3], [7, 5]])
    assert set(model(ids[:3], labels=labels[:3]).losses) == {"mcqt", "mlm"}
    with pytest.raises(ValueError, match="3 parts"):  # MCQT is asked for
        model(ids, group_size=2)


def test_an_older_transformers_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    with pytest.raises(ImportError, match=r"needs transformers 5, this is transformers 4.57.6"):
        runpy.run_path(multicls.configuration_multicls.__file__)


def test_input_without_room_for_the_facets_is_refused() -> None:
    model = MultiClsModel(tiny(num_hidden_layers=1, facet_layers=[])).eval()
    with pytest.raises(ValueError, match="3 tokens have no room for"):
        model(torch.tensor([[5, 1, 2]]))
    model(inputs_embeds=torch.zeros(1, 6, 16))


PARTS = "mean+facets+topics"


def model_of_parts() -> MultiClsModel:
    """A model with an embedding of three parts, whose encoder reads 8 tokens and whose topics read all."""
    model = MultiClsModel(tiny(embedding=PARTS, encoder_tokens=8, num_topics=4)).eval()
    assert model.topics is not None
    model.topics.idf.uniform_(1, 2)
    model.topics.table.normal_()
    return model


def test_an_embedding_of_parts_has_equal_parts_and_topics_of_whole_texts() -> None:
    model, cosine = model_of_parts(), torch.nn.functional.cosine_similarity
    ids = torch.randint(10, 97, (3, 12))
    mask = torch.ones_like(ids)
    mask[1, 6:], mask[2, 8:] = 0, 0
    ids[0, 11], ids[1, 5], ids[2, 7] = 2, 2, 2  # [SEP]
    own, facets, topics = model.embed_sentences(ids, mask).split([16, 3 * 16, 4], dim=1)
    for part in (own, facets, topics):
        torch.testing.assert_close(part.norm(dim=1), torch.full((3,), 3**-0.5))
    cut = ids[:, :8].clone()
    cut[0, 7] = 2  # as a tokenizer truncates
    outputs = model(cut, mask[:, :8])
    expected = {own: model.pool(outputs.last_hidden_state, mask[:, :8])}
    expected |= dict(zip(facets.split(16, 1), outputs.facet_embeddings.unbind(1), strict=True))
    expected |= {topics: model(ids, mask).topics}
    for part, values in expected.items():
        torch.testing.assert_close(cosine(part, values), torch.ones(3))
    for wrong in ("mean+topics", "mean+mean", "mean+"):
        with pytest.raises(ValueError, match="not some of mean, cls, facets, joined by"):
            tiny(embedding=wrong)
    for name in ("embedding", "pooling"):  # as options of `from_pretrained` are set
        setattr(config := tiny(), name, "maen")
        with pytest.raises(ValueError, match=f"{name} = 'maen': not"):
            MultiClsModel(config)


@pytest.mark.slow
def test_an_embedding_of_parts_as_onnx(tmp_path: Path) -> None:
    """For any number of texts and tokens, shorter and longer than the encoder reads."""
    model, file = model_of_parts(), str(tmp_path / "model.onnx")

    class Wrapped(torch.nn.Module):
        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            return model.embed_sentences(ids, mask)

    any_size = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    ids = torch.randint(10, 97, (3, 12))
    options: Any = {"dynamic_shapes": (any_size, any_size), "verbose": False}
    program: Any = torch.onnx.export(Wrapped().eval(), (ids, torch.ones_like(ids)), **options)
    program.save(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    for texts, length in ((5, 20), (2, 6)):
        ids = torch.randint(10, 97, (texts, length))
        mask = torch.ones_like(ids)
        mask[0, 5:] = 0
        (found,) = session.run(None, dict(zip(names, (ids.numpy(), mask.numpy()), strict=True)))
        with torch.no_grad():
            expected = model.embed_sentences(ids, mask)
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("facets", [0, 3])
def test_sentence_embeddings(facets: int) -> None:
    """The mean leaves the facets out; without facets it is the usual mean."""
    model = MultiClsModel(tiny(num_facets=facets)).eval()
    ids = torch.randint(10, 97, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    out = model(ids, attention_mask=mask)
    kept = [0, *range(1 + facets, 12)]
    expected = torch.stack(
        [out.last_hidden_state[0, kept].mean(0), out.last_hidden_state[1, kept[:-3]].mean(0)]
    )
    model.config.return_dict = False  # as somebody's config.json may say
    twice = [model.embed_sentences(ids, mask) for _ in range(2)]  # which keep the mask as it is
    torch.testing.assert_close(twice, [expected] * 2)


def test_pooling_of_a_single_embedding_is_not_centred() -> None:
    model = multicls.modeling_multicls.MultiClsForSequenceClassification(tiny(num_facets=1)).eval()
    model.classifier = torch.nn.Identity()
    ids = torch.randint(10, 97, (2, 12))
    weight = model.multicls.facet_head.dense.weight
    expected = model.multicls(ids).last_hidden_state[:, 1] @ weight.T
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-6)


LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}


@pytest.mark.parametrize(
    ("shape", "millions"), [({}, 118.4), (LARGE | {"intermediate_size": 4096}, 350.9)]
)
def test_parameter_counts_of_the_paper(shape: dict[str, int], millions: float) -> None:
    """The published counts include the authors' task-type table (17 x D), which is folded into the token types here."""
    config = MultiClsConfig(encoder=BertConfig(**shape))  # type: ignore[arg-type]
    with torch.device("meta"):
        model = multicls.modeling_multicls.MultiClsForSequenceClassification(config)
    assert config.facet_layers == ([4, 8] if config.num_hidden_layers == 12 else [8, 16])
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.06)
    assert round((count + 17 * config.hidden_size) / 1e6, 1) == millions


def attend_within_sequences(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    starts: Tensor,
    *_: Any,
    scale: float | None,
    window_size: tuple[int, int],
) -> Tensor:
    """Stands in for torch's flash attention on a GPU: attends within each of the packed sequences."""
    attend, parts = torch.nn.functional.scaled_dot_product_attention, []
    ends = starts.tolist()
    for start, end in zip(ends, ends[1:], strict=False):
        if start == end:  # a sequence of no padding
            continue
        query, key, value = (
            states[start:end].transpose(0, 1) for states in (query_THD, key_THD, value_THD)
        )
        places = torch.arange(end - start)
        reach = window_size[0] if window_size[0] >= 0 else end
        near = (places[:, None] - places).abs() <= reach
        parts.append(attend(query, key, value, attn_mask=near, scale=scale).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("kind", UNPADDING)
def test_leaving_out_the_padding_changes_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and gradients of the packed tokens are those of the padded batch; with a wrong mask they are not."""
    torch.manual_seed(0)
    config = MultiClsConfig(encoder=encoder_config(kind), num_facets=3)
    inputs = batch(config)
    lengths = torch.tensor([20, 13, 16, 20, 12, 14, 18, 11, 20, 19, 12, 17])
    mask = inputs["attention_mask"] = (torch.arange(20) < lengths[:, None]).long()
    padding = torch.tensor(config.pad_token_id)
    inputs["input_ids"] = torch.randint(5, 50, (12, 20)).where(mask.bool(), padding)
    inputs["labels"] = inputs["labels"].where(mask.bool(), -100)
    inputs["anchor_targets"] = torch.randn(12, config.hidden_size)
    model = MultiClsForPreTraining(config).eval()

    def losses_and_gradients(**options: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model.zero_grad()
        out = model(**(inputs | options))
        out.loss.backward()
        named = model.named_parameters()
        return out.losses, {name: p.grad.clone() for name, p in named if p.grad is not None}

    expected, gradients = losses_and_gradients()
    with pytest.raises(ValueError, match=f"'flash_attention_2', which run on a GPU.* is {kind}"):
        model(**inputs, unpad=True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_within_sequences)
    model.set_attn_implementation("varlen")
    found, packed_gradients = losses_and_gradients(unpad=True)
    assert found.keys() == set(OBJECTIVES)
    for name, loss in expected.items():
        torch.testing.assert_close(found[name], loss, rtol=1e-4, atol=0)
    for name, gradient in gradients.items():
        if not name.endswith("key.bias"):  # whose true gradient is 0
            assert (packed_gradients[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-7, name
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    boundaries = {"real_positions": mask.flatten().nonzero()[:, 0], "sequence_starts": starts}
    assert losses_and_gradients(unpad=True, **boundaries)[0] == found
    positions, more = pack(mask.numpy(), multiple=100)  # 192 tokens are real, 8 are padding
    rounded = {"real_positions": positions, "sequence_starts": more}
    losses, rounded_gradients = losses_and_gradients(
        unpad=True, **{name: torch.from_numpy(array) for name, array in rounded.items()}
    )
    assert len(positions) == 200
    torch.testing.assert_close(losses, found, rtol=1e-5, atol=1e-6)
    for name, gradient in packed_gradients.items():
        torch.testing.assert_close(rounded_gradients[name], gradient, rtol=1e-4, atol=1e-6)
    shorter = mask.clone()
    shorter[1, 12] = 0  # the control
    wrong, _ = losses_and_gradients(unpad=True, attention_mask=shorter)
    assert abs(wrong["tfidf"] / expected["tfidf"] - 1) > 1e-4


@pytest.mark.parametrize("objectives", [("mlm",), ("mcqt",), ("so", "tfidf")])
def test_only_the_heads_of_the_objectives_are_computed(objectives: tuple[str, ...]) -> None:
    config = tiny()
    model = MultiClsForPreTraining(config).eval()
    everything = model(**batch(config))
    called: set[str] = set()
    heads = {"mlm": model.mlm, "tfidf": model.tfidf, "so": model.order}
    for name, head in heads.items():
        head.register_forward_hook(lambda *_, name=name: called.add(name))
    some = model(**batch(config), objectives=objectives)
    assert called == set(objectives) - {"mcqt"} and some.losses.keys() == set(objectives)
    assert all(some.losses[name] == everything.losses[name] for name in objectives)
    assert (some.mcqt_scores is None) == ("mcqt" not in objectives)
    model.freeze_unused(objectives)
    model.zero_grad()
    model(**batch(config), objectives=objectives).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    reached = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == reached and any("word_embeddings" in name for name in trained)


def test_default_layers_stand_before_global_ones() -> None:
    encoder = encoder_config("modernbert", num_hidden_layers=22)
    assert MultiClsConfig(encoder=encoder).facet_layers == [6, 15]
