// Interface between the kernel shell and the functional units.
#pragma once

#include "verilated.h"
#if VM_TRACE
#include "verilated_vcd_c.h"
#endif

namespace nearstep {

template <class Shell>
class Units {
  public:
    virtual ~Units() = default;

    // Drops all operations in flight.
    virtual void reset(const Shell& shell) = 0;
    // Copies the scalars and switches of the update rule, which change only between runs.
    virtual void configure(const Shell& shell) = 0;
    // A cycle in which the shell enables the units; results are shown in the next cycle.
    virtual void clock(const Shell& shell) = 0;
    // Drives the results into the shell.
    virtual void show(Shell& shell) const = 0;
#if VM_TRACE
    virtual void trace(VerilatedVcdC*) {}
#endif
};

}  // namespace nearstep
