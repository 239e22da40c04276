"""The fine-tuning loop."""
