"""What tests share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
