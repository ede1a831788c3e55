// The random bits of stochastic rounding: Threefry-2x32-13.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nearstep::golden {

constexpr std::size_t call_elements = 4;

struct DrawKey {
    std::uint32_t words[3];
    DrawKey(std::uint32_t seed, std::uint32_t step)
        : words{seed, step, seed ^ step ^ 0x1BD11BDAu} {}
};

// The results of `calls` calls from `number` on, two words each: 16 bits an element, in order.
template <bool carries>
inline void draw_words(std::uint64_t number, std::uint32_t stream, const DrawKey& key,
                       std::uint32_t* __restrict words, std::size_t calls) {
    constexpr int rounds = 13, injected = 4, stream_bit = 28;
    constexpr int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    const std::uint32_t begin = static_cast<std::uint32_t>(number);
    const std::uint32_t above = static_cast<std::uint32_t>(number >> 32);
    for (std::uint32_t k = 0; k < calls; ++k) {
        const std::uint32_t counter = begin + k, carry = carries && counter < begin;
        std::uint32_t low = counter + key.words[0];
        std::uint32_t high = ((above + carry) | stream << stream_bit) + key.words[1];
#pragma GCC unroll 13  // clang vectorises the outer loop only if there is no inner one
        for (int round = 0; round < rounds; ++round) {
            const int by = rotations[round % 8];
            low += high;
            high = (high << by | high >> (32 - by)) ^ low;
            if ((round + 1) % injected == 0) {
                const int number_of = (round + 1) / injected;
                low += key.words[number_of % 3];
                high += key.words[(number_of + 1) % 3] + static_cast<std::uint32_t>(number_of);
            }
        }
        words[2 * k] = low;
        words[2 * k + 1] = high;
    }
}

inline void draw(std::uint64_t number, std::uint32_t stream, const DrawKey& key,
                 std::uint32_t* words, std::size_t calls) {
    if ((number ^ (number + calls)) >> 32) {
        draw_words<true>(number, stream, key, words, calls);
    } else {
        draw_words<false>(number, stream, key, words, calls);
    }
}

}  // namespace nearstep::golden
