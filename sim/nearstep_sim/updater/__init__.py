"""Update kernels, emulated: functional and Verilated."""
