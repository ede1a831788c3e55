"""Ends of flows by SimGrid, as a program: JSON of links and flows comes in, of seconds goes out.

Its model CM02 without latencies, cross traffic and the bound of TCP's window is max-min fair.
"""

import json
import sys

import simgrid


def main() -> None:
    task = json.load(sys.stdin)
    options = ("network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0")
    engine = simgrid.Engine(["flows", *(f"--cfg={each}" for each in options)])
    zone = simgrid.NetZone.create_full_zone("zone")
    links = {lane: zone.create_link(lane, rate) for lane, rate in task["links"].items()}
    ends = {}

    def send(number: int, begins: float, start: object, stop: object, nbytes: int) -> None:
        simgrid.this_actor.sleep_for(begins)
        simgrid.Comm.sendto(start, stop, nbytes)
        ends[number] = simgrid.Engine.clock

    for number, (begins, nbytes, route) in enumerate(task["flows"]):
        start, stop = (zone.create_host(f"{end}{number}", 1e9) for end in ("from", "to"))
        hops = [simgrid.LinkInRoute(links[lane]) for lane in route]
        zone.add_route(start.netpoint, stop.netpoint, None, None, hops, False)
        simgrid.Actor.create(f"actor{number}", start, send, number, begins, start, stop, nbytes)
    zone.seal()
    engine.run()
    json.dump([ends[number] for number in range(len(ends))], sys.stdout)


main()
