"""Bytes that benchmarks hold a device against: each array once, whatever was moved."""

import importlib.util
from pathlib import Path

import pytest

from nearstep_spec.updater.config import UpdateKernelConfig

FILE = Path(__file__).resolve().parents[2] / "bench" / "needed.py"
COUNT = 1000
RULES = ("adam", "adam_amsgrad", "sgd", "sgd_momentum", "adagrad")


def needed():
    spec = importlib.util.spec_from_file_location("needed", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("rule", "read", "written"),
    [("adam", 4, 3), ("adam_amsgrad", 5, 4), ("sgd", 2, 1), ("sgd_momentum", 3, 2),
     ("adagrad", 3, 2)],
)  # fmt: skip
def test_an_update_needs_each_array_once(rule: str, read: int, written: int) -> None:
    config = UpdateKernelConfig(rules=RULES, compression=("fused",))
    assert needed().update_bytes(config, rule, COUNT) == 4 * COUNT * (read + written)
    # an index and a value for each pair, once, in place of whole gradients
    with_pairs = needed().update_bytes(config, rule, COUNT, pairs=10)
    assert with_pairs == 4 * COUNT * (read - 1 + written) + 8 * 10


def test_a_scan_needs_the_gradients() -> None:
    assert needed().scan_bytes(COUNT) == 4 * COUNT
