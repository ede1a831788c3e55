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

// Makes a context that of the thread. A model with public signals or hierarchical blocks finds its
// own there when it is made, first evaluated, and destroyed; another one may be there, even one that
// is gone, as the last that was made stays.
inline Context* in_thread(Context* context) {
    Verilated::threadContextp(context);
    return context;
}

}  // namespace nearstep
