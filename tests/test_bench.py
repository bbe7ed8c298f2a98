"""bench.py runs and reports; what it measures is not a test's business."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_bench_reports_every_figure():
    argv = ["bench.py", "--num-envs", "2", "--num-steps", "64", "--rounds", "1", "--rollouts", "3"]
    argv += ["--no-compile", "--json"]
    result = subprocess.run([sys.executable, *argv], cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found) == 20
    for value in found.values():
        assert all(number >= 0 for number in (value if isinstance(value, list) else [value]))
