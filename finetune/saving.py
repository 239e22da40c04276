"""Saves a fine-tuned model in a folder that loads without this project."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files

import multicls
from finetune.heads.modeling_task import FILES, MULTICLS, PooledHead, TaskModel
from multicls.build import quiet_transformers
from multicls.files import atomic_folder
from multicls.tokenization import facet_ids

ENTRY = "task_model"  # the saved folder's first module: it imports what its head needs
MULTICLS_ENTRY = """
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel
from .modeling_multicls import MultiClsConfig, MultiClsModel

if MultiClsConfig.model_type not in CONFIG_MAPPING:
    AutoConfig.register(MultiClsConfig.model_type, MultiClsConfig)
    AutoModel.register(MultiClsConfig, MultiClsModel)
"""


def save_model(
    model: TaskModel, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str = ""
) -> None:
    """Saves model, tokenizer, README.md and the code that loads them; replaces the folder as a whole.

    `AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)` loads the model without this
    project.
    """
    model.config.auto_map = {
        "AutoConfig": f"{ENTRY}.TaskModelConfig",
        "AutoModelForSequenceClassification": f"{ENTRY}.TaskModel",
    }
    heads = [model.config.head]
    if isinstance(model.head, PooledHead):
        heads.append(model.config.pooling)
    modules = sorted({FILES.get(name, name) for name in heads})
    files = {Path(__file__).parent / "heads" / f"{module}.py" for module in modules}
    files |= {Path(needed) for file in files for needed in get_relative_import_files(file)}
    entry = '"""Loads this model; written when it was saved."""\n\n'
    entry += "from .modeling_task import TaskModel, TaskModelConfig\n"
    entry += "".join(f"from .{module} import HEADS as {module}_heads\n" for module in modules)
    if model.config.encoder["model_type"] == MULTICLS:
        entry += MULTICLS_ENTRY
        model.config.encoder["facet_ids"] = list(facet_ids(tokenizer))
        folder_of_code = Path(multicls.__file__).parent
        files |= {folder_of_code / f"{kind}_multicls.py" for kind in ("configuration", "modeling")}
    with atomic_folder(folder) as fresh, quiet_transformers():
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        for file in files:
            shutil.copy(file, fresh)
        (fresh / f"{ENTRY}.py").write_text(entry, encoding="utf-8")
        if card:
            (fresh / "README.md").write_text(card, encoding="utf-8")
