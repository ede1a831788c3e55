// binary32 to and from patterns of 16 bits; a NaN becomes the default quiet NaN.

#include <bit>
#include <cstddef>
#include <cstdint>

namespace {

constexpr std::uint32_t magnitude = 0x7FFFFFFFu;
constexpr std::uint32_t infinity = 0x7F800000u;
constexpr std::uint32_t quiet_nan = 0x7FC00000u;

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

// Adds half of the unit at `drop`, less where that unit is even: what is halfway goes to even.
std::uint32_t rounded(std::uint32_t bits, int drop) {
    return (bits + ((1u << (drop - 1)) - 1) + (bits >> drop & 1)) >> drop;
}

}  // namespace

extern "C" void widen_bf16(const std::uint16_t* in, std::uint32_t* out, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        const std::uint32_t bits = static_cast<std::uint32_t>(in[i]) << 16;
        out[i] = (bits & magnitude) > infinity ? quiet_nan : bits;
    }
}

extern "C" void narrow_bf16(const std::uint32_t* in, std::uint16_t* out, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        const std::uint32_t bits = in[i];
        const std::uint32_t nan = quiet_nan >> 16;
        out[i] = static_cast<std::uint16_t>((bits & magnitude) > infinity ? nan : rounded(bits, 16));
    }
}

extern "C" void widen_fp16(const std::uint16_t* in, std::uint32_t* out, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        const std::uint32_t word = in[i];
        const std::uint32_t sign = (word & 0x8000u) << 16, rest = word & 0x7FFFu;
        // A subnormal is its significand times 2^-24; others have 127 for the bias of 15.
        const std::uint32_t small = bits_of(static_cast<float>(static_cast<int>(rest)) * 0x1p-24f);
        const std::uint32_t normal = (rest << 13) + (112u << 23);
        const std::uint32_t finite = rest < 0x400u ? small : normal;
        const std::uint32_t special = rest == 0x7C00u ? infinity | sign : quiet_nan;
        out[i] = rest >= 0x7C00u ? special : finite | sign;
    }
}

extern "C" void narrow_fp16(const std::uint32_t* in, std::uint16_t* out, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        const std::uint32_t sign = in[i] >> 16 & 0x8000u, rest = in[i] & magnitude;
        // Beside 0.5 a unit is 2^-24, that of the subnormals: the sum is rounded to it.
        const std::uint32_t bounded = rest < 0x38800000u ? rest : 0u;
        const std::uint32_t small = bits_of(std::bit_cast<float>(bounded) + 0.5f) - bits_of(0.5f);
        const std::uint32_t normal = rounded(rest - (112u << 23), 13);
        const std::uint32_t finite = rest < 0x38800000u ? small : normal;
        const std::uint32_t large = rest > infinity ? 0x7E00u : 0x7C00u | sign;
        out[i] = static_cast<std::uint16_t>(rest >= 0x47800000u ? large : finite | sign);
    }
}
