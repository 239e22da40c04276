"""Turns rows into token ids: one sequence a row or a choice; spans become masks over tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from finetune.heads.modeling_task import IGNORE_INDEX
from finetune.tasks import Example, Task
from multicls.errors import UserError


class Encoded:
    """Tokenized rows with their targets; batches are padded to their own longest sequence.

    If a row is longer than `max_length`, its longest text loses tokens at its end, so that a passage gives way to a
    question. A marked span is never cut: its text loses its beginning instead.

    Attributes:
        task, examples: what was encoded.
        lengths: number of tokens of each row; of its first choice if it has several.
        labels: (N,) class indices (-100: hidden), or scores divided by the task's scale; (N, C) 0.0 and 1.0 if a row
            has several labels.

    Raises:
        UserError: A span does not fit, or no token belongs to it.
    """

    def __init__(
        self,
        task: Task,
        examples: Sequence[Example],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
    ) -> None:
        self.task, self.examples, self.spans = task, examples, list[Tensor]()
        if task.shape != "texts":
            features, self.spans = _encode_segments(task, examples, tokenizer, max_length)
        else:
            texts = [list(texts) for texts in zip(*(e.texts for e in examples), strict=True)]
            features = dict(tokenizer(*texts, truncation=True, max_length=max_length))
        features.pop("attention_mask", None)
        self.features = {name: _tensors(rows) for name, rows in features.items()}
        self.sequences_per_row = count = max(1, task.num_choices)
        self.lengths = [len(ids) for ids in features["input_ids"][::count]]
        self.padding = {
            "input_ids": tokenizer.pad_token_id or 0,
            "token_type_ids": tokenizer.pad_token_type_id,
        }
        self.labels = _targets(task, examples)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Returns the inputs and labels of B rows, by their indices.

        Returns:
            `input_ids`, `attention_mask` and maybe `token_type_ids` (B, L), or (B*C, L) with a row's C choices
            together; `spans` (B, S, L) for tasks that have them; `labels` (B,) or (B, C).
        """
        copies = self.sequences_per_row
        sequences = [row * copies + choice for row in rows for choice in range(copies)]
        inputs = {
            name: pad_sequence([ids[i] for i in sequences], True, self.padding[name]).long()
            for name, ids in self.features.items()
        }
        ones = [torch.ones_like(self.features["input_ids"][i]) for i in sequences]
        inputs["attention_mask"] = pad_sequence(ones, batch_first=True).long()
        if self.spans:
            spans = pad_sequence([self.spans[row].T for row in rows], batch_first=True)
            inputs["spans"] = spans.transpose(1, 2)
        inputs["labels"] = self.labels[list(rows)]
        return inputs


def _targets(task: Task, examples: Sequence[Example]) -> Tensor:
    if task.multi_label:
        hidden = (math.nan,) * len(task.labels)
        return torch.tensor([example.labels or hidden for example in examples])
    labels = torch.tensor([example.label for example in examples], dtype=torch.float32)
    if task.is_regression:
        return labels / task.label_scale
    return torch.where(labels.isnan(), IGNORE_INDEX, labels).long()


def _tensors(rows: list[list[int]]) -> list[Tensor]:
    """Returns int32 views of one tensor: half the memory, and ten times as quick as a tensor each."""
    flat = np.fromiter(chain.from_iterable(rows), np.int32)
    return list(torch.from_numpy(flat).split([len(row) for row in rows]))


class _Frame:
    """The special tokens around segments, read off the tokenizer's own empty pair.

    It serves `[CLS] [C1]..[CK] a [SEP] b [SEP]` and for RoBERTa's `<s> a </s></s> b </s>`; a third segment is
    joined like the second. Texts are split one by one, so none can bring in a special token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        single = tokenizer("")["input_ids"]
        pair = tokenizer([""], [""])  # in lists: alone, "" passes for no second text
        self.prefix, self.close = single[:-1], single[-1:]
        self.joiner = pair["input_ids"][0][len(single) : -1]
        self.second_type = pair["token_type_ids"][0][-1] if "token_type_ids" in pair else None

    def join(self, segments: Sequence[list[int]]) -> tuple[list[int], list[int], list[int]]:
        """Returns ids and token types of the sequence, and the start of each segment in it."""
        ids, types, starts = list(self.prefix), [0] * len(self.prefix), []
        for number, segment in enumerate(segments):
            ids += self.joiner if number else []
            starts.append(len(ids))
            ids += [*segment, *self.close]
            types += [min(number, 1) * (self.second_type or 0)] * (len(ids) - len(types))
        return ids, types, starts


def _encode_segments(
    task: Task, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[dict[str, list[list[int]]], list[Tensor]]:
    """Returns the features of all sequences, and for each row with spans their mask (S, L).

    Each text is split once, however many rows have it: a passage of MultiRC has about sixty.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"task {task.name} needs a fast tokenizer, one that knows where its tokens are in the text."
        )
    frame = _Frame(tokenizer)
    texts = sorted({text for example in examples for text in (*example.texts, *example.choices)})
    split = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = dict(zip(texts, split["input_ids"], strict=True))
    offsets = dict(zip(texts, split["offset_mapping"], strict=True))
    features: dict[str, list[list[int]]] = {"input_ids": [], "token_type_ids": []}
    masks: list[Tensor] = []
    for example in examples:
        spans = [(n, *_tokens_in(example, n, a, b, offsets)) for n, a, b in example.spans]
        for last in [[choice] for choice in example.choices] or [[]]:
            segments = [tokens[text] for text in (*example.texts, *last)]
            room = max_length - len(frame.join([[] for _ in segments])[0])
            sizes = _fit([len(segment) for segment in segments], room)
            begins = [_begin(example, n, size, spans, max_length) for n, size in enumerate(sizes)]
            cuts = zip(segments, begins, sizes, strict=True)
            ids, types, starts = frame.join([ids[begin : begin + n] for ids, begin, n in cuts])
            features["input_ids"].append(ids)
            features["token_type_ids"].append(types)
        if spans:
            masks.append(torch.zeros(len(spans), len(ids), dtype=torch.bool))
            for number, (text, first, end) in enumerate(spans):
                shift = starts[text] - begins[text]
                masks[-1][number, first + shift : end + shift] = True
    if frame.second_type is None:
        del features["token_type_ids"]
    return features, masks


def _tokens_in(
    example: Example, number: int, start: int, end: int, offsets: Mapping[str, Any]
) -> tuple[int, int]:
    """Returns the first token of a text that shares a character with the span, and the one after the last."""
    text = example.texts[number]
    pairs = enumerate(offsets[text])
    inside = [token for token, (first, last) in pairs if first < end and last > start]
    if not inside:
        raise UserError(f"row {example.id}: the tokenizer leaves nothing of {text[start:end]!r}.")
    return inside[0], inside[-1] + 1


def _fit(lengths: list[int], room: int) -> list[int]:
    """Returns the lengths after shortening the longest until all fit, as tokenizers do with a pair."""
    while (excess := sum(lengths) - max(room, 0)) > 0:
        *_, second, longest = sorted([0, *lengths])
        last = max(text for text, length in enumerate(lengths) if length == longest)
        lengths[last] -= min(excess, max(1, longest - second))
    return lengths


def _begin(
    example: Example, text: int, size: int, spans: Sequence[tuple[int, int, int]], max_length: int
) -> int:
    """Returns the first token to keep of a text of `size` tokens: 0 unless a span ends after them."""
    ranges = [(first, end) for index, first, end in spans if index == text]
    begin = max([0, *(end - size for _, end in ranges)])
    if any(first < begin for first, _ in ranges):
        need = max(end for _, end in ranges) - min(first for first, _ in ranges)
        raise UserError(
            f"row {example.id}: its marked words take {need} tokens from the first to the last, {size} fit: raise "
            f"--max_length (= {max_length})."
        )
    return begin
