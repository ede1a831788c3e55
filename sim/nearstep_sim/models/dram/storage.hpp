// Contents of a rank: rows are allocated when they are first written.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "models/dram/command.hpp"

namespace nearstep {

inline std::uint64_t mix(std::uint64_t x) {  // splitmix64
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

class SparseStorage {
  public:
    explicit SparseStorage(const Geometry& geometry)
        : geometry_(geometry),
          count_(std::size_t(geometry.banks()) << geometry.row_bits),
          row_bytes_(std::size_t(geometry.row_beats()) * kBeatBytes),
          rows_(static_cast<std::uint8_t**>(std::calloc(count_, sizeof(std::uint8_t*)))) {
        if (!rows_) throw std::bad_alloc();
    }
    ~SparseStorage() {
        for (std::size_t i = 0; allocated_ && i < count_; ++i)
            if (rows_[i]) {
                std::free(rows_[i]);
                --allocated_;
            }
        std::free(rows_);
    }
    SparseStorage(const SparseStorage&) = delete;
    SparseStorage& operator=(const SparseStorage&) = delete;

    // Copies a beat. False if no byte of it was ever written: `out` is a pattern of its address.
    bool read(const Place& at, std::uint8_t* out) const {
        const std::uint8_t* row = rows_[index(at)];
        const unsigned beat = at.column / kBurstLength;
        if (row && written(row, beat)) {
            std::memcpy(out, row + beat * kBeatBytes, kBeatBytes);
            return true;
        }
        pattern(at, out);
        return false;
    }

    // A set bit i of keep leaves byte i unchanged.
    void write(const Place& at, const std::uint8_t* data, std::uint64_t keep) {
        std::uint8_t*& row = rows_[index(at)];
        if (!row) {
            row = static_cast<std::uint8_t*>(std::calloc(row_bytes_ + row_bytes_ / kBeatBytes, 1));
            if (!row) throw std::bad_alloc();
            ++allocated_;
        }
        const unsigned beat = at.column / kBurstLength;
        std::uint8_t* to = row + beat * kBeatBytes;
        if (keep == 0) {
            std::memcpy(to, data, kBeatBytes);
        } else if (keep == ~std::uint64_t{0}) {
            return;
        } else {
            if (!written(row, beat)) pattern(at, to);
            for (int i = 0; i < kBeatBytes; ++i)
                if (!(keep >> i & 1)) to[i] = data[i];
        }
        row[row_bytes_ + beat] = 1;
    }

    std::size_t allocated_rows() const { return allocated_; }

  private:
    std::size_t index(const Place& at) const {
        const std::size_t bank = (std::size_t(at.bg) << geometry_.bank_bits) | at.ba;
        return (bank << geometry_.row_bits) | at.row;
    }
    bool written(const std::uint8_t* row, unsigned beat) const { return row[row_bytes_ + beat]; }
    void pattern(const Place& at, std::uint8_t* out) const {
        const std::uint64_t seed = (index(at) * geometry_.row_beats() + at.column / 8) * 8;
        for (int i = 0; i < kBeatBytes / 8; ++i) {
            const std::uint64_t word = mix(seed + i);
            std::memcpy(out + 8 * i, &word, 8);
        }
    }

    Geometry geometry_;
    std::size_t count_, row_bytes_;
    std::uint8_t** rows_;
    std::size_t allocated_ = 0;
};

}  // namespace nearstep
