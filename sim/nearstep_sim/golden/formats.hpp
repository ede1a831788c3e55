// binary32 to and from patterns of 16 bits, in the lower half of a word.
#pragma once

#include "golden/floats.hpp"

namespace nearstep::golden {

// Drops the lower `drop` bits, rounded to nearest, ties to even.
inline std::uint32_t rounded(std::uint32_t bits, int drop) {
    return (bits + ((1u << (drop - 1)) - 1) + (bits >> drop & 1)) >> drop;
}

// NaNs keep their payload; `canonical` makes them the default one.
inline float widen_bf16(std::uint32_t word) { return as_float(word << 16); }

// NaNs must be canonical: others could be rounded to infinity or zero.
inline std::uint32_t narrow_bf16(float value) { return rounded(as_bits(value), 16); }

// The same, rounded up if the lower half of the number is not below 2^16 less 16 random bits.
inline std::uint32_t narrow_bf16(float value, std::uint32_t random) {
    return (as_bits(value) + random) >> 16;
}

// `a` or `b`, without a branch, so that loops are vectorised.
inline std::uint32_t chosen(bool first, std::uint32_t a, std::uint32_t b) {
    const std::uint32_t mask = 0u - static_cast<std::uint32_t>(first);
    return (a & mask) | (b & ~mask);
}

inline float widen_fp16(std::uint32_t word) {
    const std::uint32_t sign = (word & 0x8000u) << 16, rest = word & 0x7FFFu;
    // A subnormal is its significand times 2^-24; others have 127 for the bias of 15.
    const std::uint32_t small = as_bits(static_cast<float>(static_cast<int>(rest)) * 0x1p-24f);
    const std::uint32_t normal = (rest << 13) + (112u << 23);
    const std::uint32_t special = chosen(rest == 0x7C00u, infinity | sign, quiet_nan);
    return as_float(chosen(rest >= 0x7C00u, special, chosen(rest < 0x400u, small, normal) | sign));
}

inline std::uint32_t narrow_fp16(float value) {
    const std::uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000u, rest = bits & magnitude;
    // Beside 0.5 a unit is 2^-24, that of the subnormals: the sum is rounded to it.
    const bool is_small = rest < 0x38800000u;
    const std::uint32_t small = as_bits(as_float(chosen(is_small, rest, 0u)) + 0.5f) - as_bits(0.5f);
    const std::uint32_t normal = rounded(rest - (112u << 23), 13);
    const std::uint32_t large = chosen(rest > infinity, 0x7E00u, 0x7C00u | sign);
    return chosen(rest >= 0x47800000u, large, chosen(is_small, small, normal) | sign);
}

}  // namespace nearstep::golden
