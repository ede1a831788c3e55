// Configuration and results shared by the benches of a channel, and counters of the controller.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "models/dram/channel.hpp"

namespace nearstep {

// Order is the ABI of both.
struct ChannelConfig {
    Timing timing;
    Geometry geometry;
    Mapping mapping;
    PortConfig port;
    std::int32_t debt;  // i_debt: refreshes due when the controller takes the channel
    std::int32_t padding;
    std::uint64_t base[4];  // byte addresses of p, g, m, v
    std::uint64_t count;    // elements of 4 bytes
    std::uint64_t seed;
    const char* commands;  // a file for the DRAM commands, or null
    const char* commands_header;

    // False if it cannot be written.
    bool trace(Ddr4Channel& channel) const {
        if (commands == nullptr) return true;
        auto writer = std::make_shared<TraceWriter>(commands, commands_header);
        if (writer->good()) channel.trace_to(writer);
        return writer->good();
    }
};

struct ChannelResult {
    static constexpr int kSlots = 8, kKinds = kCommands + 1, kRanks = 2;
    std::uint64_t cycles;             // from START to done
    std::uint64_t start, drain;       // cycles before the first and after the last column command
    std::uint64_t slots[kSlots];      // column slots, by use, between these commands
    std::uint64_t commands[kKinds];
    std::uint64_t checks;             // beats compared
    std::uint64_t debt[kRanks];       // refreshes due at done, of each rank
};

// Counters of the column slots at the first and at the last column command since they were cleared.
class SlotSpan {
  public:
    template <typename Dut>
    void observe(const Dut& dut) {
        const std::uint64_t beats = dut.o_read + dut.o_write;
        if (beats == beats_) return;
        last_ = counters(dut);
        if (beats_ == 0) first_ = last_;
        beats_ = beats;
    }
    // At done: all three from the counters, so that their sum is what these have counted.
    template <typename Dut>
    void take(const Dut& dut, ChannelResult& result) {
        constexpr int kData = 2;  // read and write are the first two
        observe(dut);
        const Counters now = counters(dut);
        result.start = result.drain = 0;
        for (int i = 0; i < ChannelResult::kSlots; ++i) {
            result.drain += now[i] - last_[i];
            result.slots[i] = last_[i];
            if (i < kData) continue;
            result.start += first_[i];
            result.slots[i] -= first_[i];
        }
    }

  private:
    using Counters = std::array<std::uint64_t, ChannelResult::kSlots>;
    template <typename Dut>
    static Counters counters(const Dut& dut) {
        return {dut.o_read,       dut.o_write,      dut.o_empty, dut.o_row,
                dut.o_bank_group, dut.o_turnaround, dut.o_space, dut.o_refresh};
    }
    Counters first_{}, last_{};
    std::uint64_t beats_ = 0;
};

// A field of i_debt or o_debt: four bits for each rank.
inline unsigned debt_of(unsigned debts, int rank) { return debts >> (4 * rank) & 15; }

template <typename Dut>
void take_counters(const Dut& dut, const Ddr4Channel& channel, ChannelResult& result) {
    for (int rank = 0; rank < channel.ranks(); ++rank)
        result.debt[rank] = debt_of(dut.o_debt, rank);
    for (int i = 0; i < ChannelResult::kKinds; ++i)
        result.commands[i] = channel.count(static_cast<Command>(i));
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
