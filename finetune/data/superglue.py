"""Turns SuperGLUE's rows, from files or the hub, into the flat rows that the table of tasks describes.

A flat row has the texts and the label under the names of the table. If the task needs them, it also has `choices` (the
last segments), `spans` ((text, first character, end character), ...), `group` (rows judged together), `answer` (what a
submission names) and `key` (what identifies it in its file).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from multicls.errors import UserError

Row = Mapping[str, Any]
QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}


def flat_rows(task: str, row: Row, where: str) -> Iterator[Row]:
    """Yields the flat rows of one row of the hub or of an official file, which `where` names with its line.

    Raises:
        UserError: The row does not have the official form.
    """
    try:
        yield from _FORMS[task](row) if task in _FORMS else (row,)
    except KeyError as error:
        raise UserError(f"{where}: no {error.args[0]!r}; there is {', '.join(map(repr, row))}.") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where}: not a row of {task} in the official form: {error}.") from None


def _copa(row: Row) -> Iterator[Row]:
    if row["question"] not in QUESTIONS:
        raise ValueError(f"question {row['question']!r} is none of {', '.join(QUESTIONS)}")
    yield {**row, "question": QUESTIONS[row["question"]], "choices": (row["choice1"], row["choice2"])}


def _multirc(row: Row) -> Iterator[Row]:
    if isinstance(row["passage" if "passage" in row else "paragraph"], str):  # from the hub: flat already
        index = row["idx"]
        yield _answer_row(row["paragraph"], row["question"], row["answer"], row.get("label"), *index.values())
        return
    passage = row["passage"]
    for question in passage["questions"]:
        for answer in question["answers"]:
            yield _answer_row(
                passage["text"], question["question"], answer["text"], answer.get("label"),
                row["idx"], question["idx"], answer["idx"],
            )  # fmt: skip


def _answer_row(passage: str, question: str, answer: str, label: Any, *index: int) -> Row:
    group, key = ":".join(map(str, index[:2])), ":".join(map(str, index))
    return {"passage": passage, "question": f"{question} {answer}", "label": label, "group": group, "key": key}


def _record(row: Row) -> Iterator[Row]:
    if "qas" not in row:  # from the hub
        passage, number, entities = row["passage"], row["idx"]["passage"], row["entities"]
        queries = [(row["query"], row["idx"]["query"], row["answers"])]
    else:
        passage, number = row["passage"]["text"], row["idx"]
        entities = [passage[span["start"] : span["end"] + 1] for span in row["passage"]["entities"]]  # end is inclusive
        queries = [(qa["query"], qa["idx"], [answer["text"] for answer in qa.get("answers", ())]) for qa in row["qas"]]
    for query, index, answers in queries:
        for entity in dict.fromkeys(entities):
            yield {
                "passage": passage,
                "query": query.replace("@placeholder", entity),
                "label": int(entity in answers) if answers else None,
                "group": f"{number}:{index}",
                "key": f"{number}:{index}:{entity}",
                "answer": entity,
            }


def _wic(row: Row) -> Iterator[Row]:
    spans = tuple((text, int(row[f"start{text + 1}"]), int(row[f"end{text + 1}"])) for text in (0, 1))
    for text, start, end in spans:
        if not 0 <= start < end <= len(row[f"sentence{text + 1}"]):
            raise ValueError(f"characters {start}..{end} are not in sentence{text + 1}")
    yield {**row, "spans": spans}


def _wsc(row: Row) -> Iterator[Row]:
    target = row.get("target", row)
    spans = [_mention(row["text"], target[f"span{n}_text"], target[f"span{n}_index"]) for n in (1, 2)]
    yield {**row, "spans": tuple((0, *span) for span in spans)}


def _mention(text: str, words: str, index: int) -> tuple[int, int]:
    """Returns the characters of the mention `words` that begins in the `index`-th word between blanks.

    A few indices of the official files are off by one: the nearest occurrence counts.
    """
    starts = [match.start() for match in re.finditer(r"\S+", text)]
    pattern = r"\s+".join(map(re.escape, words.split()))
    found = [match.span() for match in re.finditer(rf"(?<!\w){pattern}(?!\w)", text, re.IGNORECASE)]
    if not found or not words.strip() or not 0 <= index < len(starts):
        raise ValueError(f"{words!r} (word {index}) is not in the text")
    return min(found, key=lambda span: abs(span[0] - starts[index]))


def _axg(row: Row) -> Iterator[Row]:
    yield {**row, "group": str(row["idx"] // 2)}  # minimal pairs are neighbours; `pair_id` may number the rows


_FORMS: dict[str, Callable[[Row], Iterator[Row]]] = {
    "copa": _copa, "multirc": _multirc, "record": _record, "wic": _wic, "wsc": _wsc, "axg": _axg,
}  # fmt: skip
