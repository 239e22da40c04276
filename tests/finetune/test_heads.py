"""One model class for all heads: what it computes, what it refuses, and that it loads without this project."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, TextClassificationPipeline

from finetune.heads import HEADS
from finetune.heads.build import Incompatible, load_fine_tuned, save_fine_tuned
from finetune.settings import RunSettings
from finetune.tasks import Task, task_of
from multicls.build import build
from multicls.configuration_multicls import MultiClsConfig
from multicls.errors import UserError
from multicls.modeling_multicls import MultiClsForSequenceClassification, MultiClsModel
from multicls.settings import load_settings
from tests.finetune.models import ENCODERS, SIZES, about, batch, load, make, parameters
from tests.processes import completed

TRAINED = list(HEADS)


DENSE = {"classifier.dense": "head.dense", "classifier.out_proj": "classifiers.0"}
POOLER = {"bert.pooler.dense": "head.dense", "classifier": "classifiers.0"}
PRE = {"pre_classifier": "head.dense", "classifier": "classifiers.0"}


@pytest.mark.parametrize(
    ("name", "names"),
    [("bert", POOLER), ("roberta", DENSE), ("electra", DENSE), ("distilbert", PRE)],
)
def test_cls_is_the_published_classifier(name: str, names: dict[str, str]) -> None:
    """Logits and loss, also with the same dropout masks; so no pooler that RoBERTa was never given is read."""
    theirs = AutoModelForSequenceClassification.from_config(ENCODERS[name])
    ours = make(name, "cls")
    weights = {}
    for key, value in theirs.state_dict().items():
        prefixes = names | {f"{theirs.base_model_prefix}.": "encoder."}
        old = next(old for old in prefixes if key.startswith(old))
        weights[prefixes[old] + key[len(old) :]] = value
    ours.load_state_dict(weights)
    labels = torch.tensor([0, 1, 1, 0])
    for training in (False, True):
        outputs = []
        for model in (theirs, ours):
            torch.manual_seed(5)
            outputs.append(model.train(training)(**batch(), labels=labels))
        assert torch.equal(outputs[0].logits, outputs[1].logits)
        torch.testing.assert_close(outputs[0].loss, outputs[1].loss)


@pytest.mark.parametrize("head", ["multicls", "multicls_sum"])
def test_multicls_is_the_pretraining_packages_classifier(head: str) -> None:
    config = MultiClsConfig(encoder=BertConfig(**SIZES), num_facets=3)
    theirs, ours = MultiClsForSequenceClassification(config).eval(), make(config, head)
    theirs.facet_bias.data.normal_()
    ours.encoder.load_state_dict(theirs.multicls.state_dict(), strict=False)
    dense = theirs.multicls.facet_head.dense
    ours.head.dense.load_state_dict(dense.state_dict())
    ours.head.bias.data = theirs.facet_bias.data
    ours.classifiers[0].load_state_dict(theirs.classifier.state_dict())
    expected = theirs(**batch()).logits
    if head == "multicls_sum":
        facets = theirs.multicls.facet_states(theirs.multicls(**batch()).last_hidden_state)
        expected = theirs.classifier((dense(facets) + theirs.facet_bias).sum(dim=1))
    assert torch.allclose(ours(**batch()).logits, expected, atol=1e-6)


POOLED = [("isobn", "multicls"), ("isobn", "mean"), ("cln", "multicls")]
CASES = [
    (name, head, pooling)
    for name in ENCODERS
    for head, pooling in [*((head, "cls") for head in TRAINED), *POOLED]
    if name == "multicls" or not {"multicls", "facets"} & {head.removesuffix("_sum"), pooling}
]


@pytest.mark.parametrize(("name", "head", "pooling"), CASES)
def test_heads_train_all_they_hold_and_ignore_padding(name: str, head: str, pooling: str) -> None:
    model = make(name, head, pooling=pooling).train()
    whole = batch()
    model(**whole, labels=torch.tensor([0, 1, 1, 0])).loss.backward()
    # The attention's key bias has a gradient of 0 in theory; None is what a parameter has that nothing reads.
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    model.eval()
    alone = {key: value[1:2, :7] for key, value in whole.items()}
    logits, unmasked = model(**whole).logits[1], model(whole["input_ids"]).logits[1]
    assert torch.allclose(logits, model(**alone).logits[0], atol=1e-5)
    assert not torch.allclose(logits, unmasked, atol=1e-5), "control"


def test_tasks_of_all_shapes() -> None:
    """Regression, choices and spans, each with its own classifier, from values worked out by hand."""
    choice, regression = about(num_labels=1, num_choices=2), about("")
    model = make("bert", "mean", about(num_spans=2), regression, choice)
    inputs = batch()
    spans = torch.zeros(4, 2, 12, dtype=torch.bool)
    spans[:, 0, 2:4] = spans[:, 1, 5] = True
    hidden = model.encoder(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    mean = (hidden * mask).sum(1) / mask.sum(1)
    expected = model.classifiers[0](torch.cat([mean, hidden[:, 2:4].mean(1), hidden[:, 5]], dim=1))
    torch.testing.assert_close(model(**inputs, spans=spans).logits, expected)

    scores, labels = model.classifiers[1](mean)[:, 0], torch.tensor([0.1, 0.2, 0.3, 0.4])
    output = model(**inputs, labels=labels, task=1)
    assert output.logits.shape == (4, 1)
    torch.testing.assert_close(output.loss, (scores - labels).square().mean())

    output = model(**inputs, labels=torch.tensor([1, 0]), task=2)
    logits = model.classifiers[2](mean).view(2, 2)
    expected = -logits.log_softmax(1)[[0, 1], [1, 0]].mean()
    torch.testing.assert_close(output.logits, logits)
    torch.testing.assert_close(output.loss, expected)


def test_token_types_reach_an_encoder_that_has_them() -> None:
    types = torch.ones_like(batch()["input_ids"])
    for name, differs in (("bert", True), ("roberta", False)):
        model = make(name, "cls")
        same = torch.equal(model(**batch()).logits, model(**batch(), token_type_ids=types).logits)
        assert same != differs


@pytest.mark.parametrize(
    ("head", "ours", "from_checkpoint"),
    [
        ("cls", "head.dense.weight", "encoder.pooler.dense.weight"),
        ("multicls", "head.dense.weight", "facet_head.dense.weight"),
        ("cln", "head.pooling.dense.weight", "encoder.pooler.dense.weight"),
        ("hire", "", ""),
    ],
)
def test_heads_keep_the_checkpoints_weights(
    head: str, ours: str, from_checkpoint: str, tiny_multicls: Path
) -> None:
    """Building draws new weights for what is new only, from torch's generator."""

    trained = MultiClsModel.from_pretrained(tiny_multicls).state_dict()
    models = [load(tiny_multicls, head, seed=seed)[0].state_dict() for seed in (1, 1, 2)]
    kept = [key for key in models[0] if key.removeprefix("encoder.") in trained]
    assert len(kept) > 30
    assert all(torch.equal(models[0][k], trained[k.removeprefix("encoder.")]) for k in kept)
    if ours:
        assert torch.equal(models[0][ours], trained[from_checkpoint])
    new = [key for key in models[0] if not torch.equal(models[0][key], models[2][key])]
    assert new and all(torch.equal(models[0][key], models[1][key]) for key in models[0])
    assert all(key.startswith(("classifiers.", "head.")) for key in new)


@pytest.mark.parametrize("facets", [None, 0])
@pytest.mark.parametrize(
    ("head", "pooling"),
    [("multicls", "cls"), ("facets", "cls"), ("isobn", "multicls"), ("cln", "facets")],
)
def test_facets_are_needed(
    head: str, pooling: str, facets: int | None, tiny_bert: Path, tmp_path: Path
) -> None:
    folder = tiny_bert
    if facets == 0:
        folder, report = tmp_path, mock.Mock()
        for part in build(str(tiny_bert), num_facets=0, facet_layers=[], report=report):
            part.save_pretrained(folder)
    with pytest.raises(Incompatible, match=f"--head {head}: .*without facets"):
        load(folder, head, pooling=pooling)


def test_a_saved_model_says_what_it_was_trained_on(tiny_bert: Path) -> None:
    (description,) = load(tiny_bert, task="stsb")[0].config.tasks
    assert description.items() > {"name": "stsb", "label_scale": 5.0, "max_length": 24}.items()
    assert task_of(description).describe() == description
    mine = Task("x", ("mail", "reply"), ("a", "b"), ("acc",))
    assert task_of(mine.describe()).describe() == mine.describe()


@pytest.mark.parametrize(
    ("task", "problem_type", "expected"),
    [
        (about(), "single_label_classification", lambda logits: logits.softmax(-1)),
        (about(multi_label=True), "multi_label_classification", lambda logits: logits.sigmoid()),
        (about(""), "regression", lambda logits: logits),
    ],
)
def test_pipelines_give_probabilities_or_the_score(
    task: dict[str, Any], problem_type: str, expected: Any, tiny_bert: Path, tmp_path: Path
) -> None:
    _, tokenizer = load(tiny_bert)
    encoder = BertConfig(**SIZES | {"vocab_size": len(tokenizer)})
    save_fine_tuned(make(encoder, "cls", task), tokenizer, tmp_path / "saved")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert model.config.problem_type == problem_type
    classify: Any = TextClassificationPipeline(model=model, tokenizer=tokenizer)
    found = {answer["label"]: answer["score"] for answer in classify(["len bal"], top_k=None)[0]}
    logits = model.eval()(**tokenizer("len bal", return_tensors="pt")).logits[0]
    names = task["labels"] or ["score"]
    assert found == pytest.approx(dict(zip(names, expected(logits).tolist(), strict=True)))


def test_the_loss_of_several_labels() -> None:
    """The mean over rows and classes, as BERT's own classifier with this problem type."""
    task = about("xyz", multi_label=True)
    model, labels = make("bert", "cls", task), torch.tensor([[0.0, 1, 1]] * 3 + [[0.0, 0, 0]])
    output = model(**batch(), labels=labels)
    probabilities = output.logits.sigmoid()
    expected = -(labels * probabilities.log() + (1 - labels) * (1 - probabilities).log()).mean()
    torch.testing.assert_close(output.loss, expected)


def test_a_trainer_s_metrics_get_the_logits_alone() -> None:
    """`np.argmax(logits)` in the usual `compute_metrics` fails on a tuple."""
    for name, head in (("multicls", "multicls"), ("bert", "hire")):
        model = make(name, head)
        output = model(**batch(), labels=torch.tensor([0, 1, 1, 0]))
        ignored = [*model.config.keys_to_ignore_at_inference, "loss"]  # as transformers.Trainer
        assert [key for key in output if key not in ignored] == ["logits"]


LOAD = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
for folder in map(Path, sys.argv[1:]):
    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    with torch.no_grad():
        logits = inputs.pop("logits")
        assert torch.equal(model(**inputs).logits, logits), folder
assert not {name.partition(".")[0] for name in sys.modules} & {"finetune", "multicls"}
"""


def test_a_saved_model_without_its_tokenizer_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    model, tokenizer = load(tiny_bert)
    save_fine_tuned(model, tokenizer, tmp_path / "saved")
    assert len(load_fine_tuned(str(tmp_path / "saved"))[1]) == len(tokenizer)
    (tmp_path / "saved" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="saved: .*its tokenizer"):
        load_fine_tuned(str(tmp_path / "saved"))


@pytest.mark.slow
def test_saved_models_load_without_the_project(
    tiny_bert: Path, tiny_multicls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with it, without a question whether to run their code."""
    monkeypatch.setattr("builtins.input", None)
    folders = []
    cases = [
        (tiny_multicls, "multicls_sum", "cls"),
        (tiny_multicls, "isobn", "multicls"),
        (tiny_bert, "hire", "cls"),
        (tiny_multicls, "cln", "facets"),
    ]
    for origin, head, pooling in cases:
        folder = tmp_path / f"{head}-{pooling}.v1"
        model, tokenizer = load(origin, head, pooling=pooling)
        inputs = dict(tokenizer(["len bal los", "the del"], padding=True, return_tensors="pt"))
        model.train()(**inputs)  # so that there are statistics
        with torch.no_grad():
            logits = model.eval()(**inputs).logits
            save_fine_tuned(model, tokenizer, folder)
            again = load_fine_tuned(str(folder))[0].eval()
            assert torch.equal(again(**inputs).logits, logits)
        assert again.config.id2label == {0: "0", 1: "1"} and (folder / "model.safetensors").exists()
        torch.save(inputs | {"logits": logits}, folder / "inputs.pt")
        folders.append(folder)
    (tmp_path / "load.py").write_text(LOAD, encoding="utf-8")
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    words = [sys.executable, "-I", tmp_path / "load.py", *folders]
    done = completed(words, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("size", "millions"), [("base", 117.74), ("large", 349.82)])
def test_parameters_of_five_facets(size: str, millions: float) -> None:
    """The paper's 118.4 M and 350.9 M less BERT's pooler, 0.59 M and 1.05 M, that this head does not read."""
    shape = {"base": (768, 12, 12), "large": (1024, 24, 16)}[size]
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    sizes: dict[str, Any] = dict(zip(names, shape, strict=True))
    config = MultiClsConfig(encoder=BertConfig(**sizes, intermediate_size=4 * shape[0]))
    with torch.device("meta"):
        model = make(config, "multicls")
    assert parameters(model) / 1e6 == pytest.approx(millions, abs=0.02)


@pytest.mark.parametrize("head", TRAINED)
def test_bf16_autocast_is_near_float32(head: str) -> None:
    model = make("multicls", head).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch(), labels=torch.tensor([0, 1, 1, 0])).loss
        near = model.eval()(**batch()).logits
    loss.backward()
    assert loss.dtype == torch.float32 and loss.isfinite()
    assert (near - model(**batch()).logits).abs().max() < 0.05
    assert all(buffer.dtype != torch.bfloat16 for buffer in model.head.buffers())


@pytest.mark.parametrize("head", ["isobn", "hire", "cln"])
def test_recipes_of_the_papers(head: str) -> None:
    recipe = Path(__file__).parents[2] / "finetune" / "recipes" / f"{head}.yaml"
    flags = {"model": "m"} if head == "cln" else {"model": "m", "task": "rte"}
    settings = load_settings(RunSettings, [str(recipe)], flags)
    assert settings.head == head and settings.train.epochs == 10
