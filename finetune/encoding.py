"""Turns rows into token ids: one sequence a row or a choice; spans become masks over tokens."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase as Tokenizer

from finetune.tasks import Example, Task
from multicls.errors import UserError

CHUNK = 1000  # rows in a call of the tokenizer: it needs about 100 bytes for each of their tokens


class Encoded:
    """Tokenized rows with their targets; batches are padded to their own longest sequence.

    If a row is longer than the task's `max_length`, its longest text loses tokens at its end: a passage gives way to a
    question. Rows with choices or spans are not cut: one that is too long is a `UserError`.

    Attributes:
        lengths: number of tokens of each row (of its first choice).
        labels: (N,) class indices, or scores divided by the task's scale; (N, C) 0.0 and 1.0 if a row
            has several labels.
    """

    def __init__(self, task: Task, examples: Sequence[Example], tokenizer: Tokenizer) -> None:
        self.task, self.examples, self.spans = task, examples, list[Tensor]()
        self.features = defaultdict[str, list[Tensor]](list)
        self.padding = {
            "input_ids": tokenizer.pad_token_id or 0,
            "token_type_ids": tokenizer.pad_token_type_id,
            "attention_mask": 0,
        }
        options = {
            "truncation": not (task.num_choices or task.num_spans),
            "max_length": task.max_length,
            "return_offsets_mapping": task.num_spans > 0,
        }
        for start in range(0, len(examples), CHUNK):
            rows = examples[start : start + CHUNK]
            texts = [list(column) for column in zip(*(row.texts for row in rows), strict=True)]
            inputs = tokenizer(*texts, **options, verbose=False)
            self.spans += [_span_masks(inputs, n, row) for n, row in enumerate(rows) if row.spans]
            inputs = _with_choices(inputs, rows, tokenizer) if task.num_choices else inputs
            for name in self.padding.keys() & inputs.keys():
                self.features[name] += [torch.tensor(s, dtype=torch.int32) for s in inputs[name]]
        self.sequences_per_row = max(1, task.num_choices)
        lengths = list(map(len, self.features["input_ids"]))
        if (longest := max(lengths)) > task.max_length:
            what = f"task {task.name}: a row with choices or marked words has {longest} tokens"
            raise UserError(f"{what}: raise --max_length (= {task.max_length}).")
        self.lengths = lengths[:: self.sequences_per_row]
        self.labels = _targets(task, examples)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Returns the inputs and labels of B rows, by their indices.

        `input_ids`, `attention_mask` and maybe `token_type_ids` are (B, L), or (B*C, L) with a row's C choices
        together; `spans` of tasks that have them (B, S, L); `labels` (B,) or (B, C).
        """
        copies = self.sequences_per_row
        sequences = [row * copies + choice for row in rows for choice in range(copies)]
        inputs = {
            name: pad_sequence([values[n] for n in sequences], True, self.padding[name]).long()
            for name, values in self.features.items()
        }
        if self.spans:
            spans = pad_sequence([self.spans[row].T for row in rows], batch_first=True)
            inputs["spans"] = spans.transpose(1, 2)
        return inputs | {"labels": self.labels[list(rows)]}


def _targets(task: Task, examples: Sequence[Example]) -> Tensor:
    if task.multi_label:
        return torch.tensor([example.labels for example in examples])
    labels = np.array([example.label for example in examples])
    if not task.is_regression:
        return torch.tensor(labels, dtype=torch.long)
    return torch.tensor(labels / task.label_scale, dtype=torch.float32)


def _span_masks(inputs: Any, row: int, example: Example) -> Tensor:
    """Returns which tokens of a row share a character with each span, (S, L)."""
    tokens = list(zip(inputs.sequence_ids(row), inputs["offset_mapping"][row], strict=True))
    masks = [
        [text == number and first < end and last > start for text, (first, last) in tokens]
        for number, start, end in example.spans
    ]
    return torch.tensor(masks)


def _with_choices(inputs: Any, examples: Sequence[Example], tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the features of each choice: those of its row, followed by the tokens of the choice and its separator."""
    choices = [(row, text) for row, example in enumerate(examples) for text in example.choices]
    alone = len(tokenizer("")["input_ids"])
    pairs = tokenizer([""] * len(choices), [text for _, text in choices])
    return {
        name: [rows[row] + pairs[name][n][alone:] for n, (row, _) in enumerate(choices)]
        for name, rows in inputs.items()
    }
