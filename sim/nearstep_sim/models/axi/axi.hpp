// Pins of an AXI4 port, by the side that drives them, for one cycle.
#pragma once

#include <array>
#include <cstdint>

namespace nearstep {

constexpr unsigned kMaxBeatBytes = 64;

using Beat = std::array<std::uint8_t, kMaxBeatBytes>;

enum Response : std::uint8_t { kOkay = 0, kExokay = 1, kSlverr = 2, kDecerr = 3 };

struct AddressPins {
    bool valid = false;
    std::uint8_t id = 0;
    std::uint64_t addr = 0;
    std::uint8_t len = 0;  // beats - 1
    std::uint8_t size = 0;
    std::uint8_t burst = 0;

    bool operator==(const AddressPins&) const = default;
};

struct ManagerPins {
    AddressPins ar, aw;
    bool wvalid = false;
    bool wlast = false;
    std::uint64_t wstrb = 0;
    Beat wdata{};
    bool rready = false;
    bool bready = false;
};

struct SubordinatePins {
    bool arready = false;
    bool awready = false;
    bool wready = false;
    bool rvalid = false;
    bool rlast = false;
    std::uint8_t rid = 0;
    std::uint8_t rresp = kOkay;
    Beat rdata{};
    bool bvalid = false;
    std::uint8_t bid = 0;
    std::uint8_t bresp = kOkay;
};

}  // namespace nearstep
