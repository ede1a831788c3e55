// Requests on a link: transaction layer packets (PCIe Base Specification, 2.2).
//
// A header is three or four dwords with byte 0 in the highest bits, as the standard draws them;
// payload is in dwords of memory, the lowest address in the lowest bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace nearstep {

enum class TlpKind : std::uint8_t {
    memory_read, memory_write, io_read, io_write, fetch_add, swap, compare_and_swap, locked_read,
    message, configuration, completion
};

struct Tlp {
    TlpKind kind = TlpKind::memory_read;
    bool poisoned = false;
    std::uint8_t address_type = 0, traffic_class = 0, attributes = 0;
    std::uint8_t tag = 0, first_be = 0, last_be = 0;
    std::uint16_t requester = 0;
    unsigned dwords = 1;        // as the header says: 1 to 1024
    std::uint64_t address = 0;  // of a dword
    std::vector<std::uint32_t> payload;

    bool posted() const { return kind == TlpKind::memory_write || kind == TlpKind::message; }

    // Of a dword of the payload.
    unsigned byte_enables(unsigned index) const {
        if (index == 0) return first_be;
        return index + 1 == dwords ? last_be : 0xF;
    }
};

constexpr std::uint64_t kTlpPage = 4096;  // no request crosses a multiple

// Byte enables that the standard forbids a memory request (2.2.5): of a last dword if there is one
// dword; none in the first or last of several dwords; a gap, except in two dwords in 8 aligned
// bytes. Receivers need not check.
inline bool forbidden_enables(const Tlp& tlp) {
    if (tlp.dwords == 1) return tlp.last_be != 0;
    if (tlp.first_be == 0 || tlp.last_be == 0) return true;
    const unsigned above = ~tlp.first_be & 0xF, last = tlp.last_be;
    const bool gap = (above & (above + 1)) != 0 || (last & (last + 1)) != 0;
    return gap && !(tlp.dwords == 2 && tlp.address % 8 == 0);
}

// Parses `count` dwords. Returns nothing for what every receiver must reject: an undefined format
// or type, a payload of another length than in the header, or of more than `most` bytes. Byte
// enables and the 4 KiB boundary, optional checks of receivers, are not checked.
inline std::optional<Tlp> decode_tlp(const std::uint32_t* words, std::size_t count, unsigned most) {
    if (count < 3) return {};
    const std::uint32_t first = words[0], second = words[1];
    const unsigned format = first >> 29, type = first >> 24 & 0x1F;
    if (format > 3) return {};  // prefixes are not supported
    const bool data = format & 2;
    const std::size_t header = format & 1 ? 4 : 3;
    Tlp tlp;
    switch (type) {
    case 0x00: tlp.kind = data ? TlpKind::memory_write : TlpKind::memory_read; break;
    case 0x01:
        if (data) return {};
        tlp.kind = TlpKind::locked_read;
        break;
    case 0x02:
        if (header == 4) return {};
        tlp.kind = data ? TlpKind::io_write : TlpKind::io_read;
        break;
    case 0x04: case 0x05:
        if (header == 4) return {};
        tlp.kind = TlpKind::configuration;
        break;
    case 0x0A: case 0x0B:
        if (header == 4) return {};
        tlp.kind = TlpKind::completion;
        break;
    case 0x0C: case 0x0D: case 0x0E:
        if (!data) return {};
        tlp.kind = TlpKind(unsigned(TlpKind::fetch_add) + type - 0x0C);
        break;
    default:
        if ((type & 0x18) != 0x10 || (type & 7) > 5 || header == 3) return {};
        tlp.kind = TlpKind::message;
    }
    const std::size_t digest = first >> 15 & 1;
    tlp.dwords = first & 0x3FF ? first & 0x3FF : 1024;
    if (count != header + (data ? tlp.dwords : 0) + digest) return {};
    if (data && 4 * tlp.dwords > most) return {};
    tlp.poisoned = first >> 14 & 1;
    tlp.traffic_class = first >> 20 & 7;
    tlp.attributes = (first >> 18 & 1) << 2 | (first >> 12 & 3);
    tlp.address_type = first >> 10 & 3;
    tlp.requester = second >> 16;
    tlp.tag = second >> 8 & 0xFF;
    tlp.last_be = second >> 4 & 0xF;
    tlp.first_be = second & 0xF;
    tlp.address = header == 4 ? std::uint64_t(words[2]) << 32 | (words[3] & ~3u) : words[2] & ~3u;
    if (data) tlp.payload.assign(words + header, words + header + tlp.dwords);
    return tlp;
}

}  // namespace nearstep
