"""Fitted systems in a folder, for predict.py: system.json beside a linear model with its encoder, or a tuned model."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from finetune.tuned import Tuned
from multicls.corpus import Corpus, tokenizer_fingerprint
from multicls.embeddings import Embedder, by_rows, token_ids, topics_of
from multicls.errors import UserError
from multicls.evaluation import Rows
from multicls.files import atomic_write, read_json, write_json
from multicls.labels import LabelType
from multicls.measures import Array
from multicls.modeling_multicls import TopicTable
from multicls.systems import Linear, Words
from multicls.topics import fit_topics, fit_topics_of_texts

SYSTEM = "system.json"
ENCODER = "encoder"
TABLE = "topics.safetensors"
FORMAT = 3
LOADERS: dict[str, Any] = {"linear": Linear, "words": Words, "tuned": Tuned}
PASSAGES = 20_000  # most texts that topics are made of


def topics_file(
    model: Embedder, texts: Sequence[str], corpus: str | None, number: int, cache: Path
) -> Path:
    """Returns a file of the topics of a corpus, or of the texts themselves, for a model's tokens; made if missing.

    Raises:
        UserError: The corpus was tokenized otherwise.
    """
    from safetensors.torch import save

    opened = Corpus(corpus) if corpus else None
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    same = opened and backend and tokenizer_fingerprint(backend.to_str())
    if opened and same != opened.tokenizer_fingerprint:
        raise UserError(
            f"--corpus {corpus}: has other tokens than {model.folder}; prepare it with --tokenizer {model.folder}."
        )
    unique = [] if opened else list(dict.fromkeys(texts))[:PASSAGES]
    source = opened.manifest if opened else unique
    content = json.dumps([source, number, sorted(model.tokenizer.get_vocab().items())])
    path = cache / f"topics-{hashlib.sha256(content.encode()).hexdigest()[:16]}.safetensors"
    if not path.exists():
        vocabulary = len(model.tokenizer)
        if opened:
            state = fit_topics(opened, number, vocabulary=vocabulary, validation_fraction=0.0)
        else:
            ids = token_ids(model.tokenizer, unique)
            state = fit_topics_of_texts(ids, number, vocabulary=vocabulary)
        cache.mkdir(parents=True, exist_ok=True)
        with atomic_write(path, "wb") as file:
            file.write(save(dict(TopicTable.of(state).state_dict())))
    return path


def load_topics(path: Path) -> TopicTable:
    """Returns the table of a `topics_file`."""
    from safetensors.torch import load_file

    return TopicTable.of(load_file(path))


def write_record(
    folder: Path,
    system: str,
    kind: LabelType,
    classes: Sequence[str],
    fields: Sequence[str],
    **more: Any,
) -> None:
    """Writes what predict.py has to know of a saved system of `LOADERS`, which reads the columns `fields`."""
    labels = {"kind": kind, "classes": list(classes), "fields": list(fields)}
    write_json(folder / SYSTEM, {"format": FORMAT, "system": system} | labels | more)


def copy_encoder(folder: Path, source: Path, topics: Path | None) -> None:
    """Copies the encoder that a linear model reads, and the topics that are not its own."""
    shutil.copytree(source, folder / ENCODER, ignore=shutil.ignore_patterns(".*"))
    if topics is not None:
        shutil.copy(topics, folder / TABLE)


class SavedSystem:
    """A saved system.

    Attributes:
        kind, classes, fields: Of the rows that it was fitted on.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder, path = Path(folder), Path(folder) / SYSTEM
        if not path.exists():
            raise UserError(
                f"{folder}: not a fitted model of texts; pass the model folder of finetune/compare.py, or of "
                "finetune/run.py --save_model on one task without choices and marked words."
            )
        self.record = read_json(path)
        if self.record.get("format") != FORMAT:
            raise UserError(f"{folder}: saved by another version; fit it again.")
        self.kind: LabelType = self.record["kind"]
        self.classes, self.fields = self.record["classes"], self.record["fields"]

    @cached_property
    def system(self) -> Any:
        """The fitted system."""
        return LOADERS[self.record["system"]].load(self.folder)

    @cached_property
    def encoder(self) -> Embedder:
        """The encoder of a linear model."""
        return Embedder(self.folder / ENCODER, self.record["max_length"])

    @property
    def shift(self) -> Array:
        """Returns what `predict` subtracts from each output, (C,) or (1,): the logit of each label's threshold."""
        return np.asarray(getattr(self.system, "shift", np.zeros(1)))

    def predict(self, texts: Sequence[tuple[str, ...]]) -> Array:
        """Returns outputs (N, C) for rows of texts; see `multicls.systems.RidgeSystem.predict`."""
        shape = (len(texts), len(self.classes)) if self.kind == "multi_label" else len(texts)
        features = self._features(texts) if isinstance(self.system, Linear) else {}
        return np.asarray(self.system.predict(Rows(self.kind, np.zeros(shape), texts, features)))

    def _features(self, texts: Sequence[tuple[str, ...]]) -> dict[str, Array]:
        """Returns the embeddings that a linear model reads, by the names that it has for them."""
        flat, names = [text for row in texts for text in row], self.system.parts
        parts = self.encoder.embed(flat)
        if any(name.endswith("topics") for name in names):
            path = self.folder / TABLE
            table = load_topics(path) if path.exists() else self.encoder.topics
            parts["topics"] = topics_of(table, self.encoder.tokenizer, flat)
        parts = by_rows(parts, len(self.fields))
        return {name: parts[name.partition("/")[2]] for name in names}

    def threshold(self, precision: float) -> float:
        """Returns the probability from which on labels are right so often, by out-of-fold predictions.

        Raises:
            UserError: They are never, or no folds have shown it.
        """
        known = self.record.get("abstention", [])
        if not known:
            what = "only systems of finetune/compare.py that give one class a row know how often they are right"
            raise UserError(f"--precision {precision:g}: {what}.")
        steps = [step for step in known if step[0] >= precision - 1e-9]
        if not steps:
            best = max(step[0] for step in known)
            raise UserError(
                f"--precision {precision:g}: not reached by this system; its most is {best:g}."
            )
        return float(steps[0][1])
