// The floating-point unit of this CPU: results and exception flags, one operation at a time (x86-64).
//
// Assembly, so that no compiler moves or folds an operation. MXCSR detects tininess after rounding.

#include <cstdint>

#if defined(__x86_64__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace {

constexpr uint32_t kQuiet = 0x1F80;  // all exceptions masked, round to nearest, no flush to zero

__m128 number(uint32_t bits) { return _mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(bits))); }
uint32_t pattern(__m128 x) { return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_castps_si128(x))); }

void clear() {
    const uint32_t state = kQuiet;
    asm volatile("ldmxcsr %0" ::"m"(state) : "memory");
}

// From MXCSR (invalid, denormal, divide by zero, overflow, underflow, inexact from bit 0).
uint8_t raised() {
    uint32_t state;
    asm volatile("stmxcsr %0" : "=m"(state)::"memory");
    return ((state >> 5) & 1) | ((state >> 4) & 1) << 1 | ((state >> 3) & 1) << 2 |
           ((state >> 2) & 1) << 3 | (state & 1) << 4;
}

}  // namespace

extern "C" int supported() { return 1; }

// Kinds: 0 add, 1 sub, 2 mul, 3 div, 4 sqrt, 5 fma, 6 binary16 to binary32, 7 binary32 to binary16.
extern "C" void run(int kind, int64_t count, const uint32_t* a, const uint32_t* b, const uint32_t* c,
                    uint32_t* z, uint8_t* flags) {
    uint32_t saved;
    asm volatile("stmxcsr %0" : "=m"(saved));
    for (int64_t k = 0; k < count; ++k) {
        __m128 x = number(a[k]);
        const __m128 y = number(b[k]), w = number(c[k]);
        clear();
        switch (kind) {
            case 0: asm volatile("addss %1, %0" : "+x"(x) : "x"(y)); break;
            case 1: asm volatile("subss %1, %0" : "+x"(x) : "x"(y)); break;
            case 2: asm volatile("mulss %1, %0" : "+x"(x) : "x"(y)); break;
            case 3: asm volatile("divss %1, %0" : "+x"(x) : "x"(y)); break;
            case 4: asm volatile("sqrtss %0, %0" : "+x"(x)); break;
            case 5: asm volatile("vfmadd213ss %2, %1, %0" : "+x"(x) : "x"(y), "x"(w)); break;
            case 6: asm volatile("vcvtph2ps %0, %0" : "+x"(x)); break;
            case 7: asm volatile("vcvtps2ph $0, %0, %0" : "+x"(x)); break;
        }
        flags[k] = raised();
        z[k] = pattern(x);
    }
    asm volatile("ldmxcsr %0" ::"m"(saved) : "memory");
}

#else

extern "C" int supported() { return 0; }
extern "C" void run(int, int64_t, const uint32_t*, const uint32_t*, const uint32_t*, uint32_t*,
                    uint8_t*) {}

#endif
