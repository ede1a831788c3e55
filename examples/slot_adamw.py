"""Trains with AdamW on a device by its driver, without torch, such as on a card in a slot:

    python examples/slot_adamw.py "pci:0000:01:00.0?lanes=4&chunk_bytes=512" [PARAMETERS [STEPS]]

Then it prints interrupts that VFIO has counted (`access=vfio`), resets the device, whose memory
must keep its contents, and prints SHA-256 of p, m and v.
"""

import hashlib
import sys
import time
from pathlib import Path

import numpy as np

import nearstep
from nearstep_sim.linux.train import numbers


def main(url: str, count: int = 4112, steps: int = 10) -> None:
    """Train on the device named `url`."""
    if min(count, steps) < 1:
        raise SystemExit("PARAMETERS and STEPS must be at least 1")
    with nearstep.open(url) as card:
        print(card)
        arrays = {name: card.alloc(count) for name in "pgmv"}
        for name in "mv":
            arrays[name].write(np.zeros(count, np.float32))
        arrays["p"].write(numbers(0, count))
        begin = time.monotonic()
        for step in range(1, steps + 1):
            arrays["g"].write(numbers(step, count))
            card.update("adamw", arrays, step=step, lr=1e-3).wait()
        milliseconds = (time.monotonic() - begin) / steps * 1000
        print(f"{steps} steps of {count} parameters, {milliseconds:.1f} ms a step")
        for line in Path("/proc/interrupts").read_text().splitlines():
            if "vfio" in line:
                print(line)
        card.reset()
        for name in "pmv":
            print(f"{hashlib.sha256(arrays[name].read().tobytes()).hexdigest()}  {name}")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 4:
        raise SystemExit("usage: slot_adamw.py DEVICE [PARAMETERS [STEPS]]")
    main(sys.argv[1], *map(int, sys.argv[2:]))
