// Exact sums of binary32, binary16 or bfloat16 in fixed point, rounded once to nearest even.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

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

// Magnitudes of binary32 from this one on are infinite, or NaN, in the format.
constexpr std::uint32_t beyond(ExactFormat format) {
    return format == ExactFormat::fp32   ? infinity
           : format == ExactFormat::fp16 ? 0x477FF000u
                                         : 0x7F7F8000u;
}

// The nearest number of the format to one that is not beyond it. The sum with a power of
// two is rounded where the format's last bit is.
template <ExactFormat format>
inline float nearest(float value) {
    const std::uint32_t word = as_bits(value), size = word & magnitude;
    if constexpr (format == ExactFormat::fp32) {
        return value;
    } else if constexpr (format == ExactFormat::bf16) {
        return as_float((word + 0x7FFFu + (word >> 16 & 1)) & 0xFFFF0000u);
    }
    const float unit = as_float(std::max(size & infinity, 113u << 23) + (13u << 23));
    return as_float(as_bits(as_float(size) + unit - unit) | (word & ~magnitude));
}

// The nearest number of the format; NaNs become the default one.
template <ExactFormat format>
inline float in_format(float value) {
    const std::uint32_t size = as_bits(value) & magnitude;
    const std::uint32_t special = infinity | (as_bits(value) & ~magnitude);
    return size < beyond(format) ? nearest<format>(value)
                                 : as_float(size > infinity ? quiet_nan : special);
}

// The value of an element in binary32, or of a pattern of the format.
template <ExactFormat format>
inline float value_of(float element) {
    return element;
}

template <ExactFormat format>
inline float value_of(std::uint16_t pattern) {
    return format == ExactFormat::fp16 ? widen_fp16(pattern) : widen_bf16(pattern);
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

// The nearest number of the format to a finite one, rounded once.
template <ExactFormat format>
inline float nearest(double value) {
    if constexpr (format == ExactFormat::fp32) {
        return static_cast<float>(value);
    }
    constexpr Shape shape = shape_of(format);
    constexpr std::int64_t least = std::int64_t{format == ExactFormat::fp16 ? 1009 : 897} << 52;
    const double size = std::fabs(value);
    const std::int64_t power = std::bit_cast<std::int64_t>(size) & 0x7FF0000000000000;
    const double unit =
        std::bit_cast<double>(std::max(power, least) + (std::int64_t{53 - shape.precision} << 52));
    const float found = static_cast<float>(size + unit - unit);
    const std::uint32_t sign = as_bits(static_cast<float>(value)) & ~magnitude;
    const bool overflows = format == ExactFormat::fp16 && found > 65504.0f;
    return as_float((overflows ? infinity : as_bits(found)) | sign);
}

// Divides sums, and rounds them. A quotient that is rounded is as good as the exact one, unless it
// looks like a tie, which has at most 25 significant bits: `errors` of such are set.
template <ExactFormat format, class Error>
void finish(double* sums, Error* errors, std::size_t size, std::uint32_t divisor, float* out) {
    if (divisor & (divisor - 1)) {
        for (std::size_t i = 0; i < size; ++i) {
            const double quotient = sums[i] / divisor;
            const bool is_short = !(std::bit_cast<std::uint64_t>(quotient) & 0x7FFFFFFu);
            errors[i] |= is_short & (quotient * divisor != sums[i]);
            sums[i] = quotient;
        }
        divisor = 1;
    }
    const double scale = 1.0 / divisor;
    for (std::size_t i = 0; i < size; ++i) {
        out[i] = nearest<format>(sums[i] * scale);
    }
}

// The sum of two numbers, and what it is too small by, exactly (Knuth's TwoSum).
inline double two_sum(double a, double b, double* error) {
    const double sum = a + b, part = sum - a;
    *error = (a - (sum - part)) + (b - part);
    return sum;
}

// Sums as two doubles, of which the second adds up the errors of the first. Those whose errors have
// errors are summed in a superaccumulator. Infinities and NaN need no other care: no sum of finite
// numbers is infinite in a double.
template <ExactFormat format, std::size_t block, class Element>
void checked_sums(
    const Element* const* tensors, std::size_t members, std::size_t at, std::size_t size,
    std::uint32_t divisor, float* out) {
    double sums[block], rests[block] = {};
    std::uint64_t errors[block] = {};
    std::fill_n(sums, size, -0.0);
    for (std::size_t member = 0; member < members; ++member) {
        const Element* __restrict tensor = tensors[member] + at;
        for (std::size_t i = 0; i < size; ++i) {
            double rest, error;
            const float value = in_format<format>(value_of<format>(tensor[i]));
            sums[i] = two_sum(sums[i], static_cast<double>(value), &rest);
            rests[i] = two_sum(rests[i], rest, &error);
            errors[i] |= std::bit_cast<std::uint64_t>(error) << 1;
        }
    }
    for (std::size_t i = 0; i < size; ++i) {
        // The last bit of a sum that is inexact is set (rounding to odd), so that it can be rounded
        // again.
        double rest;
        const double sum = two_sum(sums[i], rests[i], &rest);
        const std::uint64_t word = std::bit_cast<std::uint64_t>(sum);
        const std::uint64_t odd = (rest < 0) == (sum < 0) ? word | 1 : (word - 1) | 1;
        const bool is_finite = std::fabs(sums[i]) < std::numeric_limits<double>::infinity();
        errors[i] = is_finite ? errors[i] | (rest != 0 && divisor & (divisor - 1)) : 0;
        if (is_finite && rests[i] != 0) {
            sums[i] = rest != 0 ? std::bit_cast<double>(odd) : sum;
        }
    }
    finish<format>(sums, errors, size, divisor, out);
    for (std::size_t i = 0; i < size; ++i) {
        if (errors[i]) {
            Superaccumulator sum;
            for (std::size_t member = 0; member < members; ++member) {
                sum.add(in_format<format>(value_of<format>(tensors[member][at + i])));
            }
            out[i] = sum.result(divisor, shape_of(format));
        } else if (!(std::fabs(sums[i]) < std::numeric_limits<double>::infinity())) {
            out[i] = canonical(static_cast<float>(sums[i]));
        }
    }
}

// The nearest number of the format to a finite element.
template <ExactFormat format>
inline float addend(float element) {
    return nearest<format>(element);
}

template <ExactFormat format>
inline float addend(std::uint16_t pattern) {
    return value_of<format>(pattern);
}

// Sums of elements of a block, with the largest magnitude of their addends, and the smallest that is
// not zero, less one.
template <std::size_t block, class Number>
struct Totals {
    Number sums[block];
    std::uint32_t most[block], least[block];

    // Adds elements `at` and on of `count` tensors.
    template <ExactFormat format, std::size_t count, class Element>
    void add(const Element* const* tensors, std::size_t at, std::size_t size) {
        std::array<const Element*, count> from;
        for (std::size_t member = 0; member < count; ++member) {
            from[member] = tensors[member] + at;
        }
        for (std::size_t i = 0; i < size; ++i) {
            Number sum = sums[i];
            std::uint32_t high = most[i], low = least[i];
            for (std::size_t member = 0; member < count; ++member) {
                const Element element = from[member][i];
                const std::uint32_t word = as_bits(value_of<format>(element)) & magnitude;
                sum += static_cast<Number>(addend<format>(element));
                high = std::max(high, word);
                low = std::min(low, word - 1);
            }
            sums[i] = sum;
            most[i] = high;
            least[i] = low;
        }
    }
};

// Most sums have no special among their addends, and are exact in a `Number`: all partial sums are
// whole numbers of the last bit of the smallest addend, and not too large. In fp16 all are exact in
// a double. The sums of parts for which this is not so are left to a double, or to `checked_sums`.
template <ExactFormat format, std::size_t block, class Number, class Element>
void sums_of(
    const Element* const* tensors, std::size_t members, std::size_t at, std::size_t size,
    std::uint32_t divisor, float* __restrict out) {
    constexpr std::size_t together = 4, part = 64;
    constexpr bool is_double = std::is_same_v<Number, double>;
    std::uint32_t errors[block];
    if (members == 2 && divisor <= 2) {
        // The sum in binary32 has more than twice the bits of 16-bit formats, so that it can be
        // rounded again; halves are inexact only if the sum is exact.
        const Element* first = tensors[0] + at;
        const Element* second = tensors[1] + at;
        const float scale = 1.0f / static_cast<float>(divisor);
        for (std::size_t i = 0; i < size; ++i) {
            const float sum = (addend<format>(first[i]) + addend<format>(second[i])) * scale;
            const std::uint32_t most = std::max(
                as_bits(sum) & magnitude,
                std::max(
                    as_bits(value_of<format>(first[i])) & magnitude,
                    as_bits(value_of<format>(second[i])) & magnitude));
            errors[i] = most >= beyond(format);
            out[i] = nearest<format>(sum);
        }
    } else {
        Totals<block, Number> totals;
        std::fill_n(totals.sums, size, Number{-0.0});
        std::fill_n(totals.most, size, 0u);
        std::fill_n(totals.least, size, ~0u);
        std::size_t member = 0;
        for (; member + together <= members; member += together) {
            totals.template add<format, together>(tensors + member, at, size);
        }
        for (; member < members; ++member) {
            totals.template add<format, 1>(tensors + member, at, size);
        }
        const int carries = static_cast<int>(std::bit_width(members - 1));
        const int digits = std::numeric_limits<Number>::digits;
        const int spread = digits - shape_of(format).precision - carries;
        for (std::size_t i = 0; i < size; ++i) {
            const std::uint32_t most = totals.most[i], least = totals.least[i];
            const int apart = static_cast<int>(most >> 23) - static_cast<int>(least >> 23);
            errors[i] = most >= beyond(format);
            errors[i] |= !(is_double && format == ExactFormat::fp16) && apart > spread;
        }
        if constexpr (is_double) {
            finish<format>(totals.sums, errors, size, divisor, out);
        } else {
            for (std::size_t i = 0; i < size; ++i) {
                errors[i] |= (as_bits(totals.sums[i]) & magnitude) >= beyond(format);
                out[i] = nearest<format>(totals.sums[i]);
            }
        }
    }
    for (std::size_t first = 0; first < size; first += part) {
        const std::size_t count = std::min(part, size - first);
        std::uint32_t error = 0;
        for (std::size_t i = 0; i < count; ++i) {
            error |= errors[first + i];
        }
        if (!error) {
            continue;
        }
        if constexpr (is_double) {
            checked_sums<format, part>(tensors, members, at + first, count, divisor, out + first);
        } else {
            sums_of<format, part, double>(
                tensors, members, at + first, count, divisor, out + first);
        }
    }
}

// Sums of few addends in one of the 16-bit formats begin in binary32: they are exact there if the
// exponents of their addends are not far apart.
template <ExactFormat format, std::size_t block, class Element>
void chosen_sums(
    const Element* const* tensors, std::size_t members, std::size_t at, std::size_t size,
    std::uint32_t divisor, float* out) {
    constexpr std::size_t few = 8;
    if (format != ExactFormat::fp32 && divisor == 1 && members > 2 && members <= few) {
        return sums_of<format, block, float>(tensors, members, at, size, divisor, out);
    }
    sums_of<format, block, double>(tensors, members, at, size, divisor, out);
}

// Exact sums of elements `at` to `at` + `size`, at most `block`, divided by `divisor`. Elements are in
// binary32, or patterns of the format, of 16 bits.
template <std::size_t block, class Element>
void exact_sums(
    ExactFormat format, const Element* const* tensors, std::size_t members, std::size_t at,
    std::size_t size, std::uint32_t divisor, float* out) {
    const auto sums = [=]<ExactFormat known>() {
        chosen_sums<known, block>(tensors, members, at, size, divisor, out);
    };
    switch (format) {
        case ExactFormat::fp16:
            return sums.template operator()<ExactFormat::fp16>();
        case ExactFormat::bf16:
            return sums.template operator()<ExactFormat::bf16>();
        case ExactFormat::fp32:
            if constexpr (std::is_same_v<Element, float>) {
                return sums.template operator()<ExactFormat::fp32>();
            }
    }
}

}  // namespace nearstep::golden
