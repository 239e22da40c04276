"""Stage 3: a Hugging Face model in, one line of `results.jsonl` a run out. See docs/finetuning.md."""
