// The Adam kernel's data movers on the DDR4 controller and the rank model, from START to done.
//
// The functional units compute p ^ g, m + 1 and v - 1, so that every word of the result identifies
// its operands. All arrays are compared, and a guard behind each.
#include <cstdint>
#include <cstring>
#include <string>

#include "VKernelOnChannel.h"
#include "models/dram/channel_bench.hpp"
#include "models/dram/dfi_pins.hpp"
#include "verilated.h"

using namespace nearstep;

namespace {

constexpr int kLanes = kBeatBytes / 4;
constexpr std::uint64_t kGuardBeats = 8;
constexpr std::uint64_t kMaxCycles = 1u << 28;

struct Write {
    std::uint32_t address, value;
};

struct Beat {
    std::uint32_t lane[kLanes];
};

class Bench {
  public:
    explicit Bench(const ChannelConfig& config)
        : c_(config),
          port_(c_.timing, c_.geometry, c_.mapping.ranks(), c_.port),
          beats_((c_.count + kLanes - 1) / kLanes),
          dut_(&context_) {}

    std::string run(const Write* writes, std::size_t size, std::uint32_t status,
                    ChannelResult& result) {
        if (!c_.trace(port_)) return "the commands cannot be written";
        fill();
        dut_.s_axil___05Fbready = dut_.s_axil___05Frready = 1;
        dut_.s_axil___05Fwstrb = 0xF;
        dut_.rst = 1;
        for (int i = 0; i < 2; ++i) step();
        dut_.rst = 0;
        dut_.i_enable = 1;
        dut_.i_debt = c_.debt;
        for (std::size_t i = 0; i + 1 < size; ++i)
            if (!write(writes[i])) return problem();
        dut_.i_clear_slots = 1;
        step();
        dut_.i_clear_slots = 0;
        const std::uint64_t start = port_.cycle();
        if (!write(writes[size - 1])) return problem();  // START
        for (std::uint32_t found = 0; !(found & 2);) {
            if (!read(status, found)) return problem();
            if (found & 4) return "the kernel reports an error";
            if (port_.cycle() - start > kMaxCycles) return "the kernel is not done";
        }
        result.cycles = port_.cycle() - start;
        take_counters(dut_, port_, result);
        slots_.take(dut_, result);
        for (int i = 0; i < 16; ++i) step();  // the last write data
        return port_.failed() ? problem() : verify(result);
    }

  private:
    Beat initial(int array, std::uint64_t i) const {
        Beat beat;
        for (int l = 0; l < kLanes; ++l)
            beat.lane[l] = static_cast<std::uint32_t>(
                mix(c_.seed ^ ((i * kLanes + l) * 4 + static_cast<std::uint64_t>(array))));
        return beat;
    }
    Place place(int array, std::uint64_t i) const {
        return place_of(c_.base[array] / kBeatBytes + i, c_.mapping, c_.geometry);
    }
    void fill() {
        for (int a = 0; a < 4; ++a)
            for (std::uint64_t i = 0; i < beats_ + kGuardBeats; ++i) {
                const Beat beat = initial(a, i);
                port_.store(place(a, i), reinterpret_cast<const std::uint8_t*>(&beat), 0);
            }
    }
    std::string verify(ChannelResult& result) const {
        for (int a = 0; a < 4; ++a)
            for (std::uint64_t i = 0; i < beats_ + kGuardBeats; ++i) {
                Beat want = initial(a, i), found;
                const Beat gradient = initial(1, i);
                for (int l = 0; l < kLanes && i * kLanes + l < c_.count; ++l) {
                    if (a == 0) want.lane[l] ^= gradient.lane[l];
                    if (a == 2) want.lane[l] += 1;
                    if (a == 3) want.lane[l] -= 1;
                }
                port_.load(place(a, i), reinterpret_cast<std::uint8_t*>(&found));
                if (std::memcmp(&found, &want, sizeof found))
                    return "memory of array " + std::to_string(a) + " differs at beat " +
                           std::to_string(i);
                ++result.checks;
            }
        return {};
    }

    std::string problem() const {
        return port_.failed() ? port_.violation()->text() : "a register access failed";
    }
    bool step() {
        NEARSTEP_DFI_READ(dut_, dfi, port_);
        dut_.eval();
        const bool ok = NEARSTEP_DFI_CYCLE(dut_, dfi, port_);
        slots_.observe(dut_);
        tick(dut_);
        return ok;
    }
    bool write(const Write& access) {
        dut_.s_axil___05Fawaddr = access.address;
        dut_.s_axil___05Fwdata = access.value;
        dut_.s_axil___05Fawvalid = dut_.s_axil___05Fwvalid = 1;
        for (bool answered = false; !answered;) {
            NEARSTEP_DFI_READ(dut_, dfi, port_);
            dut_.eval();
            const bool address_taken = dut_.s_axil___05Fawready, data_taken = dut_.s_axil___05Fwready;
            answered = dut_.s_axil___05Fbvalid;
            if (answered && dut_.s_axil___05Fbresp) return false;
            if (!step()) return false;
            if (address_taken) dut_.s_axil___05Fawvalid = 0;
            if (data_taken) dut_.s_axil___05Fwvalid = 0;
        }
        return true;
    }
    bool read(std::uint32_t address, std::uint32_t& value) {
        dut_.s_axil___05Faraddr = address;
        dut_.s_axil___05Farvalid = 1;
        for (bool answered = false; !answered;) {
            NEARSTEP_DFI_READ(dut_, dfi, port_);
            dut_.eval();
            const bool taken = dut_.s_axil___05Farready;
            answered = dut_.s_axil___05Frvalid;
            value = dut_.s_axil___05Frdata;
            if (answered && dut_.s_axil___05Frresp) return false;
            if (!step()) return false;
            if (taken) dut_.s_axil___05Farvalid = 0;
        }
        return true;
    }

    ChannelConfig c_;
    Ddr4Channel port_;
    std::uint64_t beats_;
    SlotSpan slots_;
    VerilatedContext context_;
    VKernelOnChannel dut_;
};

}  // namespace

// `writes` configures the kernel; the last one starts it. Returns 0, or 1 and why in `message`.
extern "C" int kernel_bench(const ChannelConfig* config, const Write* writes, std::size_t size,
                            std::uint32_t status, ChannelResult* result, char* message,
                            std::size_t message_size) {
    Bench bench(*config);
    return report(bench.run(writes, size, status, *result), message, message_size);
}
