"""Starting from a checkpoint: nothing of it is lost, what is new is named, what does not fit is refused."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from sentence_transformers import SentenceTransformer

from multicls.build import build, new_parts
from multicls.cards import write_sentence_transformer
from multicls.errors import UserError
from multicls.files import write_json
from multicls.modeling_multicls import TopicTable
from multicls.optim import parameter_groups
from multicls.tokenization import facet_ids
from tests.encoders import SIZES, encoder_config, save_encoder, wordpiece


def quietly(folder: Path, **settings: Any) -> tuple[Any, Any]:
    return build(str(folder), report=lambda line: None, **settings)


def test_what_a_checkpoint_lacks_is_named(tiny_bert: Path, tmp_path: Path) -> None:
    save_encoder("electra", tmp_path)
    notes: list[str] = []
    _, tokenizer = build(str(tiny_bert), num_facets=3, report=notes.append)
    assert facet_ids(tokenizer) == (1, 2, 3)
    assert notes.pop() == "weights: encoder, MLM head; new: facets, TF-IDF head, order head"
    config = hf.AutoConfig.from_pretrained(tmp_path)
    hf.ElectraForPreTraining(config).save_pretrained(tmp_path)  # a discriminator
    build(str(tmp_path), num_facets=2, report=notes.append)
    assert notes[0].startswith("weights: encoder; new: MLM head (its loss begins near ")
    folder = save_encoder("roberta", tmp_path / "roberta")
    build(str(folder), num_facets=2, report=notes.append)
    assert "encoder, MLM head; new: pooler, facets" in notes[1]
    hf.AutoModel.from_pretrained(folder).save_pretrained(folder)  # without a head
    build(str(folder), num_facets=2, report=notes.append)
    assert "new: MLM head (its" in notes[2]
    build(str(folder), num_facets=2, random_weights=True, report=notes.append)
    assert notes[3] == "weights: random"


def test_a_multicls_checkpoint_is_continued(tiny_bert: Path, tmp_path: Path) -> None:
    model, tokenizer = quietly(tiny_bert, num_facets=3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, _ = quietly(tmp_path, num_facets=3, mcqt_lambda=0.5, hard_negatives=False)
    assert (again.config.mcqt_lambda, again.config.num_parts) == (0.5, 2)
    with pytest.raises(UserError, match="num_facets = 3"):
        quietly(tmp_path, num_facets=5)
    with pytest.raises(UserError, match="facet_layers"):
        quietly(tmp_path, num_facets=3, facet_layers=[])
    hf.AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="tokenizer inserts 0 facets, the model has 3"):
        quietly(tmp_path, num_facets=3)


def factors_of(model: Any) -> dict[str, float]:
    """Returns each weight's factor of the learning rate where that of new weights is 10."""
    names = {weight: name for name, weight in model.named_parameters()}
    groups = parameter_groups(model, 0.0, 10.0)
    return {names[weight]: group["lr_factor"] for group in groups for weight in group["params"]}


def test_new_weights_are_those_that_the_checkpoint_lacks(tiny_bert: Path, tmp_path: Path) -> None:
    factors = factors_of(quietly(tiny_bert, num_facets=3)[0])
    for name, factor in factors.items():
        is_new = name.startswith(("multicls.facet_head", "tfidf", "order")) or ".facets." in name
        assert factor == (10.0 if is_new else 1.0), name
    assert factors["multicls.encoder.encoder.layer.0.facets.weight"] == 10.0
    assert factors["mlm.lm.cls.predictions.transform.dense.weight"] == 1.0
    hf.AutoModel.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    hf.AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    model, tokenizer = quietly(tmp_path, num_facets=3)
    assert factors_of(model) == factors | {n: 10.0 for n in factors if n.startswith("mlm.")}
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert set(factors_of(quietly(tmp_path, num_facets=3)[0]).values()) == {1.0}
    untrained = {"new_weights": [name for name in factors if name.startswith("mlm.")]}
    write_json(tmp_path / "export.json", untrained)  # as of a run without masked LM
    assert new_parts(quietly(tmp_path, num_facets=3)[0]) == ["MLM head"]
    random = factors_of(quietly(tmp_path, num_facets=3, random_weights=True)[0])
    assert {n for n, factor in random.items() if factor == 1.0} == {
        name for name in random if ".encoder." in name
    }


LACKING: list[tuple[str, str]] = [
    ("AutoModel", "encoder, facets; new: MLM head (its loss begins near 6.0), TF-IDF head, order"),
    ("AutoModelForSequenceClassification", "encoder, facets; new: MLM head"),
    ("AutoModelForMaskedLM", "encoder, MLM head, facets; new: TF-IDF head, order head"),
    ("AutoModelForPreTraining", "all"),
]


@pytest.mark.parametrize(("kind", "line"), LACKING)
def test_a_multicls_model_saved_as_any_class_is_continued(
    tiny_bert: Path, tmp_path: Path, kind: str, line: str
) -> None:
    """Trainer, sentence-transformers or `save_pretrained` wrote the checkpoint."""
    first, tokenizer = quietly(tiny_bert, num_facets=3)
    first.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    getattr(hf, kind).from_pretrained(tmp_path).save_pretrained(tmp_path)
    notes: list[str] = []
    model: Any = build(str(tmp_path), num_facets=3, report=notes.append)[0]
    assert notes == [notes[0]] and notes[0].startswith(f"weights: {line}")
    state, expected = model.state_dict(), first.state_dict()
    assert state.keys() == expected.keys() and "id2label" not in model.config.to_diff_dict()
    for name, weight in state.items():
        kept = not name.startswith(tuple(model.new_weights))
        assert torch.equal(weight, expected[name]) or not kept, name
        assert (weight - weight.mean()).abs().max() < 0.5, f"{name} is drawn"
    assert {name.split(".")[0] for name in model.new_weights} <= {"mlm", "tfidf", "order"}


def test_a_multicls_model_without_facets_gets_new_ones(tiny_bert: Path, tmp_path: Path) -> None:
    first, tokenizer = quietly(tiny_bert, num_facets=0)
    first.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    notes: list[str] = []
    model: Any
    model, tokenizer = build(str(tmp_path), num_facets=3, report=notes.append)
    assert notes == ["weights: encoder, MLM head, TF-IDF head; new: facets, order head"]
    assert (facet_ids(tokenizer), model.config.facet_layers) == ((1, 2, 3), [1, 2])
    expected = first.state_dict()
    for name, weight in model.state_dict().items():
        assert name in model.new_weights or torch.equal(weight, expected[name]), name
    assert len(model.new_weights) == 2 + 3 + 4  # layers, facet head, order head
    assert quietly(tmp_path, num_facets=0)[0].new_weights == set()


def test_topics_stay_with_the_corpus_they_are_of(tiny_bert: Path, tmp_path: Path) -> None:
    first, tokenizer = quietly(tiny_bert, num_facets=3)
    first.multicls.add_topics(TopicTable(first.config.vocab_size, 7).state_dict())
    first.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert hf.AutoModel.from_pretrained(tmp_path).topics.table.shape[1] == 7
    model, _ = quietly(tmp_path, num_facets=3)
    assert model.config.num_topics == 0 and model.multicls.topics is None


@pytest.mark.parametrize(("kind", "most"), [("bert", 64), ("roberta", 62)])
def test_a_tokenizer_cuts_at_what_the_encoder_reads(kind: str, most: int, tmp_path: Path) -> None:
    """The limit is set where the checkpoint's tokenizer names none, as many on the Hub do."""
    save_encoder(kind, tmp_path)
    for limit, expected in ((None, most), (40, 40), (512, most)):
        theirs = hf.AutoTokenizer.from_pretrained(tmp_path)
        theirs.model_max_length = limit or int(1e30)
        theirs.save_pretrained(tmp_path)
        model, tokenizer = quietly(tmp_path, num_facets=2)
        tokenizer.save_pretrained(tmp_path / "ours")
        saved = hf.AutoTokenizer.from_pretrained(tmp_path / "ours")
        batch = saved(["bal " * 80], truncation=True, return_tensors="pt")
        assert batch["input_ids"].shape[1] == expected
        model(**batch)


def declare(folder: Path, *modules: tuple[str, dict[str, Any]], **config: Any) -> None:
    """Makes a checkpoint a SentenceTransformer with these modules after the model, in the older files' names."""
    kind = "sentence_transformers.models."
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{kind}Transformer"}]
    for number, (name, fields) in enumerate(modules, start=1):
        path = f"{number}_{name}"
        listed.append({"idx": number, "name": str(number), "path": path, "type": kind + name})
        write_json(folder / path / "config.json", fields)
    write_json(folder / "modules.json", listed)
    write_json(folder / "config_sentence_transformers.json", config)


CLS, MEAN = {"pooling_mode_cls_token": True}, {"pooling_mode": "mean"}


@pytest.mark.parametrize("pooling", [CLS, MEAN])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_sentence_transformers_embedding_is_kept(
    tmp_path: Path, pooling: dict[str, Any], normalize: bool
) -> None:
    base, ours = save_encoder("bert", tmp_path / "base"), tmp_path / "ours"
    modules: list[tuple[str, Any]] = [("Pooling", {"word_embedding_dimension": 32} | pooling)]
    modules += [("Normalize", {})] * normalize
    declare(base, *modules, prompts={"query": "fil "}, similarity_fn_name="dot")
    write_json(base / "sentence_bert_config.json", {"max_seq_length": 20})
    theirs: Any = SentenceTransformer(str(base), device="cpu")
    texts = ["bal del", "gol", "nar pel ros " * 30]
    expected = theirs.encode(texts, prompt_name="query", convert_to_tensor=True)
    for folder in (base, ours):  # and from a Multi-CLS checkpoint
        notes: list[str] = []
        model: Any
        model, tokenizer = build(str(folder), num_facets=0, report=notes.append)
        assert len(notes) == 1
        model.save_pretrained(ours)
        tokenizer.save_pretrained(ours)
        write_sentence_transformer(ours, model.sentence_files)
        again: Any = SentenceTransformer(str(ours), device="cpu", trust_remote_code=True)
        found = again.encode(texts, prompt_name="query", convert_to_tensor=True)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert (found.norm(dim=1).allclose(torch.ones(3))) == normalize
        assert (again.max_seq_length, again.similarity_fn_name) == (20, "dot")
    with_facets: Any = quietly(base, num_facets=2)[0]
    assert with_facets.config.pooling == ("cls" if pooling is CLS else "mean")
    assert with_facets.config.normalize == normalize
    config = quietly(base, num_facets=2, random_weights=True)[0].config
    assert (config.pooling, config.normalize) == ("mean", False)


def test_what_replaces_an_embedding_that_cannot_be_kept_is_named(tmp_path: Path) -> None:
    base = save_encoder("bert", tmp_path)
    both = {"pooling_mode": ["cls", "max"], "include_prompt": False}
    declare(base, ("Pooling", both), ("Dense", {}), ("Normalize", {}))
    notes: list[str] = []
    model: Any = build(str(base), num_facets=2, report=notes.append)[0]
    assert notes[1:] == [
        "sentence embedding: replaces cls and max pooling by the mean over tokens, "
        "pooling without the prompt by pooling with it, the module Dense by nothing"
    ]
    assert (model.config.pooling, model.config.normalize) == ("mean", True)
    declare(base, ("Pooling", {"pooling_mode_max_tokens": True}))
    build(str(base), num_facets=2, report=notes.append)
    assert notes[-1] == "sentence embedding: replaces max pooling by the mean over tokens"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(
    tiny_bert: Path, tmp_path: Path, value: float
) -> None:
    model = hf.AutoModelForMaskedLM.from_pretrained(tiny_bert)
    with torch.no_grad():
        model.bert.encoder.layer[1].output.dense.bias[3] = value
    model.save_pretrained(tmp_path)
    hf.AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"its weight encoder\.layer\.1\.output\.dense\.bias holds"):
        quietly(tmp_path)


def test_the_vocabulary_grows_to_a_multiple_and_never_shrinks(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path)
    model, grown = quietly(tmp_path, num_facets=20, facet_layers=[])
    assert grown.convert_ids_to_tokens(facet_ids(grown)[0]) == "[C1]"
    assert len(grown) == len(tokenizer) + 20 and model.config.vocab_size % 64 == 0
    assert model.config.vocab_size - len(grown) < 64
    assert model.get_output_embeddings().bias.shape == (model.config.vocab_size,)
    assert model.mlm.lm.cls.predictions.bias is model.get_output_embeddings().bias
    config = encoder_config("bert", vocab_size=1000)  # more rows than the tokenizer has tokens
    hf.AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    assert quietly(tmp_path)[0].config.vocab_size == 1024


def test_one_shared_layer_works_without_inserted_layers(tmp_path: Path) -> None:
    tokenizer = wordpiece()
    tokenizer.save_pretrained(tmp_path)
    config = hf.AlbertConfig(**SIZES | {"vocab_size": len(tokenizer), "embedding_size": 16})
    hf.AlbertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"'albert' has no list of 3 layers .* set facet_layers to"):
        quietly(tmp_path, num_facets=3)
    model, tokenizer = quietly(tmp_path, num_facets=3, facet_layers=[])
    out = model(**tokenizer(["bal del", "gol", "fil"], return_tensors="pt", padding=True))
    assert out.facet_embeddings.shape == (3, 3, 32)
    assert {p.grad for p in model.parameters()} == {None}, "the trial leaves no gradient"


def _without_tokenizer(folder: Path) -> None:
    save_encoder("bert", folder)
    for path in folder.glob("token*"):
        path.unlink()


def _deeper(folder: Path) -> None:
    save_encoder("bert", folder)
    config = hf.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers += 1
    config.save_pretrained(folder)


def _without_mask(folder: Path) -> None:
    save_encoder("roberta", folder)
    backend = hf.AutoTokenizer.from_pretrained(folder).backend_tokenizer
    hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def _own_code(folder: Path) -> None:
    save_encoder("bert", folder)
    text = (folder / "config.json").read_text().replace('"bert"', '"secret"')
    text = text.replace("{", '{"auto_map": {"AutoConfig": "secret.Config"},', 1)
    (folder / "config.json").write_text(text)
    (folder / "secret.py").write_text("raise SystemExit('executed')")


def _config_of(config: Any) -> Callable[[Path], Any]:
    return lambda folder: (config.save_pretrained(folder), wordpiece().save_pretrained(folder))


BERT = partial(save_encoder, "bert")
UNTIED = partial(save_encoder, "roberta", tie_word_embeddings=False)
RANDOM, SQUEEZE = {"random_weights": True}, SIZES | {"embedding_size": 32}
ESM = SIZES | {"pad_token_id": 1, "vocab_size": 40}
REFUSED: list[tuple[Callable[[Path], Any], dict[str, Any], str]] = [
    (_config_of(hf.GPT2Config()), {}, "'gpt2' has no masked-LM class .* BERT, RoBERTa, XLM-R"),
    (_config_of(hf.SqueezeBertConfig(**SQUEEZE)), RANDOM, "'squeezebert' passes by its layers"),
    (_config_of(hf.EsmConfig(**ESM)), RANDOM, "'esm' does not work"),
    (_config_of(hf.BartConfig()), {}, "'bart' is a decoder or an encoder-decoder"),
    (_own_code, {}, "'secret' is not one of transformers. Code in a checkpoint is never executed"),
    (UNTIED, RANDOM, "'roberta' with .* head with two biases"),
    (_without_tokenizer, {}, "has no vocabulary"),
    (_without_mask, {}, "has no mask_token"),
    (_deeper, {}, "weights of the encoder"),
    (Path.rmdir, {}, "no such folder"),
    (Path.exists, {}, "holds no config.json; of a run, pass RUN/hf"),
    (BERT, {"facet_layers": [2, 4]}, r"in 1\.\.3"),
    (BERT, {"facet_layers": [2, 1]}, "no ascending"),
    (BERT, {"facet_layers": [1], "num_facets": 0}, "no facets"),
    (partial(save_encoder, "mpnet"), {"num_facets": 60}, r"in 0\.\.59"),
]


@pytest.mark.parametrize(("write", "settings", "message"), REFUSED)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, write: Callable[[Path], Any], settings: dict[str, Any], message: str
) -> None:
    write(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path}.*{message}"):
        quietly(tmp_path, **settings)


def test_a_revision_of_the_hub_is_loaded_and_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache as huggingface_hub leaves it, with two commits; tests have no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cache, commits = tmp_path / "models--a--tiny", {"main": "a" * 40, "v1": "b" * 40}
    (cache / "refs").mkdir(parents=True)
    for seed, (name, commit) in enumerate(commits.items()):
        save_encoder("bert", cache / "snapshots" / commit, seed=seed)
        (cache / "refs" / name).write_text(commit)
    models = {name: build("a/tiny", revision=name, report=lambda line: None)[0] for name in commits}
    hashes = {name: model.config._commit_hash for name, model in models.items()}
    assert hashes == commits
    main, v1 = (next(model.parameters()) for model in models.values())
    assert not torch.equal(main, v1)
    with pytest.raises(UserError, match="is a folder, not a Hub id"):
        build(str(cache), revision="v1")
