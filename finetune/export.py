"""Exports a fine-tuned model for serving: as ONNX, or as transformers' own class, which needs no code of ours.

python finetune/export.py results/k5-mean/tickets-full/p1-d1-s1/model --onnx
python finetune/export.py MODEL --onnx --rows new.csv --output served
python finetune/export.py MODEL --stock

The folder holds the tokenizer, too. Before it is kept, its outputs for rows are compared with the model's.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from finetune.predict import find_task
from multicls.console import count, print_summary
from multicls.errors import UserError, run_command
from multicls.files import atomic_folder
from multicls.labels import find_columns, texts_of, with_texts
from multicls.settings import Settings, parse
from multicls.tables import read_table

if TYPE_CHECKING:
    from finetune.heads.modeling_task import TaskModel
    from finetune.tasks import Array, Task

SENTENCES = ("Where is my parcel?", "It stopped working after a day. " * 4, "Thank you!", "Hello")
TOLERANCE = 1e-4
MOST_ROWS = 64
# Encoder types whose published classifier the head `cls` is -> our modules by the names of that class.
STOCK = {
    "bert": {"bert.pooler.dense": "head.dense", "classifier": "classifiers.0"},
    "roberta": {"classifier.dense": "head.dense", "classifier.out_proj": "classifiers.0"},
    "electra": {"classifier.dense": "head.dense", "classifier.out_proj": "classifiers.0"},
    "distilbert": {"pre_classifier": "head.dense", "classifier": "classifiers.0"},
}


class ExportOptions(Settings):
    """Options of the command."""

    model: CliPositionalArg[str] = Field(
        description="a fine-tuned model: RUN/model, best/TASK/model"
    )
    onnx: bool = Field(False, description="write model.onnx, for any number of rows and tokens")
    stock: bool = Field(False, description="write transformers' own class; only for the head cls")
    rows: str | None = Field(None, description="table of rows to compare on; default: sentences")
    output: str | None = Field(None, description="folder; default: MODEL-onnx or MODEL-stock")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(ExportOptions, argv, prog="finetune/export.py", doc=__doc__)
    if options.onnx == options.stock:
        raise UserError("set either --onnx or --stock.")
    _, task = find_task(options.model)
    texts = read_texts(task, options.rows)
    kind = "onnx" if options.onnx else "stock"
    output = Path(options.output or f"{Path(options.model)}-{kind}")
    write = write_onnx if options.onnx else write_stock
    with atomic_folder(output) as folder:
        difference = write(options.model, folder, texts)
        if not difference <= TOLERANCE:
            raise UserError(f"{output}: not kept: its outputs differ by {difference:.2g}.")
    same = f"{difference:.1e} at most, on {count(len(texts), 'row')}"
    print_summary([("exported", output), ("difference of the outputs", same)])
    return 0


def read_texts(task: "Task", file: str | None) -> list[tuple[str, ...]]:
    """Returns the texts of at most 64 rows of a table, or sentences."""
    if file is None:
        return [(text,) * len(task.fields) for text in SENTENCES]
    rows = read_table(Path(file))
    full, _ = with_texts(rows, find_columns(*rows[0], [task.fields]), "row")
    return [texts_of(row, task.fields, where) for where, row in full[:MOST_ROWS]]


def write_onnx(model_folder: str, folder: Path, texts: Sequence[tuple[str, ...]]) -> float:
    """Writes model.onnx by torch's exporter (not the older tracer: it was wrong by 0.17 without an error).

    Returns:
        The largest difference to the model's outputs.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 (torch's exporter needs it)
    except ImportError as error:
        raise UserError(f"--onnx: {error}: pip install onnx onnxruntime onnxscript.") from None
    import torch

    model, tokenizer, encode = _load(model_folder, texts)
    inputs = encode(texts[:2])
    names = list(inputs)

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return self.model(**dict(zip(names, values, strict=True))).logits

    any_size = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    options: Any = {"input_names": names, "output_names": ["logits"], "verbose": False}
    options |= {"dynamic_shapes": ((any_size,) * len(names),), "dynamo": True}
    program: Any = torch.onnx.export(Logits().eval(), tuple(inputs.values()), **options)
    program.save(str(folder / "model.onnx"))
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    providers = ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=providers)
    differences = []
    for rows in (texts[:1], texts):  # other numbers of rows and tokens than exported
        batch = encode(rows)
        (found,) = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
        differences.append(_difference(found, model, batch))
    return max(differences)


def write_stock(model_folder: str, folder: Path, texts: Sequence[tuple[str, ...]]) -> float:
    """Writes the model as transformers' own class for its encoder, which loads without `trust_remote_code`.

    Returns:
        The largest difference to the model's outputs.

    Raises:
        UserError: The head is not `cls`, there are several tasks, or the encoder has no such class.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    model, tokenizer, encode = _load(model_folder, texts)
    kind, ours = model.encoder.config.model_type, model.config
    if ours.head != "cls" or len(ours.tasks) > 1 or kind not in STOCK:
        raise UserError(
            f"{model_folder}: head {ours.head} on {kind}: --stock needs one task, the head cls and an encoder of "
            f"{', '.join(STOCK)}. Use --onnx."
        )
    config = AutoConfig.for_model(**ours.encoder)
    config.update({name: getattr(ours, name) for name in ("id2label", "label2id", "problem_type")})
    stock = AutoModelForSequenceClassification.from_config(config).eval()
    prefix, weights = stock.base_model_prefix, model.state_dict()
    state = {
        f"{prefix}.{n.removeprefix('encoder.')}": w for n, w in weights.items() if "encoder." in n
    }
    for theirs, name in STOCK[kind].items():
        state |= {f"{theirs}.{of}": weights[f"{name}.{of}"] for of in ("weight", "bias")}
    stock.load_state_dict(state)
    stock.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    batch = encode(texts)
    with torch.no_grad():
        return _difference(stock(**batch).logits.numpy(), model, batch)


def _load(
    folder: str, texts: Sequence[tuple[str, ...]]
) -> tuple["TaskModel", Any, Callable[[Sequence[tuple[str, ...]]], Any]]:
    """Returns the model, its tokenizer and a function that encodes rows as the model reads them."""
    from finetune.heads.build import load_fine_tuned

    model, tokenizer = load_fine_tuned(folder)
    limit = model.config.tasks[0]["max_length"]

    def encode(rows: Sequence[tuple[str, ...]]) -> Any:
        columns = [list(column) for column in zip(*rows, strict=True)]
        options: Any = {"truncation": True, "max_length": limit, "return_tensors": "pt"}
        return tokenizer(*columns, padding=True, **options)

    return model.eval(), tokenizer, encode


def _difference(found: "Array", model: Any, batch: Any) -> float:
    import torch

    with torch.no_grad():
        return float(np.abs(found - model(**batch).logits.numpy()).max())


if __name__ == "__main__":
    run_command(main)
