"""Sections of the page on the COARSE memory devices."""

from __future__ import annotations

from page_table import Results, percent, table

AREA = ("dsp", "lut", "lut_memory", "ff", "bram36")
AREA_HEAD = ("DSP48E2", "LUT", "LUT as memory", "FF", "BRAM, 36 Kib")


def mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB"


def span(shares: list[float]) -> str:
    """Least and most of some shares."""
    return f"{100 * min(shares):.2f} to {100 * max(shares):.2f} %"


def coarse(results: Results) -> list[str]:
    """Sums against the bound; other designs; faults; snapshots; speed."""
    runs = results["runs"]
    two = [row for row in runs if row["wire"] == "fp32" and row["rings"] == 2]
    differ = sum(row["elements_differ"] for row in [*runs, *results["faults"]])
    compared = sum(row["elements"] for row in [*runs, *results["faults"]])
    phit, beat = results["phit_bytes"], results["beat_bytes"]
    lines = [
        "## The COARSE memory devices",
        "",
        "A sum of a tensor on N devices, *measured* in cycles of the devices' RTL, from the first",
        "job's start to the last one's end, by the cores' own counters. Two rings run in opposite",
        f"directions. A link moves {phit} bytes a cycle each way, and takes 100 cycles; a local",
        f"DRAM gives {beat} bytes a cycle, reads and writes together. The bound counts payload in",
        "the busiest direction: (N - 1) / N x n / BW for n bytes a device, n / BW for N = 2, which",
        "has one link. Headers and trailers, 2 of 130 phits, are 1.54 % of a direction. *Busy* is",
        "the share of cycles in which a direction of a link took a phit: least and most of all",
        f"directions. Of {compared:,} elements of results in all runs of this section, {differ}",
        "differ from golden's.",
        "",
    ]
    lines += table(
        ["N, size a device", "cycles", "bound", "of bound", "busy", "DRAM, B/cycle"],
        (
            [
                f"{row['devices']}, {mebibytes(row['bytes'])}",
                f"{row['cycles']:,}",
                f"{row['bound']:,.0f}",
                percent(row["of_bound"]),
                span(row["busy"]),
                f"{row['dram_bytes_per_cycle']:.1f}",
            ]
            for row in two
        ),
    )
    return [
        *lines,
        *_others(results, two),
        *_faults(results),
        *_snapshots(results),
        *_speed(two),
    ]


def _others(results: Results, two: list[Results]) -> list[str]:
    """One ring and DENSE beside two rings."""
    size = results["dense"][0]["bytes"]
    one = {row["devices"]: row for row in results["runs"] if row["rings"] == 1}
    both = {row["devices"]: row for row in two if row["bytes"] == size}
    lines = [
        f"The same {mebibytes(size)} a device with one ring, *measured*, and with DENSE, in which",
        "all send to one device over its links and read back from there: *modelled* as",
        "(N - 1) n / BW over the links of that device, both directions at once. With N = 2 one",
        "ring uses both directions; else only acknowledgements go against the ring.",
        "",
    ]
    lines += table(
        ["N", "two rings", "one ring", "DENSE, *modelled*", "one / two", "DENSE / two"],
        (
            [
                dense["devices"],
                f"{both[dense['devices']]['cycles']:,}",
                f"{one[dense['devices']]['cycles']:,}",
                f"{dense['cycles']:,.0f}",
                f"{one[dense['devices']]['cycles'] / both[dense['devices']]['cycles']:.2f}",
                f"{dense['cycles'] / both[dense['devices']]['cycles']:.2f}",
            ]
            for dense in results["dense"]
        ),
    )
    return [*lines, "![Cycles over devices, lost frames, snapshots](coarse.png)", ""]


def _faults(results: Results) -> list[str]:
    """What lost frames cost."""
    faults = results["faults"]
    lines = [
        "### Lost frames",
        "",
        f"{faults[0]['devices']} devices, {mebibytes(faults[0]['bytes'])} each; every frame is",
        "lost with that chance, in each direction of each link, *measured*. The sums stay equal,",
        "bit for bit. What is lost is sent again, and nothing else (selective repeat): that takes",
        "its share of the link. The other part is time: an entry that is missing comes some 500",
        "cycles late, and what came behind it waits in the RecvBuf.",
        "",
    ]
    return lines + table(
        ["lost", "cycles", "of the rate without loss", "entries sent again"],
        (
            [
                f"{100 * row['rate']:g} %",
                f"{row['cycles']:,}",
                percent(faults[0]["cycles"] / row["cycles"]),
                row["replays"],
            ]
            for row in faults
        ),
    )


def _snapshots(results: Results) -> list[str]:
    """What an open snapshot costs."""
    snapshots = results["snapshots"]
    size = 4 * snapshots[0]["elements"]
    base = snapshots[0]
    lines = [
        "### Snapshots",
        "",
        f"A sum of {mebibytes(size)} on each of four devices while a snapshot is open on part of",
        "what it overwrites, *measured*. A page of 4 KiB is read before its first write, and all",
        "writes wait meanwhile; it goes to the area beside them. *Stalled* are cycles in which a",
        "write waited.",
        "",
    ]
    return lines + table(
        ["pages copied, each device", "cycles", "slow-down", "stalled", "cycles more, a page"],
        (
            [
                row["pages_copied"],
                f"{row['cycles']:,}",
                f"{row['cycles'] / base['cycles']:.2f}",
                f"{row['stall']:,}",
                f"{(row['cycles'] - base['cycles']) / row['pages_copied']:.0f}"
                if row["pages_copied"]
                else "",
            ]
            for row in snapshots
        ),
    )


def _speed(two: list[Results]) -> list[str]:
    """How fast the emulation is."""
    rows = [row for row in two if row["bytes"] == max(each["bytes"] for each in two)]
    lines = [
        "### Speed of the emulation",
        "",
        "Elements of the result a second on one core, *measured* (this machine, by the clock on",
        "the wall): an element that all N devices summed and hold counts once. Additions are N - 1",
        "for each.",
        "",
    ]
    return lines + table(
        ["device", "elements of the result", "elements/s", "device cycles/s"],
        (
            [
                f"`sim:coarse?devices={row['devices']}&window=direct`",
                f"{row['bytes'] // 4:,}",
                f"{row['simulated_elements_per_s']:,.0f}",
                f"{row['simulated_elements_per_s'] * row['cycles'] / (row['bytes'] // 4):,.0f}",
            ]
            for row in rows
        ),
    )


def coarse_wire(results: Results) -> list[str]:
    """Which of links, ALUs and memory limits a sum with 16 bits on the links."""
    rows = results["rows"]
    lines = [
        "### 16 bits on the links",
        "",
        f"{mebibytes(rows[0]['bytes'])} on each of {rows[0]['devices']} devices, two rings,",
        "*measured*, and bounds of the links (frames included), the ALUs and the DRAM alone,",
        "*modelled*. A core does 2 N - 1 steps of a chunk and sends 2 N - 2 entries; a full entry",
        "of 16-bit elements takes 130 phits on a link and 128 beats of 8 ALUs. In any format the",
        "DRAM is read once and written once: `halfduplex`, 64 bytes a cycle in all, or `ideal`,",
        "which reads and writes at the same time.",
        "",
    ]
    limits = {"links": "links", "alus": "ALUs", "dram": "DRAM"}

    def cells(row: Results) -> list[str]:
        bounds = dict(row["bounds"])
        if row["memory"] == "ideal":
            bounds["dram"] /= 2
        slowest = max(bounds, key=lambda name: bounds[name])
        return [
            f"{row['wire']}, {row['alus']} ALUs, `{row['memory']}`",
            f"{row['cycles']:,}",
            *(f"{bounds[name]:,.0f}" for name in limits),
            f"{limits[slowest]}, {percent(bounds[slowest] / row['cycles'])}",
            f"{row['beats_per_cycle']:.3f}",
            span(row["busy"]),
        ]

    return lines + table(
        ["wire", "cycles", "links", "ALUs", "DRAM", "the slowest, its share", "ALU beats/cycle",
         "busy"],
        (cells(row) for row in rows),
    )  # fmt: skip


def coarse_pipeline(results: Results) -> list[str]:
    """Push, sync and pull, whole and in shards, with where the links' time went."""
    runs, sweep = results["runs"], results["sweep"]
    clients = results["clients"]
    every = [*runs.values(), *sweep]
    lines = [
        "### Push, sync and pull",
        "",
        f"{clients} clients push a tensor each, the rings of {clients} devices sum it, and all",
        "clients pull it, *measured* in cycles of the RTL of all devices, from the first push to",
        "the last pull. Transfers go through the window of a device, beside the sync cores, over a",
        f"link for each client with {results['phit_bytes']} bytes a cycle in each direction, 100",
        "cycles long. Bounds follow from sizes and rates of the links alone, payload without",
        "headers: a direction of a client's link carries n bytes, one of a ring's link",
        "(N - 1) / N x n. *Busy* is n over the rate of the link, over all cycles: the least of all",
        f"clients. Shards are of S' = {results['shard_bytes'] // 1024} KiB, the smallest size with",
        "95 % of the full rate, as a client measures it. Of",
        f"{sum(row['elements'] for row in every):,} elements",
        f"{sum(row['elements_differ'] for row in every)} differ from golden's.",
        "",
    ]
    names = {
        "shards": "in shards",
        "whole": "whole",
        "ideal": "in shards, `memory=ideal`",
        "slow_ring": "in shards, `link_interval=2`",
    }

    def cells(row: Results) -> list[str]:
        bounds = row["bounds"]
        return [
            row["shards"],
            f"{row['cycles']:,}",
            f"{bounds['client']:,.0f}",
            f"{bounds['ring']:,.0f}",
            f"{row['of_slower_link']:.3f}",
            *(percent(row["busy"][way]) for way in ("up", "down")),
        ]

    head = ["shards", "cycles", "bound, client", "bound, ring", "of the slower", "up", "down"]
    lines += table(
        ["size, how", *head],
        ([f"{mebibytes(row['bytes'])}, {names[name]}", *cells(row)] for name, row in runs.items()),
    )
    lines += [
        "![Links and rings of all clients over time, whole and in shards](coarse-pipeline.png)",
        "",
        "Where the cycles of a direction of a client's link went, of the client with the least",
        "busy: *within* transfers are their latency and waits for the memory, whose half-duplex",
        "port moves 4 n bytes at 64 a cycle: as long as the client's link.",
        "",
    ]
    parts = ("moving", "before", "between", "within", "after")
    lines += table(
        ["size, how, direction", *parts],
        (
            [
                f"{mebibytes(row['bytes'])}, {names[name]}, {way}",
                *(f"{row['uses'][way][part]:,}" for part in parts),
            ]
            for name, row in runs.items()
            for way in ("up", "down")
        ),
    )
    lines += [f"The same {mebibytes(sweep[0]['bytes'])} in shards of several sizes:", ""]
    return lines + table(
        ["size of a shard", *head],
        ([f"{row['shard_bytes'] // 1024:,} KiB", *cells(row)] for row in sweep),
    )


def coarse_area(results: Results) -> list[str]:
    """Parts, their sums, and what a lane costs."""
    parts, sums, config = results["parts"], results["sums"], results["config"]

    def row(name: str, cells: Results, form: str = ".0f") -> list[str]:
        return [name, *(f"{cells[key]:,{'g' if key == 'bram36' else form}}" for key in AREA)]

    depth, groups = config["buffer_entries"], config["groups"]
    buffers = groups * 2 * depth * config["entry_phits"] * 16 // 1024
    lines = [
        "### Area of a memory device",
        "",
        "After `synth_xilinx -family xcup`, *measured* part by part (synthesis only, so timing is",
        "unproven, and no registers are packed into DSP48E2, so FF counts read high); sums in",
        f"italics are added up. {groups} sync cores, buffers of {depth} entries of",
        f"{config['entry_phits']} phits, all wire formats.",
        "",
    ]
    named = ("ALUs", "sync core", "link layer", "CRC", "Flow", "snapshot")
    whole = {name: sums[name] for name in sums if not name.startswith("its")}
    lines += table(
        ["part", *AREA_HEAD],
        [
            *(row(name, parts[name]) for name in parts if any(each in name for each in named)),
            *(row(f"*{name}*", area) for name, area in whole.items()),
        ],
    )
    if results["lanes"]:
        lines += ["A lane of the ALUs: receives, adds or compares, scales, converts.", ""]
        lines += table(
            ["lane", *AREA_HEAD], (row(each["of"], each, ".1f") for each in results["lanes"])
        )
    links, replay = sums.get("link layer"), sums.get("its replay")
    if replay:
        lines += [
            "Replay of the link layer (sequence numbers, credits, requests, timeout; `SendFlow`,",
            f"`RecvFlow`; {groups} groups) is {replay['lut']:,.0f} LUT and",
            f"{replay['ff']:,.0f} FF by itself. It has a serial number of each entry, which",
            f"stays in its SendBuf until it is acknowledged. All buffers are {buffers} KiB.",
            "",
        ]
    if links:
        crc = sums["its CRC"]
        lines += [
            "CRC of headers and entries (eight circuits: two kinds, two ports, both ways) is",
            f"{crc['lut']:,.0f} of the {links['lut']:,.0f} LUT of the link layer.",
            "",
        ]
    return lines


def coarse_service(results: Results) -> list[str]:
    """All-reduces by the service, beside gloo's."""
    options = results["options"]
    lines = [
        "## The memory devices as a service",
        "",
        f"An all-reduce of {options['processes']} processes on this machine, *measured*, in turn:",
        f"by gloo, and by the service of `{options['device']}`;",
        "the time of the slowest process, medians of",
        f"{options['rounds']} rounds, and the median of the ratios. For each byte of a tensor a",
        "process copies one into shared memory and one out of it; the service reads what all have",
        "pushed there and writes what they pull, and holds",
        f"{results['service_bytes'] / 2**20:.0f} MiB resident, shared memory included.",
        "",
    ]
    lines += table(
        ["tensor", "gloo, ms", "service, ms", "gloo / service"],
        (
            [
                mebibytes(int(nbytes)),
                f"{1e3 * row['gloo_s']:.1f}",
                f"{1e3 * row['coarse_s']:.1f}",
                f"{row['gloo_over_coarse']:.2f}",
            ]
            for nbytes, row in results["rows"].items()
        ),
    )
    return lines


def coarse_update(results: Results) -> list[str]:
    """A step of an optimizer where the parameters are stored, beside DENSE."""
    rows = results["rows"]
    totals = {(row["clients"], row["devices"]): row["total"] for row in rows}
    lines = [
        "### The optimizer at the storage, and DENSE",
        "",
        f"A step of AdamW on {results['kib']:,} KiB of parameters, *measured* in cycles of the RTL",
        "of every device: clients push gradients, the devices sum them, every device updates its",
        "copy, and clients pull the parameters. COARSE has a device for each client and sums in",
        "two rings; DENSE is one device, which all clients push to, whose update kernel adds one",
        "client's gradients after the other's. The phases are one behind the other here; the",
        "service overlaps them shard by shard. Transfers to one device follow each other; those to",
        "several are of links of their own, and the slowest counts. The update reads and writes 28",
        f"bytes a parameter. Of {sum(row['elements'] for row in rows):,} parameters",
        f"{sum(row['elements_differ'] for row in rows)} differ from golden's.",
        "",
    ]
    return lines + table(
        ["clients", "devices", "push", "sum", "update", "pull", "all", "of COARSE's"],
        (
            [
                row["clients"],
                f"{row['devices']}, {'DENSE' if row['devices'] == 1 else 'COARSE'}",
                *(f"{row[name]:,}" for name in ("push", "sum", "update", "pull", "total")),
                f"{row['total'] / totals[row['clients'], row['clients']]:.2f}",
            ]
            for row in rows
        ),
    )
