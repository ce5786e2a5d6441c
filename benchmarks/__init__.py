"""Programs that measure: `python -m benchmarks.FOLDER.NAME` from the root of a checkout; results/ has the figures."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
