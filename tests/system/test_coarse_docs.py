"""The code of docs/coarse.md runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coarse.md"


def test_the_code_of_the_page_prints_what_it_says() -> None:
    names: dict[str, object] = {}
    printed = []
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block, str(PAGE), "exec"), names)
        printed.append(out.getvalue())
    assert printed == [
        "True\n[True, True]\n44\n",
        "0\n",
        "True\n",
        "state.000001 True\n",
        "(0, 1) device 0 has tensor 0 in work and waits for device 1 (with tensor 1)\n[0, 1]\n",
        "True True\n",
        "[1.099 0.899 0.899] False\n",
        "41142 0 1\n2097152 32\n0.5497\n",
        "1 67644 0.36 0.36\n16 28568 0.86 0.86\n"
        "LinkUse(moving=24576, before=0, between=0, within=552, after=3440)\n"
        "LinkUse(moving=24576, before=2943, between=48, within=1001, after=0)\nTrue\n",
        "True\n1 1\ndevice 0 heard nothing from device 3 on link 0 "
        "(device 0: SILENT, device 1: PEER, device 2: PEER, device 3: PEER)\nTrue\n",
    ]
