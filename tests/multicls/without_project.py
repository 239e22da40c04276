"""What users do with exported folders, in a process that cannot import this project: `python -I FILE FOLDER ...`.

Each function whose name begins with `check_` is one check. The process prints a JSON line for each: folder, name and
traceback, or null. `expected.safetensors` in a folder holds the outputs of this project. SKIPPED in the environment
names checks that are left out, as folder/name.
"""

import itertools
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file

TRUST: dict[str, Any] = {"trust_remote_code": True}
TEXTS = ["bal del fil", "gol", "nar pel ros tun"]


class Refused:
    """Makes the project impossible to import, as if it were not installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in ("multicls", "finetune", "pretrain", "data_prep"):
            raise ModuleNotFoundError(name)


def tokenizer_of(folder: Path) -> Any:
    return hf.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)  # it needs no code


def batch(folder: Path) -> dict[str, torch.Tensor]:
    return dict(tokenizer_of(folder)(TEXTS, padding=True, return_tensors="pt"))


def load(auto: Any, folder: Path, **options: Any) -> Any:
    model, report = auto.from_pretrained(folder, output_loading_info=True, **TRUST, **options)
    assert not report["unexpected_keys"] and not report["mismatched_keys"], report
    new = ("classifier.", "facet_bias")
    assert all(name.startswith(new) for name in report["missing_keys"]), report
    return model.eval()


def check_every_auto_class(folder: Path) -> None:
    expected, inputs = load_file(folder / "expected.safetensors"), batch(folder)
    with torch.no_grad():
        facets = load(hf.AutoModel, folder)(**inputs).facet_embeddings
        options = {"labels": inputs["input_ids"], "output_hidden_states": True}
        masked = load(hf.AutoModelForMaskedLM, folder)(**inputs, **options)
        pretraining = load(hf.AutoModelForPreTraining, folder)(**inputs)
    torch.testing.assert_close(facets, expected["facets"])
    torch.testing.assert_close(masked.logits, expected["logits"])
    torch.testing.assert_close(pretraining.logits, expected["logits"])
    cross_entropy = torch.nn.functional.cross_entropy
    loss = cross_entropy(masked.logits.flatten(0, 1), inputs["input_ids"].flatten())
    torch.testing.assert_close(masked.loss, loss)
    assert len(masked.hidden_states) == 4


def check_pipelines(folder: Path) -> None:
    features = hf.pipeline("feature-extraction", str(folder), **TRUST)(TEXTS[0])
    tokens = tokenizer_of(folder)(TEXTS[0])["input_ids"]
    assert np.shape(features) == (1, len(tokens), 32)
    mask = tokenizer_of(folder).mask_token
    best = hf.pipeline("fill-mask", str(folder), **TRUST)(f"bal {mask} fil", top_k=2)
    assert len(best) == 2 and 0 < best[0]["score"] < 1 and mask not in best[0]["sequence"]
    scores = hf.pipeline("text-classification", str(folder), **TRUST)(TEXTS)
    assert len(scores) == 3 and {row["label"] for row in scores} <= {"LABEL_0", "LABEL_1"}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    tokenizer = tokenizer_of(folder)
    return [dict(tokenizer(text)) | {"labels": number % 2} for number, text in enumerate(TEXTS * 2)]


def trainer_of(folder: Path, output: str, **options: Any) -> Any:
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
    still = dict.fromkeys(rates, 0.0)
    model = hf.AutoModelForSequenceClassification.from_pretrained(
        folder, classifier_dropout=0.0, encoder=still, **TRUST
    )
    with torch.no_grad():  # the new weights, the same in each process
        for parameter in (model.classifier.weight, model.facet_bias):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    plain = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    options |= plain | quiet | {"use_cpu": True, "max_steps": 1, "max_grad_norm": 0.0}
    arguments = hf.TrainingArguments(str(folder / output), **options)
    data: Any = {"train_dataset": rows_of(folder), "processing_class": tokenizer_of(folder)}
    return hf.Trainer(model=model, args=arguments, **data)


def check_trainer(folder: Path) -> None:
    whole = trainer_of(folder, "whole", per_device_train_batch_size=6)
    before = whole.model.classifier.weight.clone()
    whole.train()
    assert not torch.equal(whole.model.classifier.weight, before)
    predicted = whole.predict(rows_of(folder)).predictions
    assert predicted.shape == (6, 2)
    whole.save_model(folder / "saved")
    again = load(hf.AutoModelForSequenceClassification, folder / "saved")
    with torch.no_grad():
        logits = again(**batch(folder)).logits
    torch.testing.assert_close(logits, torch.tensor(predicted[:3]), rtol=1e-4, atol=1e-5)
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    parts = trainer_of(folder, "parts", **sizes)
    parts.train()
    ours, theirs = parts.model.classifier.weight, whole.model.classifier.weight
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def check_onnx(folder: Path) -> None:
    import onnxruntime

    model, inputs = load(hf.AutoModel, folder), batch(folder)
    names = list(inputs)

    class Wrapped(torch.nn.Module):
        model: Any

        def forward(self, *given: torch.Tensor) -> Any:
            outputs = self.model(**dict(zip(names, given, strict=True)))
            return outputs.last_hidden_state, outputs.facet_embeddings

    sizes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},) * len(names)
    wrapped, file = Wrapped().eval(), str(folder / "model.onnx")
    wrapped.model = model
    options: Any = {"input_names": names, "dynamic_shapes": (sizes,), "verbose": False}
    program: Any = torch.onnx.export(wrapped, tuple(inputs.values()), **options)
    program.save(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    longer = tokenizer_of(folder)([*TEXTS, "bal " * 20], padding=True, return_tensors="np")
    found = session.run(None, {name: longer[name] for name in names})
    with torch.no_grad():
        outputs = model(**{name: torch.tensor(longer[name]) for name in names})
    real = longer["attention_mask"].astype(bool)
    hidden = outputs.last_hidden_state.numpy()
    np.testing.assert_allclose(found[0][real], hidden[real], atol=1e-5)
    np.testing.assert_allclose(found[1], outputs.facet_embeddings.numpy(), atol=1e-5)


def check_compile(folder: Path) -> None:
    model, inputs = load(hf.AutoModel, folder), batch(folder)
    torch.compiler.reset()  # it counts what it has compiled for other folders
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found, expected = compiled(**inputs), model(**inputs)
    torch.testing.assert_close(found.facet_embeddings, expected.facet_embeddings)


def check_sentence_transformers(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    expected = load_file(folder / "expected.safetensors")
    model = SentenceTransformer(str(folder), device="cpu", **TRUST)
    assert model.get_embedding_dimension() == 32
    found = model.encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(found, expected["mean"], rtol=1e-4, atol=1e-5)
    ids = model.tokenizer("bal [MASK]")["input_ids"]
    assert model.tokenizer.mask_token_id not in ids  # all text is text
    torch.testing.assert_close(model.similarity(found, found).diagonal(), torch.ones(3))
    parts = {"embedding": "mean+cls"}
    model = SentenceTransformer(str(folder), device="cpu", config_kwargs=parts, **TRUST)
    assert model.encode(TEXTS).shape == (3, model.get_embedding_dimension()) == (3, 64)


def main(folders: list[str]) -> None:
    """Runs all checks on each folder and prints their results."""
    assert not {"multicls", "finetune"} & set(sys.modules)
    sys.meta_path.insert(0, Refused())
    checks = {name: check for name, check in globals().items() if name.startswith("check_")}
    for folder, (name, check) in itertools.product(folders, checks.items()):
        if f"{Path(folder).name}/{name}" in os.environ["SKIPPED"].split():
            continue
        problem = None
        try:
            check(Path(folder))
        except Exception:
            problem = traceback.format_exc()
        print("RESULT", json.dumps([Path(folder).name, name, problem]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
