// float32 to and from 8 bits, in groups of 256 elements that share a scale.

#include "golden/blockwise.hpp"

using namespace nearstep::golden;

// `smallest`: pattern of the least scale. `steps`: for each upper half of a quotient, a code in the
// top byte, another in the next byte, and the least lower half that has the other code.
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

// `map`: the values of the codes.
extern "C" void dequantize_blockwise(const std::uint8_t* codes, const float* scales,
                                     float* out, std::size_t size, const float* map) {
    const DefaultEnvironment environment;
    for (std::size_t at = 0; at < size; at += group) {
        dequantize_group(codes + at, out + at, std::min(group, size - at), scales[at / group], map);
    }
}
