// A C++ kernel of equal latency in place of the functional units; the same bits, many times faster.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "updater/units.hpp"

namespace nearstep {

// `Ports`, generated, accesses the ports: configure, load and compute into a slot, show a slot.
template <class Shell, class Ports, unsigned kLatency>
class NativeUnits final : public Units<Shell> {
  public:
    void reset(const Shell& shell) override {
        for (auto& slot : ring_) slot.valid = false;
        at_ = 0;
        configure(shell);
    }

    void configure(const Shell& shell) override { Ports::configure(shell, registers_); }

    void clock(const Shell& shell) override {
        auto& slot = ring_[at_];
        slot.valid = shell.fu___05Fi_valid;
        if (slot.valid) Ports::compute(shell, registers_, slot);
        at_ = at_ + 1 == kLatency ? 0 : at_ + 1;
    }

    void show(Shell& shell) const override {
        const auto& slot = ring_[at_];
        shell.fu___05Fo_valid = slot.valid;
        if (slot.valid) Ports::show(shell, slot);
    }

  private:
    std::array<typename Ports::Slot, kLatency> ring_{};
    typename Ports::Registers registers_{};
    unsigned at_ = 0;
};

}  // namespace nearstep
