"""The machines that come with the package, and what can be wrong with a description."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from nearstep_spec.platform.dump import dump
from nearstep_spec.platform.load import PARTS, expand, load, parse, shipped
from nearstep_spec.platform.machine import Figure, Platform, PlatformError

ROOT = Path(__file__).resolve().parents[3]
MACHINES = ROOT / "hw" / "nearstep_spec" / "platform" / "machines"

GOOD = """\
name = "good"
title = "A machine"
switches = ["root"]

[sources]
sheet = "a datasheet"

[processors.cpu]
title = "a CPU"
memory_bytes = { value = 1e9, origin = "datasheet", source = "sheet" }
memory_bytes_per_s = { value = 1e9, origin = "measured", source = "by hand" }
[processors.cpu.flops]
fp32 = { value = 1e12, origin = "datasheet", source = "sheet" }

[drives."ssd{0..1}"]
title = "a drive"
capacity_bytes = { value = 1e12, origin = "datasheet", source = "sheet" }
read_bytes_per_s = { value = 3e9, origin = "datasheet", source = "sheet" }
read_latency_s = { value = 0, origin = "datasheet", source = "sheet" }

[links.bus]
ends = ["cpu", "root"]
bytes_per_s = { value = 2e9, origin = "datasheet", source = "sheet" }

[links."lane{0..1}"]
ends = ["root", "ssd{0..1}"]
bytes_per_s = { value = 1e9, origin = "datasheet", source = "sheet" }
back_bytes_per_s = { value = 5e8, origin = "datasheet", source = "sheet" }
"""


def figures(platform: Platform) -> list[Figure]:
    found: list[Figure] = []
    for table in PARTS:
        for part in getattr(platform, table).values():
            values = [getattr(part, each.name) for each in fields(part)]
            found += [value for value in values if isinstance(value, Figure)]
            found += getattr(part, "flops", {}).values()
    return found


def test_the_machines_of_all_four_papers_come_with_the_package() -> None:
    names = shipped()
    assert names == tuple(sorted(names))
    assert {name.partition("-")[0] for name in names} == {"axdimm", "smart", "coarse", "memferry"}
    assert len(names) == 7
    checks = 0
    for name in names:
        platform = load(name)
        assert platform.name == name
        for figure in figures(platform):
            assert figure.origin in ("paper", "datasheet"), (name, figure)
            assert len(figure.source) > 10
            checks += 1
    assert checks > 150, checks


@pytest.mark.parametrize("name", shipped())
def test_every_source_is_used(name: str) -> None:
    text = (MACHINES / f"{name}.toml").read_text()
    sources = tomllib.loads(text)["sources"]
    assert sources
    for key in sources:
        assert f'source = "{key}"' in text, key


def test_the_machines_are_part_of_the_wheel() -> None:
    """Hatchling takes all files of a package that git does not ignore."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "hw/nearstep_spec" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert "toml" not in (ROOT / ".gitignore").read_text()
    assert len(list(MACHINES.glob("*.toml"))) == len(shipped())


def test_rates_of_pcie_are_those_of_its_lanes() -> None:
    """In a source that has them: transfers a second of a lane, lanes, and 128/130 coding."""
    checks = 0
    for name in shipped():
        for figure in figures(load(name)):
            found = re.search(r"(\d+) GT/s x (\d+) lanes x 128/130", figure.source)
            if found:
                giga, lanes = map(int, found.groups())
                assert float(figure) == round(giga * 1e9 * lanes * 128 / 130 / 8), (name, figure)
                checks += 1
    assert checks > 50, checks


def test_figures_of_the_axdimm_agree_with_each_other() -> None:
    """Table 5: what a memory could do at 28 bytes a parameter, in millions, and the efficiency."""
    platform = load("axdimm")
    cpu, dimm = platform.processors["cpu"], platform.dimms["axdimm"]
    assert cpu.memory_bytes_per_s is not None
    assert cpu.adam_params_per_s is not None
    host = float(cpu.memory_bytes_per_s) / 28
    channels = float(dimm.channels) * float(dimm.channel_bytes_per_s) / 28
    assert (round(host / 1e6, 2), round(channels / 1e6, 2)) == (228.57, 914.29)
    assert round(100 * float(cpu.adam_params_per_s) / host, 1) == 61.4
    assert round(100 * float(dimm.adam_params_per_s) / channels, 1) == 86.3


@pytest.mark.parametrize("name", shipped())
def test_a_description_is_read_back_as_it_was_written(name: str) -> None:
    platform = load(name)
    assert parse(dump(platform), "dumped") == platform


def test_text_of_any_kind_is_read_back() -> None:
    platform = parse(GOOD.replace("A machine", 'A \\"machine\\" \\\\ \\u007f \\t é'), "good")
    assert platform.title == 'A "machine" \\ \x7f \t é'
    assert parse(dump(platform), "dumped") == platform


@pytest.mark.parametrize(
    ("name", "start", "stop", "lanes"),
    [
        ("axdimm", "axdimm.1", "gpu", ["axdimm.1", "ddr", "pcie cpu>gpu", "gpu memory"]),
        ("axdimm", "gpu", "ssd1", ["gpu memory", "pcie gpu>cpu", "nvme1 cpu>ssd1", "ssd1 write"]),
        ("axdimm", "cpu", "axdimm.0", ["cpu memory", "ddr", "axdimm.0"]),
        (
            "smart-infinity",
            "ssd3",
            "fpga3",
            ["ssd3", "card-ssd3 ssd3>switch3", "card-fpga3 switch3>fpga3"],
        ),
        (
            "smart-infinity",
            "ssd9",
            "cpu",
            [
                "ssd9",
                "card-ssd9 ssd9>switch9",
                "card9 switch9>falcon",
                "uplink falcon>cpu",
                "cpu memory",
            ],
        ),
        ("coarse-p3", "gpu2", "gpu3", ["gpu2 memory", "local1 gpu2>gpu3", "gpu3 memory"]),
    ],
)
def test_a_route_goes_over_the_fewest_links(
    name: str, start: str, stop: str, lanes: list[str]
) -> None:
    assert [hop.lane for hop in load(name).route(start, stop)] == lanes


def test_rates_of_the_way_back_may_be_others() -> None:
    platform = parse(GOOD, "good")
    there, back = platform.route("root", "ssd1"), platform.route("ssd1", "root")
    assert [hop.bytes_per_s for hop in there] == [1e9]
    assert [hop.bytes_per_s for hop in back] == [3e9, 5e8]
    assert [hop.direction for hop in back] == [0, 1]


@pytest.mark.parametrize("ends", [("axdimm", "gpu"), ("axdimm.2", "gpu"), ("gpu", "nothing")])
def test_a_route_to_what_is_not_there_is_refused(ends: tuple[str, str]) -> None:
    with pytest.raises(PlatformError, match=r"there is no part .*; there are cpu, gpu, axdimm.0"):
        load("axdimm").route(*ends)


def test_a_route_has_two_ends() -> None:
    with pytest.raises(PlatformError, match="at no two ends"):
        load("axdimm").route("gpu", "gpu")


def test_a_name_with_a_range_stands_for_many() -> None:
    assert expand("ssd{0..2}") == ["ssd0", "ssd1", "ssd2"]
    assert expand("cpu") == ["cpu"]
    assert set(parse(GOOD, "good").drives) == {"ssd0", "ssd1"}


RATE = '{ value = 2e9, origin = "datasheet", source = "sheet" }'


def line_of(text: str, part: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.parametrize(
    ("old", "new", "where", "message"),
    [
        ('name = "good"\n', "", None, "name: is missing"),
        ('title = "a CPU"', "", "[processors.cpu]", "processors.cpu.title: is missing"),
        ("bytes_per_s = { value = 2e9", "rate = { value = 2e9", "rate =", "there is no such entry"),
        ("value = 2e9", "value = -2e9", "-2e9", "must be a number above 0, not -2000000000.0"),
        ("s = { value = 2e9", "s = { value = 0", "bytes_per_s = { value = 0", "above 0, not 0"),
        ("value = 2e9", "value = inf", "inf", "must be a number above 0, not inf"),
        ("value = 2e9", "value = true", "true", "must be a number above 0, not True"),
        ("value = 2e9", 'value = "2e9"', '"2e9"', "must be a number above 0, not '2e9'"),
        ("value = 0,", "value = -1,", "value = -1", "must be a number from 0, not -1"),
        ("value = 2e9, ", "", "bytes_per_s = { origin", "links.bus.bytes_per_s.value: is missing"),
        ("value = 2e9, ", "value = 2e9, unit = 1, ", "unit = 1", "unit: there is no such entry"),
        (RATE, "[2e9]", "[2e9]", "must be { value, origin, source }, not [2000000000.0]"),
        ('origin = "measured"', 'origin = "guess"', '"guess"', "must be one of paper, datasheet"),
        ('source = "by hand"', 'source = "shet"', '"shet"', "there is no source 'shet'"),
        ('source = "by hand"', 'source = ""', 'source = ""', "must be a text, not ''"),
        ('"cpu", "root"]', '"cpu", "rot"]', '"rot"]', "links.bus.ends: must be of cpu, root"),
        ('"cpu", "root"]', '"cpu"]', 'ends = ["cpu"]', "must be two names, not ['cpu']"),
        ('"cpu", "root"]', '"cpu", "cpu"]', '"cpu", "cpu"]', "must differ"),
        ('"ssd{0..1}"]\nb', '"ssd{0..2}"]\nb', "0..2", "must be one name or 2, as the link, not 3"),
        ('[drives."ssd{0..1}"]', '[drives."ssd{1..0}"]', "1..0", "must not end before it begins"),
        ('[drives."ssd{0..1}"]', '[drives."ssd{0..2}"]', "0..2", "ssd2 must be at a link"),
        ("[drives.", "[disks.", "[disks.", "disks: there is no such entry"),
        ('switches = ["root"]', 'switches = ["root", "cpu"]', "switches", "stands for two parts"),
        ('switches = ["root"]', 'switches = "root"', "switches", "must be a list of names"),
        ('ends = ["cpu', 'duplex = "none"\nends = ["cpu', '"none"', "must be one of full, half"),
        (
            'ends = ["root',
            'duplex = "half"\nends = ["root',
            "back_bytes",
            "both ways of half duplex have one rate",
        ),
        ("{0..1}", "{0..99999999999}", "99999999999", "must stand for 1024 at most"),
        ("value = 2e9", f"value = {10**400}", "0000000000", "must be a number above 0"),
        ("fp32 =", "fp33 =", "fp33", "must be one of fp32, tf32, fp16, bf16, not 'fp33'"),
        ("read_bytes_per_s = {", "# {", "read_latency_s", "needs read_bytes_per_s"),
        ('title = "A machine"', "title = 7", "title = 7", "title: must be a text, not 7"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    old: str, new: str, where: str | None, message: str
) -> None:
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    with pytest.raises(PlatformError) as caught:
        parse(text, "file.toml")
    assert message in str(caught.value)
    line = "" if where is None else f":{line_of(text, where)}"
    assert str(caught.value).startswith(f"file.toml{line}: "), caught.value


def test_parts_without_a_route_are_refused() -> None:
    text = GOOD + (
        '[processors.a]\ntitle = "a"\n[processors.b]\ntitle = "b"\n[links.far]\nends = ["a", "b"]\n'
        'bytes_per_s = { value = 1, origin = "paper", source = "sheet" }\n'
    )
    with pytest.raises(PlatformError, match=r"links: there must be a route from a to cpu"):
        parse(text, "file.toml")


@pytest.mark.parametrize("channels", [0, 1.5, 65, 10**400])
def test_channels_are_a_few(channels: float) -> None:
    text = (MACHINES / "axdimm.toml").read_text().replace("value = 2,", f"value = {channels},")
    with pytest.raises(PlatformError, match=r"file.toml:\d+: dimms.axdimm.channels: must be a"):
        parse(text, "file.toml")


VALUES = ("-1", "0", "true", '"x"', '""', "[]", "{}", "[[]]", "{ a = 1 }", "1979-05-27", "nan")


def test_no_line_that_is_gone_or_another_is_more_than_refused() -> None:
    """Whatever stands in a description, it is a machine or an error that names the file."""
    lines = GOOD.splitlines()
    texts = ["\n".join([*lines[:i], *lines[i + 1 :]]) for i in range(len(lines))]
    for i, line in enumerate(lines):
        key, equals, _ = line.partition(" = ")
        if equals:
            texts += ["\n".join([*lines[:i], f"{key} = {v}", *lines[i + 1 :]]) for v in VALUES]
    refused = []
    for text in texts:
        try:
            parse(text, "file.toml")
        except PlatformError as error:
            refused.append(str(error))
    assert all(error.startswith("file.toml") for error in refused)
    assert len(refused) > 150, len(refused)
    assert len(texts) - len(refused) > 10, len(texts)


def test_a_part_is_declared_once() -> None:
    text = f'{GOOD}[drives.ssd1]\ntitle = "b"\ncapacity_bytes = {RATE}\n'
    with pytest.raises(PlatformError, match=r"drives.ssd1: ssd1 is declared twice"):
        parse(text, "file.toml")


def test_what_is_not_toml_is_said_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text('name = "x"\ntitle = \n')
    with pytest.raises(PlatformError, match=rf"{re.escape(str(file))}: not TOML: .*line 2"):
        load(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PlatformError, match="cannot be read"):
        load(file)


def test_a_name_of_no_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEARSTEP_CACHE", str(tmp_path))
    with pytest.raises(PlatformError, match=r"there is no machine 'axdim': axdimm, .*, this, or"):
        load("axdim")
    with pytest.raises(PlatformError, match=r"not measured: run `nearstep platform this`"):
        load("this")
    (tmp_path / "platform").mkdir()
    (tmp_path / "platform" / "this.toml").write_text(GOOD)
    assert load("this").name == "good"
