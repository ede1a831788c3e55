// Interface of an emulated memory: a clocked AXI4 subordinate.
#pragma once

#include <cstdint>

#include "models/axi/axi.hpp"
#include "verilate/fault.hpp"
#include "verilate/history.hpp"
#include "verilate/injection.hpp"
#include "models/random.hpp"
#include "models/store.hpp"

namespace nearstep {

struct MemoryCounters {
    std::uint64_t read_beats = 0, write_beats = 0, turnarounds = 0;
};

// A model computes its pins for a cycle from its state before the cycle: they do not depend on the
// pins that the manager drives in the same cycle.
class Memory {
  public:
    virtual ~Memory() = default;

    // Pins that this drives in the current cycle.
    virtual const SubordinatePins& pins() const = 0;
    // The clock edge that ends the current cycle, in which the manager drove `manager`.
    virtual void tick(const ManagerPins& manager) = 0;
    // Drops every outstanding access. The contents are kept.
    virtual void reset() = 0;

    Injections injections;
    History history;
    Fault fault;
    MemoryCounters counters;
};

}  // namespace nearstep
