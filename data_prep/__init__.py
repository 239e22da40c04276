"""Stage 1: documents in, shards out (`run.py`); shards in, three-part batches out (`triples.py`)."""
