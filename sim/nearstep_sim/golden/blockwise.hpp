// A group of 256 elements, which share a scale, to and from 8 bits.
#pragma once

#include <algorithm>

#include "golden/floats.hpp"

namespace nearstep::golden {

constexpr std::size_t group = 256;

// Magnitudes are in the order of their patterns, those of NaN above all others.
inline std::uint32_t scale_of(const float* in, std::size_t size, std::uint32_t smallest) {
    std::uint32_t largest = smallest;
    for (std::size_t i = 0; i < size; ++i) {
        largest = std::max(largest, as_bits(in[i]) & magnitude);
    }
    return canonical(largest);
}

inline void quantize_group(const float* __restrict in, std::uint8_t* __restrict codes,
                           std::size_t size, float scale, const std::uint32_t* __restrict steps) {
    for (std::size_t i = 0; i < size; ++i) {
        const std::uint32_t bits = as_bits(in[i] / scale);
        const std::uint32_t step = steps[bits >> 16];
        const bool below = (bits & 0xFFFFu) < (step & 0xFFFFu);
        codes[i] = static_cast<std::uint8_t>(below ? step >> 24 : step >> 16);
    }
}

inline void dequantize_group(const std::uint8_t* __restrict codes, float* __restrict out,
                             std::size_t size, float scale, const float* __restrict map) {
    for (std::size_t i = 0; i < size; ++i) {
        out[i] = canonical(map[codes[i]] * scale);
    }
}

}  // namespace nearstep::golden
