"""Stage 1: documents in, shards out (`run.py`); shards in, three-part batches out (`windows.py`, `examples.py`)."""
