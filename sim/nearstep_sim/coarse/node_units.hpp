// The functional units of a memory device, outside its model `Vdevice`, which has ports for units
// if the device has an update kernel. Only then is `design.hpp` generated.
#pragma once

#if COARSE_UPDATER
#include "design.hpp"

using Vdevice = nearstep::design::Shell;

namespace nearstep {

class NodeUnits {
  public:
    NodeUnits(bool native, VerilatedContext* context)
        : units_(design::make_units(native, context)) {}

    void rest(Vdevice& device) { device.fu___05Fo_valid = 0; }
    void reset(const Vdevice& device) { units_->reset(device); }
    void configure(const Vdevice& device) { units_->configure(device); }
    void show(Vdevice& device) const { units_->show(device); }
    void clock(const Vdevice& device) {
        if (device.fu___05Fi_en) units_->clock(device);
    }
#if VM_TRACE
    void trace(VerilatedVcdC* trace) { units_->trace(trace); }
#endif

  private:
    std::unique_ptr<Units<Vdevice>> units_;
};

}  // namespace nearstep
#else
#include "Vdevice.h"
#if VM_TRACE
#include "verilated_vcd_c.h"
#endif

namespace nearstep {

struct NodeUnits {
    NodeUnits(bool, VerilatedContext*) {}
    void rest(Vdevice&) {}
    void reset(const Vdevice&) {}
    void configure(const Vdevice&) {}
    void show(Vdevice&) const {}
    void clock(const Vdevice&) {}
#if VM_TRACE
    void trace(VerilatedVcdC*) {}
#endif
};

}  // namespace nearstep
#endif
