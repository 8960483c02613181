"""Runs the measurements that need nothing but this checkout, one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
COMMANDS = (
    ("startup.py",),
    ("gateway.py",),
    ("observing.py",),
    ("continuation.py",),
    ("reliability.py",),
    ("trajectory.py",),
    ("schedule.py",),
    ("backend.py",),
    ("prefix.py",),
    ("engine.py",),
    ("quickstart.py",),
)

if __name__ == "__main__":
    for script, *options in COMMANDS:
        print(f"\n== {script} {' '.join(options)}", flush=True)
        subprocess.run([sys.executable, str(HERE / script), *options], check=True)
