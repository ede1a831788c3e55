// The DDR4 ranks of one channel of a simulated DIMM, which check every command on the pins of its
// DFI port, and the state of each line, against which the kernel's accesses are checked.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "models/dram/channel.hpp"
#include "models/dram/host.hpp"
#include "models/line_states.hpp"
#include "verilate/fault.hpp"
#include "verilate/injection.hpp"
#include "verilated.h"

namespace nearstep {

// Order is the ABI.
struct DimmOptions {
    HostConfig host;
    Timing timing;
    Geometry geometry;  // of a rank
    PortConfig port;
    std::int32_t native;
    std::uint64_t window_bytes;  // registers, at the end of each channel
    const char* trace;
    const char* commands;  // a file of DRAM commands for each channel: this, with .0 and so on
    const char* commands_header;
    std::uint32_t threads;  // at most

    unsigned ranks() const { return static_cast<unsigned>(host.mapping.ranks()); }  // of a channel
    unsigned channels() const { return static_cast<unsigned>(host.ranks) / ranks(); }
    std::uint64_t channel_beats() const { return geometry.beats() * ranks(); }
};

// Half a beat of read data, if a channel drives them.
struct ReadData {
    bool valid;
    std::uint8_t data[HostCycle::kDataBytes];
};

// Where the pins of a DFI port are in a Verilated model.
struct DfiPins {
    struct Phase {
        const CData *cs_n, *act_n;
        const IData* address;
        const CData *bg, *ba;
    };
    std::array<Phase, 4> phases;
    const CData* wrdata_en;
    const void* wrdata;
    const QData* wrdata_mask;
    CData* rddata_valid;
    void* rddata;

    Pins of(unsigned phase) const {
        const Phase& from = phases[phase];
        Pins pins;
        pins.act_n = *from.act_n;
        pins.address = *from.address;
        pins.bg = *from.bg;
        pins.ba = *from.ba;
        return pins;
    }
};

#define NEARSTEP_PHASE_PINS(dut, port, n)                                                  \
    {                                                                                      \
        &(dut).port##___05Fp##n##___05Fcs_n, &(dut).port##___05Fp##n##___05Fact_n,         \
            &(dut).port##___05Fp##n##___05Faddress, &(dut).port##___05Fp##n##___05Fbg,     \
            &(dut).port##___05Fp##n##___05Fba                                              \
    }
// `DfiPins` of a port of a model; Verilator writes __ as ___05F.
#define NEARSTEP_DFI_PINS(dut, port)                                                       \
    nearstep::DfiPins {                                                                    \
        {{NEARSTEP_PHASE_PINS(dut, port, 0), NEARSTEP_PHASE_PINS(dut, port, 1),            \
          NEARSTEP_PHASE_PINS(dut, port, 2), NEARSTEP_PHASE_PINS(dut, port, 3)}},          \
            &(dut).port##___05Fwrdata_en, &(dut).port##___05Fwrdata,                       \
            &(dut).port##___05Fwrdata_mask, &(dut).port##___05Frddata_valid,               \
            &(dut).port##___05Frddata                                                      \
    }

class ChannelMemory {
  public:
    ChannelMemory(const DimmOptions& options, unsigned number)
        : number_(number),
          mapping_(options.host.mapping),
          dram_(options.timing, options.geometry, static_cast<int>(options.ranks()), options.port,
                number * options.ranks()),
          beats_(options.channel_beats()),
          nobody_((1u << options.ranks()) - 1),
          read_latency_(options.port.read_latency),
          states_(options.channel_beats()) {
        if (options.commands != nullptr)
            dram_.trace_to(std::make_shared<TraceWriter>(
                std::string(options.commands) + "." + std::to_string(number),
                options.commands_header));
    }

    void connect(const DfiPins& pins) {
        pins_ = pins;
        *pins_.rddata_valid = 0;
    }

    // Read data of the cycle, before the model is settled.
    void show() {
        const std::uint8_t* data = dram_.read_data();
        *pins_.rddata_valid = data != nullptr;
        if (data) std::memcpy(pins_.rddata, data, kBeatBytes);
        if (dram_.cycle() >= silent_from_) *pins_.rddata_valid = 0;
    }

    // Commands and write data of the cycle, once the model is settled. The kernel drives them in
    // `acceleration` mode.
    void take(bool acceleration, std::uint64_t cycle) {
        if (acceleration && watched_) watch(cycle);
        for (unsigned phase = 0; phase < pins_.phases.size(); ++phase)
            if (const unsigned selected = selected_by(phase))
                dram_.command(phase, selected, pins_.of(phase));
        if (!dram_.end_cycle(*pins_.wrdata_en, static_cast<const std::uint8_t*>(pins_.wrdata),
                             *pins_.wrdata_mask)) [[unlikely]] {
            const Violation& found = *dram_.violation();
            fault.protocol(("dram" + std::to_string(number_)).c_str(), found.rule, cycle, "%s",
                           found.text().c_str());
        }
    }

    // The kernel is reset in the cycle that ends.
    void kernel_was_reset() { silent_from_ = kNever; }

    void judge(bool on) { watched_ = on; }
    LineStates& states() { return states_; }
    const Ddr4Channel& dram() const { return dram_; }
    Injections& injections() { return injections_; }

    Fault fault;  // the first since the last clear

  private:
    // Checks the kernel's column command of this cycle against the line states.
    void watch(std::uint64_t cycle) {
        const unsigned selected = selected_by(0);
        if (!selected || !*pins_.phases[0].act_n) return;
        const unsigned rank = selected >> 1;  // two ranks at most; a column command selects one
        const Pins pins = pins_.of(0);
        const Command command = decode(pins);
        const bool write = command == Command::WR || command == Command::WRA;
        if (!write && command != Command::RD && command != Command::RDA) return;
        if (rank >= static_cast<unsigned>(dram_.ranks()) ||
            dram_.device(rank).open_row(pins.bg, pins.ba) < 0)
            return;  // the rank reports the violation
        const std::uint64_t line = beat_of(dram_.place(rank, pins), mapping_);
        const std::uint64_t address = (number_ * beats_ + line) * kBeatBytes;
        const LineState state = states_.of(line);
        if (state == LineState::guard)
            fault.access(FaultKind::guard, address, write, cycle);
        else if (!write && state == LineState::unwritten)
            fault.access(FaultKind::unwritten, address, write, cycle);
        else if (write)
            states_.mark(line, line + 1, LineState::written);
        if (!write && injections_.of(false, false, address, address + kBeatBytes).never)
            silent_from_ = std::min(silent_from_, dram_.cycle() + read_latency_);
    }

    // A bit for each rank that the command of a phase is for.
    unsigned selected_by(unsigned phase) const { return ~*pins_.phases[phase].cs_n & nobody_; }

    static constexpr std::uint64_t kNever = ~std::uint64_t{0};

    unsigned number_;
    bool watched_ = true;
    Mapping mapping_;
    Ddr4Channel dram_;
    std::uint64_t beats_;
    unsigned nobody_;
    int read_latency_;
    LineStates states_;
    Injections injections_;
    std::uint64_t silent_from_ = kNever;  // no read data until the kernel is reset
    DfiPins pins_{};
};

using Memories = std::vector<std::unique_ptr<ChannelMemory>>;

}  // namespace nearstep
