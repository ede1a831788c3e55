"""The map that tests of the register mechanism use."""

import pytest

from nearstep_spec.csr.model import RegisterMap

from .sample import sample_map


@pytest.fixture
def every_kind() -> RegisterMap:
    return sample_map()
