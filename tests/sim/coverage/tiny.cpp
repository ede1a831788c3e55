#include "VTiny.h"

/// A model of its own for each call; counts are summed.
extern "C" void run(const int* values, int count) {
    VerilatedContext context;
    VTiny dut{&context};
    for (int cycle = 0; cycle <= count; ++cycle) {
        dut.rst = cycle == 0;
        dut.x = cycle == 0 ? 0 : values[cycle - 1];
        dut.clk = 0;
        dut.eval();
        dut.clk = 1;
        dut.eval();
    }
}
