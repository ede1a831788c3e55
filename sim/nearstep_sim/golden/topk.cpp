// The elements of largest magnitude of an array that the caches hold.

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr std::uint32_t magnitude = 0x7FFFFFFFu;
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

}  // namespace

// Positions of the `count` elements of largest magnitude, ascending; of equal ones the first. NaN
// is above infinity. 0 < count <= size < 2^32.
extern "C" void topk_largest(
    const std::uint32_t* bits, std::size_t size, std::size_t count, std::int64_t* out) {
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
