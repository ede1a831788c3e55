// The context of Verilated models that are evaluated in the thread of their caller alone.
#pragma once

#include "verilated.h"

namespace nearstep {

// Verilator's own starts a pool of threads, which nothing here uses, and which is waited for when a
// process ends: in a child after fork(), which has no threads, for ever.
class Context : public VerilatedContext {
  public:
    Context() { threads(1); }
};

}  // namespace nearstep
