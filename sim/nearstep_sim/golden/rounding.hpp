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

// The results of `calls` calls from `number` on, for each stream: two words each, 16 bits an
// element, in order; those of a stream are `stride` words behind those of the one before. Streams
// take turns, since each round waits for the one before.
template <bool carries, std::size_t streams>
inline void draw_words(std::uint64_t number, const std::uint32_t (&stream)[streams],
                       const DrawKey& key, std::uint32_t* __restrict words, std::size_t stride,
                       std::size_t calls) {
    constexpr int rounds = 13, injected = 4, stream_bit = 28;
    constexpr int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
    const std::uint32_t begin = static_cast<std::uint32_t>(number);
    const std::uint32_t above = static_cast<std::uint32_t>(number >> 32);
    for (std::uint32_t k = 0; k < calls; ++k) {
        const std::uint32_t counter = begin + k, carry = carries && counter < begin;
        std::uint32_t low[streams], high[streams];
#pragma GCC unroll 8  // clang vectorises the outer loop only if there is no inner one
        for (std::size_t s = 0; s < streams; ++s) {
            low[s] = counter + key.words[0];
            high[s] = ((above + carry) | stream[s] << stream_bit) + key.words[1];
        }
#pragma GCC unroll 13
        for (int round = 0; round < rounds; ++round) {
            const int by = rotations[round % 8];
#pragma GCC unroll 8
            for (std::size_t s = 0; s < streams; ++s) {
                low[s] += high[s];
                high[s] = (high[s] << by | high[s] >> (32 - by)) ^ low[s];
                if ((round + 1) % injected == 0) {
                    const int number_of = (round + 1) / injected;
                    low[s] += key.words[number_of % 3];
                    high[s] +=
                        key.words[(number_of + 1) % 3] + static_cast<std::uint32_t>(number_of);
                }
            }
        }
#pragma GCC unroll 8
        for (std::size_t s = 0; s < streams; ++s) {
            words[s * stride + 2 * k] = low[s];
            words[s * stride + 2 * k + 1] = high[s];
        }
    }
}

template <std::size_t streams>
inline void draw(std::uint64_t number, const std::uint32_t (&stream)[streams], const DrawKey& key,
                 std::uint32_t* words, std::size_t stride, std::size_t calls) {
    if ((number ^ (number + calls)) >> 32) {
        draw_words<true>(number, stream, key, words, stride, calls);
    } else {
        draw_words<false>(number, stream, key, words, stride, calls);
    }
}

}  // namespace nearstep::golden
