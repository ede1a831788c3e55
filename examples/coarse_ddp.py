"""Train a GPT data parallel in several processes, its gradients averaged near memory.

    torchrun --nproc-per-node 4 examples/coarse_ddp.py --device "sim:coarse?devices=4&window=direct"

Each process is a worker; DDP's gradients go to COARSE's memory devices, a service that the first
process starts, and come back averaged. At the end of each epoch the training's state is kept in the
devices and written to a snapshot, from which `--resume` goes on, with any number of processes.
With `--hook` the processes' group is gloo's, and a communication hook takes the gradients alone.
"""

from __future__ import annotations
