"""Makes the auto classes of transformers know fine-tuned models; importing it is enough."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForSequenceClassification

from finetune.heads.modeling_task import TaskModel, TaskModelConfig

AutoConfig.register(TaskModelConfig.model_type, TaskModelConfig)
AutoModelForSequenceClassification.register(TaskModelConfig, TaskModel)
