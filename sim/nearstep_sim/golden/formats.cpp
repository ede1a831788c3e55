// Arrays of binary32 to and from patterns of 16 bits; a NaN becomes the default quiet NaN.

#include "golden/formats.hpp"

using namespace nearstep::golden;

extern "C" void widen_bf16(const std::uint16_t* in, float* out, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        out[i] = canonical(nearstep::golden::widen_bf16(std::uint32_t{in[i]}));
    }
}

extern "C" void narrow_bf16(const float* in, std::uint16_t* out, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        out[i] = static_cast<std::uint16_t>(nearstep::golden::narrow_bf16(canonical(in[i])));
    }
}

extern "C" void widen_fp16(const std::uint16_t* in, float* out, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        out[i] = nearstep::golden::widen_fp16(in[i]);
    }
}

extern "C" void narrow_fp16(const float* in, std::uint16_t* out, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        out[i] = static_cast<std::uint16_t>(nearstep::golden::narrow_fp16(in[i]));
    }
}
