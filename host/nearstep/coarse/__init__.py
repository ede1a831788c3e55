"""A pool of memory devices that sum tensors near memory.

    with CoarsePool.open("golden:coarse?devices=4&groups=2") as pool:
        gradients = pool.tensor([worker.gradients() for worker in workers])
        pool.all_reduce(gradients, op="average")
        for device, worker in enumerate(workers):
            worker.use(gradients.read(device))

Ref: COARSE paper, sections III and IV.
"""

from nearstep.coarse.device import CoarseDevice
from nearstep.coarse.event import Event
from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.proxies import Proxies
from nearstep.coarse.tensor import PoolTensor

__all__ = ["CoarseDevice", "CoarsePool", "Event", "PoolTensor", "Proxies"]
