"""Saves a fine-tuned model in a folder that loads without this project, with its model card."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedTokenizerBase as Tokenizer

import multicls
from finetune.estimates import example_interval
from finetune.heads.modeling_task import MULTICLS, TaskModel
from finetune.results import Predictions, Record
from finetune.tasks import TaskData
from multicls.build import quiet_transformers
from multicls.cards import METHOD, PAPERS, TRANSFORMERS, cell, inherited_metadata, model_link
from multicls.files import atomic_folder

ENTRY = "task_model"  # the saved folder's first module, which imports all others
NOT_A_HEAD = ("__init__", "build", "modeling_task")
HEADS_FOLDER, MULTICLS_FOLDER = Path(__file__).parent / "heads", Path(multicls.__file__).parent
TEMPLATE = Path(__file__).with_name("card.md.jinja")


def save_model(model: TaskModel, tokenizer: Tokenizer, folder: Path, card: str = "") -> None:
    """Saves model, tokenizer, README.md and the code of all heads; replaces the folder as a whole.

    `AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)` loads the model without this
    project.
    """
    model.config.auto_map = {
        "AutoConfig": f"{ENTRY}.TaskModelConfig",
        "AutoModelForSequenceClassification": f"{ENTRY}.TaskModel",
    }
    files = sorted(file for file in HEADS_FOLDER.glob("*.py") if file.stem not in NOT_A_HEAD)
    entry = '"""Loads this model; written when it was saved."""\n\n'
    entry += "from .modeling_task import TaskModel, TaskModelConfig\n"
    entry += "".join(f"from .{file.stem} import HEADS as {file.stem}_heads\n" for file in files)
    files.append(HEADS_FOLDER / "modeling_task.py")
    if model.config.encoder["model_type"] == MULTICLS:
        entry += "from .modeling_multicls import MultiClsModel\n"  # it registers itself
        files += [MULTICLS_FOLDER / f"{name}_multicls.py" for name in ("configuration", "modeling")]
    with atomic_folder(folder) as fresh, quiet_transformers():
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        for file in files:
            shutil.copy(file, fresh)
        (fresh / f"{ENTRY}.py").write_text(entry, encoding="utf-8")
        (fresh / "README.md").write_text(card, encoding="utf-8")


def model_card(record: Record, tasks: Sequence[tuple[TaskData, Predictions]]) -> str:
    """Returns the card of a saved model as Markdown with the Hub's metadata."""
    inherited, intervals, task = inherited_metadata(record["model"]), list[str](), tasks[0][0].task
    for part, predictions in tasks:
        low, high = example_interval(part.task, predictions["dev"])
        interval = f" (95 % interval {100 * low:.1f} to {100 * high:.1f})"
        intervals.append("" if math.isnan(low) else interval)
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": None if task.num_choices or task.num_spans else "text-classification",
        "tags": ["text-classification"],
        "datasets": sorted({part.task.hub[0] for part, _ in tasks if part.task.hub}),
        **inherited,
    }
    head = record["head"]
    papers = [METHOD] * (METHOD in head + record["settings"]["pooling"]) + [head]
    card = ModelCard.from_template(
        ModelCardData(**{name: value for name, value in metadata.items() if value}),
        template_path=str(TEMPLATE),
        cell=cell,
        start=model_link(inherited),
        record=record,
        task=task,
        intervals=intervals,
        license=inherited.get("license_name") or inherited.get("license"),
        transformers=TRANSFORMERS,
        citations=[PAPERS[name] for name in dict.fromkeys(papers) if name in PAPERS],
    )
    return str(card)
