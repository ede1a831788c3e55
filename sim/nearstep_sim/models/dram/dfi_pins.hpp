// Joins the DFI pins of a Verilated controller to a Ddr4Channel. Pins have the names of DfiSignature.
#pragma once

#include <cstdint>
#include <cstring>

#include "models/dram/channel.hpp"

namespace nearstep {

// Read data of this cycle; before the first evaluation of the cycle.
template <typename Dut>
void show_read_data(Dut& dut, const Ddr4Channel& port) {
    const std::uint8_t* data = port.read_data();
    dut.dfi___05Frddata_valid = data != nullptr;
    if (data) std::memcpy(&dut.dfi___05Frddata, data, kBeatBytes);
}

// Commands and write data of this cycle; after the last evaluation of the cycle. False once a rule
// was violated.
template <typename Dut>
bool take_commands(const Dut& dut, Ddr4Channel& port) {
    const unsigned all = (1u << port.ranks()) - 1;
    const auto phase = [&port, all](unsigned number, unsigned cs_n, bool act_n,
                                    std::uint32_t address, unsigned bg, unsigned ba) {
        if (cs_n == all) return;
        Pins pins;
        pins.act_n = act_n;
        pins.address = address;
        pins.bg = static_cast<std::uint8_t>(bg);
        pins.ba = static_cast<std::uint8_t>(ba);
        port.command(number, ~cs_n & all, pins);
    };
#define NEARSTEP_PHASE(n)                                                                       \
    phase(n, dut.dfi___05Fp##n##___05Fcs_n, dut.dfi___05Fp##n##___05Fact_n,                     \
          dut.dfi___05Fp##n##___05Faddress, dut.dfi___05Fp##n##___05Fbg,                        \
          dut.dfi___05Fp##n##___05Fba)
    NEARSTEP_PHASE(0);
    NEARSTEP_PHASE(1);
    NEARSTEP_PHASE(2);
    NEARSTEP_PHASE(3);
#undef NEARSTEP_PHASE
    return port.end_cycle(dut.dfi___05Fwrdata_en,
                          reinterpret_cast<const std::uint8_t*>(&dut.dfi___05Fwrdata),
                          dut.dfi___05Fwrdata_mask);
}

}  // namespace nearstep
