// Copies and comparisons of memory larger than the caches.

#include <algorithm>

#include "models/bulk.hpp"

extern "C" int bulk_same(const std::uint8_t* one, const std::uint8_t* other, std::size_t size) {
    return std::memcmp(one, other, size) == 0;
}

extern "C" void bulk_copy(std::uint8_t* out, const std::uint8_t* in, std::size_t size) {
    using namespace nearstep;
    std::size_t at = std::min(size, -reinterpret_cast<std::uintptr_t>(out) % line_bytes);
    std::memcpy(out, in, at);
    for (; at + line_bytes <= size; at += line_bytes) {
        __builtin_prefetch(in + at + ahead_bytes);
        put_line(out + at, in + at);
    }
    finish_puts();
    std::memcpy(out + at, in + at, size - at);
}
