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
constexpr std::uint32_t nothing = 0x80000000u;  // -0: x + -0 has the bits of x
constexpr std::size_t sampled = 64;  // distance between elements of a sample
constexpr std::size_t lanes = 16;
constexpr std::size_t chunk = 256;  // elements whose sums fit the first cache

// The count-th largest of keys in [least, 2^31), bit by bit from the highest bit in which keys
// differ; 0 < count <= size.
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
        if (reach == count) {  // the least key that reaches `tried`
            std::uint32_t fewest = most;
            for (std::size_t i = 0; i < size; ++i) {
                fewest = keys[i] >= tried && keys[i] < fewest ? keys[i] : fewest;
            }
            return fewest;
        }
    }
    return found;
}

struct Candidates {
    std::vector<std::uint32_t> bits;
    std::vector<std::uint32_t> keys;  // bits without the sign
    std::vector<std::uint32_t> places;
    std::size_t size = 0;

    // Allocates for a block of `most` elements, and for whole vectors stored from the last one on.
    void reserve(std::size_t most) {
        if (bits.size() < most + lanes) {
            bits.resize(most + lanes);
            keys.resize(most + lanes);
            places.resize(most + lanes);
        }
    }
};

// Adds elements whose key is `least` or more, in order; `first` is the place of the first one.
void collect(
    const std::uint32_t* bits, std::size_t first, std::size_t size, std::uint32_t least,
    Candidates& out) {
    std::size_t n = out.size, i = 0;
    std::uint32_t* found = out.bits.data();
    std::uint32_t* places = out.places.data();
#if defined(__AVX512F__)
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(magnitude));
    const __m512i bound = _mm512_set1_epi32(static_cast<int>(least));
    const __m512i step = _mm512_set1_epi32(static_cast<int>(lanes));
    __m512i place = _mm512_add_epi32(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
        _mm512_set1_epi32(static_cast<int>(first)));
    for (; i + lanes <= size; i += lanes) {
        const __m512i each = _mm512_loadu_si512(bits + i);
        const __mmask16 reach = _mm512_cmpge_epu32_mask(_mm512_and_si512(each, mask), bound);
        _mm512_storeu_si512(found + n, _mm512_maskz_compress_epi32(reach, each));
        _mm512_storeu_si512(places + n, _mm512_maskz_compress_epi32(reach, place));
        n += static_cast<std::size_t>(__builtin_popcount(reach));
        place = _mm512_add_epi32(place, step);
    }
#endif
    for (; i < size; ++i) {
        found[n] = bits[i];
        places[n] = static_cast<std::uint32_t>(first + i);
        n += (bits[i] & magnitude) >= least ? 1u : 0u;
    }
    out.size = n;
}

std::uint32_t plus(std::uint32_t one, std::uint32_t other) {
    return std::bit_cast<std::uint32_t>(std::bit_cast<float>(one) + std::bit_cast<float>(other));
}

// A block of the gradient, plus the residual of the step before if `before` is not null.
struct Block {
    const std::uint32_t* given;
    const std::uint32_t* before;
    std::size_t size;

    std::uint32_t at(std::size_t place) const {
        return before == nullptr ? given[place] : plus(before[place], given[place]);
    }

    // Elements from `start` on: of the gradient, or summed in `sums`, which has `length` elements.
    const std::uint32_t* part(std::size_t start, std::size_t length, std::uint32_t* sums) const {
        if (before == nullptr) {
            return given + start;
        }
        const std::uint32_t* __restrict one = before + start;
        const std::uint32_t* __restrict other = given + start;
        for (std::size_t i = 0; i < length; ++i) {
            sums[i] = plus(one[i], other[i]);
        }
        return sums;
    }

    // A key that probably `count` elements or more reach, from a sample; 0 if it is too small.
    std::uint32_t guess(std::size_t count, Candidates& room) const {
        std::size_t taken = 0;
        for (std::size_t i = 0; i < size; i += sampled) {
            room.keys[taken++] = at(i) & magnitude;
        }
        const std::size_t rank = (taken * count + size - 1) / size * 3 / 2 + 8;
        return rank < taken / 2 ? nth_largest(room.keys.data(), taken, rank, 0) : 0;
    }

    // Collects elements that reach `least`; writes all elements to `rest` unless null.
    void collect_all(std::uint32_t least, std::uint32_t* rest, Candidates& out) const {
        alignas(nearstep::line_bytes) std::uint32_t sums[chunk];
        out.size = 0;
        for (std::size_t start = 0; start < size; start += chunk) {
            const std::size_t length = std::min(chunk, size - start);
            const std::uint32_t* each = part(start, length, sums);
            if (rest != nullptr) {
                put(rest + start, each, length);
            }
            collect(each, start, length, least, out);
        }
    }

  private:
    static void put(std::uint32_t* out, const std::uint32_t* in, std::size_t length) {
        std::size_t i = 0;
        for (; i + lanes <= length; i += lanes) {
            nearstep::put_line(out + i, in + i);
        }
        std::memcpy(out + i, in + i, (length - i) * sizeof(*in));
    }
};

// Takes blocks in order. The result depends on no guess: if fewer than `count` elements reach the
// guessed key, the block is read again with a lower key.
class Taker {
    Candidates& found_;
    std::uint32_t least_ = 0;  // least key taken of the block before
    std::uint32_t margin_ = 0;  // how far the next block's first key is below `least_`; 0: unknown

  public:
    explicit Taker(Candidates& room) : found_(room) {}

    // Places, ascending, and values of the `count` elements of largest magnitude of a block; of
    // equal magnitudes the first. NaN is above infinity. 0 < count <= size < 2^32.
    void take(
        const Block& block, std::size_t count, std::uint32_t* rest, std::uint32_t* places,
        std::uint32_t* values) {
        found_.reserve(block.size);
        const bool known = margin_ != 0;
        std::uint32_t from = known ? least_ - std::min(least_, margin_) : block.guess(count, found_);
        block.collect_all(from, rest, found_);
        const bool missed = found_.size < count;
        if (missed) {
            from = known ? block.guess(count, found_) : 0;
            block.collect_all(from, nullptr, found_);
        }
        if (found_.size < count) {
            from = 0;
            block.collect_all(from, nullptr, found_);
        }
        for (std::size_t i = 0; i < found_.size; ++i) {
            found_.keys[i] = found_.bits[i] & magnitude;
        }
        least_ = nth_largest(found_.keys.data(), found_.size, count, from);
        choose(count, places, values);
        margin_ = missed || !known ? least_ - from : margin_;
        if (found_.size < count + count / 8 + 8) {
            margin_ = std::min(margin_ + margin_ / 2, magnitude);
        } else if (found_.size > 2 * count) {
            margin_ -= margin_ / 4;
        }
    }

  private:
    void choose(std::size_t count, std::uint32_t* places, std::uint32_t* values) const {
        std::size_t reach = 0;
        for (std::size_t i = 0; i < found_.size; ++i) {
            reach += found_.keys[i] >= least_ ? 1u : 0u;
        }
        std::size_t last = found_.size;  // from here on, keys equal to `least_` are dropped
        for (std::size_t surplus = reach - count; surplus != 0;) {
            surplus -= found_.keys[--last] == least_ ? 1u : 0u;
        }
        for (std::size_t i = 0, n = 0; n < count; ++i) {
            places[n] = found_.places[i];
            values[n] = found_.bits[i];
            n += found_.keys[i] >= least_ + (i < last ? 0u : 1u) ? 1u : 0u;
        }
    }
};

}  // namespace

// Positions, ascending, and values of the `count` elements of largest magnitude of each block of an
// array, `last_count` of a shorter last block. The array is `gradient`; if neither `rest` nor
// `residual` is null, `residual` plus `gradient`. Unless null, `rest` gets the array with -0 for
// the elements found.
extern "C" void topk_take(
    const std::uint32_t* gradient, const std::uint32_t* residual, std::uint32_t* rest,
    std::size_t size, std::size_t block, std::size_t count, std::size_t last_count,
    std::int64_t* index, std::uint32_t* value) {
    thread_local Candidates room;
    thread_local std::vector<std::uint32_t> places;
    places.resize(std::max(places.size(), block));
    Taker taker(room);
    for (std::size_t start = 0; start < size; start += block) {
        const std::size_t length = std::min(block, size - start);
        const std::size_t taken = length < block ? last_count : count;
        const bool adds = rest != nullptr && residual != nullptr;
        std::uint32_t* left = rest == nullptr ? nullptr : rest + start;
        const Block each{gradient + start, adds ? residual + start : nullptr, length};
        taker.take(each, taken, left, places.data(), value);
        if (left != nullptr) {
            nearstep::finish_puts();
        }
        for (std::size_t i = 0; i < taken; ++i) {
            index[i] = static_cast<std::int64_t>(start + places[i]);
            if (left != nullptr) {
                left[places[i]] = nothing;
            }
        }
        index += taken;
        value += taken;
    }
}
