// Functional units as Verilated objects: one C++ class, an object for each unit.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <string>

#include "updater/units.hpp"

namespace nearstep {

// `Ports`, generated, accesses the ports: drive, configure and collect for one unit.
template <class Shell, class Unit, class Ports, unsigned kUnits>
class RtlUnits final : public Units<Shell> {
  public:
    explicit RtlUnits(VerilatedContext* context) {
        for (unsigned k = 0; k < kUnits; ++k) {
            units_[k] = std::make_unique<Unit>(context, ("unit" + std::to_string(k)).c_str());
            units_[k]->eval();  // a trace begins with the shell's reset, before that of the units
        }
    }

    ~RtlUnits() override {
        for (auto& unit : units_) unit->final();
    }

    void reset(const Shell& shell) override {
        for (auto& unit : units_) {
            unit->i_en = 1;
            unit->i_valid = 0;
            unit->rst = 1;
            for (int i = 0; i < 2; ++i) tick(*unit);
            unit->rst = 0;
        }
        configure(shell);
    }

    void configure(const Shell& shell) override {
        for (auto& unit : units_) Ports::configure(shell, *unit);
    }

    void clock(const Shell& shell) override {
        Ports::drive(shell, units_);
        for (auto& unit : units_) tick(*unit);
    }

    void show(Shell& shell) const override {
        shell.fu___05Fo_valid = units_[0]->o_valid;
        if (units_[0]->o_valid) Ports::collect(shell, units_);
    }

#if VM_TRACE
    void trace(VerilatedVcdC* trace) override {
        for (auto& unit : units_) unit->trace(trace, 99);
    }
#endif

  private:
    static void tick(Unit& unit) {
        unit.clk = 1;
        unit.eval();
        unit.clk = 0;
        unit.eval();
    }

    std::array<std::unique_ptr<Unit>, kUnits> units_;
};

}  // namespace nearstep
