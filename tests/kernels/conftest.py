"""Fixtures of the kernels' tests."""

import pytest

from jax_fa4 import emulator


@pytest.fixture(scope="module")
def software_gpu():
    try:
        return emulator.library()
    except (FileNotFoundError, OSError) as error:
        pytest.skip(f"the package's library is not built: {error}")
