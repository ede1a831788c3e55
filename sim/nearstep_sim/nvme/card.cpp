// A Verilated top whose ports are words of arrays. `ports.hpp` has INPUTS and OUTPUTS, a list of
// PORT(name, first word, width) each.

#include <cstdint>
#include <type_traits>

#include "Vcard.h"
#include "ports.hpp"
#include "verilated.h"

namespace {

struct Card {
    VerilatedContext context;
    Vcard top{&context, "card"};
};

template <class Port>
void put(Port& port, unsigned width, const std::uint32_t* words) {
    if constexpr (std::is_integral_v<Port>) {
        std::uint64_t value = words[0];
        if (width > 32) value |= std::uint64_t(words[1]) << 32;
        port = static_cast<Port>(value);
    } else {
        for (unsigned word = 0; word * 32 < width; ++word) port[word] = words[word];
    }
}

template <class Port>
void get(const Port& port, unsigned width, std::uint32_t* words) {
    if constexpr (std::is_integral_v<Port>) {
        words[0] = static_cast<std::uint32_t>(port);
        if (width > 32) words[1] = static_cast<std::uint32_t>(std::uint64_t(port) >> 32);
    } else {
        for (unsigned word = 0; word * 32 < width; ++word) words[word] = port[word];
    }
}

void clock(Vcard& top) {
    top.clk = 1;
    top.eval();
    top.clk = 0;
    top.eval();
}

}  // namespace

// Opens a card after a reset.
extern "C" void* card_open() {
    auto* card = new Card;
    card->top.rst = 1;
    clock(card->top);
    clock(card->top);
    card->top.rst = 0;
    return card;
}

extern "C" void card_close(void* handle) { delete static_cast<Card*>(handle); }

// Clocks the card until an output has a bit of `until`, and for `limit` cycles at most. Inputs are
// those of `in` all the time; `out` has the outputs behind the last edge. Returns the cycles.
extern "C" int card_run(
    void* handle, const std::uint32_t* in, std::uint32_t* out, const std::uint32_t* until,
    int limit) {
    Vcard* const top = &static_cast<Card*>(handle)->top;
#define PORT(name, word, width) put(top->name, width, in + word);
    INPUTS
#undef PORT
    for (int cycle = 1;; ++cycle) {
        clock(*top);
#define PORT(name, word, width) get(top->name, width, out + word);
        OUTPUTS
#undef PORT
        bool seen = false;
        for (int word = 0; word < OUT_WORDS; ++word) seen |= (out[word] & until[word]) != 0;
        if (seen || cycle >= limit) return cycle;
    }
}
