// Bit patterns of binary32, and the environment that every loop of the golden models runs in.
#pragma once

#ifdef __FAST_MATH__
#error "fast-math changes results"
#endif

#include <bit>
#include <cfenv>
#include <cstddef>
#include <cstdint>

namespace nearstep::golden {

constexpr std::uint32_t magnitude = 0x7FFFFFFFu;
constexpr std::uint32_t infinity = 0x7F800000u;
constexpr std::uint32_t quiet_nan = 0x7FC00000u;

inline float as_float(std::uint32_t bits) { return std::bit_cast<float>(bits); }
inline std::uint32_t as_bits(float value) { return std::bit_cast<std::uint32_t>(value); }
inline float canonical(float value) { return value == value ? value : as_float(quiet_nan); }
inline std::uint32_t canonical(std::uint32_t bits) {
    return (bits & magnitude) > infinity ? quiet_nan : bits;
}

// Default rounding mode and no flush-to-zero during its life; then the caller's again.
class DefaultEnvironment {
    std::fenv_t saved_;

  public:
    DefaultEnvironment() {
        std::fegetenv(&saved_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultEnvironment() { std::fesetenv(&saved_); }
    DefaultEnvironment(const DefaultEnvironment&) = delete;
    DefaultEnvironment& operator=(const DefaultEnvironment&) = delete;
};

}  // namespace nearstep::golden
