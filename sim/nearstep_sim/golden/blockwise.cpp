// float32 to and from 8 bits, in groups of 256 elements that share a scale.

#ifdef __FAST_MATH__
#error "fast-math changes results"
#endif

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cstddef>
#include <cstdint>

namespace {

constexpr std::size_t group = 256;
constexpr std::uint32_t magnitude = 0x7FFFFFFFu;
constexpr std::uint32_t infinity = 0x7F800000u;
constexpr std::uint32_t quiet_nan = 0x7FC00000u;

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
std::uint32_t canonical(std::uint32_t bits) {
    return (bits & magnitude) > infinity ? quiet_nan : bits;
}

// Nobody's flush-to-zero or rounding mode reaches the loops, and the caller's come back after them.
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

// Magnitudes are in the order of their patterns, those of NaN above all others.
std::uint32_t scale_of(const float* in, std::size_t size, std::uint32_t smallest) {
    std::uint32_t largest = smallest;
    for (std::size_t i = 0; i < size; ++i) {
        largest = std::max(largest, bits_of(in[i]) & magnitude);
    }
    return canonical(largest);
}

void quantize_group(const float* __restrict in, std::uint8_t* __restrict codes, std::size_t size,
                    float scale, const std::uint32_t* __restrict steps) {
    for (std::size_t i = 0; i < size; ++i) {
        const std::uint32_t bits = bits_of(in[i] / scale);
        const std::uint32_t step = steps[bits >> 16];
        const bool below = (bits & 0xFFFFu) < (step & 0xFFFFu);
        codes[i] = static_cast<std::uint8_t>(below ? step >> 24 : step >> 16);
    }
}

void dequantize_group(const std::uint8_t* __restrict codes, std::uint32_t* __restrict out,
                      std::size_t size, float scale, const float* __restrict map) {
    for (std::size_t i = 0; i < size; ++i) {
        out[i] = canonical(bits_of(map[codes[i]] * scale));
    }
}

}  // namespace

// `smallest` is the pattern of the least scale. `steps` has, for the upper 16 bits of a quotient,
// a code in the top byte, another in the next one, and from which lower 16 bits on it is that one.
extern "C" void quantize_blockwise(const float* in, std::uint8_t* codes, std::uint32_t* scales,
                                   std::size_t size, std::uint32_t smallest,
                                   const std::uint32_t* steps) {
    const DefaultEnvironment environment;
    for (std::size_t at = 0; at < size; at += group) {
        const std::size_t own = std::min(group, size - at);
        const std::uint32_t scale = scales[at / group] = scale_of(in + at, own, smallest);
        quantize_group(in + at, codes + at, own, std::bit_cast<float>(scale), steps);
    }
}

// `map` has the values of the codes.
extern "C" void dequantize_blockwise(const std::uint8_t* codes, const float* scales,
                                     std::uint32_t* out, std::size_t size, const float* map) {
    const DefaultEnvironment environment;
    for (std::size_t at = 0; at < size; at += group) {
        dequantize_group(codes + at, out + at, std::min(group, size - at), scales[at / group], map);
    }
}
