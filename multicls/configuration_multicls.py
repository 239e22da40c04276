"""Configuration of Multi-CLS BERT (arXiv:2210.05043). Saved models carry this file: it imports only transformers."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import BertConfig, __version__

if int(__version__.split(".")[0]) < 5:
    raise ImportError(
        f"Multi-CLS BERT needs transformers 5, this is transformers {__version__}: pip install 'transformers>=5.17,<6'"
    )

POOLINGS = ("multicls", "sum", "cls")
SENTENCE_EMBEDDINGS = ("mean", "facets")
AUTO_MAP = {
    "AutoConfig": "configuration_multicls.MultiClsBertConfig",
    "AutoModel": "modeling_multicls.MultiClsBertModel",
    "AutoModelForPreTraining": "modeling_multicls.MultiClsBertForPreTraining",
    "AutoModelForMaskedLM": "modeling_multicls.MultiClsBertForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_multicls.MultiClsBertForSequenceClassification",
}


class MultiClsBertConfig(BertConfig):
    """Configuration of a BERT with K facets: extra CLS tokens after [CLS].

    Args:
        num_facets: K; the facets stand at positions 1..K. 0 is the plain single-CLS model, in which [CLS] serves as the
            only facet.
        facet_layers: layers (numbered from 1, ascending) after which each facet's hidden state passes its own inserted
            linear layer (section 2.5). None means one third and two thirds of the depth (4 and 8 of 12); [] means none.
        mcqt_lambda: weight of the best facet pair, against the sum of facets, in the MCQT score (Eq. 2).
        hard_negatives: an example has three consecutive parts; the third is a hard negative of the first (section 2.4).
            False: two parts, and only in-batch negatives.
        classifier_pooling: input of the classifier in `MultiClsBertForSequenceClassification`: "multicls" is the
            re-parameterised sum of facets (section 2.6), "sum" the plain sum, "cls" BERT's pooled [CLS].
        sentence_embedding: result of `MultiClsBertModel.embed_sentences`, which sentence-transformers calls: "mean" is
            the mean over all tokens but the facets, "facets" the sum of the facet embeddings.
        facet_ids: the K token ids of the facets; the model warns of input that lacks them. None: not known.
        **kwargs: fields of `BertConfig`.

    Raises:
        ValueError: a field is out of range, or the facets leave no position for text.
    """

    model_type = "multicls-bert"
    # With `pooled` left out, a Trainer's `compute_metrics` gets the logits alone.
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["pooled"]

    num_facets: int = 5
    facet_layers: list[int] | None = None
    mcqt_lambda: float = 0.1
    hard_negatives: bool = True
    classifier_pooling: str = "multicls"
    sentence_embedding: str = "mean"
    facet_ids: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        depth = self.num_hidden_layers
        if self.facet_layers is None:
            thirds = sorted({round(depth / 3), round(2 * depth / 3)} - {0}) if self.num_facets else []
            self.facet_layers = thirds
        self.facet_layers = [int(layer) for layer in self.facet_layers]
        if not 0 <= self.num_facets < self.max_position_embeddings - 2:
            raise ValueError(f"num_facets = {self.num_facets}: must lie in 0..{self.max_position_embeddings - 3}")
        if self.facet_layers != sorted(set(self.facet_layers)) or not all(1 <= x <= depth for x in self.facet_layers):
            raise ValueError(f"facet_layers = {self.facet_layers}: must be ascending layer numbers in 1..{depth}")
        if self.facet_layers and not self.num_facets:
            raise ValueError(
                f"facet_layers = {self.facet_layers}: there are no facets (num_facets = 0); leave it empty"
            )
        if not 0.0 <= self.mcqt_lambda <= 1.0:
            raise ValueError(f"mcqt_lambda = {self.mcqt_lambda}: must lie in 0..1")
        for field, choices in (("classifier_pooling", POOLINGS), ("sentence_embedding", SENTENCE_EMBEDDINGS)):
            if (value := getattr(self, field)) not in choices:
                raise ValueError(f"{field} = {value!r}: must be one of {', '.join(choices)}")
        if self.facet_ids is not None and len(self.facet_ids) != self.num_facets:
            raise ValueError(f"facet_ids = {self.facet_ids}: must be num_facets = {self.num_facets} token ids")
        super().__post_init__(**kwargs)

    @property
    def facet_slice(self) -> slice:
        """Positions of the facets in a sequence: 1..K, between [CLS] and the text."""
        return slice(1, 1 + self.num_facets)

    @property
    def num_embeddings_per_sequence(self) -> int:
        """S, the number of embeddings per sequence: K, or 1 ([CLS] itself) if K is 0."""
        return max(self.num_facets, 1)

    @property
    def num_parts(self) -> int:
        """Number of consecutive parts in a training example: 3 with hard negatives, 2 without."""
        return 3 if self.hard_negatives else 2

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields and the `auto_map` with which `trust_remote_code=True` finds the classes."""
        return super().to_dict() | {"auto_map": dict(AUTO_MAP)}
