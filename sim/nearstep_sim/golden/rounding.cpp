// Arrays of binary32 to bfloat16, rounded stochastically.

#include <algorithm>

#include "golden/formats.hpp"
#include "golden/rounding.hpp"

using namespace nearstep::golden;

extern "C" void narrow_bf16_stochastically(const float* in, std::uint16_t* out,
                                           std::size_t size, std::uint32_t seed, std::uint32_t step,
                                           std::uint32_t stream, std::uint64_t index,
                                           std::uint64_t within, std::uint64_t block,
                                           std::uint64_t skip) {
    constexpr std::size_t calls = 256;  // whose words fit the first cache
    const DrawKey key(seed, step);
    alignas(64) std::uint32_t words[2 * calls];
    while (size > 0) {
        // Elements with consecutive indices, of at most `calls` calls.
        const std::size_t before = index % call_elements;
        const std::uint64_t left = block - within % block;
        const std::size_t part = static_cast<std::size_t>(std::min<std::uint64_t>(
            std::min<std::uint64_t>(left, size), call_elements * calls - before));
        draw(index / call_elements, {stream}, key, words, 2 * calls, calls);
        for (std::size_t i = 0; i < part; ++i) {
            const std::size_t element = before + i;
            const std::uint32_t random = words[element / 2] >> 16 * (element % 2) & 0xFFFFu;
            out[i] = static_cast<std::uint16_t>(narrow_bf16(canonical(in[i]), random));
        }
        in += part;
        out += part;
        size -= part;
        index += part + (part == left ? skip : 0);
        within += part;
    }
}
