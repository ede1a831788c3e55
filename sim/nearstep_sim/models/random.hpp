// splitmix64: small, seeded, the same everywhere.
#pragma once

#include <cstdint>

namespace nearstep {

class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    std::uint64_t next() {
        std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }

    // True in `of_65536` of 65536 cases.
    bool chance(std::uint32_t of_65536) {
        return of_65536 != 0 && (next() & 0xFFFF) < of_65536;
    }

  private:
    std::uint64_t state_;
};

}  // namespace nearstep
