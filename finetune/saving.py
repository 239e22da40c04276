"""Saves a fine-tuned model in a folder that loads without this project."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase

import multicls
from finetune.heads.modeling_task import MULTICLS, TaskModel
from multicls.build import quiet_transformers
from multicls.files import atomic_folder

ENTRY = "task_model"  # the saved folder's first module, which imports all others
NOT_A_HEAD = ("__init__", "build", "modeling_task")
HEADS_FOLDER, MULTICLS_FOLDER = Path(__file__).parent / "heads", Path(multicls.__file__).parent


def save_model(
    model: TaskModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str = ""
) -> None:
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
