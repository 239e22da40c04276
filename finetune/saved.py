"""Systems of finetune/compare.py in a folder, for predict.py: system.json, the fitted model, encoder and topics."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.tasks import Example, Task, task_of
from multicls.embeddings import Embedder, token_ids, topics_of
from multicls.errors import UserError
from multicls.evaluation import Rows
from multicls.files import atomic_folder, read_json, write_json
from multicls.measures import Array
from multicls.modeling_multicls import TopicTable
from multicls.systems import Linear, Words
from multicls.topics import fit_topics, fit_topics_of_texts

SYSTEM = "system.json"
ENCODER = "encoder"
TABLE = "topics.safetensors"
FORMAT = 1
PASSAGES = 20_000  # most texts that topics are made of


def fit_table(
    model: Embedder, texts: Sequence[str], corpus: str | None, number: int, cache: Path
) -> tuple[TopicTable, str]:
    """Returns the topics of a corpus, or of the texts themselves, for a model's tokens; and their source in words.

    Those of texts are kept in the folder `cache`.

    Raises:
        UserError: The corpus was tokenized otherwise.
    """
    vocabulary = len(model.tokenizer)
    if not corpus:
        unique = list(dict.fromkeys(texts))[:PASSAGES]
        content = json.dumps([unique, number, sorted(model.tokenizer.get_vocab().items())])
        path = cache / f"topics-{hashlib.sha256(content.encode()).hexdigest()[:16]}.safetensors"
        if not path.exists():
            ids = token_ids(model.tokenizer, unique)
            state = fit_topics_of_texts(ids, number, vocabulary=vocabulary)
            save_topics(TopicTable.of(state), path)
        return load_topics(path), "the rows' texts"
    from multicls.corpus import Corpus, tokenizer_fingerprint

    opened = Corpus(corpus)
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    if not backend or tokenizer_fingerprint(backend.to_str()) != opened.tokenizer_fingerprint:
        raise UserError(
            f"--corpus {corpus}: has other tokens than {model.folder}; prepare it with --tokenizer {model.folder}."
        )
    state = fit_topics(opened, number, vocabulary=vocabulary, validation_fraction=0.0)
    return TopicTable.of(state), corpus


def save_topics(table: TopicTable, path: Path) -> None:
    """Writes a table of topics."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(table.state_dict()), path)


def load_topics(path: Path) -> TopicTable:
    """Returns a table that `save_topics` has written."""
    from safetensors.torch import load_file

    return TopicTable.of(load_file(path))


def save_system(
    system: Linear | Words,
    folder: Path,
    task: Task,
    about: dict[str, Any],
    source: Path | None = None,
    max_length: int = 0,
    topics: Path | None = None,
) -> None:
    """Writes a fitted system with all that it needs: a copy of the encoder, and of the topics beside it."""
    with atomic_folder(folder) as fresh:
        system.save(fresh)
        if source is not None:
            shutil.copytree(source, fresh / ENCODER, ignore=shutil.ignore_patterns(".*"))
        if topics is not None and topics.exists():
            shutil.copy(topics, fresh / TABLE)
        kind = "words" if isinstance(system, Words) else "linear"
        record = {"format": FORMAT, "kind": kind, "max_length": max_length}
        # The outputs of these systems are labels, not targets.
        task = replace(task, label_scale=1.0, label_shift=0.0, label_range=())
        write_json(fresh / SYSTEM, record | {"task": task.describe()} | about)


class SavedSystem:
    """A system that `save_system` has written."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.record = read_json(self.folder / SYSTEM)
        if self.record.get("format") != FORMAT:
            raise UserError(f"{folder}: saved by another version; run finetune/compare.py again.")
        self.task = task_of(self.record["task"])

    def predict(self, examples: Sequence[Example]) -> Array:
        """Returns outputs (N, C) for examples; see `multicls.systems.RidgeSystem.predict`."""
        texts = [row.texts for row in examples]
        kind: Any = "multi_label" if self.task.multi_label else "class"
        if self.task.is_regression:
            kind = "score"
        rows = Rows(kind, np.zeros((len(texts), max(1, len(self.task.labels)))), texts)
        if self.record["kind"] == "words":
            return Words.load(self.folder).predict(rows)
        system = Linear.load(self.folder)
        model = Embedder(self.folder / ENCODER, self.record["max_length"])
        flat = [text for row in texts for text in row]
        parts = model.embed(flat)
        if any(part.endswith("topics") for part in system.parts):
            parts["topics"] = topics_of(self._topics(model), model.tokenizer, flat)
        fields = len(self.task.fields)
        features = {part: parts[part.partition("/")[2]] for part in system.parts}
        if fields > 1:
            features = {k: v.reshape(-1, fields, v.shape[1]) for k, v in features.items()}
        return system.predict(Rows(kind, rows.targets, texts, features))

    def threshold(self, precision: float) -> float:
        """Returns the probability from which on labels are right so often, by out-of-fold predictions.

        Raises:
            UserError: They are never.
        """
        steps = [step for step in self.record["abstention"] if step[0] >= precision - 1e-9]
        if not steps:
            best = max((step[0] for step in self.record["abstention"]), default=0.0)
            raise UserError(
                f"--precision {precision:g}: not reached by this system; its most is {best:g}."
            )
        return float(steps[0][1])

    def _topics(self, model: Embedder) -> TopicTable:
        path = self.folder / TABLE
        table = load_topics(path) if path.exists() else model.topics
        assert table is not None
        return table
