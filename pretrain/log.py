"""Writes the output of a run: console, metrics.jsonl, TensorBoard. Rank 0 writes."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from multicls.console import print_line
from multicls.files import append_jsonl, atomic_write, read_jsonl
from multicls.probe import VIEWS

SHOWN = {  # of a record, on the console
    "loss/total": "loss {:.3f}",
    **{f"loss/{name}": f"{name} {{:.3f}}" for name in ("mlm", "tfidf", "so", "mcqt")},
    "optim/lr": "lr {:.1e}",
    "optim/grad_norm": "gnorm {:.2f}",
    "speed/sequences_per_second": "{:.0f} seq/s",
    "speed/data_wait": "data wait {:.0%}",
    "speed/tokens_per_second": "{:.0f} tokens/s",
    "speed/mfu": "MFU {:.0%}",
    "memory/peak_gb": "mem {:.1f}G",
    "acc/mcqt": "acc mcqt {:.2f}",
    "acc/so": "acc so {:.2f}",
    "facets/mean_cosine": "cos {:.2f}",
    **{f"probe/{name}": f"probe {name} {{:.3f}}" for name in VIEWS},
}


class Log:
    """The output of a run on rank 0; other ranks write nothing.

    TensorBoard gets two writers, `tb/train` and `tb/validation`, so that the curves of one tag lie over each other.

    Args:
        resumed_step: Step of the checkpoint, or 0. Later records, and the validation of this step, are dropped.
    """

    def __init__(self, folder: Path, writes: bool, resumed_step: int) -> None:
        self._metrics, self.writes = folder / "metrics.jsonl", writes
        if not writes:
            return
        from torch.utils.tensorboard import SummaryWriter

        last = {"train": resumed_step, "validation": resumed_step - 1} if resumed_step else {}
        records = read_jsonl(self._metrics)
        with atomic_write(self._metrics) as file:
            for record in records:
                if record["step"] <= last.get(record["split"], -1):
                    file.write(json.dumps(record) + "\n")
        self._boards = {
            split: SummaryWriter(str(folder / "tb" / split), purge_step=last.get(split, -1) + 1)
            for split in ("train", "validation")
        }

    def info(self, text: str) -> None:
        """Prints a line with the clock."""
        if self.writes:
            print_line(text)

    def record(self, step: int, split: str, values: Mapping[str, float], note: str = "") -> None:
        """Writes the finite values under the same keys to metrics.jsonl and TensorBoard, and prints some of them."""
        if self.writes:
            values = {name: value for name, value in values.items() if math.isfinite(value)}
            append_jsonl(self._metrics, {"step": step, "split": split, **values})
            for name, value in values.items():
                self._boards[split].add_scalar(name, value, step)
            shown = [form.format(values[name]) for name, form in SHOWN.items() if name in values]
            print_line(f"step {step}  {split}  {'  '.join(shown)}{note}")

    def close(self) -> None:
        """Flushes TensorBoard."""
        for board in self._boards.values() if self.writes else ():
            board.close()
