// What the benches of a channel share: configuration, results, and the counters of the controller.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "port.hpp"

namespace nearstep {

// Order is the ABI of both.
struct ChannelConfig {
    Timing timing;
    Geometry geometry;
    Mapping mapping;
    PortConfig port;
    std::int32_t debt;  // refreshes due when the controller takes the channel
    std::int32_t padding;
    std::uint64_t base[4];  // byte addresses of p, g, m, v
    std::uint64_t count;    // elements of 4 bytes
    std::uint64_t seed;
};

struct ChannelResult {
    static constexpr int kSlots = 8, kCommands = 10;
    std::uint64_t cycles;             // from START to done
    std::uint64_t slots[kSlots];      // of the column, by use, from START to done
    std::uint64_t commands[kCommands];
    std::uint64_t checks;             // beats compared
    std::uint64_t debt;               // refreshes due at done
};

template <typename Dut>
void take_counters(const Dut& dut, const Ddr4Device& device, ChannelResult& result) {
    const std::uint64_t slots[] = {dut.o_read,       dut.o_write,      dut.o_empty, dut.o_row,
                                   dut.o_bank_group, dut.o_turnaround, dut.o_space, dut.o_refresh};
    static_assert(sizeof slots == sizeof result.slots);
    std::memcpy(result.slots, slots, sizeof slots);
    result.debt = dut.o_debt;
    for (int i = 0; i < ChannelResult::kCommands; ++i)
        result.commands[i] = device.count(static_cast<Command>(i));
}

template <typename Dut>
void tick(Dut& dut) {
    dut.clk = 1;
    dut.eval();
    dut.clk = 0;
    dut.eval();
}

inline int report(const std::string& error, char* message, std::size_t size) {
    std::strncpy(message, error.c_str(), size - 1);
    message[size - 1] = 0;
    return error.empty() ? 0 : 1;
}

}  // namespace nearstep
