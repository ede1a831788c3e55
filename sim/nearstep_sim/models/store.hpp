// Contents and line states of the emulated memory; the host owns both arrays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "models/axi/axi.hpp"
#include "verilate/fault.hpp"

namespace nearstep {

class Store {
  public:
    static constexpr std::uint64_t kLineBytes = 64;
    static constexpr std::uint32_t kPoison = 0xFFDEADFFu;
    enum State : std::uint8_t { kGuard = 0, kUnwritten = 1, kWritten = 2 };

    Store(std::uint8_t* data, std::uint8_t* state, std::uint64_t capacity, unsigned beat_bytes)
        : data_(data), state_(state), capacity_(capacity), beat_bytes_(beat_bytes) {}

    unsigned beat_bytes() const { return beat_bytes_; }

    // Copies a beat to `out`, or makes a fault: out of range, a guard, or never written. The host
    // may read every line.
    void read(std::uint64_t address, Beat& out, Fault& fault, std::uint64_t now,
              bool host = false) const {
        if (address + beat_bytes_ > capacity_)
            return fault.access(FaultKind::out_of_range, address, false, now);
        const std::uint8_t state = state_[address / kLineBytes];
        if (state != kWritten && !host) [[unlikely]]
            return fault.access(state == kGuard ? FaultKind::guard : FaultKind::unwritten, address,
                                false, now);
        std::memcpy(out.data(), data_ + address, beat_bytes_);
    }

    // Writes the bytes of a beat that have a strobe, or makes a fault. Without a strobe nothing is
    // accessed. Lines written by the host cease to be guards.
    void write(std::uint64_t address, const Beat& beat, std::uint64_t strobes, Fault& fault,
               std::uint64_t now, bool host = false) {
        const std::uint64_t all = beat_bytes_ == 64 ? ~0ull : (1ull << beat_bytes_) - 1;
        if ((strobes & all) == 0) return;
        if (address + beat_bytes_ > capacity_)
            return fault.access(FaultKind::out_of_range, address, true, now);
        std::uint8_t& state = state_[address / kLineBytes];
        if (state == kGuard && !host) [[unlikely]]
            return fault.access(FaultKind::guard, address, true, now);
        if (state != kWritten) [[unlikely]] {
            auto* line = data_ + address / kLineBytes * kLineBytes;
            for (unsigned i = 0; i < kLineBytes; i += 4) std::memcpy(line + i, &kPoison, 4);
            state = kWritten;
        }
        if ((strobes & all) == all) {
            std::memcpy(data_ + address, beat.data(), beat_bytes_);
            return;
        }
        for (unsigned i = 0; i < beat_bytes_; ++i)
            if (strobes >> i & 1) data_[address + i] = beat[i];
    }

  private:
    std::uint8_t* data_;
    std::uint8_t* state_;
    std::uint64_t capacity_;
    unsigned beat_bytes_;
};

}  // namespace nearstep
