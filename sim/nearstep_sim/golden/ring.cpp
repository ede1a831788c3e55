// Sums of a ring's tensors: in binary32, with the ring's order of additions for every element; and
// exact ones, which are rounded once and have no order.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

#include "golden/exact.hpp"
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

// The arguments of exact_sum.
struct ExactSum {
    const float* const* tensors;
    std::size_t members, first;
    nearstep::golden::ExactFormat format;
    std::uint32_t divisor;
    float* const* outs;
    std::size_t copies;
};

void exact_range(const ExactSum& sum, std::size_t first, std::size_t last) {
    const nearstep::golden::DefaultEnvironment environment;
    alignas(nearstep::line_bytes) float sums[block];
    for (std::size_t at = first; at < last; at += block) {
        const std::size_t size = std::min(block, last - at);
        nearstep::golden::exact_sums<block>(
            sum.format, sum.tensors, sum.members, at, size, sum.divisor, sums);
        for (std::size_t copy = 0; copy < sum.copies; ++copy) {
            put(sum.outs[copy] + (at - sum.first), sums, size);
        }
    }
    nearstep::finish_puts();
}

// Calls `run(sum, first, last)` for parts of a range in `threads`.
template <class Sum>
void share(
    void (*run)(const Sum&, std::size_t, std::size_t), const Sum& sum, std::size_t first,
    std::size_t last, std::size_t threads) {
    const std::size_t part = ((last - first) / threads / block + 1) * block;
    std::vector<std::thread> helpers;
    std::size_t end = last;
    try {
        for (; end - first > part; end -= part) {
            helpers.emplace_back(run, std::cref(sum), end - part, end);
        }
    } catch (const std::system_error&) {
        // No thread could be started: the rest is summed here.
    }
    run(sum, first, end);
    for (std::thread& helper : helpers) {
        helper.join();
    }
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
    share(sum_range, sum, first, last, threads);
}

// Elements `first` to `last` of the exact sums of `members` tensors, divided by `divisor`, to each
// of `outs`, which begin with element `first`. Elements of the tensors are rounded to `format`, of
// golden/exact.hpp, before they are added, and results once.
extern "C" void exact_sum(
    const float* const* tensors, std::size_t members, std::size_t first, std::size_t last,
    int format, std::uint32_t divisor, float* const* outs, std::size_t copies,
    std::size_t threads) {
    const ExactSum sum{
        tensors, members, first, static_cast<nearstep::golden::ExactFormat>(format),
        divisor, outs,    copies};
    share(exact_range, sum, first, last, threads);
}
