"""Whether processes have ended."""

import time
from pathlib import Path


def ends(process: int) -> bool:
    """Whether a process ends, or has ended and waits for whoever adopts it to notice."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
