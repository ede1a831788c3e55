// Copies a host's command slots to the DFI pins of a Verilated model; Verilator writes _ as ___05F.
#pragma once

#include <cstdint>
#include <cstring>

#include "models/dram/dfi_pins.hpp"
#include "models/dram/host.hpp"

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
