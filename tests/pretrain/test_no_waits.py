"""The host waits for no device in a micro-batch, and all tensors of a step are on one device."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.processes import completed


@pytest.mark.launcher
def test_the_host_waits_only_where_the_page_says() -> None:
    script = Path(__file__).with_name("no_waits.py")
    done = completed([sys.executable, script], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    for name in ("zero1", "zero2"):
        # DeepSpeed checks the norm before the update, after the last of 4 micro-batches. The mask is
        # read on CPUs only.
        assert results[name]["reads"] == {
            "utils.py:is_invalid_grad_norm": 1,
            "masking_utils.py:_ignore_bidirectional_mask_sdpa": 4,
        }
        assert results[name]["synchronize"] == {}
    assert len(results["fake"]) == 6 and set(results["fake"].values()) == {""}
    assert len(results["heads"]) == 9 and set(results["heads"].values()) == {""}
    assert "DataDependentOutput" in results["control"], "transformers' own mask is read on the host"
