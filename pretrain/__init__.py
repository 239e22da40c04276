"""Pretraining: micro-batches in, a run folder with a Hugging Face model out."""
