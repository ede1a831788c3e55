// The module, Verilated, between a host memory controller and the DDR4 ranks of its channels.
//
// NEARSTEP_CHANNELS: number of channels; 1, 2 or 4.
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "VAxdimmModule.h"
#include "axdimm/dfi_pins.hpp"
#include "models/dram/hosted.hpp"
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

class ModuleBench final : public HostedDram {
  public:
    explicit ModuleBench(const ModuleConfig& config) : HostedDram(config.host), dut_(&context_) {
        for (int channel = 0; channel < kChannels; ++channel)
            channels_.push_back(std::make_unique<Ddr4Channel>(config.timing, config.geometry, 1,
                                                              config.port, channel));
        dut_.host___05Fp0___05Fcs_n = dut_.host___05Fp1___05Fcs_n = (1 << kChannels) - 1;
        dut_.rst = 1;
        for (int i = 0; i < 2; ++i) tick();
        dut_.rst = 0;
    }

    Ddr4Device& device(int channel) override { return channels_[channel]->device(0); }
    const std::string& error() override {
        for (int channel = 0; channel < kChannels; ++channel)
            if (error_.empty() && device(channel).failed())
                error_ =
                    "channel " + std::to_string(channel) + ": " + device(channel).violation().text();
        return error_.empty() ? host_.error() : error_;
    }

  private:
    bool failed() const override {
        for (const auto& channel : channels_)
            if (channel->failed()) return true;
        return !host_.error().empty();
    }
    void tick() {
        dut_.clk = 1;
        dut_.eval();
        dut_.clk = 0;
        dut_.eval();
    }
    void step() override {
        HostCycle out;
        std::uint8_t rddata[HostCycle::kDataBytes];
        std::memcpy(rddata, &dut_.host___05Frddata, sizeof rddata);
        host_.tick(dut_.host___05Frddata_valid ? rddata : nullptr, out);
        NEARSTEP_HOST_DRIVE(dut_, out, (1 << kChannels) - 1);
#define NEARSTEP_SHOW(c) NEARSTEP_DFI_READ(dut_, dfi##c, *channels_[c]);
#define NEARSTEP_TAKE(c) NEARSTEP_DFI_CYCLE(dut_, dfi##c, *channels_[c]);
        NEARSTEP_EACH_CHANNEL(NEARSTEP_SHOW)
        dut_.eval();
        NEARSTEP_EACH_CHANNEL(NEARSTEP_TAKE)
        tick();
    }

    std::vector<std::unique_ptr<Ddr4Channel>> channels_;
    VerilatedContext context_;
    VAxdimmModule dut_;
};

}  // namespace

extern "C" HostedDram* module_new(const ModuleConfig* config) {
    return guarded([&] { return new ModuleBench(*config); });
}
