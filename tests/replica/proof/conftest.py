"""Puts this folder on the path, which --import-mode=importlib leaves off."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
