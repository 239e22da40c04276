"""What a frozen encoder knows of the order of two segments, the question of the objective SO.

    OMP_NUM_THREADS=2 python benchmarks/run.py sentence_order --corpus CORPUS

Each segment of a part is encoded alone by all-MiniLM-L6-v2. Logistic regression tells from the embeddings whether the
segments were swapped: from the mean of each segment, or from two cosines, between the end of one and the beginning of
the other (means over eight tokens). It learns on training documents and is scored on those held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoModel, AutoTokenizer

from benchmarks.compare import Report
from data_prep.examples import ExampleStream, SpecialIds
from multicls.corpus import Corpus
from multicls.sample import sample_model
from multicls.settings import Settings

ENDS = 8  # tokens
TINY = 1e-9  # masks no token


class Options(Settings):
    """Options of the benchmark."""

    corpus: str = Field(description="a corpus in the tokens of bert-base-uncased or --tokenizer sample")
    parts: int = Field(8000, description="most parts to learn from")
    held_out: int = Field(3000, description="most parts to score")


def segments(stream: ExampleStream, parts: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Returns the token ids of the two segments of each part with a cut, 2N arrays, and whether they are swapped."""
    found, swapped = [], []
    number = min(parts // stream.num_parts, stream.examples_per_epoch)
    for example in stream.examples(0, range(number)):
        for ids, types, label in zip(example.input_ids, example.token_type_ids, example.so_labels, strict=True):
            if label >= 0:
                text = ~np.isin(ids, stream.special.all())
                found += [ids[text & (types == segment)] for segment in (0, 1)]
                swapped.append(label)
    return found, np.array(swapped)


@torch.inference_mode()
def embed(model: Any, tokenizer: Any, texts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the mean over all tokens, over the first and over the last ones of each text, (N, 3, D), of length 1."""
    out = np.zeros((len(texts), 3, model.config.hidden_size), np.float32)
    order = np.argsort([len(text) for text in texts])
    for rows in np.array_split(order, -(-len(order) // 64)):
        ids = [{"input_ids": [tokenizer.cls_token_id, *texts[row], tokenizer.sep_token_id]} for row in rows]
        hidden = model(**tokenizer.pad(ids, return_tensors="pt")).last_hidden_state
        for row, states in zip(rows, hidden, strict=True):
            inside = states[1 : 1 + len(texts[row])]
            means = torch.stack([inside.mean(0), inside[:ENDS].mean(0), inside[-ENDS:].mean(0)])
            out[row] = torch.nn.functional.normalize(means, dim=-1).numpy()
    return out


def main(args: Options, argv: Sequence[str]) -> None:
    """Measures and writes the results."""
    tokenizer, model = AutoTokenizer.from_pretrained(sample_model()), AutoModel.from_pretrained(sample_model()).eval()
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("cls", "sep", "pad", "mask")}
    corpus, special = Corpus.open(args.corpus), SpecialIds(**ids, facets=())
    features: dict[str, list[np.ndarray]] = {"mean of each segment": [], "two cosines": []}
    labels = []
    splits: dict[Literal["train", "validation"], int] = {"train": args.parts, "validation": args.held_out}
    for split, parts in splits.items():
        stream = ExampleStream(corpus, special, seq_length=128, seed=1, split=split, num_parts=2,
                               mlm_probability=TINY, validation_fraction=0.02)  # fmt: skip
        texts, swapped = segments(stream, parts)
        embedded = embed(model, tokenizer, texts)
        one, other = embedded[::2], embedded[1::2]
        features["mean of each segment"].append(np.hstack([one[:, 0], other[:, 0]]))
        cosines = [(one[:, 2] * other[:, 1]).sum(1), (other[:, 2] * one[:, 1]).sum(1)]
        features["two cosines"].append(np.stack(cosines, axis=1))
        labels.append(swapped)
        print(f"{split}: {len(swapped):,} parts", flush=True)
    rows = []
    for name, (known, new) in features.items():
        regression = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        strengths = {"logisticregression__C": np.logspace(-6, 0, 7)}
        search = GridSearchCV(regression, strengths, scoring="neg_log_loss").fit(known, labels[0])
        chances = search.predict_proba(new)[:, 1]
        right = accuracy_score(labels[1], chances > 0.5)
        error = np.sqrt(right * (1 - right) / len(labels[1]))
        rows.append([name, f"{100 * right:.1f} ± {100 * error:.1f}", float(log_loss(labels[1], chances))])
    report = Report("sentence_order", "Sentence order from a frozen encoder", argv)
    report.table(f"{len(labels[0])} parts to learn from, {len(labels[1])} held out",
                 ["features", "accuracy, %", "log loss"], rows)  # fmt: skip
    report.write()
