"""Configuration of Multi-CLS BERT (arXiv:2210.05043). Travels with saved models: imports only transformers."""

from __future__ import annotations

from typing import Any

from transformers import BertConfig

POOLINGS = ("multicls", "sum", "cls")
AUTO_MAP = {
    "AutoConfig": "configuration_multicls.MultiClsBertConfig",
    "AutoModel": "modeling_multicls.MultiClsBertModel",
    "AutoModelForPreTraining": "modeling_multicls.MultiClsBertForPreTraining",
    "AutoModelForSequenceClassification": "modeling_multicls.MultiClsBertForSequenceClassification",
}


class MultiClsBertConfig(BertConfig):
    """A BERT with K facet tokens behind [CLS].

    Args:
        num_facets: K, the facets (extra CLS tokens) at positions 1..K. 0 is the plain single-CLS model: [CLS] itself
            then takes the place of the one facet.
        facet_layers: after these layers (1-based, ascending) every facet's hidden state passes its own inserted linear
            layer (section 2.5). None means one and two thirds of the depth (4 and 8 of 12), [] none.
        mcqt_lambda: weight of the best facet pair against the facet sum in the MCQT score (Eq. 2).
        hard_negatives: batches come in three consecutive parts of which the third is a hard negative of the first
            (section 2.4); False: two parts and in-batch negatives only.
        classifier_pooling: what `MultiClsBertForSequenceClassification` classifies: "multicls", the re-parameterised
            sum of facets (section 2.6); "sum", the plain sum; "cls", BERT's pooled [CLS].
        **kwargs: as `BertConfig`.

    Raises:
        ValueError: a field is out of range, or facets and text do not fit `max_position_embeddings`.
    """

    model_type = "multicls-bert"

    num_facets: int = 5
    facet_layers: list[int] | None = None
    mcqt_lambda: float = 0.1
    hard_negatives: bool = True
    classifier_pooling: str = "multicls"

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
        if self.classifier_pooling not in POOLINGS:
            raise ValueError(f"classifier_pooling = {self.classifier_pooling!r}: must be one of {', '.join(POOLINGS)}")
        super().__post_init__(**kwargs)

    @property
    def num_embeddings_per_sequence(self) -> int:
        """S: facet embeddings of one sequence; K, or 1 (the [CLS] itself) when K is 0."""
        return max(self.num_facets, 1)

    @property
    def num_parts(self) -> int:
        """Consecutive parts of one training example: 3 with hard negatives, 2 without."""
        return 3 if self.hard_negatives else 2

    def to_dict(self) -> dict[str, Any]:
        """As `BertConfig`, with the map by which `trust_remote_code=True` finds every class in a saved folder."""
        return super().to_dict() | {"auto_map": dict(AUTO_MAP)}
