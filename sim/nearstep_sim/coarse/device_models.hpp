// The Verilated devices of a pool: an object of one model for each, or, with COARSE_RING, one object
// of a whole ring, whose pins are told apart by the device that they belong to.
#pragma once

#include <memory>
#include <string>
#include <vector>

#if COARSE_RING
#include "ring.hpp"  // generated
#else
#include "coarse/node_units.hpp"
#endif
#include "verilate/context.hpp"

namespace nearstep {

constexpr unsigned kResetCycles = 6;

#if COARSE_RING

// Units are inside.
struct NodeUnits {
    NodeUnits(bool, VerilatedContext*) {}
    void rest(Vdevice&) {}
    void reset(const Vdevice&) {}
    void configure(const Vdevice&) {}
    void show(Vdevice&) const {}
    void clock(const Vdevice&) {}
};

class DeviceModels {
  public:
    static constexpr bool kJoined = true;  // all devices settle, and are clocked, at once

    DeviceModels(unsigned count, std::vector<Context>& contexts)
        : context_(in_thread(&contexts[0])), ring_(context_, "ring") {
        for (unsigned i = 0; i < count; ++i)
            pins_.push_back(std::make_unique<Vdevice>(pins_of(ring_, i)));
    }
    ~DeviceModels() { in_thread(context_); }

    Vdevice& at(unsigned number) { return *pins_[number]; }

    // The links of the ring are the caller's, or in the model.
    void links_outside(bool outside) { ring_.i_outside = outside; }

    // A cycle later than at a device of a pool, in which a register delays the reset.
    void reset() {
        for (unsigned i = 0; i < kResetCycles; ++i) {
            ring_.rst = i >= 1 && i < kResetCycles - 1;
            settle();
            clock();
        }
    }

    void settle() { edge(0); }
    void clock() { edge(1); }
    void finish() { ring_.final(); }

    static void settle(Vdevice&) {}
    static void clock(Vdevice&) {}

  private:
    void edge(bool clock) {
        ring_.clk = clock;
        ring_.eval();
    }

    Context* context_;
    Vring ring_;
    std::vector<std::unique_ptr<Vdevice>> pins_;
};

#else

class DeviceModels {
  public:
    static constexpr bool kJoined = false;

    DeviceModels(unsigned count, std::vector<Context>& contexts) {
        for (unsigned i = 0; i < count; ++i)
            models_.push_back(std::make_unique<Vdevice>(
                &contexts[VM_TRACE ? 0 : i], ("device" + std::to_string(i)).c_str()));
    }

    Vdevice& at(unsigned number) { return *models_[number]; }
    void links_outside(bool) {}

    void reset() {
        for (auto& model : models_) {
            for (unsigned i = 0; i < kResetCycles; ++i) {
                model->rst = i < kResetCycles - 2;
                settle(*model);
                clock(*model);
            }
        }
    }

    void settle() {}
    void clock() {}
    void finish() {
        for (auto& model : models_) model->final();
    }

    static void settle(Vdevice& model) { edge(model, 0); }
    static void clock(Vdevice& model) { edge(model, 1); }

  private:
    static void edge(Vdevice& model, bool clock) {
        model.clk = clock;
        model.eval();
    }

    std::vector<std::unique_ptr<Vdevice>> models_;
};

#endif

}  // namespace nearstep
