// Rules that an AXI4 manager has to keep, checked in every cycle (IHI 0022, chapters A3 and A5), and
// additional rules of this project's kernels: incrementing bursts of whole, aligned beats,
// and write data that is not offered before its address.
#pragma once

#include <cstdint>
#include <deque>

#include "models/axi/axi.hpp"
#include "verilate/fault.hpp"

namespace nearstep {

class AxiChecker {
  public:
    explicit AxiChecker(unsigned beat_bytes) : beat_bytes_(beat_bytes) {
        while ((1u << size_) < beat_bytes) ++size_;
    }

    void reset() {
        had_ = {};
        took_ = {};
        bursts_.clear();
        beat_ = 0;
        fresh_ = true;
    }

    // One cycle, in which both sides drove these pins.
    void cycle(const ManagerPins& m, const SubordinatePins& s, Fault& fault, std::uint64_t now) {
        if (fresh_) {
            if (m.ar.valid || m.aw.valid || m.wvalid)
                fault.protocol("AR/AW/W", "no VALID in the cycle after reset", now, "%s",
                               m.ar.valid ? "ARVALID" : m.aw.valid ? "AWVALID" : "WVALID");
            fresh_ = false;
        }
        stable("AR", had_.ar, took_.arready, m.ar, fault, now);
        stable("AW", had_.aw, took_.awready, m.aw, fault, now);
        stable_data(m, fault, now);
        if (m.ar.valid) address("AR", m.ar, fault, now);
        if (m.aw.valid) address("AW", m.aw, fault, now);
        data(m, s, fault, now);
        if (m.aw.valid && s.awready) bursts_.push_back(m.aw.len + 1u);
        had_ = m;
        took_ = s;
    }

  private:
    void stable(const char* channel, const AddressPins& before, bool taken, const AddressPins& now_,
                Fault& fault, std::uint64_t now) {
        if (!before.valid || taken) return;
        if (!now_.valid)
            fault.protocol(channel, "VALID holds until READY", now, "VALID fell");
        else if (!(now_ == before))
            fault.protocol(channel, "payload holds until READY", now, "address was %#llx, is %#llx",
                           (unsigned long long)before.addr, (unsigned long long)now_.addr);
    }

    void stable_data(const ManagerPins& m, Fault& fault, std::uint64_t now) {
        if (!had_.wvalid || took_.wready) return;
        if (!m.wvalid)
            fault.protocol("W", "VALID holds until READY", now, "VALID fell");
        else if (m.wdata != had_.wdata || m.wstrb != had_.wstrb || m.wlast != had_.wlast)
            fault.protocol("W", "payload holds until READY", now, "beat %u of its burst", beat_);
    }

    void address(const char* channel, const AddressPins& pins, Fault& fault, std::uint64_t now) {
        const std::uint64_t bytes = (pins.len + 1ull) * beat_bytes_;
        const auto at = (unsigned long long)pins.addr;
        if (pins.burst != 1)
            fault.protocol(channel, "bursts are INCR", now, "burst is %u", pins.burst);
        else if (pins.size != size_)
            fault.protocol(channel, "beats are as wide as the port", now, "size is %u, not %u",
                           pins.size, size_);
        else if (pins.addr % beat_bytes_)
            fault.protocol(channel, "addresses are aligned to beats", now, "address %#llx", at);
        else if (pins.addr / 4096 != (pins.addr + bytes - 1) / 4096)
            fault.protocol(channel, "bursts do not cross 4 KiB", now, "%llu bytes at %#llx",
                           (unsigned long long)bytes, at);
    }

    void data(const ManagerPins& m, const SubordinatePins& s, Fault& fault, std::uint64_t now) {
        if (!m.wvalid) return;
        const unsigned beats =
            !bursts_.empty() ? bursts_.front() : m.aw.valid ? m.aw.len + 1u : 0u;
        if (beats == 0) {
            fault.protocol("W", "data does not precede its address", now, "no burst is open");
            return;
        }
        if (m.wlast != (beat_ + 1 == beats))
            fault.protocol("W", "LAST marks the last beat", now, "beat %u of %u, LAST is %d", beat_,
                           beats, int(m.wlast));
        if (!s.wready) return;
        if (bursts_.empty()) {
            fault.protocol("W", "data does not precede its address", now, "the address waits");
        } else if (++beat_ == beats) {
            bursts_.pop_front();
            beat_ = 0;
        }
    }

    unsigned beat_bytes_;
    unsigned size_ = 0;
    ManagerPins had_{};
    SubordinatePins took_{};
    std::deque<unsigned> bursts_;
    unsigned beat_ = 0;
    bool fresh_ = true;
};

}  // namespace nearstep
