"""An encoder, a head that makes one embedding of it, and a classifier for each task. Saved models hold this file.

Imports only torch and transformers. Shape legend: B sequences, L tokens, D hidden size, E size of the embedding, C
outputs (or choices), S marked spans.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel, __version__
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput

if int(__version__.split(".")[0]) < 5:
    raise ImportError(
        f"this model needs transformers 5, this is transformers {__version__}: pip install 'transformers>=5.17,<6'"
    )

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]
NOT_OF_THE_ENCODER = ("auto_map", "architectures", "dtype", "transformers_version")  # fields of its file, not of itself


class TaskModelConfig(PretrainedConfig):
    """The parts of a `TaskModel`; other fields are those of `PretrainedConfig`."""

    model_type = "encoder-with-head"
    # With these left out, a Trainer's `compute_metrics` gets the logits alone.
    keys_to_ignore_at_inference: ClassVar[list[str]] = [
        "hidden_states", "pooled", "features", "layer_weights", "facets"
    ]  # fmt: skip

    encoder: Any = None  # its configuration, as an object or as a dictionary with `model_type`
    head: str = "cls"  # a file of this folder, whose class `Head` makes the embedding
    head_options: dict[str, Any] | None = None  # that head's settings
    pooling: str = "cls"  # the head that `isobn`, `batchnorm`, `cln` and `probe` are built on: cls, multicls or mean
    # For each task name, labels, num_labels, num_choices, num_spans, is_regression, multi_label, label_scale,
    # max_length, shape and text_columns; made by `finetune.heads.building.describe`.
    tasks: list[dict[str, Any]] | None = None
    dropout: float | None = None  # before the classifier; None: the encoder's own

    def __post_init__(self, **kwargs: Any) -> None:
        encoder = self.encoder if isinstance(self.encoder, dict) else self.encoder.to_dict() if self.encoder else {}
        self.encoder = {name: value for name, value in encoder.items() if name not in NOT_OF_THE_ENCODER}
        self.head_options, self.tasks = self.head_options or {}, self.tasks or []
        first = self.tasks[0] if self.tasks else {}
        names = [str(label) for label in first.get("labels") or (["score"] if first.get("is_regression") else [])]
        if names and self.id2label is None:
            self.id2label = dict(enumerate(names))
            self.label2id = {label: index for index, label in enumerate(names)}
        if first and self.problem_type is None:
            self.problem_type = problem_type_of(first)
        super().__post_init__(**kwargs)


def problem_type_of(task: dict[str, Any]) -> ProblemType:
    """Returns the `problem_type` of a task; by it a pipeline chooses softmax, sigmoid or nothing."""
    if task.get("is_regression"):
        return "regression"
    return "multi_label_classification" if task.get("multi_label") else "single_label_classification"


@dataclass
class TaskModelOutput(SequenceClassifierOutput):
    """The output of a `TaskModel`: BERT's classifier output with more fields."""

    pooled: Tensor | None = None  # the embedding before dropout, (B, E)
    features: Tensor | None = None  # the embedding with the means over the spans after it, (B, E + S * D)
    layer_weights: Tensor | None = None  # HIRE's importance of each layer, (B, layers + 1)
    facets: Tensor | None = None  # the part of each facet in `pooled`, (B, K, E), without gradient


class Head(nn.Module, ABC):
    """Makes one embedding of an encoder's hidden states. The file of each head defines a class of this name.

    It may take modules of the checkpoint (`encoder.pooler`). The encoder is left without pooler and facet head, so that
    nothing is trained or saved that nothing reads.
    """

    width: int  # E, the size of the embedding
    reads_all_layers = False  # it needs `states.hidden_states`
    dropout_before_classifier = True  # the paper of the head has dropout there
    layer_weights: Tensor | None = None  # for analysis: weight of each layer in the last batch, (B, layers + 1)
    facets: Tensor | None = None  # for analysis: part of each facet in the last batch's embedding, (B, K, E)

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__()
        self.width = int(encoder.config.hidden_size)

    @abstractmethod
    def forward(self, states: BaseModelOutput, attention_mask: Tensor) -> Tensor:
        """Returns the embedding, (B, E), from hidden states (B, L, D) and the mask (B, L)."""

    def select_task(self, task: int) -> None:
        """Prepares for a batch of that task; called before the encoder runs."""

    @classmethod
    def why_not(cls, encoder: dict[str, Any]) -> str:
        """Returns why the head does not work on an encoder of that configuration; "" if it does."""
        return ""


class PooledHead(Head):
    """A head on top of another head, the one that `config.pooling` names."""

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel) -> None:
        super().__init__(config, encoder)
        self.pooling = find_head(config.pooling)(config, encoder)
        self.width = self.pooling.width

    def forward(self, states: BaseModelOutput, attention_mask: Tensor) -> Tensor:
        """Returns the embedding of the other head, (B, E)."""
        pooled: Tensor = self.pooling(states, attention_mask)
        self.facets = self.pooling.facets
        return pooled


def find_head(name: str) -> type[Head]:
    """Returns the class `Head` of the file `name` in this folder."""
    if not name.isidentifier():
        raise ValueError(f"head {name!r}: not a name")
    head: type[Head] = importlib.import_module(f".{name}", __package__).Head
    return head


class TaskModel(PreTrainedModel):
    """An encoder with a head, and a linear classifier for each task.

    Logits = W dropout([pooled; mean over span 1; mean over span 2]) + b, with means of the last hidden states over the
    spans of a task that has them. Each choice of a choice task is a sequence with one output.

    Args:
        config: its parts.
        encoder: with its weights; None: drawn anew.
    """

    config_class = TaskModelConfig
    base_model_prefix = "encoder"
    accepts_loss_kwargs = False  # the loss is a mean over the batch: a Trainer divides it by its accumulation steps

    def __init__(self, config: TaskModelConfig, encoder: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        self.encoder = encoder or AutoModel.from_config(AutoConfig.for_model(**config.encoder))
        self.head = find_head(config.head)(config, self.encoder)
        for unused, stand_in in (("pooler", None), ("facet_head", nn.Identity())):
            if getattr(self.encoder, unused, None) is not None:
                setattr(self.encoder, unused, stand_in)
        hidden_size = int(self.encoder.config.hidden_size)
        self.dropout = nn.Dropout(dropout_of(config) if self.head.dropout_before_classifier else 0.0)
        self.classifiers = nn.ModuleList(
            nn.Linear(self.head.width + task["num_spans"] * hidden_size, task["num_labels"])
            for task in config.tasks or []
        )
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        spans: Tensor | None = None,
        labels: Tensor | None = None,
        task: int = 0,
        class_weights: Tensor | None = None,
        **kwargs: Any,
    ) -> TaskModelOutput:
        """Classifies sequences of one task.

        Args:
            input_ids: (B, L); of a choice task (B * C, L), a row's choices together.
            attention_mask: (B, L), 1 up to the padding, which is on the right.
            token_type_ids: (B, L); left out where the encoder has none.
            spans: (B, S, L) bool, the tokens of each marked span, for tasks that mark spans.
            labels: by `config.problem_type` of a model of one task, else by the task: (B,) class ids; (B,) or (B, C)
                numbers for regression; (B, C) zeros and ones for a multi-label task.
            task: index into `config.tasks`.
            class_weights: (C,) factor of a row's loss by its class; the loss is then the mean of the weighted losses.
            **kwargs: for the encoder.

        Returns:
            `loss`, the mean over rows (and over classes in a multi-label task), if labels are given; `logits`
            (B, num_labels), or (B, C) in a choice task.
        """
        self.head.select_task(task)
        if getattr(self.encoder.config, "type_vocab_size", 0) > 1:
            kwargs["token_type_ids"] = token_type_ids
        if self.head.reads_all_layers:
            kwargs["output_hidden_states"] = True
        kwargs["return_dict"] = True
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        hidden_BLD = states.last_hidden_state
        mask = torch.ones_like(hidden_BLD[..., 0], dtype=torch.long) if attention_mask is None else attention_mask
        pooled_BE = self.head(states, mask)
        features = pooled_BE
        if spans is not None:
            features = torch.cat([pooled_BE, span_means(hidden_BLD, spans).flatten(1)], dim=-1)
        logits = self.classifiers[task](self.dropout(features))
        about = (self.config.tasks or [])[task]
        if about["num_choices"]:
            logits = logits.view(-1, about["num_choices"])
        problem = self.config.problem_type if len(self.classifiers) == 1 else problem_type_of(about)
        loss = None if labels is None else loss_of(problem, logits.float(), labels, class_weights)
        return TaskModelOutput(
            loss=loss,
            logits=logits,
            hidden_states=states.hidden_states,
            attentions=states.attentions,
            pooled=pooled_BE,
            features=features,
            layer_weights=self.head.layer_weights,
            facets=self.head.facets,
        )


def loss_of(problem: str | None, logits_BC: Tensor, labels: Tensor, class_weights: Tensor | None) -> Tensor:
    """Returns the mean loss of a batch: squared error, binary cross-entropy (multi-label) or cross-entropy."""
    if problem == "regression":
        return F.mse_loss(logits_BC.squeeze(-1), labels.float())
    if problem == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits_BC, labels.float())
    if class_weights is None:
        return F.cross_entropy(logits_BC, labels)
    return F.cross_entropy(logits_BC, labels, weight=class_weights, reduction="none").mean()


def span_means(hidden_BLD: Tensor, spans_BSL: Tensor) -> Tensor:
    """Returns the mean over the positions of each span, (B, S, D); 0 for a span that truncation has cut off."""
    weights_BSL = spans_BSL.to(hidden_BLD.dtype)
    return weights_BSL @ hidden_BLD / weights_BSL.sum(dim=-1, keepdim=True).clamp(min=1)


def dropout_of(config: TaskModelConfig) -> float:
    """Returns the dropout before the classifier: the settings', else the checkpoint's."""
    candidates = (config.dropout, *(config.encoder.get(name) for name in ("classifier_dropout", "hidden_dropout_prob")))
    return float(next((value for value in candidates if value is not None), 0.1))
