"""Makes the rows of swe_rows.py importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
