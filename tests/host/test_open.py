"""Device names and their options: what is wrong with one is said before anything is opened."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Literal

import pytest

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.backends.emulated import Injection
from nearstep.backends.options import DeviceUrl, parse_options
from nearstep.coarse import CoarseDevice
from nearstep.device import backends
from nearstep.errors import ArgumentError, MismatchError, OptionError, UrlError
from nearstep.updater.device import KernelDevice
from nearstep_sim.backends import golden
from nearstep_spec.codec import Option


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("golden", "backend:target"),
        ("golden:", "backend:target"),
        (":axdimm", "backend:target"),
        ("golden:axdimm?lanes", "name=value"),
        ("golden:axdimm?lanes=4&lanes=8", "given twice"),
        ("gold:axdimm", "no backend 'gold'; valid: golden, host, nvme, pci, serial, sim"),
        ("golden:axdim", "no family 'axdim'; valid: axdimm"),
        ("sim:axdim", "no family 'axdim'; valid: axdimm"),
        ("host:", "the processor is no device: .*nearstep.optim"),
        ("host:?threads=2", "the processor is no device"),
        ("host:cpu", r"backend:target\?option=value, or host:\?option=value"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(url, message):
    with pytest.raises(UrlError, match=message):
        nearstep.open(url)


def test_a_device_of_the_class_that_was_asked_for():
    with nearstep.open("golden:coarse?memory_bytes=64KiB", CoarseDevice) as device:
        assert type(device) is CoarseDevice
    with nearstep.open("golden:axdimm?memory_bytes=64KiB&engine=numpy", KernelDevice) as device:
        assert type(device) is AxdimmDevice


def test_a_device_of_another_class_is_closed(monkeypatch):
    """Where the name does not say the family, as that of a board."""
    backend = golden.open_device("axdimm", {"memory_bytes": "64KiB", "engine": "numpy"})
    closed = []
    monkeypatch.setattr(backend, "close", lambda: closed.append(backend))
    board = SimpleNamespace(name="board", load=lambda: lambda target, options: backend)
    monkeypatch.setitem(backends(), "board", board)
    with pytest.raises(MismatchError, match="driven by CoarseDevice, not AxdimmDevice"):
        nearstep.open("board:/dev/card0", CoarseDevice)
    assert closed == [backend]
    assert type(nearstep.open("board:/dev/card0", AxdimmDevice)) is AxdimmDevice


@pytest.mark.parametrize("url", [None, 5, b"golden:axdimm"])
def test_a_name_that_is_no_text_is_refused(url):
    with pytest.raises(UrlError, match="must be text"):
        nearstep.open(url)


@pytest.mark.parametrize("backend", ["golden", "sim"])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("lane=4", "no such option; valid: lanes, functional_units"),
        ("lanes=three", "must be a whole number"),
        ("lanes=3", "lanes must be one of"),
        ("lanes=4&functional_units=3", "functional_units must divide"),
        ("block_bytes=1000", "block_bytes must be a power of two"),
        ("memory_bytes=100", "multiple of 64"),
        ("memory_bytes=64GiB", "multiple of 64 up to"),
        ("order=newest", "no such choice; valid: default, paper"),
    ],
)
def test_a_wrong_option_says_what_is_valid(backend, option, message):
    with pytest.raises(OptionError, match=message):
        nearstep.open(f"{backend}:axdimm?{option}")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("memory=ddr9", "valid: ideal, halfduplex"),
        ("fu=fast", "valid: rtl, native"),
        ("stall=1.5", r"stall must lie in \[0, 0.95\]"),
        ("stall=often", "must be a number"),
        ("latency=0", "latency must lie in"),
        ("engine=cpp", "no such option"),
    ],
)
def test_options_of_the_simulation_are_checked(option, message):
    with pytest.raises(OptionError, match=message):
        nearstep.open(f"sim:axdimm?{option}")


@pytest.mark.parametrize(
    ("url", "option", "value", "reason"),
    [
        ("smartssd?chunk_bytes=1000", "chunk_bytes", "1000", "must be a power of two from 512"),
        ("smartssd?memory_bytes=4096", "memory_bytes", "4096", "must hold 2 chunks .*, 131072,"),
        ("smartssd?memory_bytes=65536&lanes=4", "memory_bytes", "65536", "must hold 2 chunks"),
        ("smartssd?memory_bytes=1000000", "memory_bytes", "1000000", "must be a power of two"),
        ("smartssd?lanes=4&chunk_bytes=1", "chunk_bytes", "1", "must be a power of two from 128"),
        ("smartssd?subgroup_elements=5", "subgroup_elements", "5", "must be a multiple of a chunk"),
        ("axdimm?block_bytes=1000&lanes=4", "block_bytes", "1000", "must be a power of two"),
        ("axdimm?channels=3", "channels", "3", "must be one of"),
        ("axdimm?channels=2&lanes=4", "lanes", "4", "must be 16"),
    ],
)
def test_the_option_at_fault_is_named_as_the_user_knows_it(url, option, value, reason):
    with pytest.raises(
        OptionError, match=rf"option {option}='{value}': {option} {reason}"
    ) as caught:
        nearstep.open(f"golden:{url}")
    assert (caught.value.option, caught.value.value) == (option, value)


def test_options_that_do_not_go_together_are_all_named():
    given = "memory_bytes=1MiB&chunk_bytes=256KiB"
    with pytest.raises(OptionError, match=r"option memory_bytes='1MiB': memory_bytes must hold"):
        nearstep.open(f"golden:smartssd?{given}")
    with pytest.raises(OptionError, match=r"option combination='lanes=1&scan=no': compression nee"):
        nearstep.open("golden:smartssd?lanes=1&scan=no")


def test_options_of_another_backend_are_unknown():
    with pytest.raises(OptionError, match="no such option"):
        nearstep.open("golden:axdimm?memory=ideal")


@dataclass(frozen=True, kw_only=True)
class Every:
    """A field of every type that options can have."""

    number: Annotated[int, Option(meaning="a number")] = 0
    ratio: Annotated[float, Option(meaning="a ratio")] = 0.0
    flag: Annotated[bool, Option(meaning="a flag")] = False
    name: Annotated[str, Option(meaning="a name")] = ""
    maybe: Annotated[int | None, Option(meaning="a number, or none")] = None
    choice: Annotated[Literal["a", "b"], Option(meaning="a choice")] = "a"


def test_every_type_of_option_is_parsed():
    url = "x:y?number=0x1_0&ratio=1e-3&flag=yes&name=some/path&maybe=2KiB&choice=b"
    parsed = parse_options(Every, "x:y", DeviceUrl.parse(url).options)
    assert parsed == Every(
        number=16, ratio=1e-3, flag=True, name="some/path", maybe=2048, choice="b"
    )
    with pytest.raises(OptionError, match="must be a boolean"):
        parse_options(Every, "x:y", {"flag": "perhaps"})


def test_a_device_with_another_register_map_is_refused():
    from nearstep.device import drive

    backend = golden.open_device("axdimm", {"memory_bytes": "64KiB", "engine": "numpy"})
    honest = backend.read_register
    backend.read_register = lambda address: honest(address) ^ (address == 12)
    with pytest.raises(MismatchError, match="map_hash must be"):
        drive(backend, "golden:axdimm")


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "odd"},
        {"base": 4, "limit": 4},
        {"nth": -1},
        {"times": 0},
        {"delay": -1},
        {"write": "no"},
        {"host": 1},
        {"nth": True},
        {"times": 1.5},
    ],
    ids=lambda each: " ".join(map(str, next(iter(each.items())))),
)
def test_a_wrong_injection_is_refused(wrong):
    with pytest.raises(ArgumentError):
        Injection(**{"kind": "slverr", "write": True, **wrong})
