// Exact sums of binary32, binary16 or bfloat16 in fixed point, rounded once to nearest even.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "golden/floats.hpp"
#include "golden/formats.hpp"

namespace nearstep::golden {

// Values are those of `job.wire`.
enum class ExactFormat { fp32 = 0, fp16 = 1, bf16 = 2 };

struct Shape {
    int precision, least, most;  // significand; exponents of the least and of the greatest bit
};

constexpr Shape shape_of(ExactFormat format) {
    return format == ExactFormat::fp32   ? Shape{24, -149, 127}
           : format == ExactFormat::fp16 ? Shape{11, -24, 15}
                                         : Shape{8, -133, 127};
}

// The nearest number of the format; NaNs become the default one.
template <ExactFormat format>
inline float in_format(float value) {
    if constexpr (format == ExactFormat::bf16) {
        return widen_bf16(narrow_bf16(canonical(value)));
    } else if constexpr (format == ExactFormat::fp16) {
        return widen_fp16(narrow_fp16(value));
    } else {
        return value;
    }
}

// A sum of up to 2^31 numbers of binary32, in units of 2^-181: 32 bits below the least number, for
// quotients. A limb holds 32 bits and its carries.
class Superaccumulator {
    static constexpr int limbs = 10, bits = 32, base = -181;
    std::array<std::int64_t, limbs> limbs_{};
    bool nan_ = false, plus_ = false, minus_ = false, negative_zeros_ = true;

    // Bit `index` of a magnitude.
    static bool bit(const std::array<std::uint32_t, limbs>& of, int index) {
        return of[index / bits] >> index % bits & 1;
    }

    // The nearest number of the format; `more`: something is below the last bit.
    static float rounded(
        const std::array<std::uint32_t, limbs>& value, bool more, const Shape& shape) {
        int top = limbs * bits - 1;
        while (top >= 0 && !bit(value, top)) {
            --top;
        }
        const int unit = std::max(top - (shape.precision - 1), shape.least - base);
        std::uint32_t kept = 0;
        for (int index = top; index >= unit; --index) {
            kept = kept << 1 | bit(value, index);
        }
        for (int index = 0; index < unit - 1; ++index) {
            more |= bit(value, index);
        }
        kept += bit(value, unit - 1) && (more || (kept & 1));
        const double found = std::ldexp(static_cast<double>(kept), unit + base);
        return found < std::ldexp(1.0, shape.most + 1) ? static_cast<float>(found)
                                                       : as_float(infinity);
    }

  public:
    void add(float value) {
        const std::uint32_t word = as_bits(value), rest = word & magnitude;
        const bool negative = word >> 31;
        negative_zeros_ &= rest == 0 && negative;
        if (rest >= infinity) {
            nan_ |= rest > infinity;
            (negative ? minus_ : plus_) = true;
            return;
        }
        const int exponent = static_cast<int>(rest >> 23);
        const std::uint64_t significand = (rest & 0x7FFFFFu) | (exponent ? 1u << 23 : 0u);
        const int shift = std::max(exponent, 1) - 150 - base;
        const std::uint64_t wide = significand << shift % bits;
        const std::int64_t sign = negative ? -1 : 1;
        limbs_[shift / bits] += sign * static_cast<std::int64_t>(wide & 0xFFFFFFFFu);
        limbs_[shift / bits + 1] += sign * static_cast<std::int64_t>(wide >> bits);
    }

    float result(std::uint32_t divisor, const Shape& shape) const {
        if (nan_ || (plus_ && minus_)) {
            return as_float(quiet_nan);
        }
        if (plus_ || minus_) {
            return as_float(infinity | (minus_ ? ~magnitude : 0u));
        }
        std::array<std::uint32_t, limbs> value;
        std::int64_t carry = 0;
        for (int i = 0; i < limbs; ++i) {
            carry += limbs_[i];
            value[i] = static_cast<std::uint32_t>(carry);
            carry >>= bits;
        }
        const bool negative = carry < 0;
        std::uint64_t borrow = negative;
        for (int i = 0; i < limbs; ++i) {
            borrow += negative ? ~value[i] : value[i];
            value[i] = static_cast<std::uint32_t>(borrow);
            borrow >>= bits;
        }
        if (std::all_of(value.begin(), value.end(), [](std::uint32_t limb) { return !limb; })) {
            return negative_zeros_ ? -0.0f : 0.0f;
        }
        std::uint64_t rest = 0;
        for (int i = limbs - 1; i >= 0; --i) {
            rest = rest << bits | value[i];
            value[i] = static_cast<std::uint32_t>(rest / divisor);
            rest %= divisor;
        }
        const float found = rounded(value, rest != 0, shape);
        return negative ? -found : found;
    }
};

// A double, rounded once to the format: by way of binary32, whose last bit is set if it is inexact
// (rounding to odd), so that the second rounding sees what the first one dropped.
template <ExactFormat format>
inline float narrowed(double value) {
    const float nearest = static_cast<float>(value);
    if constexpr (format == ExactFormat::fp32) {
        return nearest;
    }
    const double back = nearest;
    std::uint32_t word = as_bits(nearest);
    word -= std::fabs(back) > std::fabs(value);
    word |= back != value;
    return in_format<format>(as_float(word));
}

// Most sums are exact in a double: all errors of additions (Knuth's TwoSum) are zero. The others,
// and specials, whose errors are NaN, are summed in a superaccumulator.
template <ExactFormat format, std::size_t block>
void sums_of(
    const float* const* tensors, std::size_t members, std::size_t at, std::size_t size,
    std::uint32_t divisor, float* out) {
    double sums[block];
    std::uint64_t errors[block];
    for (std::size_t i = 0; i < size; ++i) {
        const float first = in_format<format>(tensors[0][at + i]);
        sums[i] = first;
        errors[i] = (as_bits(first) & magnitude) >= infinity;
    }
    for (std::size_t member = 1; member < members; ++member) {
        const float* __restrict tensor = tensors[member] + at;
        for (std::size_t i = 0; i < size; ++i) {
            const double more = in_format<format>(tensor[i]), sum = sums[i] + more;
            const double part = sum - sums[i];
            const double error = (sums[i] - (sum - part)) + (more - part);
            errors[i] |= std::bit_cast<std::uint64_t>(error) << 1;
            sums[i] = sum;
        }
    }
    if (divisor > 1) {
        // A quotient that is rounded is as good as the exact one, unless it looks like a tie, which
        // has at most 25 significant bits.
        for (std::size_t i = 0; i < size; ++i) {
            const double quotient = sums[i] / divisor;
            const bool is_short = !(std::bit_cast<std::uint64_t>(quotient) & 0x7FFFFFFu);
            errors[i] |= is_short && quotient * divisor != sums[i];
            sums[i] = quotient;
        }
    }
    for (std::size_t i = 0; i < size; ++i) {
        out[i] = narrowed<format>(sums[i]);
    }
    for (std::size_t i = 0; i < size; ++i) {
        if (errors[i]) {
            Superaccumulator sum;
            for (std::size_t member = 0; member < members; ++member) {
                sum.add(in_format<format>(tensors[member][at + i]));
            }
            out[i] = sum.result(divisor, shape_of(format));
        }
    }
}

// Exact sums of elements `at` to `at` + `size`, at most `block`, divided by `divisor`.
template <std::size_t block>
void exact_sums(
    ExactFormat format, const float* const* tensors, std::size_t members, std::size_t at,
    std::size_t size, std::uint32_t divisor, float* out) {
    switch (format) {
        case ExactFormat::fp16:
            return sums_of<ExactFormat::fp16, block>(tensors, members, at, size, divisor, out);
        case ExactFormat::bf16:
            return sums_of<ExactFormat::bf16, block>(tensors, members, at, size, divisor, out);
        case ExactFormat::fp32:
            return sums_of<ExactFormat::fp32, block>(tensors, members, at, size, divisor, out);
    }
}

}  // namespace nearstep::golden
