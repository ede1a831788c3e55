// The module, Verilated, between a host memory controller and the DDR4 ranks of its channels.
//
// NEARSTEP_CHANNELS: how many; 1, 2 or 4.
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <string>

#include "VAxdimmModule.h"
#include "axdimm/dfi_pins.hpp"
#include "verilated.h"

using namespace nearstep;

namespace {

constexpr int kChannels = NEARSTEP_CHANNELS;
#if NEARSTEP_CHANNELS == 1
#define NEARSTEP_EACH_CHANNEL(DO) DO(0)
#elif NEARSTEP_CHANNELS == 2
#define NEARSTEP_EACH_CHANNEL(DO) DO(0) DO(1)
#else
#define NEARSTEP_EACH_CHANNEL(DO) DO(0) DO(1) DO(2) DO(3)
#endif

// Order is the ABI.
struct ModuleConfig {
    HostConfig host;
    Timing timing;
    Geometry geometry;
    PortConfig port;
};

class ModuleBench {
  public:
    explicit ModuleBench(const ModuleConfig& config) : host_(config.host), dut_(&context_) {
        for (int channel = 0; channel < kChannels; ++channel) {
            devices_.emplace_back(config.timing, config.geometry, channel);
            ports_.emplace_back(devices_.back(), config.port);
        }
        dut_.host___05Fp0___05Fcs_n = dut_.host___05Fp1___05Fcs_n = (1 << kChannels) - 1;
        dut_.rst = 1;
        for (int i = 0; i < 2; ++i) tick();
        dut_.rst = 0;
    }

    HostController& host() { return host_; }
    Ddr4Device& device(int channel) { return devices_[channel]; }
    const std::string& error() {
        for (int channel = 0; channel < kChannels; ++channel)
            if (error_.empty() && devices_[channel].failed())
                error_ = "channel " + std::to_string(channel) + ": " +
                         devices_[channel].violation().text();
        return error_.empty() ? host_.error() : error_;
    }

    std::uint64_t run(std::uint64_t cycles, bool until_idle) {
        std::uint64_t ran = 0;
        while (ran < cycles && !(until_idle && host_.idle())) {
            step();
            ++ran;
            if (failed()) break;
        }
        return ran;
    }

  private:
    bool failed() const {
        for (const Ddr4Device& device : devices_)
            if (device.failed()) return true;
        return !host_.error().empty();
    }
    void tick() {
        dut_.clk = 1;
        dut_.eval();
        dut_.clk = 0;
        dut_.eval();
    }
    void step() {
        HostCycle out;
        std::uint8_t rddata[HostCycle::kDataBytes];
        std::memcpy(rddata, &dut_.host___05Frddata, sizeof rddata);
        host_.tick(dut_.host___05Frddata_valid ? rddata : nullptr, out);
        NEARSTEP_HOST_DRIVE(dut_, out, (1 << kChannels) - 1);
#define NEARSTEP_SHOW(c) NEARSTEP_DFI_READ(dut_, dfi##c, ports_[c]);
#define NEARSTEP_TAKE(c) NEARSTEP_DFI_CYCLE(dut_, dfi##c, ports_[c]);
        NEARSTEP_EACH_CHANNEL(NEARSTEP_SHOW)
        dut_.eval();
        NEARSTEP_EACH_CHANNEL(NEARSTEP_TAKE)
        tick();
    }

    HostController host_;
    std::deque<Ddr4Device> devices_;  // their places in memory do not change
    std::deque<Ddr4Port> ports_;
    VerilatedContext context_;
    VAxdimmModule dut_;
    std::string error_;
};

thread_local std::string construction_error;

}  // namespace

extern "C" {

ModuleBench* module_new(const ModuleConfig* config) {
    try {
        return new ModuleBench(*config);
    } catch (const std::exception& error) {
        construction_error = error.what();
        return nullptr;
    }
}
const char* module_construction_error() { return construction_error.c_str(); }
void module_free(ModuleBench* bench) { delete bench; }
HostController* module_host(ModuleBench* bench) { return &bench->host(); }
Ddr4Device* module_device(ModuleBench* bench, int channel) { return &bench->device(channel); }
std::uint64_t module_run(ModuleBench* bench, std::uint64_t cycles, int until_idle) {
    return bench->run(cycles, until_idle);
}
const char* module_error(ModuleBench* bench) { return bench->error().c_str(); }

}  // extern "C"
