// Joins the DFI pins of a Verilated controller to a Ddr4Channel. Pins have the names of DfiSignature;
// Verilator writes _ as ___05F.
#pragma once

#include <cstdint>
#include <cstring>

#include "models/dram/channel.hpp"

namespace nearstep {

inline void give(Ddr4Channel& channel, unsigned phase, unsigned cs_n, bool act_n,
                 std::uint32_t address, unsigned bg, unsigned ba) {
    const unsigned selected = ~cs_n & ((1u << channel.ranks()) - 1);
    if (!selected) return;
    Pins pins;
    pins.act_n = act_n;
    pins.address = address;
    pins.bg = static_cast<std::uint8_t>(bg);
    pins.ba = static_cast<std::uint8_t>(ba);
    channel.command(phase, selected, pins);
}

}  // namespace nearstep

#define NEARSTEP_PIN(dut, port, phase, pin) dut.port##___05Fp##phase##___05F##pin

#define NEARSTEP_DFI_PHASE(dut, port, phase, channel)                                           \
    nearstep::give(channel, phase, NEARSTEP_PIN(dut, port, phase, cs_n),                        \
                   NEARSTEP_PIN(dut, port, phase, act_n),                                       \
                   NEARSTEP_PIN(dut, port, phase, address), NEARSTEP_PIN(dut, port, phase, bg), \
                   NEARSTEP_PIN(dut, port, phase, ba))

// Read data of this cycle; before the first evaluation of the cycle.
#define NEARSTEP_DFI_READ(dut, port, channel)                                            \
    do {                                                                                 \
        const std::uint8_t* data = (channel).read_data();                                \
        dut.port##___05Frddata_valid = data != nullptr;                                  \
        if (data) std::memcpy(&dut.port##___05Frddata, data, nearstep::kBeatBytes);      \
    } while (0)

// Commands and write data of this cycle; after the last evaluation of the cycle. False once a rule
// was violated.
#define NEARSTEP_DFI_CYCLE(dut, port, channel)                                            \
    (NEARSTEP_DFI_PHASE(dut, port, 0, channel), NEARSTEP_DFI_PHASE(dut, port, 1, channel), \
     NEARSTEP_DFI_PHASE(dut, port, 2, channel), NEARSTEP_DFI_PHASE(dut, port, 3, channel), \
     (channel).end_cycle(dut.port##___05Fwrdata_en,                                       \
                         reinterpret_cast<const std::uint8_t*>(&dut.port##___05Fwrdata),  \
                         dut.port##___05Fwrdata_mask))
