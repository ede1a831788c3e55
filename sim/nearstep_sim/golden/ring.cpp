// The sum of a ring's tensors in binary32, with the ring's order of additions for every element.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

#include "models/bulk.hpp"

namespace {

constexpr std::uint32_t magnitude = 0x7FFFFFFFu;
constexpr std::uint32_t infinity = 0x7F800000u;
constexpr std::uint32_t quiet_nan = 0x7FC00000u;
constexpr std::size_t block = 512;  // elements whose sums fit the first cache
constexpr std::size_t lanes = nearstep::line_bytes / sizeof(float);

void add(float* __restrict sums, const float* __restrict more, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        sums[i] += more[i];
    }
}

void scale_all(float* sums, float scale, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        sums[i] *= scale;
    }
}

// Makes NaNs canonical. Once at the end is enough: a sum with a NaN operand is a NaN.
void make_canonical(float* sums, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
        const std::uint32_t bits = std::bit_cast<std::uint32_t>(sums[i]);
        sums[i] = std::bit_cast<float>((bits & magnitude) > infinity ? quiet_nan : bits);
    }
}

void put(float* out, const float* in, std::size_t size) {
    std::size_t i = 0;
    for (; i + lanes <= size; i += lanes) {
        nearstep::put_line(out + i, in + i);
    }
    std::memcpy(out + i, in + i, (size - i) * sizeof(*in));
}

// The arguments of ring_sum.
struct Sum {
    const float* const* tensors;
    std::size_t members, elements, entry, rest, first;
    bool scales;
    float scale;
    float* const* outs;
    std::size_t copies;
};

void sum_range(const Sum& sum, std::size_t first, std::size_t last) {
    alignas(nearstep::line_bytes) float sums[block];
    const std::size_t whole = sum.elements - sum.elements % (sum.members * sum.entry);
    for (std::size_t at = first; at < last;) {
        const std::size_t begin = at < whole ? 0 : whole;
        const std::size_t part = at < whole ? sum.entry : sum.rest;
        const std::size_t number = (at - begin) / part;
        const std::size_t end = std::min(last, begin + (number + 1) * part);
        const std::size_t size = std::min(block, end - at);
        std::memcpy(sums, sum.tensors[number % sum.members] + at, size * sizeof(float));
        for (std::size_t hop = 1; hop < sum.members; ++hop) {
            add(sums, sum.tensors[(number + hop) % sum.members] + at, size);
        }
        if (sum.scales) {
            scale_all(sums, sum.scale, size);
        }
        make_canonical(sums, size);
        for (std::size_t copy = 0; copy < sum.copies; ++copy) {
            put(sum.outs[copy] + (at - sum.first), sums, size);
        }
        at += size;
    }
    nearstep::finish_puts();
}

}  // namespace

// Elements `first` to `last` of the sums of `members` tensors of `elements` each, in the order of
// the ring, times `scale` if `scales`; to each of `outs`, which begin with element `first`. A chunk
// has a part of `entry` elements for each member, the last chunk parts of `rest`: part p is summed
// from the tensor of position p on. `threads` share the elements; no bit depends on their number.
extern "C" void ring_sum(
    const float* const* tensors, std::size_t members, std::size_t elements, std::size_t entry,
    std::size_t rest, std::size_t first, std::size_t last, int scales, float scale,
    float* const* outs, std::size_t copies, std::size_t threads) {
    const Sum sum{tensors, members, elements, entry, rest, first, scales != 0, scale, outs, copies};
    const std::size_t share = ((last - first) / threads / block + 1) * block;
    std::vector<std::thread> helpers;
    std::size_t end = last;
    try {
        for (; end - first > share; end -= share) {
            helpers.emplace_back(sum_range, std::cref(sum), end - share, end);
        }
    } catch (const std::system_error&) {
        // No thread could be started: the rest is summed here.
    }
    sum_range(sum, first, end);
    for (std::thread& helper : helpers) {
        helper.join();
    }
}
