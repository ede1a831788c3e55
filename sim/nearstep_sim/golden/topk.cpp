// The elements of largest magnitude of each block of an array.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "models/bulk.hpp"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr std::uint32_t magnitude = 0x7FFFFFFFu;
constexpr std::uint32_t nothing = 0x80000000u;  // -0: added to a number it changes no bit of it
constexpr std::size_t sampled = 64;  // of so many elements one is looked at first
constexpr std::size_t lanes = 16;

// The count-th largest of keys from `least` on, below 2^31, bit by bit from the highest that they
// differ in; 0 < count <= size.
std::uint32_t nth_largest(
    const std::uint32_t* keys, std::size_t size, std::size_t count, std::uint32_t least) {
    std::uint32_t most = least;
    for (std::size_t i = 0; i < size; ++i) {
        most = keys[i] > most ? keys[i] : most;
    }
    const int width = std::bit_width(most ^ least);
    std::uint32_t found = width == 0 ? least : most >> width << width;
    for (std::uint32_t bit = (1u << width) >> 1; bit != 0; bit >>= 1) {
        const std::uint32_t tried = found | bit;
        std::uint32_t reach = 0;
        for (std::size_t i = 0; i < size; ++i) {
            reach += keys[i] >= tried ? 1u : 0u;
        }
        found = reach >= count ? tried : found;
    }
    return found;
}

struct Candidates {
    std::vector<std::uint32_t> keys;
    std::vector<std::uint32_t> places;
    std::size_t size = 0;
};

// Elements whose key is `least` or more, in order.
void collect(const std::uint32_t* bits, std::size_t size, std::uint32_t least, Candidates& out) {
    std::size_t n = 0, i = 0;
    std::uint32_t* keys = out.keys.data();
    std::uint32_t* places = out.places.data();
#if defined(__AVX512F__)
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(magnitude));
    const __m512i bound = _mm512_set1_epi32(static_cast<int>(least));
    const __m512i step = _mm512_set1_epi32(static_cast<int>(lanes));
    __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + lanes <= size; i += lanes) {
        const __m512i key = _mm512_and_si512(_mm512_loadu_si512(bits + i), mask);
        const __mmask16 reach = _mm512_cmpge_epu32_mask(key, bound);
        _mm512_storeu_si512(keys + n, _mm512_maskz_compress_epi32(reach, key));
        _mm512_storeu_si512(places + n, _mm512_maskz_compress_epi32(reach, place));
        n += static_cast<std::size_t>(__builtin_popcount(reach));
        place = _mm512_add_epi32(place, step);
    }
#endif
    for (; i < size; ++i) {
        const std::uint32_t key = bits[i] & magnitude;
        keys[n] = key;
        places[n] = static_cast<std::uint32_t>(i);
        n += key >= least ? 1u : 0u;
    }
    out.size = n;
}

// Positions of the `count` elements of largest magnitude, ascending; of equal ones the first. NaN
// is above infinity. 0 < count <= size < 2^32.
void largest(
    const std::uint32_t* bits, std::size_t size, std::size_t count, std::uint32_t* out) {
    thread_local Candidates found;
    if (found.keys.size() < size + lanes) {  // a whole vector is stored behind the last
        found.keys.resize(size + lanes);
        found.places.resize(size + lanes);
    }
    // More than enough reach what this part of a sample reaches, unless it says little of the rest.
    std::size_t taken = 0;
    for (std::size_t i = 0; i < size; i += sampled) {
        found.keys[taken++] = bits[i] & magnitude;
    }
    const std::size_t rank = (taken * count + size - 1) / size * 3 / 2 + 8;
    std::uint32_t from = 0;
    if (rank < taken / 2) {
        from = nth_largest(found.keys.data(), taken, rank, 0);
        collect(bits, size, from, found);
    }
    if (rank >= taken / 2 || found.size < count) {
        from = 0;
        collect(bits, size, from, found);
    }
    const std::uint32_t least = nth_largest(found.keys.data(), found.size, count, from);
    std::size_t reach = 0;
    for (std::size_t i = 0; i < found.size; ++i) {
        reach += found.keys[i] >= least ? 1u : 0u;
    }
    std::size_t last = found.size;  // element from which on equal ones are not kept
    for (std::size_t surplus = reach - count; surplus != 0;) {
        surplus -= found.keys[--last] == least ? 1u : 0u;
    }
    for (std::size_t i = 0, n = 0; n < count; ++i) {
        out[n] = found.places[i];
        n += found.keys[i] >= least + (i < last ? 0u : 1u) ? 1u : 0u;
    }
}

// What is left of a block, on its way to memory.
struct Rest {
    std::uint32_t* out = nullptr;
    const std::uint32_t* in = nullptr;
    std::size_t size = 0;

    // Part [start, start + lanes), if there is one.
    void put(std::size_t start) const {
        if (start + lanes <= size) {
            nearstep::put_line(out + start, in + start);
        } else if (start < size) {
            std::memcpy(out + start, in + start, (size - start) * sizeof(*in));
        }
    }

    void put_all() const {
        for (std::size_t start = 0; start < size; start += lanes) {
            put(start);
        }
    }
};

std::uint32_t plus(std::uint32_t one, std::uint32_t other) {
    return std::bit_cast<std::uint32_t>(std::bit_cast<float>(one) + std::bit_cast<float>(other));
}

// The sums of a block, while what is left of the block before goes to memory: reads and writes at
// once take as long as the slower of them.
void add(
    const std::uint32_t* __restrict before, const std::uint32_t* __restrict given,
    std::size_t size, std::uint32_t* __restrict sum, const Rest& last) {
    constexpr std::size_t ahead = nearstep::ahead_bytes / sizeof(*given);
    std::size_t start = 0;
    for (; start + lanes <= size; start += lanes) {
        __builtin_prefetch(given + start + ahead);
        __builtin_prefetch(before + start + ahead);
        last.put(start);
        for (std::size_t i = start; i < start + lanes; ++i) {
            sum[i] = plus(before[i], given[i]);
        }
    }
    for (std::size_t i = start; i < size; ++i) {
        sum[i] = plus(before[i], given[i]);
    }
    for (; start < last.size; start += lanes) {
        last.put(start);
    }
}

}  // namespace

// Of each block of an array the `count` elements of largest magnitude, of the last, shorter one
// `last_count`: their positions in the array, ascending, and values. The array is `gradient`, or,
// where `rest` is given, `residual`, if there is one, plus `gradient`; it goes to `rest`, with -0
// for the elements that were found.
extern "C" void topk_take(
    const std::uint32_t* gradient, const std::uint32_t* residual, std::uint32_t* rest,
    std::size_t size, std::size_t block, std::size_t count, std::size_t last_count,
    std::int64_t* index, std::uint32_t* value) {
    thread_local std::vector<std::uint32_t> sums, places;
    places.resize(std::max(places.size(), block));
    sums.resize(std::max(sums.size(), 2 * block));
    Rest last;
    for (std::size_t start = 0; start < size; start += block) {
        const std::size_t length = std::min(block, size - start);
        const std::size_t taken = length < block ? last_count : count;
        const std::uint32_t* given = gradient + start;
        std::uint32_t* sum = sums.data() + (start / block % 2) * block;
        if (rest != nullptr) {
            if (residual == nullptr) {
                last.put_all();
                std::memcpy(sum, given, length * sizeof(*sum));
            } else {
                add(residual + start, given, length, sum, last);
            }
            given = sum;
            last = {rest + start, sum, length};
        }
        largest(given, length, taken, places.data());
        for (std::size_t i = 0; i < taken; ++i) {
            const std::size_t at = places[i];
            index[i] = static_cast<std::int64_t>(start + at);
            value[i] = given[at];
            if (rest != nullptr) {
                sum[at] = nothing;
            }
        }
        index += taken;
        value += taken;
    }
    last.put_all();
    nearstep::finish_puts();
}
