"""Exports a fine-tuned model for serving as ONNX.

python finetune/export.py results/k5-mean/tickets-full/p1-d1-s1/model
python finetune/export.py MODEL --rows new.csv --output served

The folder holds the tokenizer, too. Before it is kept, its outputs for rows are compared with the model's.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # not finetune/: its names hide packages

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg

from finetune.predict import find_task, read_examples
from multicls.console import count, print_summary
from multicls.errors import UserError, first_line, run_command
from multicls.files import atomic_folder, check_output
from multicls.settings import Settings, parse
from multicls.tables import RawRows, read_table

if TYPE_CHECKING:
    from finetune.encoding import Encoded
    from finetune.heads.modeling_task import TaskModel

SENTENCES = ("Where is my parcel?", "It stopped working after a day. " * 4, "Thank you!", "Hello")
TOLERANCE = 1e-4
MOST_ROWS = 64


class ExportOptions(Settings):
    """Options of the command."""

    model: CliPositionalArg[str] = Field(description="a fine-tuned model, such as RUN/model")
    rows: str | None = Field(None, description="table of rows to compare on; default: sentences")
    text_column: str | None = Field(None, description="text or text1,text2; default: training's")
    output: str | None = Field(None, description="folder; default: MODEL-onnx")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    options = parse(ExportOptions, argv, prog="finetune/export.py", doc=__doc__)
    if options.text_column and not options.rows:
        raise UserError("--text_column: it names a column of --rows; set --rows.")
    _, task = find_task(options.model)
    table: RawRows = [("", dict.fromkeys(task.fields, text)) for text in SENTENCES]
    if options.rows:
        table = read_table(Path(options.rows))
    examples = read_examples(task, table, options.text_column)[:MOST_ROWS]
    import torch

    from finetune.encoding import Encoded
    from finetune.heads.build import load_fine_tuned

    model, tokenizer = load_fine_tuned(options.model)
    rows = Encoded(task, examples, tokenizer)
    output = Path(options.output or f"{Path(options.model)}-onnx")
    check_output(output)
    if output.resolve() == Path(options.model).resolve():
        raise UserError(f"--output {output}: is the model itself; set another folder.")
    with atomic_folder(output) as folder, torch.no_grad():
        difference = write_onnx(model.eval(), rows, folder)
        if not difference <= TOLERANCE:
            raise UserError(f"{output}: not kept: its outputs differ by {difference:.2g}.")
        tokenizer.save_pretrained(folder)
    same = f"{difference:.1e} at most, on {count(len(examples), 'row')}"
    print_summary([("exported", output), ("difference of the outputs", same)])
    return 0


def write_onnx(model: "TaskModel", rows: "Encoded", folder: Path) -> float:
    """Writes model.onnx (the older tracer is wrong by 0.17); returns the largest difference of the outputs."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 (torch's exporter needs it)
    except ImportError as error:
        raise UserError(f"{error}: pip install onnx onnxruntime onnxscript.") from None
    import torch

    inputs = _inputs(rows, 2)
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
    model.config.save_pretrained(folder)
    file, differences = str(folder / "model.onnx"), []
    try:
        program: Any = torch.onnx.export(Logits().eval(), tuple(inputs.values()), **options)
        program.save(file)
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        for number in (1, len(rows)):  # other numbers of rows and tokens than exported
            inputs = _inputs(rows, number)
            (found,) = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
            differences.append(np.abs(found - model(**inputs).logits.numpy()).max())
    except OSError:  # of the file
        raise
    except Exception as error:  # whatever an operator of torch or onnxruntime raises
        what = f"the head {model.config.head} cannot be exported"
        raise UserError(f"{what}: {first_line(error)}") from error
    return float(max(differences))


def _inputs(rows: "Encoded", number: int) -> dict[str, Any]:
    """Returns the model's inputs of the first rows, without their labels."""
    batch = rows.batch(range(min(number, len(rows))))
    return {name: tensor for name, tensor in batch.items() if name != "labels"}


if __name__ == "__main__":
    run_command(main)
