// The context of Verilated models that are evaluated in the thread of their caller alone.
#pragma once

#include "verilated.h"

namespace nearstep {

// Verilator's default context starts a thread pool, unused here, and joins it when the process
// ends: a child after fork(), which has no such threads, would wait for ever.
class Context : public VerilatedContext {
  public:
    Context() { threads(1); }
};

// Makes `context` the current one of the thread. A model with public signals or hierarchical blocks
// needs this when it is made, first evaluated, and destroyed: the current context is otherwise the
// last one that was made, which may have been destroyed.
inline Context* in_thread(Context* context) {
    Verilated::threadContextp(context);
    return context;
}

}  // namespace nearstep
