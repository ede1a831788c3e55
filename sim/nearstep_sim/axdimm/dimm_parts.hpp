// The RTL of a DIMM in parts: a Verilated object for each channel, and functional units outside it,
// joined as in `AxdimmModule`, which `dimm_whole.hpp` simulates as one object.
//
// `design.hpp`, generated, gives the constants of the configuration, and the copies between ports.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "axdimm/dimm_memory.hpp"
#include "design.hpp"
#include "updater/units.hpp"

namespace nearstep {

class Parts {
  public:
    // Number of parts that are simulated independently: one for each channel.
    static unsigned count(const DimmOptions& options) { return options.channels(); }

    // `contexts`: one for each part, or a single one.
    Parts(const DimmOptions& options, Memories& memories, std::vector<Context>& contexts)
        : memories_(memories), ranks_(static_cast<int>(options.ranks())) {
        for (unsigned c = 0; c < memories.size(); ++c) {
            VerilatedContext* context = &contexts[contexts.size() == 1 ? 0 : c];
            shells_.push_back(std::make_unique<design::Shell>(
                context, ("channel" + std::to_string(c)).c_str()));
            units_.push_back(design::make_units(options.native != 0, context));
            auto& shell = *shells_[c];
            memories[c]->connect(NEARSTEP_DFI_PINS(shell, dfi));
            shell.host___05Fp0___05Fcs_n = shell.host___05Fp1___05Fcs_n = nobody();
            shell.host___05Fwrdata_en = 0;
            shell.fu___05Fo_valid = 0;
        }
    }
    ~Parts() {
        for (auto& shell : shells_) shell->final();
    }

    // While the module is reset nothing reaches the ranks.
    void reset_cycle(bool last) {
        for (unsigned c = 0; c < shells_.size(); ++c) {
            auto& shell = *shells_[c];
            shell.rst = 1;
            shell.clk = 0;
            shell.eval();
            shell.clk = 1;
            shell.eval();
            if (last) {
                shell.rst = 0;
                units_[c]->reset(shell);
            }
        }
    }

    // Read data of the cycle that begins.
    void sample(unsigned part, ReadData& out) const {
        const auto& shell = *shells_[part];
        out.valid = shell.host___05Frddata_valid;
        if (out.valid) std::memcpy(out.data, &shell.host___05Frddata, sizeof out.data);
    }

    void settle(unsigned part, const HostCycle& host) {
        auto& shell = *shells_[part];
        drive_slot(part, host.slots[0], shell.host___05Fp0___05Fcs_n,
                   shell.host___05Fp0___05Fact_n, shell.host___05Fp0___05Faddress,
                   shell.host___05Fp0___05Fbg, shell.host___05Fp0___05Fba);
        drive_slot(part, host.slots[1], shell.host___05Fp1___05Fcs_n,
                   shell.host___05Fp1___05Fact_n, shell.host___05Fp1___05Faddress,
                   shell.host___05Fp1___05Fbg, shell.host___05Fp1___05Fba);
        shell.host___05Fwrdata_en = host.wrdata_en;
        if (host.wrdata_en) {
            shell.host___05Fwrdata_mask = host.wrdata_mask;
            std::memcpy(&shell.host___05Fwrdata, host.wrdata, sizeof host.wrdata);
        }
        memories_[part]->show();
        units_[part]->show(shell);
        shell.clk = 0;
        shell.eval();
    }

    void clock(unsigned part, std::uint64_t cycle) {
        auto& shell = *shells_[part];
        memories_[part]->take(shell.o_acceleration, cycle);
        const bool reset = shell.o_kernel_reset;
        if (shell.fu___05Fi_en) units_[part]->clock(shell);
        shell.clk = 1;
        shell.eval();
        if (reset) {
            units_[part]->reset(shell);
            memories_[part]->kernel_was_reset();
        }
    }

    // Passes the scalars of a channel to its units.
    void configure(unsigned channel) { units_[channel]->configure(*shells_[channel]); }

#if VM_TRACE
    void trace(VerilatedVcdC* trace) {
        for (unsigned c = 0; c < shells_.size(); ++c) {
            shells_[c]->trace(trace, 99);
            units_[c]->trace(trace);
        }
    }
#endif

  private:
    template <class Cs, class Act, class Address, class Bg, class Ba>
    void drive_slot(unsigned part, const HostSlot& slot, Cs& cs_n, Act& act_n, Address& address,
                    Bg& bg, Ba& ba) const {
        const int rank = slot.rank - static_cast<int>(part) * ranks_;
        const bool mine = slot.rank >= 0 && rank >= 0 && rank < ranks_;
        cs_n = nobody();
        if (!mine) return;
        cs_n = nobody() & ~(1u << rank);
        act_n = slot.pins.act_n;
        address = slot.pins.address;
        bg = slot.pins.bg;
        ba = slot.pins.ba;
    }

    unsigned nobody() const { return (1u << ranks_) - 1; }

    Memories& memories_;
    int ranks_;  // of a channel
    std::vector<std::unique_ptr<design::Shell>> shells_;
    std::vector<std::unique_ptr<Units<design::Shell>>> units_;
};

}  // namespace nearstep
