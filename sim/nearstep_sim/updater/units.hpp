// The functional units, as the kernel shell sees them.
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

    // Nothing is in flight.
    virtual void reset(const Shell& shell) = 0;
    // Takes over the scalars and switches of the update rule; they change only between runs.
    virtual void configure(const Shell& shell) = 0;
    // A cycle in which the shell enables the units. It sees the results in its next cycle.
    virtual void clock(const Shell& shell) = 0;
    // Drives the results into the shell.
    virtual void show(Shell& shell) const = 0;
#if VM_TRACE
    virtual void trace(VerilatedVcdC*) {}
#endif
};

}  // namespace nearstep
