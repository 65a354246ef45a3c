"""What a small kernel's test consists of."""

import dataclasses

import numpy as np
from emu import tensor_maps


@dataclasses.dataclass(frozen=True)
class Map:
    """A tensor map over a buffer; see tensor_maps.encode."""

    buffer: str
    dtype: str
    sizes: tuple
    strides: tuple
    box: tuple
    swizzle: str = "none"
    fill_nan: bool = False

    extra_bits: int = 0  # of word 2

    def encode(self, address: int) -> np.ndarray:
        words = tensor_maps.encode(address, self.dtype, self.sizes, self.strides, self.box, self.swizzle, self.fill_nan)
        words[2] |= np.uint32(self.extra_bits)
        return words


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    text: str
    buffers: dict          # name -> initial contents; in device memory, read back after the run
    parameters: tuple      # in order: name of a buffer, a numpy scalar, bytes by value (uint8 array), a Map
    expected: dict         # name -> contents after the run, or a function of them that asserts
    kernel: str = "main"
    grid: int = 1
    block: int = 32
    cluster: int = 1
    shared: int = 0        # dynamic bytes
    target: str = "sm_90a"
    tolerance: np.ndarray | None = None  # of float32 results: how far two right implementations may be apart

    def check(self, outputs: dict) -> None:
        for name, value in self.expected.items():
            if callable(value):
                value(outputs[name])
            else:
                np.testing.assert_array_equal(outputs[name], value, err_msg=f"{self.name}: {name}")
