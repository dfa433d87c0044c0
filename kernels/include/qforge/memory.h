// Memory that a step works in: from a cache line's start on, or in huge pages where it is large. A row's results lie 12 KiB apart, panels of weights take 50 pages: more than the first TLB holds.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace qforge {

// Raises std::bad_alloc
inline void *take_memory(int64_t bytes) {
    constexpr int64_t kLine = 64, kHugePage = int64_t{1} << 21;
    const int64_t unit = bytes >= kHugePage / 16 ? kHugePage : kLine, whole = (bytes + unit - 1) / unit * unit;
    void *memory = std::aligned_alloc(static_cast<size_t>(unit), static_cast<size_t>(whole ? whole : unit));
    if (!memory) throw std::bad_alloc();
#if defined(__linux__)
    if (unit == kHugePage) madvise(memory, static_cast<size_t>(whole), MADV_HUGEPAGE);  // where that is not possible, small pages serve, too
#endif
    return memory;
}

struct Free {
    void operator()(float *p) const { std::free(p); }
};

using Scratch = std::unique_ptr<float[], Free>;

inline Scratch take_floats(int64_t floats) { return Scratch(static_cast<float *>(take_memory(floats * static_cast<int64_t>(sizeof(float))))); }

// For std::vector
template <typename T>
struct Pages {
    using value_type = T;
    Pages() = default;
    template <typename U>
    Pages(const Pages<U> &) {}
    T *allocate(size_t count) { return static_cast<T *>(take_memory(static_cast<int64_t>(count * sizeof(T)))); }
    void deallocate(T *p, size_t) { std::free(p); }
    friend bool operator==(const Pages &, const Pages &) { return true; }
};

}  // namespace qforge
