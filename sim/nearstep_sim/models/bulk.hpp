// Copies that bypass the caches.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace nearstep {

constexpr std::size_t line_bytes = 64;
constexpr std::size_t ahead_bytes = 4096;

// Whether a store of 64 bytes to `out` is one whole cache line.
inline bool takes_lines(const void* out) {
    return reinterpret_cast<std::uintptr_t>(out) % line_bytes == 0;
}

// Stores 64 bytes; a whole cache line bypasses the caches, so memory is not read first. The bytes
// are visible to other threads after finish_puts().
inline void put_line(void* out, const void* in) {
#if defined(__SSE2__)
    if (takes_lines(out)) {
        for (std::size_t part = 0; part < line_bytes / sizeof(__m128i); ++part) {
            _mm_stream_si128(
                static_cast<__m128i*>(out) + part,
                _mm_loadu_si128(static_cast<const __m128i*>(in) + part));
        }
        return;
    }
#endif
    std::memcpy(out, in, line_bytes);
}

inline void finish_puts() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace nearstep
