"""README's examples have types that a checker accepts, as a user's program would be checked."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nearstep

ROOT = Path(__file__).resolve().parents[2]
MODEL = "model = torch.nn.Linear(256, 64)\n"


def programs() -> list[str]:
    """Each example with what it takes from the first one."""
    examples = re.findall(
        r"^```py(?:thon)?\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M
    )
    return [
        "import nearstep\nimport torch\n" + ("" if "model = " in each else MODEL) + each
        for each in examples
    ]


@pytest.mark.deep
def test_the_examples_pass_mypy(tmp_path: Path) -> None:
    assert programs()
    for number, text in enumerate(programs()):
        (tmp_path / f"example_{number}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *sorted(tmp_path.glob("*.py"))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_says_that_it_has_types_and_what_it_has() -> None:
    assert (Path(nearstep.__file__).parent / "py.typed").exists()
    assert {"optim", "offload", "open", "Device", "__version__"} <= set(dir(nearstep))
    assert re.fullmatch(r"\d+\.\d+\.\d+", nearstep.__version__)
    with pytest.raises(AttributeError):
        nearstep.nothing  # noqa: B018
