// The module, Verilated, between a host memory controller and the DDR4 ranks of its two channels.
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>

#include "VAxdimmModule.h"
#include "dfi_pins.hpp"
#include "verilated.h"

using namespace nearstep;

namespace {

constexpr int kChannels = 2;

// Order is the ABI.
struct ModuleConfig {
    HostConfig host;
    Timing timing;
    Geometry geometry;
    PortConfig port;
};

class ModuleBench {
  public:
    explicit ModuleBench(const ModuleConfig& config)
        : host_(config.host),
          device0_(config.timing, config.geometry, 0),
          device1_(config.timing, config.geometry, 1),
          port0_(device0_, config.port),
          port1_(device1_, config.port),
          dut_(&context_) {
        dut_.host___05Fp0___05Fcs_n = dut_.host___05Fp1___05Fcs_n = 3;
        dut_.rst = 1;
        for (int i = 0; i < 2; ++i) tick();
        dut_.rst = 0;
    }

    HostController& host() { return host_; }
    Ddr4Device& device(int channel) { return channel ? device1_ : device0_; }
    const std::string& error() {
        for (int channel = 0; channel < kChannels; ++channel)
            if (error_.empty() && device(channel).failed())
                error_ = "channel " + std::to_string(channel) + ": " +
                         device(channel).violation().text();
        return error_.empty() ? host_.error() : error_;
    }

    std::uint64_t run(std::uint64_t cycles, bool until_idle) {
        std::uint64_t ran = 0;
        while (ran < cycles && !(until_idle && host_.idle())) {
            step();
            ++ran;
            if (device0_.failed() || device1_.failed() || !host_.error().empty()) break;
        }
        return ran;
    }

  private:
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
        NEARSTEP_DFI_READ(dut_, dfi0, port0_);
        NEARSTEP_DFI_READ(dut_, dfi1, port1_);
        dut_.eval();
        NEARSTEP_DFI_CYCLE(dut_, dfi0, port0_);
        NEARSTEP_DFI_CYCLE(dut_, dfi1, port1_);
        tick();
    }

    HostController host_;
    Ddr4Device device0_, device1_;
    Ddr4Port port0_, port1_;
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
