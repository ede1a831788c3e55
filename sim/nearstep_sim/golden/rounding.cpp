// binary32 to bfloat16, rounded stochastically with the bits of Threefry-2x32-13.

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace {

constexpr std::uint32_t magnitude = 0x7FFFFFFFu;
constexpr std::uint32_t infinity = 0x7F800000u;
constexpr std::uint16_t quiet_nan = 0x7FC0u;

constexpr int rounds = 13, injected = 4, call_elements = 4, stream_bit = 28;
constexpr int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};

constexpr std::size_t calls = 256;  // whose words stay in registers and the first cache

// The results of `calls` calls from `number` on: 16 bits an element.
void draw(std::uint64_t number, std::uint32_t stream, const std::uint32_t* key,
          std::uint16_t* bits) {
    for (std::size_t k = 0; k < calls; ++k) {
        const std::uint64_t counter = number + k;
        std::uint32_t low = static_cast<std::uint32_t>(counter) + key[0];
        std::uint32_t high =
            (static_cast<std::uint32_t>(counter >> 32) | stream << stream_bit) + key[1];
        for (int round = 0; round < rounds; ++round) {
            const int by = rotations[round % 8];
            low += high;
            high = (high << by | high >> (32 - by)) ^ low;
            if ((round + 1) % injected == 0) {
                const int number_of = (round + 1) / injected;
                low += key[number_of % 3];
                high += key[(number_of + 1) % 3] + static_cast<std::uint32_t>(number_of);
            }
        }
        bits[4 * k + 0] = static_cast<std::uint16_t>(low);
        bits[4 * k + 1] = static_cast<std::uint16_t>(low >> 16);
        bits[4 * k + 2] = static_cast<std::uint16_t>(high);
        bits[4 * k + 3] = static_cast<std::uint16_t>(high >> 16);
    }
}

}  // namespace

extern "C" void narrow_bf16_stochastically(const std::uint32_t* in, std::uint16_t* out,
                                           std::size_t size, std::uint32_t seed, std::uint32_t step,
                                           std::uint32_t stream, std::uint64_t index,
                                           std::uint64_t within, std::uint64_t block,
                                           std::uint64_t skip) {
    const std::uint32_t key[3] = {seed, step, seed ^ step ^ 0x1BD11BDAu};
    alignas(64) std::uint16_t bits[call_elements * calls];
    while (size > 0) {
        // Neighbours in the index, of as many calls as are made together.
        const std::size_t before = index % call_elements;
        const std::uint64_t left = block - within % block;
        const std::size_t part = static_cast<std::size_t>(std::min<std::uint64_t>(
            std::min<std::uint64_t>(left, size), call_elements * calls - before));
        draw(index / call_elements, stream, key, bits);
        for (std::size_t i = 0; i < part; ++i) {
            const std::uint32_t word = in[i], total = word + bits[before + i];
            const bool nan = (word & magnitude) > infinity;
            out[i] = nan ? quiet_nan : static_cast<std::uint16_t>(total >> 16);
        }
        in += part;
        out += part;
        size -= part;
        index += part + (part == left ? skip : 0);
        within += part;
    }
}
