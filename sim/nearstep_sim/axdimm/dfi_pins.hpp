// From the ports of a Verilated model to the DDR4 models and back; Verilator writes _ as ___05F.
#pragma once

#include <cstdint>
#include <cstring>

#include "models/dram/host.hpp"
#include "models/dram/port.hpp"

namespace nearstep {

inline void give(Ddr4Port& port, int phase, bool cs_n, bool act_n, std::uint32_t address, int bg,
                 int ba) {
    if (cs_n) return;
    Pins pins;
    pins.act_n = act_n;
    pins.address = address;
    pins.bg = static_cast<std::uint8_t>(bg);
    pins.ba = static_cast<std::uint8_t>(ba);
    port.command(phase, pins);
}

}  // namespace nearstep

#define NEARSTEP_PIN(dut, port, phase, pin) dut.port##___05Fp##phase##___05F##pin

#define NEARSTEP_DFI_PHASE(dut, port, phase, rank)                                              \
    nearstep::give(rank, phase, NEARSTEP_PIN(dut, port, phase, cs_n),                           \
                   NEARSTEP_PIN(dut, port, phase, act_n),                                       \
                   NEARSTEP_PIN(dut, port, phase, address), NEARSTEP_PIN(dut, port, phase, bg), \
                   NEARSTEP_PIN(dut, port, phase, ba))

// rddata of this cycle, before the model is evaluated.
#define NEARSTEP_DFI_READ(dut, port, rank)                                               \
    do {                                                                                 \
        const std::uint8_t* data = (rank).read_data();                                   \
        dut.port##___05Frddata_valid = data != nullptr;                                  \
        if (data) std::memcpy(&dut.port##___05Frddata, data, nearstep::kBeatBytes);      \
    } while (0)

// Commands and wrdata of this cycle, after the model was evaluated.
#define NEARSTEP_DFI_CYCLE(dut, port, rank)                                              \
    do {                                                                                 \
        NEARSTEP_DFI_PHASE(dut, port, 0, rank);                                          \
        NEARSTEP_DFI_PHASE(dut, port, 1, rank);                                          \
        NEARSTEP_DFI_PHASE(dut, port, 2, rank);                                          \
        NEARSTEP_DFI_PHASE(dut, port, 3, rank);                                          \
        (rank).end_cycle(dut.port##___05Fwrdata_en,                                      \
                         reinterpret_cast<const std::uint8_t*>(&dut.port##___05Fwrdata), \
                         dut.port##___05Fwrdata_mask);                                   \
    } while (0)

// One slot of the host; bit r of cs_n is low if the command is for rank r.
#define NEARSTEP_HOST_SLOT(dut, slot, out)                                                        \
    do {                                                                                          \
        const nearstep::HostSlot& each = (out).slots[slot];                                       \
        NEARSTEP_PIN(dut, host, slot, cs_n) = each.rank < 0 ? ~0 : ~(1 << each.rank);             \
        NEARSTEP_PIN(dut, host, slot, act_n) = each.pins.act_n;                                   \
        NEARSTEP_PIN(dut, host, slot, address) = each.pins.address;                               \
        NEARSTEP_PIN(dut, host, slot, bg) = each.pins.bg;                                         \
        NEARSTEP_PIN(dut, host, slot, ba) = each.pins.ba;                                         \
    } while (0)

#define NEARSTEP_HOST_DRIVE(dut, out, select_mask)                                   \
    do {                                                                             \
        NEARSTEP_HOST_SLOT(dut, 0, out);                                             \
        NEARSTEP_HOST_SLOT(dut, 1, out);                                             \
        NEARSTEP_PIN(dut, host, 0, cs_n) &= (select_mask);                           \
        NEARSTEP_PIN(dut, host, 1, cs_n) &= (select_mask);                           \
        dut.host___05Fwrdata_en = (out).wrdata_en;                                   \
        dut.host___05Fwrdata_mask = (out).wrdata_mask;                               \
        std::memcpy(&dut.host___05Fwrdata, (out).wrdata, sizeof (out).wrdata);       \
    } while (0)
