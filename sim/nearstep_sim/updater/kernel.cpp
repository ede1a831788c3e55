// A kernel of an AXDIMM in this process: the Verilated shell with AXI4-Lite registers.

#include "updater/shell_device.hpp"

namespace nearstep {
namespace {

constexpr std::uint64_t kRegisterCycles = 1000;  // a register access that takes longer has hung
constexpr unsigned kPollInterval = 32;           // cycles between looks at a register in a wait

class Device final : public ShellDevice {
  public:
    explicit Device(const Options& options) : ShellDevice(options) { reset(); }

    void reset() override {
        auto& port = shell();
        port.s_axil___05Fawvalid = port.s_axil___05Fwvalid = port.s_axil___05Farvalid = 0;
        port.s_axil___05Fbready = port.s_axil___05Frready = 1;
        port.s_axil___05Fwstrb = 0xF;
        reset_shell();
    }

    std::int32_t read_register(std::uint64_t address, std::uint32_t* value) override {
        auto& port = shell();
        port.s_axil___05Faraddr = address;
        port.s_axil___05Farvalid = 1;
        const std::uint64_t limit = cycle() + kRegisterCycles;
        while (cycle() < limit && !memory().fault) {
            settle();
            const bool taken = port.s_axil___05Farready && port.s_axil___05Farvalid;
            const bool answered = port.s_axil___05Frvalid;
            if (answered) *value = port.s_axil___05Frdata;
            const std::int32_t response = port.s_axil___05Frresp;
            clock();
            if (taken) port.s_axil___05Farvalid = 0;
            if (answered) return response;
        }
        return memory().fault ? kFaulted : kHung;
    }

    std::int32_t write_register(std::uint64_t address, std::uint32_t value) override {
        auto& port = shell();
        port.s_axil___05Fawaddr = address;
        port.s_axil___05Fwdata = value;
        port.s_axil___05Fawvalid = port.s_axil___05Fwvalid = 1;
        const std::uint64_t limit = cycle() + kRegisterCycles;
        while (cycle() < limit && !memory().fault) {
            settle();
            const bool address_taken = port.s_axil___05Fawready && port.s_axil___05Fawvalid;
            const bool data_taken = port.s_axil___05Fwready && port.s_axil___05Fwvalid;
            const bool answered = port.s_axil___05Fbvalid;
            const std::int32_t response = port.s_axil___05Fbresp;
            clock();
            if (address_taken) port.s_axil___05Fawvalid = 0;
            if (data_taken) port.s_axil___05Fwvalid = 0;
            if (answered) {
                configure_units();
                return response;
            }
        }
        return memory().fault ? kFaulted : kHung;
    }

  private:
    void sleep(std::uint64_t limit) override {
        const std::uint64_t until = std::min(limit, cycle() + kPollInterval);
        while (cycle() < until && !memory().fault) {
            settle();
            clock();
        }
    }
};

}  // namespace
}  // namespace nearstep

extern "C" void* device_open(const nearstep::Options* options) {
    return static_cast<nearstep::ShellDevice*>(new nearstep::Device(*options));
}
