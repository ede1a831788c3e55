"""Debian's packages of QEMU and of a guest, unpacked into the build cache.

apt runs with a root of its own, whose list of installed packages is empty: it resolves every
dependency, libc included, and installs nothing on this machine.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from nearstep_spec.cache import cache_dir, once
from nearstep_spec.errors import NearstepError

MIRROR = "http://deb.debian.org/debian"
RELEASE, BACKPORTS = "trixie", "trixie-backports"
KEYRINGS = "/usr/share/keyrings"
INSTALLED = ("qemu-system-x86", "nvme-cli", "fio", "virtiofsd")
"""Packages whose dependencies are fetched, too. QEMU has a client of vfio-user from 10.1 on."""

KERNEL = "linux-image-cloud-amd64"
"""Depends on the kernel's package. Its NVMe driver is built in: only VFIO needs modules."""

VFIO = ("irqbypass", "vfio", "vfio_iommu_type1", "vfio-pci-core", "vfio-pci")
"""Modules of the kernel, in the order in which they can be inserted."""

ALONE = ("busybox-static",)
QEMU = "qemu-system-x86_64"
VIRTIOFSD = "virtiofsd"
LOADER = "ld-linux-x86-64.so.2"
"""Of the packages' libc: this machine's may be older."""

LAYOUT = 5
"""Raised when the content of the folder changes."""


class PackagesError(NearstepError, RuntimeError):
    """Packages cannot be fetched or unpacked.

    Attributes
    ----------
    step : what was done.
    reason : why it failed: the last lines that the command printed.
    """

    def __init__(self, step: str, reason: str) -> None:
        self.step = step
        self.reason = reason
        super().__init__(f"cannot {step}: {reason}")


def unpacked() -> Path:
    """Return a folder of the cache with QEMU, its firmware (`share`), libraries of all programs
    (`lib`), the guest's kernel, its modules of VFIO (`modules`), busybox, nvme and fio; they are
    fetched if they are not there.

    Raises
    ------
    PackagesError : a tool, the network or a package is missing, or the processor is another one.
    CacheError
    """
    if platform.machine() != "x86_64":
        raise PackagesError("run QEMU's package for x86-64", f"this is {platform.machine()}")
    wanted = (MIRROR, RELEASE, BACKPORTS, *INSTALLED, KERNEL, *ALONE, str(LAYOUT))
    digest = hashlib.sha256(repr(wanted).encode()).hexdigest()[:24]
    return once(cache_dir() / "linux" / f"debian-{digest}", _fetch)


def _fetch(folder: Path) -> Path:
    apt, debs, root = folder / "apt", folder / "debs", folder / "root"
    state = (
        "etc/apt/apt.conf.d",
        "etc/apt/preferences.d",
        "var/lib/dpkg",
        "var/lib/apt/lists/partial",
        "var/cache/apt/archives/partial",
    )
    for each in (*(apt / name for name in state), debs, root):
        each.mkdir(parents=True)
    (apt / "var/lib/dpkg/status").touch()
    suites = f"{RELEASE} {RELEASE}-updates {BACKPORTS}"
    signed = ",".join(str(each) for each in sorted(Path(KEYRINGS).glob("debian-archive-*")))
    (apt / "etc/apt/debian.sources").write_text(
        f"Types: deb\nURIs: {MIRROR}\nSuites: {suites}\nComponents: main\nSigned-By: {signed}\n"
    )
    (apt / "apt.conf").write_text(
        f'Dir "{apt}";\nDir::State "{apt}/var/lib/apt";\n'
        f'Dir::State::status "{apt}/var/lib/dpkg/status";\nDir::Cache "{apt}/var/cache/apt";\n'
        f'Dir::Etc::sourcelist "{apt}/etc/apt/debian.sources";\n'
        'Dir::Etc::sourceparts "/dev/null";\n'
        'APT::Sandbox::User "root";\nAPT::Install-Recommends "false";\n'
        'APT::Architecture "amd64";\nAcquire::Languages "none";\nAcquire::Retries "3";\n'
        'APT::Update::Error-Mode "any";\n'
        'Binary::apt::APT::Keep-Downloaded-Packages "true";\n'
    )
    environment = os.environ | {"APT_CONFIG": str(apt / "apt.conf"), "LC_ALL": "C"}

    def run(step: str, command: Sequence[str], cwd: Path = debs) -> str:
        try:
            done = subprocess.run(
                command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise PackagesError(step, f"{command[0]} is not installed") from None
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-3:]
            raise PackagesError(step, "; ".join(last))
        return done.stdout

    run("read Debian's lists of packages", ["apt-get", "update", "-q"])
    depends = run("find the kernel", ["apt-cache", "depends", KERNEL])
    kernels = [line.split()[-1] for line in depends.splitlines() if "Depends: linux-image-" in line]
    if not kernels:
        raise PackagesError("find the kernel", f"{KERNEL} depends on none")
    get = ["apt-get", "-q", "-y"]
    run(
        "fetch QEMU, nvme-cli and fio",
        [*get, "install", "--download-only", "-t", BACKPORTS, *INSTALLED],
    )
    run("fetch the kernel and busybox", [*get, "download", kernels[0], *ALONE])
    found = sorted([*debs.glob("*.deb"), *(apt / "var/cache/apt/archives").glob("*.deb")])
    for each in found:
        run(f"unpack {each.name}", ["dpkg-deb", "-x", str(each), str(root)])
    made = folder / "files"
    (made / "lib").mkdir(parents=True)
    (made / "packages.txt").write_text("".join(f"{each.name}\n" for each in found))
    shutil.copytree(root / "usr/share/qemu", made / "share", ignore_dangling_symlinks=True)
    shutil.copy(root / "usr/share/seabios/bios-256k.bin", made / "share")
    shutil.copy(next((root / "boot").glob("vmlinuz-*")), made / "vmlinuz")
    (made / "modules").mkdir()
    for name in VFIO:
        packed = next((root / "usr/lib/modules").rglob(f"{name}.ko.xz"), None)
        if packed is None:
            raise PackagesError("unpack the kernel's modules", f"it has no {name}.ko.xz")
        (made / "modules" / f"{name}.ko").write_bytes(lzma.decompress(packed.read_bytes()))
    shutil.copy(root / "usr/bin/busybox", made)
    libraries = root / "usr/lib/x86_64-linux-gnu"
    loader = str(root / "usr/lib64" / LOADER)
    folders = f"{libraries}:{libraries / 'ceph'}"
    for place in (f"bin/{QEMU}", "sbin/nvme", "bin/fio", f"libexec/{VIRTIOFSD}"):
        program = root / "usr" / place
        shutil.copy(program, made)
        list_them = [loader, "--library-path", folders, "--list", str(program)]
        listed = run(f"list the libraries of {program.name}", list_them)
        paths = dict(re.findall(r"^\s*(\S+) => (\S+)", listed, re.MULTILINE))
        for name, path in paths.items():
            shutil.copy(path, made / "lib" / Path(name).name)
        names = sorted(Path(name).name for name in paths)
        (made / f"{program.name}.libraries").write_text("\n".join(names))
    shutil.copy(loader, made / "lib" / LOADER)
    return made
