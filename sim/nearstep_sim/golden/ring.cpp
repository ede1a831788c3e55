// Sums of a ring's tensors: in binary32, with the ring's order of additions for every element; and
// exact ones, which are rounded once and have no order. Tensors and results are in binary32, or in
// formats of 16 bits: those are widened before they are added, and rounded once at the end.

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
#include "golden/formats.hpp"
#include "models/bulk.hpp"

namespace {

using nearstep::golden::ExactFormat;
constexpr std::uint32_t magnitude = 0x7FFFFFFFu;
constexpr std::uint32_t infinity = 0x7F800000u;
constexpr std::uint32_t quiet_nan = 0x7FC00000u;
constexpr std::size_t block = 512;  // elements whose sums fit the first cache

// Arrays, and the format of each.
template <class Pointer>
struct Arrays {
    Pointer const* data;
    const ExactFormat* formats;
};

// Calls `take(i, element)` for elements `at` and on of an array.
template <class Take>
void each(
    const Arrays<const void*>& arrays, std::size_t index, std::size_t at, std::size_t size,
    Take take) {
    const auto* values = static_cast<const float*>(arrays.data[index]) + at;
    const auto* patterns = static_cast<const std::uint16_t*>(arrays.data[index]) + at;
    switch (arrays.formats[index]) {
        case ExactFormat::fp32:
            for (std::size_t i = 0; i < size; ++i) {
                take(i, values[i]);
            }
            return;
        case ExactFormat::fp16:
            for (std::size_t i = 0; i < size; ++i) {
                take(i, nearstep::golden::widen_fp16(patterns[i]));
            }
            return;
        case ExactFormat::bf16:
            for (std::size_t i = 0; i < size; ++i) {
                take(i, nearstep::golden::widen_bf16(patterns[i]));
            }
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

template <class Element>
void put(void* out, std::size_t at, const Element* in, std::size_t size) {
    constexpr std::size_t lanes = nearstep::line_bytes / sizeof(Element);
    Element* to = static_cast<Element*>(out) + at;
    std::size_t i = 0;
    for (; i + lanes <= size; i += lanes) {
        nearstep::put_line(to + i, in + i);
    }
    std::memcpy(to + i, in + i, (size - i) * sizeof(*in));
}

// Writes canonical sums to elements `at` and on of all `copies`.
void put_all(
    const Arrays<void*>& outs, std::size_t copies, std::size_t at, const float* sums,
    std::size_t size) {
    alignas(nearstep::line_bytes) std::uint16_t patterns[block];
    ExactFormat held = ExactFormat::fp32;  // of `patterns`, unless it is binary32
    for (std::size_t copy = 0; copy < copies; ++copy) {
        const ExactFormat format = outs.formats[copy];
        if (format == ExactFormat::fp32) {
            put(outs.data[copy], at, sums, size);
            continue;
        }
        if (format == ExactFormat::fp16 && held != format) {
            for (std::size_t i = 0; i < size; ++i) {
                patterns[i] = static_cast<std::uint16_t>(nearstep::golden::narrow_fp16(sums[i]));
            }
        } else if (held != format) {
            for (std::size_t i = 0; i < size; ++i) {
                patterns[i] = static_cast<std::uint16_t>(nearstep::golden::narrow_bf16(sums[i]));
            }
        }
        held = format;
        put(outs.data[copy], at, patterns, size);
    }
}

// The arguments of ring_sum.
struct Sum {
    Arrays<const void*> tensors;
    std::size_t members, elements, entry, rest, first;
    bool scales;
    float scale;
    Arrays<void*> outs;
    std::size_t copies;
};

void sum_range(const Sum& sum, std::size_t first, std::size_t last) {
    const nearstep::golden::DefaultEnvironment environment;
    alignas(nearstep::line_bytes) float sums[block];
    const std::size_t whole = sum.elements - sum.elements % (sum.members * sum.entry);
    for (std::size_t at = first; at < last;) {
        const std::size_t begin = at < whole ? 0 : whole;
        const std::size_t part = at < whole ? sum.entry : sum.rest;
        const std::size_t number = (at - begin) / part;
        const std::size_t end = std::min(last, begin + (number + 1) * part);
        const std::size_t size = std::min(block, end - at);
        each(sum.tensors, number % sum.members, at, size, [&](std::size_t i, float value) {
            sums[i] = value;
        });
        for (std::size_t hop = 1; hop < sum.members; ++hop) {
            const std::size_t next = (number + hop) % sum.members;
            each(sum.tensors, next, at, size, [&](std::size_t i, float value) {
                sums[i] += value;
            });
        }
        if (sum.scales) {
            scale_all(sums, sum.scale, size);
        }
        make_canonical(sums, size);
        put_all(sum.outs, sum.copies, at - sum.first, sums, size);
        at += size;
    }
    nearstep::finish_puts();
}

// The arguments of exact_sum.
struct ExactSum {
    Arrays<const void*> tensors;
    std::size_t members, first;
    ExactFormat format;
    std::uint32_t divisor;
    Arrays<void*> outs;
    std::size_t copies;
};

// The tensors' elements as they are, if they are of one type; else in binary32, a block at a time.
template <class Element>
void exact_range_of(const ExactSum& sum, std::size_t first, std::size_t last) {
    alignas(nearstep::line_bytes) float sums[block];
    std::vector<const Element*> tensors(sum.members);
    std::vector<float> rooms;
    for (std::size_t at = first; at < last; at += block) {
        const std::size_t size = std::min(block, last - at);
        for (std::size_t member = 0; member < sum.members; ++member) {
            if (std::is_same_v<Element, std::uint16_t> ||
                sum.tensors.formats[member] == ExactFormat::fp32) {
                tensors[member] = static_cast<const Element*>(sum.tensors.data[member]) + at;
                continue;
            }
            if constexpr (std::is_same_v<Element, float>) {
                rooms.resize(sum.members * block);
                float* room = &rooms[member * block];
                tensors[member] = room;
                each(sum.tensors, member, at, size, [=](std::size_t i, float value) {
                    room[i] = value;
                });
            }
        }
        nearstep::golden::exact_sums<block>(
            sum.format, tensors.data(), sum.members, 0, size, sum.divisor, sums);
        put_all(sum.outs, sum.copies, at - sum.first, sums, size);
    }
    nearstep::finish_puts();
}

void exact_range(const ExactSum& sum, std::size_t first, std::size_t last) {
    const nearstep::golden::DefaultEnvironment environment;
    const ExactFormat* formats = sum.tensors.formats;
    const bool is_short = sum.format != ExactFormat::fp32 &&
                          std::count(formats, formats + sum.members, sum.format) ==
                              static_cast<std::ptrdiff_t>(sum.members);
    (is_short ? exact_range_of<std::uint16_t> : exact_range_of<float>)(sum, first, last);
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
// the ring, times `scale` if `scales`; to each of `outs`, which begin with element `first`. The
// tensors have the first `members` of `formats`, `outs` the rest. A chunk
// has a part of `entry` elements for each member, the last chunk parts of `rest`: part p is summed
// from the tensor of position p on. `threads` share the elements; no bit depends on their number.
extern "C" void ring_sum(
    const void* const* tensors, std::size_t members, std::size_t elements, std::size_t entry,
    std::size_t rest, std::size_t first, std::size_t last, int scales, float scale,
    void* const* outs, std::size_t copies, std::size_t threads, const ExactFormat* formats) {
    const Sum sum{
        {tensors, formats}, members,     elements, entry, rest,
        first,              scales != 0, scale,    {outs, formats + members}, copies};
    share(sum_range, sum, first, last, threads);
}

// Elements `first` to `last` of the exact sums of `members` tensors, divided by `divisor`, to each
// of `outs`, which begin with element `first`. Elements of the tensors are rounded to `format`, of
// golden/exact.hpp, before they are added, and results once. `formats`: as of ring_sum.
extern "C" void exact_sum(
    const void* const* tensors, std::size_t members, std::size_t first, std::size_t last,
    int format, std::uint32_t divisor, void* const* outs, std::size_t copies,
    std::size_t threads, const ExactFormat* formats) {
    const ExactSum sum{
        {tensors, formats}, members, first, static_cast<ExactFormat>(format),
        divisor,            {outs, formats + members}, copies};
    share(exact_range, sum, first, last, threads);
}
