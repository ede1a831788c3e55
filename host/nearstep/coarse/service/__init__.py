"""The memory devices as a service, for clients in other processes.

    nearstep coarse serve --device "golden:coarse?devices=4" --listen unix:/run/coarse

Ref: COARSE paper, section III-D and figure 7.
"""

from nearstep.coarse.service.client import Client
from nearstep.coarse.service.server import Server
from nearstep.coarse.service.spawn import Spawned

__all__ = ["Client", "Server", "Spawned"]
