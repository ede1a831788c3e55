"""How much memory a process holds that trains with state on the drives of cards: run by itself.

Arguments: elements of the model, elements of a subgroup, cards, folder. Prints the bytes that the
process had at most, in steps, beyond what it had with the model, its gradients, and an optimizer of
a model of one parameter on such a device.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import nearstep


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)


def train(elements: int, device: str, parameters: int) -> tuple[int, int]:
    """Bytes that the process had before the optimizer was made, and at most from then on."""
    layers = [torch.nn.Parameter(torch.ones(elements // parameters)) for _ in range(parameters)]
    for p in layers:
        p.grad = torch.full_like(p, 0.5)
    Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now
    before = status("VmRSS")
    optimizer = nearstep.optim.AdamW(layers, device=device)
    for _ in range(3):
        optimizer.step()
    most = status("VmHWM")
    optimizer.store.close()
    return before, most


def main() -> None:
    elements, subgroup, cards, folder = (*map(int, sys.argv[1:4]), Path(sys.argv[4]))
    torch.set_num_threads(1)
    shape = f"golden:smartssd?cards={cards}"
    small, large = folder / "small", folder / "large"
    small.mkdir()
    large.mkdir()
    train(4096, f"{shape}&subgroup_elements=4096&drive={small}", 1)
    before, most = train(elements, f"{shape}&subgroup_elements={subgroup}&drive={large}", 8)
    print(most - before)


if __name__ == "__main__":
    main()
