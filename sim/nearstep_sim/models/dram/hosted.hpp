// A host memory controller and DDR4 devices, with a design between them or none. Python drives it
// through the functions `ddr4_hosted_*` of library.cpp: `nearstep_sim.models.dram.host.HostedDram`.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "models/dram/ddr4.hpp"
#include "models/dram/host.hpp"

namespace nearstep {

// Why the last constructor or submission failed.
inline thread_local std::string last_error;

template <typename Make>
auto guarded(Make make) -> decltype(make()) {
    try {
        return make();
    } catch (const std::exception& error) {
        last_error = error.what();
        return {};
    }
}

class HostedDram {
  public:
    explicit HostedDram(const HostConfig& config) : host_(config) {}
    virtual ~HostedDram() = default;

    HostController& host() { return host_; }
    virtual Ddr4Device& device(int number) = 0;
    // The first error; empty if none.
    virtual const std::string& error() = 0;

    // Runs `cycles`, until an error or, with `until_idle`, an idle host; returns cycles run.
    std::uint64_t run(std::uint64_t cycles, bool until_idle) {
        std::uint64_t ran = 0;
        while (ran < cycles && !(until_idle && host_.idle())) {
            step();
            ++ran;
            if (failed()) break;
        }
        return ran;
    }

  protected:
    virtual void step() = 0;
    virtual bool failed() const = 0;

    HostController host_;
    std::string error_;
};

}  // namespace nearstep
