// The RTL of a DIMM as one Verilated object: the module as it is shipped, with all functional
// units; or one channel as it is shipped (NEARSTEP_CHANNEL_ALONE).
//
// NEARSTEP_CHANNELS: number of channels; 1, 2 or 4.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "axdimm/dimm_memory.hpp"
#include "Vmodule.h"
#include "Vmodule___024root.h"
#if VM_TRACE
#include "verilated_vcd_c.h"
#endif

namespace nearstep {

#if NEARSTEP_CHANNELS == 1
#define NEARSTEP_EACH_CHANNEL(DO) DO(0)
#elif NEARSTEP_CHANNELS == 2
#define NEARSTEP_EACH_CHANNEL(DO) DO(0) DO(1)
#else
#define NEARSTEP_EACH_CHANNEL(DO) DO(0) DO(1) DO(2) DO(3)
#endif

#if NEARSTEP_CHANNEL_ALONE
#define NEARSTEP_DFI(c) dfi
#define NEARSTEP_IN_CHANNEL(c, name) axdimm_channel__DOT__##name
#else
#define NEARSTEP_DFI(c) dfi##c
#define NEARSTEP_IN_CHANNEL(c, name) axdimm_module__DOT__channel##c##__DOT__##name
#endif
#define NEARSTEP_PINS_OF(dut, port) NEARSTEP_DFI_PINS(dut, port)  // of a port that is a macro

class Whole {
  public:
    // One part: the object is simulated as a whole.
    static unsigned count(const DimmOptions&) { return 1; }

    Whole(const DimmOptions& options, Memories& memories, std::vector<Context>& contexts)
        : memories_(memories), nobody_((1u << options.host.ranks) - 1), context_(&contexts[0]) {
        top_ = std::make_unique<Vmodule>(in_thread(context_), "module");
        Vmodule& top = *top_;
        Vmodule___024root& inside = *top.rootp;
#define NEARSTEP_CONNECT(c)                                                                      \
    memories[c]->connect(NEARSTEP_PINS_OF(top, NEARSTEP_DFI(c)));                                \
    acceleration_[c] = &inside.NEARSTEP_IN_CHANNEL(c, memory__DOT__o_acceleration);              \
    kernel_reset_[c] = &inside.NEARSTEP_IN_CHANNEL(c, o_kernel_reset);
        NEARSTEP_EACH_CHANNEL(NEARSTEP_CONNECT)
#undef NEARSTEP_CONNECT
        top.host___05Fp0___05Fcs_n = top.host___05Fp1___05Fcs_n = nobody_;
        top.host___05Fwrdata_en = 0;
        top.eval();
    }
    ~Whole() {
        in_thread(context_);
        top_->final();
    }

    // While the module is reset nothing reaches the ranks.
    void reset_cycle(bool last) {
        Vmodule& top = *top_;
        top.rst = 1;
        top.clk = 0;
        top.eval();
        top.clk = 1;
        top.eval();
        if (last) top.rst = 0;
    }

    // Read data of the cycle that begins.
    void sample(unsigned, ReadData& out) const {
        const Vmodule& top = *top_;
        out.valid = top.host___05Frddata_valid;
        if (out.valid) std::memcpy(out.data, &top.host___05Frddata, sizeof out.data);
    }

    void settle(unsigned, const HostCycle& host) {
        Vmodule& top = *top_;
        drive_slot(host.slots[0], top.host___05Fp0___05Fcs_n, top.host___05Fp0___05Fact_n,
                   top.host___05Fp0___05Faddress, top.host___05Fp0___05Fbg,
                   top.host___05Fp0___05Fba);
        drive_slot(host.slots[1], top.host___05Fp1___05Fcs_n, top.host___05Fp1___05Fact_n,
                   top.host___05Fp1___05Faddress, top.host___05Fp1___05Fbg,
                   top.host___05Fp1___05Fba);
        top.host___05Fwrdata_en = host.wrdata_en;
        if (host.wrdata_en) {
            top.host___05Fwrdata_mask = host.wrdata_mask;
            std::memcpy(&top.host___05Fwrdata, host.wrdata, sizeof host.wrdata);
        }
        for (auto& memory : memories_) memory->show();
        top.clk = 0;
        top.eval();
    }

    void clock(unsigned, std::uint64_t cycle) {
        std::array<bool, NEARSTEP_CHANNELS> reset;
        for (unsigned c = 0; c < NEARSTEP_CHANNELS; ++c) {
            memories_[c]->take(*acceleration_[c], cycle);
            reset[c] = *kernel_reset_[c];
        }
        top_->clk = 1;
        top_->eval();
        for (unsigned c = 0; c < NEARSTEP_CHANNELS; ++c)
            if (reset[c]) memories_[c]->kernel_was_reset();
    }

    // The units in the model read the registers.
    void configure(unsigned) {}

#if VM_TRACE
    void trace(VerilatedVcdC* trace) { top_->trace(trace, 99); }
#endif

  private:
    template <class Cs, class Act, class Address, class Bg, class Ba>
    void drive_slot(const HostSlot& slot, Cs& cs_n, Act& act_n, Address& address, Bg& bg,
                    Ba& ba) const {
        cs_n = slot.rank < 0 ? nobody_ : nobody_ & ~(1u << slot.rank);
        if (slot.rank < 0) return;
        act_n = slot.pins.act_n;
        address = slot.pins.address;
        bg = slot.pins.bg;
        ba = slot.pins.ba;
    }

    Memories& memories_;
    unsigned nobody_;  // chip selects of no rank
    Context* context_;
    std::array<const CData*, NEARSTEP_CHANNELS> acceleration_, kernel_reset_;
    std::unique_ptr<Vmodule> top_;
};

}  // namespace nearstep
